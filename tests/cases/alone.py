"""Tests that have the GPU to themselves, where several workers of pytest-xdist share it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(file: Path, alone: bool) -> Iterator[None]:
    """Hold a file's lock: beside others who want it so, or `alone`. Each waits for who has it."""
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
