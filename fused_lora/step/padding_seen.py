"""Padding seen in a step's eager calls, noted for its captures in graphs (`graph.py`).

A graph cannot look at a mask. The model called in a step finds these notes (`current`), writes down
what it sees, and reads them during a capture.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class PaddingSeen:
    """Notes of one step on the padding in its batches."""

    def __init__(self) -> None:
        self.is_there = False
        self.is_apart = True  # no labelled token depends on it

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context in which the model runs or is captured."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[PaddingSeen | None] = ContextVar("padding seen", default=None)


def current() -> PaddingSeen | None:
    """Return the notes of the step that is calling the model, None outside of one."""
    return _current.get()
