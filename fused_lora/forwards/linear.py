"""Projections that share an input, run as LoRA_QKV, and single ones, run as LoRA_W: attention's o,
or one of a group in which another cannot run fused."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..foreign.ownership import why_not_own_forward
from ..functions.lora_linear import FrozenLayers, FrozenLinear, LoRA_QKV, LoRA_W
from ..layer.operands import Frame
from ..reading.aside import step_aside, why_unloaded
from ..reading.projection import (
    Projection,
    bias_of,
    frozen_bias,
    read_projection,
    seed_for,
    trains_bias,
)
from ..reading.refusal import Refusal, attempt, refuse
from ..weights.four_bit_parts import why_not_input, written


class Reads(NamedTuple):
    """Projections of one module as they are now."""

    fit: list[Projection]  # can run fused, in order: all together, or else each by itself
    left: dict[str, str]  # why the others cannot, by name

    @property
    def are_all(self) -> bool:
        return bool(self.fit) and not self.left


def read_projections(module: Any, names: Sequence[str]) -> Reads:
    """Return these projections of a module as they are now.

    If some cannot run fused, at least one of the others has an adapter; otherwise this raises a
    Refusal.
    """
    reads = Reads([], {})
    for name in names:
        read, reason = attempt(read_projection, getattr(module, name))
        if reason:
            reads.left[name] = reason
        else:
            reads.fit.append(read)
    if reads.left and not any(len(one.A) for one in reads.fit):
        raise Refusal(": ".join(next(iter(reads.left.items()))))
    if not reads.left:
        refuse(why_unloaded(module, reads.fit))
    return reads


def tensors_of(
    reads: Sequence[Projection], more: Sequence[Tensor | None] = ()
) -> tuple[Tensor | None, ...]:
    """Return the operands that a function of these projections differentiates: each one's A and B;
    then, if one of these is there, the trained biases of all, and more."""
    adapters = [tensor for read in reads for tensor in (read.A, read.B)]
    has_biases = any(map(trains_bias, reads))
    others = [*(bias_of(read) if has_biases else None for read in reads), *more]
    return *adapters, *([] if all(other is None for other in others) else others)


def trained_by(reads: Sequence[Projection], frame: Frame) -> tuple[Tensor | None, ...]:
    """Return the tensors that a block of these projections trains, as `Trained` has them."""
    norms = [
        norm.weight if norm and norm.weight.requires_grad else None
        for norm in (frame.norm, frame.norm_after)
    ]
    return tensors_of(reads, [*(read.magnitude for read in reads), *norms])


def with_reads(
    reads: Sequence[Projection], frame: Frame
) -> tuple[tuple[Tensor | None, ...], Frame]:
    """Return what a block trains, and the block with all else that its projections say."""
    trained = trained_by(reads, frame)
    rates = tuple(read.dropout for read in reads)
    return trained, frame._replace(dropout_rates=rates, trains_others=len(trained) > 2 * len(rates))


def bases_under(owner: nn.Module, names: Sequence[str]) -> Iterator[Any]:
    """Yield the linear layers under these projections of a module."""
    for name in names:
        projection: Any = owner._modules[name]
        base = getattr(projection, "base_layer", projection)
        if isinstance(base, nn.Linear):
            yield base


def largest_ranks(module: Any, names: Sequence[str], parts: Sequence[Projection]) -> list[int]:
    """Return the largest rank of the adapters of each part of these projections."""
    adapters = (getattr(module._modules[name], "lora_A", {}).values() for name in names)
    largest = [max((A.out_features for A in its), default=0) for its in adapters]
    return largest * (len(parts) // len(names))


def run_together(
    module: nn.Module,
    reads: list[Projection],
    x: Tensor,
    split: Callable[[list[Projection]], list[Projection]] = list,
) -> tuple[Tensor, ...]:
    """Run projections of a module, or what they split into, as one function."""
    found, write_again = written(module, reads)
    parts = split(found)
    layers = [FrozenLinear(one.weight, frozen_bias(one), one.scaling, one.dropout) for one in parts]
    frozen = FrozenLayers(tuple(layers), seed_for(x, *(one.dropout for one in parts)), write_again)
    return (LoRA_W if len(parts) == 1 else LoRA_QKV).apply(x, *tensors_of(parts), frozen)


def run_alone(module: nn.Module, projection: nn.Module, x: Tensor) -> Tensor:
    """Run a projection of a module as LoRA_W, or PEFT's way if it cannot be fused or has no
    adapter."""
    read, reason = attempt(read_projection, projection)
    if reason or not len(read.A) or why_not_input(x, [read]):
        return projection(x)
    (output,) = run_together(module, [read], x)
    return output


# --- attention's o --------------------------------------------------------------------------------


def read_output(projection: nn.Module) -> Projection:
    refuse(why_not_own_forward(projection))
    return read_projection(projection, own_forward=False)


def output_forward(projection: nn.Module, parts: frozenset[str], x: Tensor, *rest, **options):
    read, reason = attempt(read_output, projection)
    if rest or options:
        reason = "it was given more than its input"
    if reason := reason or why_not_input(x, [read]):
        return step_aside(projection, reason, x, *rest, **options)
    (output,) = run_together(projection, [read], x)
    return output
