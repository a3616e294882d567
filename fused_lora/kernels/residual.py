"""Kernels on a decoder layer's residual: RMSNorm into the first columns of a wider buffer, its
backward, and the residual's sum with what an adapted projection gives, or with the norm of that.

    residual_norm_forward    y = x r w,   r = 1 / sqrt(mean(x^2) + eps)
    residual_norm_backward   grad_x = r (g - n mean(g n)) + grad_residual,   n = x r,  g = grad_y w,
                             and where w is trained, its gradient
    add_adapted         total = residual + m (y + z B'),  z_copy = z
    add_normed          total = residual + x r w

where w is the weight, or 1 + weight if that is zero-centred.

(The first two are the kernels of `rms_norm.py`, which derives the second.) A bordered product wants
its input as [x | x A'], so the norm writes x where the product reads it, with a row stride of its
own, and no copy is made.

Traffic in tensors of x's size: 2, or 3 with a copy of x, 4 (grad_y, x, grad_residual, grad_x) and
3. `add_adapted` is an addition that finishes a product: with z B' by cuBLAS and the sum in the norm
after it, they would be 6 with the norm's own and not 5, and 5 and not 3 where no norm follows. It
is not in the norm itself: that wants whole rows, of which a multiprocessor holds too few to read B
[hidden, rank] rarely enough. z and B are small, z [rows, rank] read once for every BLOCK_COLUMNS
columns. The copy is for whoever keeps z but not the product's buffer, whose last columns z is: as a
launch of its own it took 3 to 6 µs.

Arithmetic is fp32 and rounds once, at the store. Deterministic. Every operand may have rows any
stride apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, launch, next_power_of_2

from ..rms_norm import (
    MAX_HIDDEN,
    MAX_PARTIAL_SUMS,
    _rms_norm_backward_kernel,
    _rms_norm_forward_kernel,
    block_of,
    rstd_of,
)
from .rows import check_alike, check_rows
from .tiling import dots_in_fp32

# A tile of 32 x 128 is 4,096 sums, 32 registers a thread in 4 warps. At 16,384 x 2,048 on an H200 a
# call takes 0.106 ms, with 64 x 128 0.125, with 64 x 256 0.155.
BLOCK_ROWS, BLOCK_COLUMNS, MAX_BLOCK_RANK = 32, 128, 64


@triton.jit
def _add_adapted_kernel(
    y_ptr,  # [rows, columns]
    residual_ptr,  # [rows, columns], or None, for 0
    z_ptr,  # [rows, rank]
    B_ptr,  # [columns, rank]
    total_ptr,  # [rows, columns], written
    z_copy_ptr,  # [rows, rank], written
    rows,
    columns,
    rank,
    residual_row_stride,
    y_row_stride,
    z_row_stride,
    B_row_stride,
    total_row_stride,
    z_copy_row_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # asked for first, so that they are on their way while the product is made
    mask = (row < rows) & (column < columns)[None, :]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_row_stride + column[None, :], mask=mask)
    y = tl.load(y_ptr + row * y_row_stride + column[None, :], mask=mask)
    B_row = B_ptr + column.to(tl.int64)[None, :] * B_row_stride
    adapted = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, rank, BLOCK_RANK):
        k = start + tl.arange(0, BLOCK_RANK)
        z_mask = (row < rows) & (k < rank)[None, :]
        z = tl.load(z_ptr + row * z_row_stride + k[None, :], mask=z_mask, other=0.0)
        if tl.program_id(1) == 0:  # every tile of columns has loaded it, the first one stores it
            tl.store(z_copy_ptr + row * z_copy_row_stride + k[None, :], z, mask=z_mask)
        B_mask = (column < columns)[None, :] & (k < rank)[:, None]
        B = tl.load(B_row + k[:, None], mask=B_mask, other=0.0)
        if IN_FP32:
            z, B = z.to(tl.float32), B.to(tl.float32)
        adapted = tl.dot(z, B, adapted, input_precision="ieee")
    total = y.to(tl.float32) + adapted
    if MULTIPLIER != 1.0:
        total *= MULTIPLIER
    if residual_ptr is not None:
        total = residual.to(tl.float32) + total
    total_tile = total_ptr + row * total_row_stride + column[None, :]
    tl.store(total_tile, total.to(total_ptr.dtype.element_ty), mask=mask)


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
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    residual = tl.load(residual_ptr + row * residual_row_stride + columns, mask=mask)
    rstd = rstd_of(x, hidden, eps)
    total = residual.to(tl.float32) + x * rstd * weight
    tl.store(total_ptr + row * total_row_stride + columns, total.to(total_ptr.dtype.element_ty),
             mask=mask)  # fmt: skip
    tl.store(rstd_ptr + row, rstd)


def residual_norm_forward(
    x: Tensor, weight: Tensor, eps: float, y: Tensor, copy: Tensor | None = None,
    zero_centered: bool = False,
) -> Tensor:  # fmt: skip
    """Write the norm of x into y; returns rstd, [rows] fp32.

    Equivalent PyTorch, for x, y and copy [rows, hidden] and weight [hidden], all of one dtype::

        copy.copy_(x)  # if it is given
        rstd = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        y.copy_(x.float() * rstd[:, None] * weight.float())  # zero_centered: 1 + weight.float()

    The copy is for a product that is added to it in place, for which PyTorch would make one.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or no kernel can run on them.
    """
    rows, hidden = x.shape
    written = {"y": y} if copy is None else {"y": y, "copy": copy}
    check_rows("residual_norm_forward", _rms_norm_forward_kernel, x.shape, x=x, **written)
    check_hidden("residual_norm_forward", x, weight)
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

    Equivalent PyTorch, for [rows, hidden] tensors of one dtype, y being the norm of x::

        grad_x.copy_(torch.autograd.grad(y, x, grad_y)[0] + grad_residual)
        grad_weight.copy_(torch.autograd.grad(y, weight, grad_y)[0])  # summed in fp32

    Without grad_residual x goes on nowhere. weight, rstd and zero_centered are as
    `residual_norm_forward` had and gave them.

    Raises:
        ValueError: as `residual_norm_forward`.
    """
    others = {} if grad_residual is None else {"grad_residual": grad_residual}
    check_rows(
        "residual_norm_backward", _rms_norm_backward_kernel, x.shape,
        grad_y=grad_y, **others, x=x, grad_x=grad_x,
    )  # fmt: skip
    check_hidden("residual_norm_backward", x, weight)
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


