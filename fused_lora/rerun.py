"""The record that a function keeps for its backward, also if its forward may run twice.

A recomputed forward (`step/recompute.py`) keeps only its inputs and reruns in backward. The
functions in it ask here what to keep from their first run and what to skip in their second. Outside
of one, `once` and `saving_last` just call their function.

`save_for_backward` keeps and watches a flat row of tensors. `store` and `restore` pass a record
through it: `split` takes the tensors out of a record of records, `join` puts others in their place.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record", bound=tuple)

_thread = threading.local()


class Keep(NamedTuple):
    """A way for `once` to keep a tensor: `out` takes it away, and `back` restores it from the
    result of `out`, like the hooks of `torch.autograd.graph.saved_tensors_hooks`."""

    out: Callable[[Tensor], Any]
    back: Callable[[Any], Tensor]


STAYS = Keep(lambda tensor: tensor, lambda tensor: tensor)


def runs() -> list[Any]:
    """Return the recomputed forwards (`step/recompute.py`) that this thread is in, innermost
    last."""
    if not hasattr(_thread, "runs"):
        _thread.runs = []
    return _thread.runs


def saving_last(function: Callable[[bool], Tensor]) -> Tensor:
    """Call ``function(output_needed)``. It is False in a recompute if nothing after this call saved
    a tensor in the first run: nobody then uses the output."""
    around = runs()
    if not around:
        return function(True)
    return around[-1].saving_last(function)


def once(function: Callable[[], tuple], is_small: bool = False) -> tuple:
    """Call ``function()``. A recomputed forward with a `keep` keeps the result for its second run.

    Use it for results that cost more to compute than to keep. If the result `is_small`, every
    recomputed forward keeps it, unmoved. Do not use it for outputs of an autograd function: others
    may change them in place, and a kept output would keep its own graph alive.
    """
    around = runs()
    keep = STAYS if is_small else around[-1].keep if around else None
    if not around or keep is None:
        return function()
    return around[-1].once(function, keep)


def has_kept() -> bool:
    """Return True in a second run, where `once` returns the first run's result without a call."""
    around = runs()
    return bool(around) and around[-1].runs_again and around[-1].keep is not None


def keeps_elsewhere() -> bool:
    """Return True if `once` moves what it keeps elsewhere, which is fast for rows without gaps."""
    around = runs()
    return bool(around) and around[-1].keep not in (None, STAYS)


# --- a record for backward ------------------------------------------------------------------------


def store(ctx: Any, record: tuple) -> None:
    """Keep a record for `restore`: its tensors by save_for_backward, all else on ctx. Under a
    checkpoint one tensor is saved, and the recompute makes the record again. Once autograd frees
    that tensor, what the checkpoint keeps is freed as well."""
    ctx.recompute = _recompute(record)
    if ctx.recompute is not None:
        ctx.save_for_backward(_first_tensor(record))
        return
    tensors, ctx.without_tensors = split(record)
    ctx.save_for_backward(*tensors)


def _first_tensor(record: Any) -> Tensor | None:
    if not isinstance(record, tuple):
        return record if isinstance(record, Tensor) else None
    return next((one for one in map(_first_tensor, record) if one is not None), None)


def restore(ctx: Any) -> Any:
    """Return the record that `store` kept."""
    tensors = ctx.saved_tensors  # raises if autograd has freed them
    return join(ctx.without_tensors, tensors) if ctx.recompute is None else ctx.recompute()


def _recompute(record: tuple) -> Callable[[], tuple] | None:
    """Return a function that makes this record of tensors again, for a function's backward, or None
    where nothing recomputes the forward. Instead of the record, save one tensor: the function works
    for as long as autograd keeps that.

    It does for all of a record what saving each of its tensors would, in a tenth of the time.
    """
    around = runs()
    if not around:
        return None
    return around[-1].recompute_record(record)


def once_as_record(function: Callable[[], Record]) -> Record:
    """`once` for a function that returns a record."""

    def flat() -> tuple:
        tensors, rest = split(function())
        return (*tensors, rest)

    *tensors, rest = once(flat)
    return join(rest, tensors)


class _Tensor:
    """Stands where a record had a tensor."""


TENSOR = _Tensor()
# Tuples that `split` leaves whole. A record for backward may add its own.
WITHOUT_TENSORS: set[type] = {torch.Size}


def split(record: Record) -> tuple[list[Tensor], Record]:
    """Return the tensors of a record, those within its records and tuples included, and the record
    with TENSOR in their places."""
    tensors: list[Tensor] = []
    return tensors, _without(record, tensors)


def _without(record: Any, tensors: list[Tensor]) -> Any:
    """Append a record's tensors to these, and return it without them."""
    values = []
    for one in record:
        if isinstance(one, Tensor):
            tensors.append(one)
            one = TENSOR
        elif isinstance(one, tuple) and type(one) not in WITHOUT_TENSORS:
            one = _without(one, tensors)
        values.append(one)
    return tuple.__new__(type(record), values)  # half of _make's time


def join(rest: Record, tensors: Any) -> Record:
    """Return the record that `split` took apart, with these tensors."""
    left: Iterator[Tensor] = iter(tensors)
    joined = _with(rest, left)
    assert next(left, None) is None
    return joined


def _with(rest: Any, left: Iterator[Tensor]) -> Any:
    values = []
    for one in rest:
        if one is TENSOR:
            one = next(left)
        elif isinstance(one, tuple) and type(one) not in WITHOUT_TENSORS:
            one = _with(one, left)
        values.append(one)
    return tuple.__new__(type(rest), values)
