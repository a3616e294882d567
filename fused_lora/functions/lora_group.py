"""LoRA_Group: any number of adapted linear layers that share an input, as one autograd function.

The same as LoRA_QKV (`lora_linear.py`), for the layers in front of a gated delta net: [q | k | v],
z, b and a. For these four it is 9 matmuls forward and 14 backward; layer by layer it is 12 and 20.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fused_mlp.utils import split_frozen

from .lora_linear import FrozenLinear, group_backward, group_forward


class FrozenGroup(NamedTuple):
    """The operands of LoRA_Group that it does not train. seed: as for LoRA_W, one for all masks;
    the layers' own are not read. write_again: as in FrozenMLP, for all weights."""

    layers: tuple[FrozenLinear, ...]
    seed: Tensor | None = None  # [1] int64
    write_again: Callable[[], None] | None = None


class LoRA_Group(torch.autograd.Function):
    """``LoRA_Group.apply(x, A_1, B_1, A_2, B_2, ..., frozen)``: layers that share x. Trained
    biases, one for each layer, go before frozen.

    Equivalent PyTorch::

        for layer, A, B in zip(frozen.layers, ...):
            z = F.linear(F.dropout(x, layer.dropout), A)  # without dropout, of x as it is
            F.linear(x, layer.weight, layer.bias) + F.linear(z, B) * layer.scaling

    Args:
        x: [..., in], as for LoRA_W.
        A: [r, in]. B: [out, r]. Any r, as for LoRA_QKV.
        bias: [out], or None. They replace frozen's.
        frozen: as for LoRA_QKV.

    Returns:
        A tuple of [..., out], one for each layer, in the compute dtype. All else, what is saved,
        gradients and errors, is as for LoRA_QKV.
    """

    @staticmethod
    def forward(ctx, x, *rest):
        trained, frozen = split_frozen("LoRA_Group", rest, FrozenGroup)
        ctx.write_again = frozen.write_again
        count = len(frozen.layers)
        prefixes = tuple(f"layer {i}'s " for i in range(count))
        adapters, biases = tuple(trained[: 2 * count]), trained[2 * count :]
        return group_forward(
            ctx, "LoRA_Group", prefixes, x, adapters, biases, [*frozen.layers], frozen.seed
        )

    @staticmethod
    def backward(ctx, *grad_outputs):
        return *group_backward(ctx, "LoRA_Group", *grad_outputs), None
