"""A function in a process of its own: what it sends, what it prints, and how it ended.

Patches, caches and allocator state of one measurement cannot reach the next, and a crash is an
outcome, not the end of the run.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

# How long a process may go on after it has closed its connection before it is killed.
EXIT_GRACE_S = 30
# How long one that is told to stop may take for it.
TERMINATE_GRACE_S = 5


@dataclass(frozen=True)
class Ended:
    """How the process ended: `error` is None, or one line, with the last of its output."""

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
    context = multiprocessing.get_context("spawn")  # fork would copy CUDA's and torch's state
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(prefix="lora-bench-", suffix=".log") as log:
        process = context.Process(target=_child, args=(sender, log.name, function, arguments))
        # what is ignored here stays ignored there: Ctrl-C is for this process, which ends the other
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, previous)
        sender.close()  # so that the child's end is the only one, and its death reads as EOF
        hangs = False
        try:
            while not hangs:
                if receiver.poll(silence_limit_s):
                    on_message(receiver.recv())
                else:
                    hangs = True
        except EOFError:
            process.join(EXIT_GRACE_S)
        finally:
            if process.is_alive():
                process.terminate()  # lets it clean up after itself, if it still listens
                process.join(TERMINATE_GRACE_S)
            if process.is_alive():
                process.kill()
            process.join()
        output = log.read().decode(errors="replace")
    error = f"nothing was heard of it for {silence_limit_s:g} s" if hangs else None
    return Ended(error or _death(process.exitcode), "\n".join(output.splitlines()[-15:]))


def _death(exitcode: int | None) -> str | None:
    if exitcode == 0:
        return None
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _child(sender: Connection, log: str, function: Callable[..., None], arguments: tuple) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    function(sender.send, *arguments)
    sender.close()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
