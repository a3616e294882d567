"""DoRA's magnitudes: a factor for each output feature of a projection with an adapter.

    y = c u + bias,  u = x (W + s B A)',  c = m / ||W + s B A||       a norm for each row

DoRA trains the magnitudes m and takes the norms for constants in backward (Liu et al., arXiv
2402.09353). So for an incoming g

    grad_u = c g        grad_m = sum over tokens of g u / norm

    magnitude_factors        c and 1 / norm
    scale_columns            y, or a residual plus y
    scale_columns_backward   grad_u, and for ranges of tokens the sums of g u
    sum_magnitudes           grad_m of these

The norms read W once: 5.5 GB of Qwen2.5-3B, 1.3 ms at 4.3 TB/s. B A exists for a tile at a time, in
registers. u is fp32 where a matmul can give it: at the start of training c is 1, and times 1.001 a
u in bf16 would round to itself. Arithmetic is fp32 and rounds once, at the store. Deterministic.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, launch, next_power_of_2

from .rows import block_of
from .tiling import MAX_BLOCK_RANK, Tiling, dots_in_fp32, stages

# For `magnitude_factors`, of few and of many rows of W: on an H200 the best of those that do not
# split columns, at [2048, 2048] and [2048, 11008] (6.0 and 18.8 µs), and at [11008, 2048] (14.5).
FEW_ROWS = Tiling(rows=16, columns=256, splits=1, warps=8, stages=4)
MANY_ROWS = Tiling(rows=64, columns=128, splits=1, warps=4, stages=4)
LEAST_OF_MANY = 8192
TOGETHER = 3  # projections that a launch takes
MAX_COLUMNS = 1024  # of a program of `scale_columns`
# For `scale_columns_backward`: one program's tile, and the least rows of a range. With 128 columns
# and ranges of 16 rows it took 17 µs for 7.5 at 2,048 rows, and at 16,384 94 for 79.
BACKWARD_ROWS, BACKWARD_COLUMNS, RANGE_ROWS = 16, 512, 64
MAX_RANGES = 128
SUM_COLUMNS = 128  # that a program of `sum_magnitudes` sums


class Factors(NamedTuple):
    """Factors of a buffer's outputs, which magnitudes make with its weights and adapters."""

    factor: Tensor  # [out] fp32: c, or 1 of a projection without magnitudes
    inverse_norm: Tensor  # [out] fp32, the derivative of c; unset without magnitudes


class ColumnScale(NamedTuple):
    """Factors of a buffer's outputs, and the bias that is added then."""

    factor: Tensor
    inverse_norm: Tensor
    bias: Tensor | None  # [out]


