"""A projection by itself, as LoRA_W: attention's o, and what is left of those that share an input,
or an MLP, where another one may not run fused."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..lora_linear import FrozenLinear, LoRA_W
from .projection import (
    Projection,
    bias_of,
    frozen_bias,
    read_projection,
    seed_for,
    trains_bias,
    why_not_dropout_here,
)
from .site import class_forward, say_once, why_not_own_forward, why_unloaded


def read_projections(module: Any, names: Sequence[str]) -> list[Projection] | dict[str, str] | str:
    """Return these projections of a module as they are now.

    If some may not run fused, the reasons by name: the others, of which one at least has an
    adapter, do so by themselves. If none does, the first reason.
    """
    reads = {name: read_projection(getattr(module, name)) for name in names}
    fit = [one for one in reads.values() if not isinstance(one, str)]
    left = {name: one for name, one in reads.items() if isinstance(one, str)}
    if left and not any(len(one.A) for one in fit):
        return ": ".join(next(iter(left.items())))
    return why_not_dropout_here(fit) or left or why_unloaded(module, fit) or fit


def tensors_of(reads: Sequence[Projection]) -> list[Tensor | None]:
    """The operands that a function of these projections differentiates: each one's A and B, and
    then, if any trains its bias, the biases of all."""
    adapters = [tensor for one in reads for tensor in (one.A, one.B)]
    biases = [bias_of(one) for one in reads] if any(map(trains_bias, reads)) else []
    return [*adapters, *biases]


def frozen_linear(read: Projection) -> FrozenLinear:
    return FrozenLinear(read.weight, frozen_bias(read), read.scaling, read.dropout)


def run_alone(projection: nn.Module, x: Tensor) -> Tensor:
    """Run a projection as LoRA_W, or as PEFT has it where it may not be fused or has no adapter."""
    read = read_projection(projection)
    if isinstance(read, str) or not len(read.A):
        return projection(x)
    return _lora_w(read, x)


def _lora_w(read: Projection, x: Tensor) -> Tensor:
    frozen = frozen_linear(read)._replace(seed=seed_for(x, read.dropout))
    return LoRA_W.apply(x, *tensors_of([read]), frozen)


# --- attention's o --------------------------------------------------------------------------------


def read_output(projection: nn.Module) -> Projection | str:
    if (reason := why_not_own_forward(projection)) is not None:
        return reason
    read = read_projection(projection, own_forward=False)
    return read if isinstance(read, str) else why_not_dropout_here([read]) or read


def output_forward(projection: nn.Module, parts: frozenset[str], x: Tensor, *rest, **options):
    read = read_output(projection)
    if rest or options:
        read = "it was given more than its input"
    if isinstance(read, str):
        say_once(projection, read)
        return class_forward(projection, x, *rest, **options)
    return _lora_w(read, x)
