"""Kernels on a decoder layer's residual: RMSNorm into the first columns of a wider buffer, its
backward, what a projection that is added to the residual reads, and the residual's sum with a norm.

    residual_norm_forward    y = x r w,   r = 1 / sqrt(mean(x^2) + eps)
    residual_norm_backward   grad_x = r (g - n mean(g n)) + grad_residual,   n = x r,  g = grad_y w,
                             and where w is trained, its gradient
    extend_rows         extended = [x | z],  z = x A'
    add_normed          total = residual + x r w

where w is the weight, or 1 + weight if that is zero-centred.

(The first two are the kernels of `row_norm.py`.) A bordered matmul reads its input as [x | x A'].
The norm therefore writes x where the matmul reads it, with that buffer's row stride, and no copy is
made. Our own attention kernels do the same. The output of a library's attention is copied by
`extend_rows`, in the pass that makes z. A matmul that is added to the residual adds to a copy of
it, which the norm before has written.

Why not add the adapter after the matmul? A y that is rounded to bf16 and a residual in bf16 often
add up to an exact tie, and then the sign of the smallest z B' decides it. Adapters of 1e-6 changed
the loss 2.4 times as much as in fp32. One matmul with one rounding gets them right on average.

Traffic in tensors of x's size: 2, or 3 with a copy of x, 4 (grad_y, x, grad_residual, grad_x), 2,
or 1 where x is in place, and 3.

Arithmetic is fp32 and rounds once, at the store. Deterministic. Every operand may have rows any
stride apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, launch, next_power_of_2

from .row_norm import (
    MAX_PARTIAL_SUMS,
    _rms_norm_backward_kernel,
    _rms_norm_forward_kernel,
    load_weight,
    norm_row,
)
from .rows import block_of
from .tiling import MAX_BLOCK_RANK, Tiling, dots_in_fp32, stages

# The fastest tried on an H100, at 2,048 to 16,384 rows of 2,048 and of 4,096, or within 2% of it.
TILING = Tiling(rows=64, columns=128, splits=1, warps=4, stages=3)


@triton.jit(do_not_specialize=["rows"])
def _extend_rows_kernel(
    x_ptr,  # [rows, columns]
    A_ptr,  # [rank, columns]
    extended_ptr,  # [rows, columns + rank], written, its first columns only where x is elsewhere
    z_ptr,  # [rows, rank], written
    rows,
    columns,
    rank,
    x_row_stride,
    A_row_stride,
    extended_row_stride,
    z_row_stride,
    COPIES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    k = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    copies = COPIES & (tl.program_id(1) == 0)  # once, and not for each block of the rank
    z = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        mask = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0)
        A_tile = A_ptr + k.to(tl.int64)[:, None] * A_row_stride + column
        A = tl.load(A_tile, mask=(k < rank)[:, None] & (column < columns), other=0.0)
        if COPIES:
            tl.store(extended_ptr + row * extended_row_stride + column, x, mask=mask & copies)
        if IN_FP32:
            x, A = x.to(tl.float32), A.to(tl.float32)
        z = tl.dot(x, tl.trans(A), z, input_precision="ieee")
    z = z.to(z_ptr.dtype.element_ty)
    mask = (row < rows) & (k < rank)[None, :]
    tl.store(z_ptr + row * z_row_stride + k[None, :], z, mask=mask)
    tl.store(extended_ptr + row * extended_row_stride + columns + k[None, :], z, mask=mask)


@triton.jit
def _add_normed_kernel(
    residual_ptr,  # [rows, hidden]
    x_ptr,  # [rows, hidden]
    weight_ptr,  # [hidden]
    total_ptr,  # [rows, hidden], written
    rstd_ptr,  # [rows] fp32, written
    residual_row_stride,
    x_row_stride,
    total_row_stride,
    hidden,
    eps,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    weight = load_weight(weight_ptr, columns, mask, ZERO_CENTERED)
    residual = tl.load(residual_ptr + row * residual_row_stride + columns, mask=mask)
    y, rstd = norm_row(x, weight, hidden, eps)
    total = residual.to(tl.float32) + y
    tl.store(total_ptr + row * total_row_stride + columns, total.to(total_ptr.dtype.element_ty),
             mask=mask)  # fmt: skip
    tl.store(rstd_ptr + row, rstd)


def residual_norm_forward(
    x: Tensor, weight: Tensor, eps: float, y: Tensor, copy: Tensor | None = None,
    zero_centered: bool = False,
) -> Tensor:  # fmt: skip
    """Write the norm of x into y; returns rstd, [rows] fp32.

    Equivalent PyTorch, for x, y and copy [rows, hidden] and weight [hidden], of one dtype, which y
    need not have::

        copy.copy_(x)  # if it is given
        rstd = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        y.copy_(x.float() * rstd[:, None] * weight.float())  # zero_centered: 1 + weight.float()

    copy is for a matmul that is added to it in place. Without it, PyTorch would make that copy.
    """
    rows, hidden = x.shape
    rstd = x.new_empty(rows, dtype=torch.float32)
    if rows:  # an empty grid cannot be launched
        block, warps = block_of(hidden)
        launch(
            _rms_norm_forward_kernel, (rows,),
            x, None, weight, copy, y, rstd,
            x.stride(0), 0, 0 if copy is None else copy.stride(0), y.stride(0),
            hidden, eps, zero_centered, block, num_warps=warps,
        )  # fmt: skip
    return rstd


def residual_norm_backward(
    grad_y: Tensor, grad_residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor,
    grad_x: Tensor, zero_centered: bool = False, grad_weight: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient of x, which was normalised and goes on as the residual, into grad_x, and
    that of weight, where it is asked for, into grad_weight [hidden], which may have any dtype.

    Equivalent PyTorch, for [rows, hidden] tensors of one dtype, which grad_y and grad_x need not
    have, y being the norm of x::

        grad_x.copy_(torch.autograd.grad(y, x, grad_y)[0] + grad_residual)
        grad_weight.copy_(torch.autograd.grad(y, weight, grad_y)[0])  # summed in fp32

    Without grad_residual x goes on nowhere. weight, rstd and zero_centered are as
    `residual_norm_forward` had and gave them.
    """
    rows, hidden = x.shape
    rows_per_program = 1 if grad_weight is None else max(cdiv(rows, MAX_PARTIAL_SUMS), 1)
    programs = cdiv(rows, rows_per_program)
    partial = None if grad_weight is None else rstd.new_empty(programs, hidden)
    if rows:
        block, warps = block_of(hidden)
        launch(
            _rms_norm_backward_kernel, (programs,),
            grad_y, grad_residual, x, weight, rstd, grad_x, partial,
            grad_y.stride(0), 0 if grad_residual is None else grad_residual.stride(0), x.stride(0),
            grad_x.stride(0),
            rows, hidden, rows_per_program, zero_centered, block, num_warps=warps,
        )  # fmt: skip
    if grad_weight is not None and partial is not None:
        grad_weight.copy_(partial.sum(0))