def operands_of(scale: ColumnScale | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the factors and the bias as kernels take them."""
    return (None, None) if scale is None else (scale.factor, scale.bias)


@triton.jit
def rescale(u, factor_ptr, bias_ptr, column, mask):
    """u of these columns, in fp32, scaled; or as it is where factor_ptr is None."""
    if factor_ptr is not None:
        u = u * tl.load(factor_ptr + column, mask=mask, other=0.0)
    if bias_ptr is not None:
        u += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return u


class Rescaled(NamedTuple):
    """A projection with magnitudes, and where it lies in a buffer."""

    magnitude: Tensor  # [outputs]
    row: int  # its first of W
    outputs: int
    border: int  # the first row of its adapter's in A
    rank: int


@triton.jit
def _magnitude_factors_kernel(
    W_ptr,  # [rows, columns]
    A_ptr,  # [rank of all, columns]
    sB_ptr,  # [rows, rank of all]
    row_scales_ptr,  # [rows], what W's rows are multiplied by, or None
    factor_ptr,  # [rows] fp32, written
    inverse_norm_ptr,  # likewise
    magnitude_0_ptr,  # of a projection, or None; with its rows of W and of A, as `Rescaled`
    row_0,
    outputs_0,
    border_0,
    rank_0,
    magnitude_1_ptr,  # likewise
    row_1,
    outputs_1,
    border_1,
    rank_1,
    magnitude_2_ptr,  # likewise
    row_2,
    outputs_2,
    border_2,
    rank_2,
    W_row_stride,
    A_row_stride,
    sB_row_stride,
    columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of the rank; unrolled, as Triton pipelines the innermost loop alone
    STAGES: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    which = tl.program_id(1)
    outputs = tl.where(which == 0, outputs_0, tl.where(which == 1, outputs_1, outputs_2))
    border = tl.where(which == 0, border_0, tl.where(which == 1, border_1, border_2))
    rank = tl.where(which == 0, rank_0, tl.where(which == 1, rank_1, rank_2))
    row = tl.where(which == 0, row_0, tl.where(which == 1, row_1, row_2)).to(tl.int64)
    place = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row, row = place < outputs, row + place
    squares = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    end = tl.where(tl.program_id(0) * BLOCK_ROWS < outputs, columns, 0)
    for start in tl.range(0, end, BLOCK_COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        mask = is_row[:, None] & (column < columns)
        W_tile = W_ptr + row[:, None] * W_row_stride + column
        total = tl.load(W_tile, mask=mask, other=0.0).to(tl.float32)
        if row_scales_ptr is not None:
            total *= tl.load(row_scales_ptr + row, mask=is_row, other=0.0)[:, None]
        for block in tl.static_range(BLOCKS):
            k = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
            is_k, k = k < rank, (border + k).to(tl.int64)
            sB_tile = sB_ptr + row[:, None] * sB_row_stride + k[None, :]
            sB = tl.load(sB_tile, mask=is_row[:, None] & is_k[None, :], other=0.0)
            A_tile = A_ptr + k[:, None] * A_row_stride + column
            A = tl.load(A_tile, mask=is_k[:, None] & (column < columns), other=0.0)
            if IN_FP32:
                sB, A = sB.to(tl.float32), A.to(tl.float32)
            total = tl.dot(sB, A, total, input_precision="ieee")
        squares += total * total
    norm = tl.sqrt_rn(tl.where(is_row, tl.sum(squares, axis=1), 1.0))
    tl.store(inverse_norm_ptr + row, tl.div_rn(1.0, norm), mask=is_row)
    magnitudes = magnitude_0_ptr, magnitude_1_ptr, magnitude_2_ptr
    for i in tl.static_range(3):
        if magnitudes[i] is not None and which == i:
            m = tl.load(magnitudes[i] + place, mask=is_row, other=0.0).to(tl.float32)
            tl.store(factor_ptr + row, tl.div_rn(m, norm), mask=is_row)


def magnitude_factors(
    W: Tensor, A: Tensor, sB: Tensor, row_scales: Tensor | None, projections: Sequence[Rescaled],
    factor: Tensor, inverse_norm: Tensor,
) -> None:  # fmt: skip
    """Write the factors c of projections, and 1 / norm, each [out] in fp32.

    Equivalent PyTorch, for W [out, in], A [rank, in] and sB [out, rank] of all of them::

        W = W.float() if row_scales is None else W.float() * row_scales[:, None]
        for magnitude, row, outputs, border, rank in projections:
            rows, its = slice(row, row + outputs), slice(border, border + rank)
            norm = torch.linalg.vector_norm(W[rows] + sB[rows, its].float() @ A[its].float(), dim=1)
            factor[rows] = magnitude / norm
            inverse_norm[rows] = 1 / norm

    W may be e4m3. A and sB are of one dtype, and need not be contiguous.
    """
    kernel = _magnitude_factors_kernel
    for first in range(0, len(projections), TOGETHER):
        some = projections[first : first + TOGETHER]
        outputs, rank = max(one.outputs for one in some), max(one.rank for one in some)
        if outputs == 0:
            continue
        block_rank = min(max(next_power_of_2(rank), 16), MAX_BLOCK_RANK)
        tiling = FEW_ROWS if outputs < LEAST_OF_MANY else MANY_ROWS
        elements = (tiling.rows + block_rank) * tiling.columns
        arguments: list[Any] = []  # one by one: `launch` remembers no tuples
        for magnitude, *places in some:
            arguments += magnitude.contiguous(), *places
        arguments += [None, 0, 0, 0, 0] * (TOGETHER - len(some))
        launch(
            kernel, (cdiv(outputs, tiling.rows), len(some)),
            W, A, sB, row_scales, factor, inverse_norm, *arguments,
            W.stride(0), A.stride(0), sB.stride(0), W.shape[1],
            tiling.rows, tiling.columns, block_rank, cdiv(rank, block_rank),
            stages(tiling, elements, A), dots_in_fp32(kernel, A), num_warps=tiling.warps,
        )  # fmt: skip


@triton.jit
def _scale_columns_kernel(
    u_ptr,  # [rows, columns]
    factor_ptr,  # [columns] fp32
    bias_ptr,  # [columns], or None
    residual_ptr,  # [rows, columns], or None
    y_ptr,  # [rows, columns], written
    copy_ptr,  # [rows, columns], written: u
    u_row_stride,
    residual_row_stride,
    y_row_stride,
    copy_row_stride,
    columns,
    multiplier,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    u = tl.load(u_ptr + row * u_row_stride + column, mask=mask).to(tl.float32)
    y = rescale(u, factor_ptr, bias_ptr, column, mask) * multiplier
    if residual_ptr is not None:
        y += tl.load(residual_ptr + row * residual_row_stride + column, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * y_row_stride + column, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(copy_ptr + row * copy_row_stride + column, u.to(copy_ptr.dtype.element_ty), mask=mask)


def scale_columns(
    u: Tensor, scale: ColumnScale, y: Tensor, copy: Tensor, residual: Tensor | None = None,
    multiplier: float = 1.0,
) -> None:  # fmt: skip
    """Write scaled u, or a residual plus that, into y, and u itself into copy, which backward
    reads.

    Equivalent PyTorch, for [rows, columns] tensors of any dtypes::

        scaled = multiplier * (scale.factor * u.float() + scale.bias)
        y.copy_(residual.float() + scaled)
        copy.copy_(u)
    """
    rows, columns = u.shape
    if rows == 0:
        return
    block, warps = block_of(min(columns, MAX_COLUMNS))
    launch(
        _scale_columns_kernel, (rows, cdiv(columns, block)),
        u, scale.factor, scale.bias, residual, y, copy,
        u.stride(0), 0 if residual is None else residual.stride(0), y.stride(0), copy.stride(0),
        columns, multiplier, block, num_warps=warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "rows_of_a_range"])
def _scale_columns_backward_kernel(
    grad_ptr,  # [rows, columns]
    u_ptr,  # likewise
    factor_ptr,  # [columns] fp32
    grad_u_ptr,  # [rows, columns], written; may be grad
    sums_ptr,  # [ranges, columns] fp32, written
    grad_row_stride,
    u_row_stride,
    grad_u_row_stride,
    rows,
    rows_of_a_range,
    columns,
    multiplier,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = column < columns
    factor = tl.load(factor_ptr + column, mask=is_column, other=0.0)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    start = tl.program_id(0) * rows_of_a_range
    end = tl.minimum(start + rows_of_a_range, rows)
    for first in range(start, end, BLOCK_ROWS):
        row = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
        mask = (row < end) & is_column[None, :]
        grad_tile = grad_ptr + row * grad_row_stride + column[None, :]
        grad = tl.load(grad_tile, mask=mask, other=0.0).to(tl.float32) * multiplier
        u_tile = u_ptr + row * u_row_stride + column[None, :]
        total += grad * tl.load(u_tile, mask=mask, other=0.0).to(tl.float32)
        grad_u = (grad * factor).to(grad_u_ptr.dtype.element_ty)
        tl.store(grad_u_ptr + row * grad_u_row_stride + column[None, :], grad_u, mask=mask)
    sums = sums_ptr + tl.program_id(0).to(tl.int64) * columns + column
    tl.store(sums, tl.sum(total, axis=0), mask=is_column)


def scale_columns_backward(
    grad: Tensor, u: Tensor, factor: Tensor, grad_u: Tensor, multiplier: float = 1.0
) -> Tensor:
    """Write the gradient of u, for that of what `scale_columns` wrote; return for ranges of the
    rows the sums of grad u, [ranges, columns] fp32.

    Equivalent PyTorch, but that grad_u may be grad, and that there may be more ranges::

        grad = multiplier * grad.float()
        grad_u.copy_(grad * factor)
        return (grad * u.float()).sum(0, keepdim=True)
    """
    rows, columns = grad.shape
    ranges = min(cdiv(rows, RANGE_ROWS), MAX_RANGES)
    rows_of_a_range = cdiv(cdiv(rows, max(ranges, 1)), BACKWARD_ROWS) * BACKWARD_ROWS
    ranges = cdiv(rows, max(rows_of_a_range, 1))
    sums = factor.new_empty(ranges, columns)
    if ranges:
        launch(
            _scale_columns_backward_kernel, (ranges, cdiv(columns, BACKWARD_COLUMNS)),
            grad, u, factor, grad_u, sums, grad.stride(0), u.stride(0), grad_u.stride(0),
            rows, rows_of_a_range, columns, multiplier, BACKWARD_ROWS, BACKWARD_COLUMNS,
            num_warps=4,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["ranges"])
def _sum_magnitudes_kernel(
    sums_ptr,  # [ranges, columns]
    inverse_norm_ptr,  # [columns]
    gradient_0_ptr,  # [outputs] of a projection, written, or None
    column_0,  # its first of sums
    outputs_0,
    gradient_1_ptr,  # likewise
    column_1,
    outputs_1,
    gradient_2_ptr,  # likewise
    column_2,
    outputs_2,
    sums_row_stride,
    ranges,
    BLOCK: tl.constexpr,
):
    gradients = gradient_0_ptr, gradient_1_ptr, gradient_2_ptr
    columns, every = (column_0, column_1, column_2), (outputs_0, outputs_1, outputs_2)
    place = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    for i in tl.static_range(3):
        if gradients[i] is not None and tl.program_id(1) == i:
            mask, column = place < every[i], columns[i] + place
            total = tl.zeros([BLOCK], tl.float32)
            for index in tl.range(0, ranges, loop_unroll_factor=4):
                total += tl.load(sums_ptr + index * sums_row_stride + column, mask=mask, other=0.0)
            total *= tl.load(inverse_norm_ptr + column, mask=mask, other=0.0)
            tl.store(gradients[i] + place, total.to(gradients[i].dtype.element_ty), mask=mask)


def sum_magnitudes(
    sums: Tensor, scale: ColumnScale, outs: Sequence[int], gradients: Sequence[Tensor | None]
) -> None:
    """Write the gradients of the magnitudes of projections that have these numbers of outputs, in
    any dtypes, None where not needed.

    Equivalent PyTorch, for sums [ranges, columns]::

        every = (sums.sum(0) * scale.inverse_norm).split(outs)
        for gradient, grad in zip(gradients, every):
            gradient.copy_(grad)
    """
    needed = [
        (gradient, end - out, out)
        for gradient, end, out in zip(gradients, accumulate(outs), outs, strict=True)
        if gradient is not None and out
    ]
    if len(sums) == 0:
        for gradient, *_ in needed:
            gradient.zero_()
        return
    for first in range(0, len(needed), TOGETHER):
        some = needed[first : first + TOGETHER]
        none: list[Any] = [None, 0, 0] * (TOGETHER - len(some))
        launch(
            _sum_magnitudes_kernel, (cdiv(max(out for *_, out in some), SUM_COLUMNS), len(some)),
            sums, scale.inverse_norm, *chain.from_iterable(some), *none, sums.stride(0), len(sums),
            SUM_COLUMNS, num_warps=4,
        )  # fmt: skip
