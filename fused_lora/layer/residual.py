"""A layer's residual: its norms before attention and MLP, what these add to
it, as it is, as a multiple or normed, the gradients of biases, and the rows that are wanted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_mlp.dropout import Mask, Masks

from ..kernels.dropped_products import dropped_products
from ..kernels.residual import extend_rows, residual_norm_backward, residual_norm_forward
from ..kernels.rows import empty_rows
from .buffer import Bordered, Codes, Extended, grow_k_forward
from .fp8.buffer import Fp8Buffer


def normed_product(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, bordered: Bordered,
    masks: Masks | None, copy: Tensor | None = None,
) -> tuple[Tensor, Extended, Tensor | None]:  # fmt: skip
    """(y, [n | z], rstd) of n, the norm of x, or without a weight x: y = n W' + bias and what the
    adapters add, of n as masks keep it; x once more into copy."""
    width, buffer, bias = x.shape[1], bordered.buffer, bordered.base_bias
    if masks is None and isinstance(buffer, Fp8Buffer):
        y, *read, rstd = buffer.product_of_norm(x, weight, eps, zero_centered, bias)
        if copy is not None:
            copy.copy_(x)
        return y, Extended(*read), rstd
    extended = empty_rows(x, len(x), bordered.x_columns)
    normed, rstd = extended[:, :width], None
    if weight is not None:
        rstd = residual_norm_forward(x, weight, eps, normed, copy, zero_centered)
    else:
        normed.copy_(x)
        if copy is not None:
            copy.copy_(x)
    y = grow_k_forward(extended, bordered, masks)
    return y, Extended(normed, extended[:, width:]), rstd


def norm_backward(
    grad_y: Tensor, grad_residual: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor | None,
    zero_centered: bool, grad_x: Tensor, grad_weight: Tensor | None,
    read_by: Bordered | None = None,
) -> Codes | None:  # fmt: skip
    """Write the gradient of `normed_product`'s x, which goes on as the residual, into grad_x, and
    that of a weight that is trained into grad_weight. Returns grad_x's codes where what reads it
    next is in FP8, and the norm has them at hand."""
    if weight is None or rstd is None:
        torch.add(grad_y, grad_residual, out=grad_x)
    elif grad_weight is None and read_by is not None and isinstance(read_by.buffer, Fp8Buffer):
        return read_by.buffer.gradient_through_norm(
            grad_y, grad_residual, x, weight, rstd, zero_centered, grad_x
        )
    else:
        residual_norm_backward(
            grad_y, grad_residual, x, weight, rstd, grad_x, zero_centered, grad_weight
        )
    return None


def adds_beside(bordered: Bordered, masks: Masks | Mask | None) -> bool:
    """Return True if the residual is added after the matmul, in a second pass: an FP8 matmul cannot
    accumulate into it."""
    return masks is None and isinstance(bordered.buffer, Fp8Buffer)


def add_projected(
    x: Tensor, extended: Tensor | None, bordered: Bordered, total: Tensor, multiplier: float,
    masks: Masks | None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add multiplier (x W' + bias + s (x A') B') to total, which holds the residual. If it
    `adds_beside`, write the sum with `residual` there instead. Return x A', new.

    extended: rows for [x | x A']; x may be their first columns. None: allocate them if needed.
    One matmul adds and rounds once; a bias rounds once more. In FP8 the matmul rounds before the
    residual is added, but by then it includes the adapter.
    """
    if isinstance(bordered.buffer, Fp8Buffer) and adds_beside(bordered, masks):
        y, z = bordered.buffer.product_and_z(x, bordered.base_bias)
        torch.add(total if residual is None else residual, y, alpha=multiplier, out=total)
        return z
    z = x.new_empty(len(x), len(bordered.A))
    if extended is None:
        extended = empty_rows(x, len(x), bordered.x_columns)
    if masks is None:
        extend_rows(x, bordered.A, extended, z)
    else:
        dropped_products(x, bordered.A, bordered.blocks, masks, z)
        first, rest = extended.split_with_sizes([x.shape[1], z.shape[1]], 1)
        if first.data_ptr() != x.data_ptr():
            first.copy_(x)
        rest.copy_(z)
    bordered.buffer.add_product(total, extended, multiplier)
    if bordered.base_bias is not None:
        total.add_(bordered.base_bias, alpha=multiplier)
    return z


def gradient_of_added(
    grad: Tensor, width: int, multiplier: float, x: Tensor | None, weight: Tensor | None,
    rstd: Tensor | None, zero_centered: bool, grad_weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """Wide rows with the gradient of what a projection gives, from those with that of a sum, to
    which it is added as it is (the same rows then), as a multiple, or normed (x, of which rstd);
    that of a norm's weight that is trained is written into grad_weight."""
    if weight is None and multiplier == 1.0:
        return grad
    of_sum, wide = grad[:, :width], empty_rows(grad, *grad.shape)
    if x is None or weight is None or rstd is None:
        torch.mul(of_sum, multiplier, out=wide[:, :width])
        return wide
    residual_norm_backward(
        of_sum, None, x, weight, rstd, wide[:, :width], zero_centered, grad_weight
    )
    if multiplier != 1.0:
        wide[:, :width].mul_(multiplier)
    return wide


def sum_biases(grad: Tensor, bordered: Bordered, grad_biases: Sequence[Tensor | None]) -> None:
    """Write the gradients of the biases that are trained, each the sum over tokens of what its
    projection gave, whose gradients are the first columns of grad."""
    grads = grad[:, : bordered.out].split_with_sizes(bordered.out_features, 1)
    for of_output, of_bias in zip(grads, grad_biases, strict=True):
        if of_bias is not None:
            # bf16 sums in fp32, and is rounded to the dtype that is asked for
            dtype = torch.promote_types(of_output.dtype, of_bias.dtype)
            of_bias.copy_(of_output.sum(0, dtype=dtype))


def wanted_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """These rows of tensor, or tensor where all are wanted."""
    return tensor if rows is None else tensor.index_select(0, rows)


def spread_rows(wanted: Tensor, rows: Tensor, count: int) -> Tensor:
    """Put `wanted_rows` back where they were among `count` rows, the others 0."""
    return wanted.new_zeros(count, wanted.shape[1]).index_copy_(0, rows, wanted)
