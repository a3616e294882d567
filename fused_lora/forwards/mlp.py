"""The switch `mlp`: the forward it sets on an MLP."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from fused_mlp import FrozenMLP, LoRA_MLP
from fused_mlp.utils import ACTIVATIONS

from ..reading.aside import say_left, step_aside
from ..reading.forms import MLPForm
from ..reading.known import known_form, why_not_class
from ..reading.projection import Projection, bias_of, seed_for, split_projection, why_call
from ..reading.refusal import attempt, refuse
from ..rerun import saving_last
from ..weights.four_bit_parts import why_not_input, written
from .linear import Reads, read_projections, run_alone


def mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield MLPs that have gate and up as two layers or as one. Unknown classes are included."""
    for name, module in model.named_modules():
        output = _named_form(module).output
        if output in module._modules and projections_of(module) - {output, "up_proj"}:  # a gate
            yield name, module


def _named_form(mlp: nn.Module) -> MLPForm:
    """Return the form with the names of an MLP's layers; in an unknown class, Llama's."""
    return known_form(mlp, "MLP") or MLPForm()


def read_mlp(mlp: nn.Module) -> Reads:
    """Return gate, up and down as they are now; gate and up may be one projection."""
    refuse(why_not_class(mlp, "MLP") or why_not_activation(mlp))
    form = known_form(mlp, "MLP")
    return read_projections(mlp, (*form.projections, form.output))


def split_gate_up(reads: list[Projection]) -> list[Projection]:
    """Return gate and up of an MLP, whether it has two layers for them or one."""
    return reads if len(reads) > 1 else split_projection(reads[0], [len(reads[0].weight) // 2] * 2)


def activation_of(mlp: Any) -> str:
    """Return LoRA_MLP's name for an MLP's activation, or its class's name if it has none."""
    name = known_form(mlp, "MLP").activation
    return activation_name(getattr(mlp, name)) if name else "silu"


def activation_name(activation: Any) -> str:
    """Return LoRA_MLP's name for an activation, or its class's name if it has none."""
    if activation is F.silu or type(activation) in (nn.SiLU, SiLUActivation):
        return "silu"
    if type(activation) is GELUTanh:
        function = activation.act  # F.gelu with an option, or a Python version
        if isinstance(function, partial) and isinstance(function.func, BuiltinFunctionType):
            return "gelu_tanh"
    return type(activation).__name__


def why_not_activation(mlp: Any) -> str | None:
    """Return the reason if we do not know the MLP's activation, or must call its module."""
    name = known_form(mlp, "MLP").activation
    return why_not_one_of(ACTIVATIONS, mlp, name) if name else None


def why_not_one_of(activations: Collection[str], module: Any, name: str) -> str | None:
    """Return the reason if the activation in this attribute is none of these, or if we must call
    its module."""
    activation = getattr(module, name)
    if activation_name(activation) not in activations:
        known = " or ".join(ACTIVATIONS[one] for one in activations)
        return f"its activation is {type(activation).__name__}, not {known}"
    if isinstance(activation, nn.Module) and (reason := why_call(activation)) is not None:
        return f"{name}: {reason}"
    return None


def mlp_forward(mlp: nn.Module, parts: frozenset[str], x: Tensor) -> Tensor:
    reads, reason = attempt(read_mlp, mlp)
    if reason := reason or why_not_input(x, reads.fit):
        return step_aside(mlp, reason, x)
    if reads.left:
        say_left(mlp, reads.left)
        return _run_apart(mlp, x)
    return run_mlp(mlp, mlp, reads.fit, x)


def run_mlp(owner: nn.Module, mlp: nn.Module, reads: Sequence[Projection], x: Tensor) -> Tensor:
    """Run an MLP as one function. owner: the module whose forward this is."""
    (*both, down), write_again = written(owner, list(reads))
    gate, up = split_gate_up(both)
    every = gate, up, down
    frozen = FrozenMLP(
        gate.weight, up.weight, down.weight, gate.scaling, up.scaling, down.scaling,
        activation=activation_of(mlp), seed=seed_for(x, *(one.dropout for one in every)),
        gate_dropout=gate.dropout, up_dropout=up.dropout, down_dropout=down.dropout,
        write_again=write_again,
    )  # fmt: skip
    adapters = [tensor for one in every for tensor in (one.A, one.B)]
    biases = [bias_of(one) for one in every]
    if all(bias is None for bias in biases):
        biases = []

    def run(output_needed: bool) -> Tensor:
        now = frozen._replace(output_needed=output_needed)
        return LoRA_MLP.apply(x, *adapters, *biases, now)

    return saving_last(run)


def _run_apart(mlp: Any, x: Tensor) -> Tensor:
    """Run the class's forward projection by projection, each fused if possible."""
    form = known_form(mlp, "MLP")
    outputs = [run_alone(mlp, getattr(mlp, name), x) for name in form.projections]
    gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    activation = getattr(mlp, form.activation) if form.activation else F.silu
    return run_alone(mlp, getattr(mlp, form.output), activation(gate) * up)


def projections_of(mlp: nn.Module) -> set[str]:
    form = _named_form(mlp)
    return mlp._modules.keys() & {"gate_up_proj", *form.projections, form.output}
