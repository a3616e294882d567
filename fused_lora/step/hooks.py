"""Hooks of our own, which a module may run fused beside."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Bystander:
    """A hook of our own that is of no concern to whether its module runs fused."""


@contextmanager
def removed_after(handles: Iterable[Any]) -> Iterator[None]:
    """Remove hooks again, which are registered as these handles are asked for."""
    held: list[Any] = []
    try:
        held.extend(handles)
        yield
    finally:
        for handle in held:
            handle.remove()
