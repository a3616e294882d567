"""RMSNorm, alone or with the residual addition before it, one Triton kernel each way.

    y = x r w,      r = 1 / sqrt(mean(x^2) + eps)      mean over the last dimension, of N elements

where w is the weight, or 1 + weight if it is zero-centred like Gemma's.

In a decoder layer x is itself a sum, total = x + delta, which continues as the residual.
`add_rms_norm` returns both: no kernel writes total just for the next one to read it.

With n = x r and g = grad_y w, and since dr/dx_j = -r^3 x_j / N,

    grad_x_j = r g_j + sum_i(g_i x_i) dr/dx_j = r (g_j - n_j mean(g n))
    grad_w   = sum over rows of grad_y n

An incoming gradient of total is added to grad_x, which is then the gradient of x and of delta.

Traffic in tensors of x's size: 2 forward (x, y), 4 with the addition (x, delta, total, y); 3
backward (grad_y, x, grad_x), 4 with the addition. Eager PyTorch moves 7 forward, and in bf16 the
equivalent of 18, because it casts x to fp32 and back. Arithmetic is fp32 and rounds once, at the
store; eager rounds n before it multiplies by w. Only total is rounded before the norm, because the
rest of the model sees it rounded.

RMSNorm: Zhang & Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

import torch
from torch import Tensor

from fused_mlp.launching import check_runnable
from fused_mlp.utils import refuse_second_derivative

from ..kernels.row_norm import (
    MAX_HIDDEN,
    _rms_norm_forward_kernel,
    rms_norm_backward,
    rms_norm_forward,
)
from ..kernels.rows import as_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Divide x by its root mean square, and multiply by weight.

    Equivalent PyTorch::

        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        weight * (x.float() * rstd).to(x.dtype)
        # zero_centered: ((1 + weight.float()) * (x.float() * rstd)).to(x.dtype)

    Args:
        x: [..., hidden], bf16, fp16 or fp32; hidden at most 65,536. Any strides: it is copied only
            if its rows are not evenly spaced, or their elements not contiguous.
        weight: [hidden], in x's dtype. Copied if not contiguous.
        zero_centered: multiply by 1 + weight, as in Gemma.

    Returns:
        A new contiguous tensor of x's shape and dtype, computed in fp32; grad_x is another. The
        weight's gradient is summed in fp32, and only if the weight requires one.

    Saved for backward: x, weight and [rows] fp32. It writes to no input, incoming gradient or saved
    tensor, so x may have other consumers, and a second backward through a retained graph is right.
    Deterministic. Not twice differentiable. Autocast changes nothing.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or no kernel can run on them.
        RuntimeError: from backward, under create_graph=True.
    """
    return RMSNorm.apply(x, weight, eps, zero_centered)


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Add x and delta. Return (y, total): the normalised sum, and the sum itself.

    Equivalent PyTorch::

        total = x + delta
        rms_norm(total, weight, eps, zero_centered), total

    Args:
        x, weight, eps, zero_centered: as for `rms_norm`.
        delta: like x, with its shape and dtype.

    Returns:
        (y, total), two new contiguous tensors of x's shape and dtype.

    Saved for backward: total, weight and [rows] fp32, but neither x nor delta. An unused output
    counts as one with a zero gradient. Everything else is as for `rms_norm`.
    """
    return AddRMSNorm.apply(x, delta, weight, eps, zero_centered)


class RMSNorm(torch.autograd.Function):
    """``RMSNorm.apply(x, weight, eps, zero_centered)``; see `rms_norm`."""

    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered):
        _check("rms_norm", x, None, weight)
        y = x.new_empty(x.shape)
        rstd = rms_norm_forward(as_rows(x), weight.contiguous(), eps, y, None, zero_centered)
        ctx.zero_centered = zero_centered
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        refuse_second_derivative("rms_norm", "the unfused norm")
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = _gradients(
            grad_y, None, x, weight, rstd, ctx.needs_input_grad[1], ctx.zero_centered
        )
        return grad_x, grad_weight, None, None


class AddRMSNorm(torch.autograd.Function):
    """``AddRMSNorm.apply(x, delta, weight, eps, zero_centered)``; see `add_rms_norm`."""

    @staticmethod
    def forward(ctx, x, delta, weight, eps, zero_centered):
        _check("add_rms_norm", x, delta, weight)
        y, total = x.new_empty(x.shape), x.new_empty(x.shape)
        rstd = rms_norm_forward(
            as_rows(x), weight.contiguous(), eps, y, total, zero_centered, as_rows(delta)
        )
        ctx.zero_centered = zero_centered
        ctx.save_for_backward(total, weight, rstd)
        return y, total

    @staticmethod
    def backward(ctx, grad_y, grad_total):
        refuse_second_derivative("add_rms_norm", "the unfused norm")
        total, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = _gradients(
            grad_y, grad_total, total, weight, rstd, ctx.needs_input_grad[2], ctx.zero_centered
        )
        # One tensor for both, like an addition: autograd never adds in place into a shared tensor.
        return grad_x, grad_x, grad_weight, None, None


def _gradients(
    grad_y: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor,
    need_weight: bool, zero_centered: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return (grad_x, grad_weight) for the norm's input `total`; grad_weight None if not needed."""
    grad_x = total.new_empty(total.shape)
    grad_weight = torch.empty_like(weight) if need_weight else None
    rms_norm_backward(
        as_rows(grad_y), None if grad_total is None else as_rows(grad_total), as_rows(total),
        weight.contiguous(), rstd, grad_x, zero_centered, grad_weight,
    )  # fmt: skip
    return grad_x, grad_weight


def _check(name: str, x: Tensor, delta: Tensor | None, weight: Tensor) -> None:
    """Raise ValueError where shapes, dtypes or devices do not fit together, naming the tensor."""
    if x.ndim == 0 or not 1 <= x.shape[-1] <= MAX_HIDDEN:
        raise ValueError(
            f"{name}: x is {list(x.shape)}, should be [..., hidden], hidden from 1 to {MAX_HIDDEN}"
        )
    wanted = {"weight": (weight, x.shape[-1:]), "delta": (delta, x.shape)}
    for other, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: {other} is {list(tensor.shape)}, should be {list(shape)} as x is "
                f"{list(x.shape)}"
            )
        if (tensor.dtype, tensor.device) != (x.dtype, x.device):
            raise ValueError(
                f"{name}: {other} is {tensor.dtype} on {tensor.device} and x {x.dtype} on "
                f"{x.device}: give both one dtype and device, or use the unfused norm"
            )
    check_runnable(name, _rms_norm_forward_kernel, x)