def add_adapted(
    residual: Tensor | None, y: Tensor, z: Tensor, B: Tensor, total: Tensor, z_copy: Tensor,
    multiplier: float = 1.0,
) -> None:  # fmt: skip
    """Write the residual plus an adapted projection's two parts into total, and z into z_copy.

    Equivalent PyTorch, for residual, y and total [rows, columns], z and z_copy [rows, rank] and
    B [columns, rank], all of one dtype, and a sum that is fp32 and rounds once::

        total.copy_(residual + multiplier * (y + z @ B.t()))
        z_copy.copy_(z)

    None for the residual is 0.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or no kernel can run on them.
    """
    others = {} if residual is None else {"residual": residual}
    check_rows("add_adapted", _add_adapted_kernel, y.shape, **others, y=y, total=total)
    rows, columns = y.shape
    rank = z.shape[-1]
    for key, tensor, shape in (
        ("z", z, (rows, rank)), ("B", B, (columns, rank)), ("z_copy", z_copy, (rows, rank))
    ):  # fmt: skip
        check_rows("add_adapted", _add_adapted_kernel, shape, **{key: tensor})
        check_alike("add_adapted", key, tensor, y)
    if rows == 0:
        return
    grid = cdiv(rows, BLOCK_ROWS), cdiv(columns, BLOCK_COLUMNS)
    launch(
        _add_adapted_kernel, grid,
        y, residual, z, B, total, z_copy,
        rows, columns, rank,
        0 if residual is None else residual.stride(0), y.stride(0), z.stride(0), B.stride(0),
        total.stride(0), z_copy.stride(0),
        BLOCK_ROWS, BLOCK_COLUMNS,
        # tl.dot wants 16 at least
        min(max(next_power_of_2(rank), 16), MAX_BLOCK_RANK),
        multiplier,
        dots_in_fp32(_add_adapted_kernel, z),
        num_warps=4,
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

    Raises:
        ValueError: as `residual_norm_forward`.
    """
    rows, hidden = x.shape
    check_rows("add_normed", _add_normed_kernel, x.shape, residual=residual, x=x, total=total)
    check_hidden("add_normed", x, weight)
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


def check_hidden(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless a norm's weight fits x [rows, hidden], and a program such a row."""
    hidden = x.shape[1]
    if not 1 <= hidden <= MAX_HIDDEN:
        raise ValueError(f"{name}: x is {list(x.shape)}, hidden should be from 1 to {MAX_HIDDEN}")
    if weight.shape != (hidden,) or not weight.is_contiguous():
        raise ValueError(
            f"{name}: weight is {list(weight.shape)}, should be [{hidden}] and contiguous"
        )
    check_alike(name, "weight", weight, x)
