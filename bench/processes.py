"""A function run in a process of its own, with what it sends and prints and how it ended; or
several of them side by side, of which one runs at a time.

Patches, caches and allocator state of one measurement cannot reach the next, and a crash is an
outcome, not the end of the run.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from bench.folders import locked_log

# How long a process may go on after it has closed its connection before it is killed.
EXIT_GRACE_S = 30
# How long one that is told to stop may take for it.
TERMINATE_GRACE_S = 5


@dataclass(frozen=True)
class Ended:
    """Outcome of a process: `error` is None or one line, beside the last of its output."""

    error: str | None
    output_tail: str


def run(
    function: Callable[..., None],
    *arguments: Any,
    on_message: Callable[[Any], None],
    silence_limit_s: float | None = None,
) -> Ended:
    """Run ``function(send, *arguments)`` in a fresh process; `on_message` gets what it sends.

    A process that sends nothing for `silence_limit_s` hangs, and is ended. Everything the process
    prints goes to a file, of which the last lines are kept. The process ends with its parent,
    whatever kills the parent.
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
    """Run ``function(send, *arguments, wait_for_turn=...)`` for each arguments of `each`, every one
    in a fresh process, side by side; `on_message` gets the index in `each` and what was sent.

    Each runs freely until it first calls ``wait_for_turn(stage)``. When all have come so far, or
    ended, they go on one at a time, each until it calls it again or ends: in order, round and
    round, but nobody begins a stage while others wait in an earlier one. It returns how many still
    run.
    """
    processes: list[_Process] = []

    def listen(index: int) -> int | None:
        return processes[index].listen(partial(on_message, index), silence_limit_s)

    try:
        for arguments in each:
            processes.append(_Process(function, arguments, takes_turns=True))
        waiting = {
            index: stage for index in range(len(each)) if (stage := listen(index)) is not None
        }
        while waiting:
            index = min(waiting, key=lambda one: waiting[one])  # the first of the lowest stage
            del waiting[index]
            processes[index].go_on(1 + len(waiting))
            if (stage := listen(index)) is not None:
                waiting[index] = stage  # behind the others
    finally:
        for process in processes:  # so that they clean up at the same time
            process.terminate()
        ended = [process.end() for process in processes]
    return ended


@dataclass(frozen=True)
class _WaitsForTurn:
    """The message that a process sends when it waits for its turn."""

    stage: int


class _Process:
    """A function in a fresh process, which has been started, and the connection to it."""

    def __init__(self, function: Callable[..., None], arguments: tuple, takes_turns: bool = False):
        self.log = locked_log()
        self.hangs_after_s: float | None = None
        context = multiprocessing.get_context("spawn")  # fork would copy CUDA's and torch's state
        self.connection, childs = context.Pipe()
        given = (childs, self.log.name, function, arguments, takes_turns)
        self.process = context.Process(target=_child, args=given)
        # what is ignored here stays ignored there: Ctrl-C is for this process, which ends the other
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, previous)
        childs.close()  # so that the child's end is the only one, and its death reads as EOF

    def listen(
        self, on_message: Callable[[Any], None], silence_limit_s: float | None
    ) -> int | None:
        """Hand on what it sends; returns when it waits for its turn, with the stage, or is over."""
        try:
            while self.connection.poll(silence_limit_s):
                message = self.connection.recv()
                if isinstance(message, _WaitsForTurn):
                    return message.stage
                on_message(message)
        except (EOFError, ConnectionResetError):
            self.process.join(EXIT_GRACE_S)
        else:
            self.hangs_after_s = silence_limit_s
            self._stop()
        return None

    def go_on(self, running: int) -> None:
        """Let it have its turn, as one of so many that still run."""
        with suppress(BrokenPipeError):  # it is dead, which `listen` will find
            self.connection.send(running)

    def end(self) -> Ended:
        """End it, if it still runs, and tell how it ended."""
        self._stop()
        self.connection.close()
        with self.log:
            output = self.log.read().decode(errors="replace")
        hangs = self.hangs_after_s
        error = f"nothing was heard of it for {hangs:g} s" if hangs is not None else None
        tail = "\n".join(output.splitlines()[-15:])
        return Ended(error or _death(self.process.exitcode), tail)

    def terminate(self) -> None:
        """Tell it to end, if it still runs: it cleans up after itself, if it still listens."""
        if self.process.is_alive():
            self.process.terminate()

    def _stop(self) -> None:
        self.terminate()
        self.process.join(TERMINATE_GRACE_S)
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

    def wait_for_turn(stage: int) -> int:
        connection.send(_WaitsForTurn(stage))
        return connection.recv()

    turns = {"wait_for_turn": wait_for_turn} if takes_turns else {}
    function(connection.send, *arguments, **turns)
    connection.close()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
