"""The switch `mlp`: the forward that it sets on an MLP."""

from typing import Any

import torch
from torch import Tensor, nn

from fused_mlp import FrozenMLP, LoRA_MLP

from ..step.recompute import is_recomputing
from .projection import read_projection, why_call
from .site import class_forward, say_once, why_not_class, why_unloaded


def read_mlp(mlp: nn.Module) -> tuple | str:
    """Return the operands of LoRA_MLP after x, read from this MLP as it is now, or the reason why
    it may not run fused."""
    if (reason := why_not_class(mlp, "MLP") or why_not_activation(mlp)) is not None:
        return reason
    projections = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        projection = read_projection(getattr(mlp, name))
        if isinstance(projection, str):
            return f"{name}: {projection}"
        if projection.bias is not None:
            return f"{name}: its base layer has a bias"
        projections.append(projection)
    if (reason := why_unloaded(mlp, projections)) is not None:
        return reason
    gate, up, down = projections
    frozen = FrozenMLP(gate.weight, up.weight, down.weight, gate.scaling, up.scaling, down.scaling)
    return gate.A, gate.B, up.A, up.B, down.A, down.B, frozen


def why_not_activation(mlp: Any) -> str | None:
    activation = mlp.act_fn
    if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation":
        return f"its activation is {type(activation).__name__}, not SiLU"
    if (reason := why_call(activation)) is not None:
        return f"act_fn: {reason}"
    return None


def mlp_forward(mlp: nn.Module, parts: frozenset[str], x: Tensor) -> Tensor:
    operands = read_mlp(mlp)
    if isinstance(operands, str):
        say_once(mlp, operands)
        return class_forward(mlp, x)
    *adapters, frozen = operands
    # a compiled layer is one graph, whether it runs for the first time or again
    output_needed = torch.compiler.is_compiling() or not is_recomputing()
    return LoRA_MLP.apply(x, *adapters, frozen._replace(output_needed=output_needed))
