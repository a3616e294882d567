"""A layer's residual: its norms and their gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.row_norm import rms_norm_backward, rms_norm_forward
from ..kernels.rows import empty_rows


class Norm(NamedTuple):
    """An RMSNorm. zero_centered: it multiplies by one more than its weight."""

    weight: Tensor  # [hidden]
    eps: float
    zero_centered: bool = False


class Normed(NamedTuple):
    """A tensor that was normed on its way into the residual, and its 1 / root mean square."""

    x: Tensor  # [T, hidden]
    rstd: Tensor  # [T]


def apply_norm(x: Tensor, norm: Norm | None, y: Tensor, copy: Tensor | None) -> Tensor | None:
    """Write the norm of x into y, and x itself into copy; without a norm y is x. Return rstd."""
    if norm is not None:
        return rms_norm_forward(x, norm.weight, norm.eps, y, copy, norm.zero_centered)
    y.copy_(x)
    if copy is not None:
        copy.copy_(x)
    return None


def norm_backward(
    grad_y: Tensor, grad_residual: Tensor, x: Tensor, norm: Norm | None, rstd: Tensor | None,
    grad_x: Tensor, grad_weight: Tensor | None,
) -> None:  # fmt: skip
    """Write the gradient of x, which was normed and goes on as the residual, into grad_x, and a
    trained weight's into grad_weight."""
    if norm is None or rstd is None:
        torch.add(grad_y, grad_residual, out=grad_x)
    else:
        rms_norm_backward(
            grad_y, grad_residual, x, norm.weight, rstd, grad_x, norm.zero_centered, grad_weight
        )


def addend_gradient(
    grad_sum: Tensor, multiplier: float, normed: Normed | None, norm: Norm | None,
    grad_weight: Tensor | None, like: Tensor, columns: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of a projection that was multiplied, or normed, before it was added.

    grad_sum [T, hidden] is the gradient of the sum. The result is the first columns of new rows
    `columns` wide, in the dtype of `like`. grad_weight gets that of a trained norm's weight.
    """
    wide = empty_rows(like, grad_sum.shape[0], columns)
    grad = wide[:, : grad_sum.shape[1]]
    if normed is None or norm is None:
        torch.mul(grad_sum, multiplier, out=grad)
        return wide
    rms_norm_backward(
        grad_sum, None, normed.x, norm.weight, normed.rstd, grad, norm.zero_centered, grad_weight
    )
    if multiplier != 1.0:
        grad.mul_(multiplier)
    return wide
