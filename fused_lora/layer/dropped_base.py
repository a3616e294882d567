"""Dropout in front of DoRA's frozen weights.

PEFT adds (c - 1) W x' + c s B A x' to W x + bias, for an x' = x m with dropout's mask m. With

    u = W x + s B A x'          which a buffer gives, and
    e = W (x' - x)

that is y = c (u + e) - e + bias. For an incoming g

    grad_u = c g        grad_e = (c - 1) g        grad_x += (m - 1) W' grad_e
    grad_m = sum over tokens of g (u + e) / norm

So each projection multiplies with its frozen weight once more in each direction, in the adapters'
dtype. It is not made to be fast: FP8 weights are dequantised whole each time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_mlp.dropout import Mask, Masks, add_dropped


def dropped_base(x: Tensor, weights: Sequence[Tensor], masks: Masks) -> Tensor:
    """Return e of projections side by side, [T, out] in fp32; 0 of one that drops nothing."""
    outs = [len(weight) for weight in weights]
    e = x.new_zeros(len(x), sum(outs), dtype=torch.float32)
    for columns, weight, mask in zip(e.split_with_sizes(outs, 1), weights, masks, strict=True):
        if mask is not None:
            columns.copy_(_change(x, mask) @ weight.t())
    return e


def add_dropped_gradient(
    grads: Sequence[Tensor], weights: Sequence[Tensor], masks: Masks, grad_x: Tensor
) -> None:
    """Add the gradient of x that e has, given e's by projection."""
    for grad, weight, mask in zip(grads, weights, masks, strict=True):
        if mask is not None:
            grad_x.add_(_change(grad @ weight, mask))


def _change(x: Tensor, mask: Mask) -> Tensor:
    """Return x' - x."""
    return add_dropped(x.neg(), x, mask)