def extend_rows(x: Tensor, A: Tensor, extended: Tensor, z: Tensor) -> None:
    """Write x and, beside it, x A' into extended, and x A' once more into z.

    Equivalent PyTorch, for x [rows, columns], A [rank, columns], z [rows, rank] and extended
    [rows, columns + rank], all of one dtype, the product summed in fp32::

        z.copy_(x @ A.t())
        extended.copy_(torch.cat((x, z), 1))

    x may be extended's first columns, which then stay. z is for whoever saves it, and need not
    keep all of extended.
    """
    kernel = _extend_rows_kernel
    (rows, columns), rank = x.shape, A.shape[0]
    if rows == 0:
        return
    tile_rows = min(max(next_power_of_2(rows), 16), TILING.rows)  # tl.dot wants 16 at least
    block_rank = min(max(next_power_of_2(rank), 16), MAX_BLOCK_RANK)
    launch(
        kernel, (cdiv(rows, tile_rows), cdiv(rank, block_rank)),
        x, A, extended, z, rows, columns, rank,
        x.stride(0), A.stride(0), extended.stride(0), z.stride(0),
        x.data_ptr() != extended.data_ptr(), tile_rows, TILING.columns, block_rank,
        dots_in_fp32(kernel, x), num_warps=TILING.warps,
        num_stages=stages(TILING, (tile_rows + block_rank) * TILING.columns, x),
    )  # fmt: skip


def add_normed(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, total: Tensor,
    zero_centered: bool = False,
) -> Tensor:  # fmt: skip
    """Write the residual plus the norm of x into total; returns rstd, [rows] fp32.

    Equivalent PyTorch, for [rows, hidden] tensors of one dtype, and a sum that rounds once::

        rstd = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        total.copy_(residual.float() + x.float() * rstd[:, None] * weight.float())
        # zero_centered: 1 + weight.float()

    `residual_norm_backward` without grad_residual has x's gradient from total's.
    """
    rows, hidden = x.shape
    rstd = x.new_empty(rows, dtype=torch.float32)
    if rows:
        block, warps = block_of(hidden)
        launch(
            _add_normed_kernel, (rows,),
            residual, x, weight, total, rstd,
            residual.stride(0), x.stride(0), total.stride(0), hidden, eps, zero_centered, block,
            num_warps=warps,
        )  # fmt: skip
    return rstd
