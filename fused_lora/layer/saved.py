"""Everything that DecoderLayer's backward needs, by name.

`save_for_backward` keeps and watches a flat row of tensors. `store` and `restore` pass a record
through it: `split` takes the tensors out of a record of records, `join` puts others in their place.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..kernels.qkv_attention import Attention, AttentionSaved
from ..rerun import once, recompute_record
from .buffer import ProductInput, WeightGroup
from .operands import Adapters, Dropouts, FrozenLayer, Others
from .residual import Normed

Record = TypeVar("Record", bound=tuple)


class Added(NamedTuple):
    """The output projection o, added to the residual."""

    x: Tensor  # [T, in of o], what o reads
    total: Tensor  # [T, hidden], the sum
    z: Tensor  # x A' of o
    normed: Normed | None  # what o gave, where that is normed


class Attended(NamedTuple):
    """Attention, and its output projection added to the residual."""

    added: Added
    saved: AttentionSaved
    attention: Attention
    before_gate: Tensor | None = None  # what o reads before its gate, if it has one


class SavedMLP(NamedTuple):
    """The MLP between a norm and the residual."""

    m: ProductInput  # what gate and up read
    rstd: Tensor | None  # of the norm
    gate_up: Tensor
    z_down: Tensor  # h A' of down
    normed: Normed | None  # what down gave, where that is normed


class Saved(NamedTuple):
    """Results of DecoderLayer's forward that its backward needs."""

    hidden: Tensor
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    n: ProductInput  # what q, k and v read
    input_rstd: Tensor | None
    raw: Tensor | None  # [q | k | v] before the norms of heads, if there are any; with gates
    qkv: Tensor
    attended: Attended
    mlp: SavedMLP
    frozen: FrozenLayer
    adapters: Adapters
    dropouts: Dropouts
    kinds: Others  # of what is trained beside the adapters


def store(ctx: Any, record: tuple) -> None:
    """Keep a record for `restore`: its tensors by save_for_backward, all else on ctx. Under a
    checkpoint one tensor is saved, and the recompute makes the record again. Once autograd frees
    that tensor, what the checkpoint keeps is freed as well."""
    ctx.recompute = recompute_record(record)
    if ctx.recompute is not None:
        ctx.save_for_backward(next(one for one in record if isinstance(one, Tensor)))
        return
    tensors, ctx.without_tensors = split(record)
    ctx.save_for_backward(*tensors)


def restore(ctx: Any) -> Any:
    """Return the record that `store` kept."""
    tensors = ctx.saved_tensors  # raises if autograd has freed them
    return join(ctx.without_tensors, tensors) if ctx.recompute is None else ctx.recompute()


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


# Tuples of numbers: `FrozenLayer.for_backward` leaves no tensor in a WeightGroup.
WITHOUT_TENSORS = (torch.Size, WeightGroup)


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
        elif isinstance(one, tuple) and not isinstance(one, WITHOUT_TENSORS):
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
        elif isinstance(one, tuple) and not isinstance(one, WITHOUT_TENSORS):
            one = _with(one, left)
        values.append(one)
    return tuple.__new__(type(rest), values)
