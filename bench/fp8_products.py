"""Vanilla PEFT with the products of its base weights in FP8, for parity of variants that have them.

In plain PyTorch and with nothing of `fused_lora`: codes, scales and what is multiplied by what are
as docs/api.md has FP8. It multiplies in fp32, slowly, and is never timed.
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
    """Within it every base layer under an adapter multiplies codes, forward and backward."""
    bases: list[Any] = [one.base_layer for one in model.modules() if hasattr(one, "base_layer")]
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
            # the scales of W's rows lie in this sum
            return (_rounded(grad * scales.t()) @ codes).to(grad.dtype), None, None


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes in e4m3 to x over the scale of its row, in fp32, and the scales."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (x / scales).to(E4M3).float(), scales


def _rounded(x: Tensor) -> Tensor:
    codes, scales = _codes(x)
    return codes * scales
