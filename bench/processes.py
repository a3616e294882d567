"""Functions in child processes: alone, or side by side with one running at a time.

The patches, caches and allocator state of one measurement cannot reach the next. A crash is an
outcome, not the end of the run.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from tempfile import NamedTemporaryFile
from typing import Any

EXIT_GRACE_S = 30  # from closing the connection to being killed
TERMINATE_GRACE_S = 5  # from being told to stop to being killed


@dataclass(frozen=True)
class Ended:
    """The end of a process: `error` is None or one line, next to its last lines of output."""

    error: str | None
    output_tail: str


def run(
    function: Callable[..., None],
    *arguments: Any,
    on_message: Callable[[Any], None],
    silence_limit_s: float | None = None,
) -> Ended:
    """Run ``function(send, *arguments)`` in a fresh process. `on_message` gets what it sends.

    A process that sends nothing for `silence_limit_s` hangs and is ended. It prints to a file, of
    which we keep the last lines. It dies with its parent, whatever kills the parent.
    """
    process = _Process(function, arguments)
    try:
        process.listen(on_message, silence_limit_s)
    finally:
        ended = process.end()
    return ended


def run_in_turns(
    function: Callable[..., None],
    each: Sequence[tuple],
    on_message: Callable[[int, Any], None],
    silence_limit_s: float | None = None,
) -> list[Ended]:
    """Run ``function(send, *arguments, wait_for_turn=...)`` for each arguments of `each`, all in
    fresh processes side by side. `on_message` gets the index in `each` and what was sent.

    Each runs freely until it first calls ``wait_for_turn(phase)``. Once all have, or ended, they
    take turns in order, round and round. A turn lasts until the next call or the end. Nobody begins
    a phase while others wait in an earlier one. The call returns how many processes still run.
    """
    processes: list[_Process] = []

    def listen(index: int) -> int | None:
        return processes[index].listen(partial(on_message, index), silence_limit_s)

    try:
        for arguments in each:
            processes.append(_Process(function, arguments, takes_turns=True))
        waiting = {
            index: phase for index in range(len(each)) if (phase := listen(index)) is not None
        }
        while waiting:
            index = min(waiting, key=lambda one: waiting[one])  # the first in the lowest phase
            del waiting[index]
            processes[index].go_on(1 + len(waiting))
            if (phase := listen(index)) is not None:
                waiting[index] = phase  # behind the others
    finally:
        for process in processes:  # they clean up at the same time
            process.terminate()
        ended = [process.end() for process in processes]
    return ended


def run_at_once(
    function: Callable[..., None],
    each: Sequence[tuple],
    on_message: Callable[[int, Any], bool],
    silence_limit_s: float | None = None,
) -> Ended:
    """Run ``function(send, *arguments)`` for each arguments of `each`, all in fresh processes at
    the same time. `on_message` gets the index in `each` and what was sent.

    They depend on each other: all are ended if one fails, if none sends anything for
    `silence_limit_s`, or if `on_message` returns True. Returns how the first that failed ended.
    """
    processes: list[_Process] = []
    failed = None
    try:
        for arguments in each:
            processes.append(_Process(function, arguments))
        failed = _listen_to_all(processes, on_message, silence_limit_s)
    finally:
        for process in processes:
            process.terminate()
        ended = [process.end() for process in processes]
    if failed is None:
        return Ended(None, "")
    if processes[failed].hangs_after_s is not None:
        return ended[failed]
    return replace(ended[failed], error=f"process {failed}: {ended[failed].error}")


def _listen_to_all(
    processes: Sequence["_Process"],
    on_message: Callable[[int, Any], bool],
    silence_limit_s: float | None,
) -> int | None:
    """Pass on what they send. Return the index of one that fails, or None once all have ended or
    `on_message` returns True. If all are silent, that is the first."""
    running: dict[Any, int] = {one.connection: index for index, one in enumerate(processes)}
    while running:
        ready: list[Any] = wait(list(running), silence_limit_s)
        if not ready:
            processes[0].hangs_after_s = silence_limit_s
            return 0
        for connection in ready:
            index = running[connection]
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                del running[connection]
                processes[index].process.join(EXIT_GRACE_S)
                if processes[index].process.exitcode != 0:
                    return index
            else:
                if on_message(index, message):
                    return None
    return None


@dataclass(frozen=True)
class _WaitsForTurn:
    """The message of a process that waits for its turn."""

    phase: int


class _Process:
    """A function in a fresh process that has started, and the connection to it."""

    def __init__(self, function: Callable[..., None], arguments: tuple, takes_turns: bool = False):
        self.log = NamedTemporaryFile(prefix="lora-bench-")  # noqa: SIM115
        self.hangs_after_s: float | None = None
        self.killed_at: float | None = None  # once asked to stop, on the monotonic clock
        context = multiprocessing.get_context("spawn")  # fork would copy CUDA's and torch's state
        self.connection, childs = context.Pipe()
        given = (childs, self.log.name, function, arguments, takes_turns)
        self.process = context.Process(target=_child, args=given)
        # the child inherits what is ignored: Ctrl-C reaches this process, which ends the child
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, previous)
        childs.close()  # the child holds the only end now, so its death reads as EOF

    def listen(
        self, on_message: Callable[[Any], None], silence_limit_s: float | None
    ) -> int | None:
        """Pass on what it sends. Return the phase once it waits for its turn, None once it ends."""
        try:
            while self.connection.poll(silence_limit_s):
                message = self.connection.recv()
                if isinstance(message, _WaitsForTurn):
                    return message.phase
                on_message(message)
        except (EOFError, ConnectionResetError):
            self.process.join(EXIT_GRACE_S)
        else:
            self.hangs_after_s = silence_limit_s
            self._stop()
        return None

    def go_on(self, running: int) -> None:
        """Give it its turn, as one of `running` processes."""
        with suppress(BrokenPipeError):  # it is dead: `listen` will notice
            self.connection.send(running)

    def end(self) -> Ended:
        """End it if it still runs, and return how it ended."""
        self._stop()
        self.connection.close()
        with self.log:
            output = self.log.read().decode(errors="replace")
        hangs = self.hangs_after_s
        error = f"nothing was heard of it for {hangs:g} s" if hangs is not None else None
        tail = "\n".join(output.splitlines()[-15:])
        return Ended(error or _death(self.process.exitcode), tail)

    def terminate(self) -> None:
        """Ask it to clean up and end, if it still runs."""
        if self.process.is_alive():
            self.process.terminate()
        if self.killed_at is None:
            self.killed_at = time.monotonic() + TERMINATE_GRACE_S

    def _stop(self) -> None:
        self.terminate()
        assert self.killed_at is not None
        self.process.join(max(0.0, self.killed_at - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _death(exitcode: int | None) -> str | None:
    if exitcode == 0:
        return None
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _child(
    connection: Connection,
    log: str,
    function: Callable[..., None],
    arguments: tuple,
    takes_turns: bool,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)

    def wait_for_turn(phase: int) -> int:
        connection.send(_WaitsForTurn(phase))
        return connection.recv()

    turns = {"wait_for_turn": wait_for_turn} if takes_turns else {}
    function(connection.send, *arguments, **turns)
    connection.close()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
