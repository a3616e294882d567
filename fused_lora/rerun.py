"""The record that a function keeps for its backward, also if its forward may run twice.

A recomputed forward (`step/recompute.py`) keeps only its inputs and reruns in backward. The
functions in it ask here what to keep from their first run and what to skip in their second. Outside
of one, `once` and `saving_last` just call their function.

`save_for_backward` keeps and watches a flat row of tensors. `store` and `restore` pass a record
through it: `split` takes the tensors out of a record of records, `join` puts others in their place.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record", bound=tuple)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.tile_rows: int | None = None


_thread = _Thread()


class Keep(NamedTuple):
    """A way for `once` to keep a tensor: `out` takes it away, and `back` restores it from the
    result of `out`, like the hooks of `torch.autograd.graph.saved_tensors_hooks`."""

    out: Callable[[Tensor], Any]
    back: Callable[[Any], Tensor]


STAYS = Keep(lambda tensor: tensor, lambda tensor: tensor)


def runs() -> list[Any]:
    """Return the recomputed forwards (`step/recompute.py`) that this thread is in, innermost
    last."""
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
    recomputed forward keeps it, unmoved. What becomes an autograd function's output is kept without
    its graph. Nobody may change it in place.
    """
    around = runs()
    keep = STAYS if is_small else around[-1].keep if around else None
    if not around or keep is None:
        return function()
    return around[-1].once(function, keep)


@contextmanager
def in_tiles(tile_rows: int | None) -> Iterator[None]:
    """Context in which an MLP outside of a recomputed forward computes this many rows at once. Use
    it only without gradients: a backward would need what the forward has dropped."""
    before, _thread.tile_rows = _thread.tile_rows, tile_rows
    try:
        yield
    finally:
        _thread.tile_rows = before


def rows_of_a_tile() -> int | None:
    """Return how many rows an MLP should compute at once, None for all of them: where its backward
    needs what it computes, or this is measured."""
    around = runs()
    return around[-1].tile_rows if around else _thread.tile_rows


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
    """Keep a record for `restore`: its tensors by save_for_backward, all else on ctx.

    Under a checkpoint one tensor is saved, and the recompute makes the record again, which takes a
    tenth of the time that saving each of its tensors does. Once autograd frees that tensor, what
    the checkpoint keeps is freed as well.
    """
    around = runs()
    ctx.recompute = around[-1].recompute_record(record) if around else None
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


def once_as_record(function: Callable[[], Record]) -> Record:
    """`once` for a function that returns a record."""
    if not runs():
        return function()

    def flat() -> tuple:
        tensors, rest = split(function())
        return (*tensors, rest)

    *tensors, rest = once(flat)
    return join(rest, tensors)


class Rest(NamedTuple):
    """A record without its tensors."""

    layout: "_Layout"
    values: tuple


def split(record: tuple) -> tuple[list[Tensor], Rest]:
    """Return the tensors of a record, those within its records and tuples included, and the
    rest."""
    layouts = _layouts.setdefault(type(record), [])
    for layout in layouts:
        try:
            tensors, values, records = layout.take_apart(record)
        except (TypeError, ValueError):  # a record is not there, or has another length
            continue
        if layout.types == [*map(type, tensors + values + records)]:
            return list(tensors), Rest(layout, values)
    layouts.append(_Layout(record))
    return split(record)


def join(rest: Rest, tensors: Sequence[Tensor]) -> Any:
    """Return the record that `split` took apart, with these tensors."""
    return rest.layout.put_together(tensors, rest.values)


class _Layout:
    """Takes records of one layout apart and puts them together again.

    Python unpacks nested tuples faster than a loop goes through their values. So we write down both
    functions for a layout and compile them once, as `namedtuple` does.
    """

    def __init__(self, record: tuple):
        tensors: list[str] = []
        values: list[str] = []
        unpacked: dict[str, tuple] = {}
        known: dict[str, Any] = {"new": tuple.__new__}  # half of _make's time

        def visit(one: Any, name: str) -> str:
            """Name everything in it. Return the expression that makes it again."""
            if not isinstance(one, tuple) or isinstance(one, torch.Size):
                (tensors if isinstance(one, Tensor) else values).append(name)
                return name
            unpacked[name] = parts = tuple(f"{name}_{i}" for i in range(len(one)))
            known[f"type_of_{name}"] = type(one)
            return f"new(type_of_{name}, {_row(map(visit, one, parts))})"

        whole = visit(record, "r")
        lines = "; ".join(f"{_row(parts)} = {name}" for name, parts in unpacked.items())
        exec(
            f"""
def take_apart(r):
    {lines}
    return {_row(tensors)}, {_row(values)}, {_row(unpacked)}
def put_together(tensors, values):
    {_row(tensors)} = tensors; {_row(values)} = values
    return {whole}
""",
            known,
        )
        self.take_apart, self.put_together = known["take_apart"], known["put_together"]
        self.types = [type(one) for some in self.take_apart(record) for one in some]


# By a record's type. There are several where values differ in type, as one that may be None.
_layouts: dict[type, list[_Layout]] = {}


def _row(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"
