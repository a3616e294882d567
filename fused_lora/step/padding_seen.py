"""Padding that a step's eager calls have seen, for its captures in graphs (`graph.py`).

A graph cannot look at a mask. The model that is called in a step finds these notes (`current`),
writes down what it sees, and reads them while it is captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class PaddingSeen:
    """Notes of one step on the padding in its batches."""

    def __init__(self) -> None:
        self.is_there = False
        self.is_apart = True  # nothing that is labelled depends on it

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within it the model runs, or is captured."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[PaddingSeen | None] = ContextVar("padding seen", default=None)


def current() -> PaddingSeen | None:
    """Return the notes of the step that calls the model now, if one does."""
    return _current.get()
