"""Vanilla PEFT with FP8 matmuls in its base layers: the parity reference of FP8 variants.

Plain PyTorch after fused_lora/docs/fp8.md, without anything of `fused_lora`. It multiplies in fp32,
slowly, and is never timed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

E4M3, LARGEST = torch.float8_e4m3fn, 448.0


@contextmanager
def fp8_products(model: nn.Module) -> Iterator[None]:
    """Let every base layer under an adapter multiply FP8 codes, forward and backward."""
    bases: list[Any] = [
        module.base_layer for module in model.modules() if hasattr(module, "base_layer")
    ]
    for base in bases:
        base.forward = partial(_run, base)
    try:
        yield
    finally:
        for base in bases:
            del base.forward


def _run(base: Any, x: Tensor) -> Tensor:
    return _Product.apply(x, base.weight, base.bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        codes, scales = _codes(weight)
        ctx.save_for_backward(codes, scales)
        with torch.autocast(x.device.type, enabled=False):
            product = _rounded(x) @ codes.t() * scales.t()
        return (product if bias is None else product + bias).to(weight.dtype)

    @staticmethod
    def backward(ctx, grad):
        codes, scales = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            # this sum runs over W's rows, so their scales go into the gradient first
            return (_rounded(grad * scales.t()) @ codes).to(grad.dtype), None, None


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the e4m3 codes nearest to x / scale, in fp32, and the scale of each row."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (x / scales).to(E4M3).float(), scales


def _rounded(x: Tensor) -> Tensor:
    codes, scales = _codes(x)
    return codes * scales
