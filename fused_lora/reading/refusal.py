"""A refusal: why a module does not run fused, in words."""

from collections.abc import Callable
from typing import Any


class Refusal(Exception):
    """Raised when reading a module (`read_*`) that cannot run fused as it is now, or in this call.
    Nothing has been computed by then."""


def refuse(reason: str | None) -> None:
    """Raise a Refusal if there is a reason. Chain checks in the order they should run:
    ``refuse(why_not_class(...) or why_not_activation(...))``."""
    if reason is not None:
        raise Refusal(reason)


def attempt(read: Callable, *inputs: Any) -> tuple[Any, str]:
    """Return ``(read(*inputs), "")``, or None and the reason if it refuses."""
    try:
        return read(*inputs), ""
    except Refusal as refusal:
        return None, str(refusal)


def reason_of(read: Callable, *inputs: Any) -> str | None:
    """Return the reason if this read refuses."""
    _, reason = attempt(read, *inputs)
    return reason or None


def refuse_documents(mixer: Any, reason: str | None) -> None:
    """Raise ValueError if there is a reason why a mixer would mix the documents of a row: a warning
    would not make its result right."""
    if reason is not None:
        raise ValueError(
            f"a {type(mixer).__name__} would mix the documents of its packed rows: {reason}; mend "
            "that, or train on rows that are not packed"
        )
