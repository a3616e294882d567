"""Our hooks. A module that has them may still run fused."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Bystander:
    """One of our hooks: it does not keep its module from running fused."""


@contextmanager
def removed_after(handles: Iterable[Any]) -> Iterator[None]:
    """Register hooks by iterating over these handles, and remove them at the end."""
    held: list[Any] = []
    try:
        held.extend(handles)
        yield
    finally:
        for handle in held:
            handle.remove()
