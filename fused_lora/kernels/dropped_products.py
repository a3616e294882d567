"""Adapters' products with masks on one side: dropout of bordered weights (`layer/buffer.py`).

    dropped_products     zi = (x mi) Ai'                    for all projections that share x
    dropped_gradient     m1 (p1 A1) + m2 (p2 A2) + ...      what they add to dx

with the masks of `fused_mlp/dropout.py`, each a sixteenth of a bf16 tensor's bytes. Without dropout
both are part of a cuBLAS call, which is what borders are for.

Traffic in tensors of x's size: 1 each. cuBLAS adds the frozen matmul to the gradient, and reads the
gradient while it multiplies. Adding the gradient to the frozen matmul afterwards would be 2 here
and 1 there that no matmul hides. All A's are read from L2 for each tile's height of rows, p once
for each tile's width of columns. We scale sums by a mask's scale, not each element. Arithmetic is
fp32 and rounds once, at the store. Deterministic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.dropout import Mask, Masks, is_kept
from fused_mlp.launching import cdiv, launch_by_triton, next_power_of_2, on_device_of

from .tiling import MAX_BLOCK_RANK, SHARED_BYTES, dots_in_fp32

# A word of a mask covers this many rows, which gives a tile one row of words. With 128 columns the
# masked copies of three projections' tiles do not fit into registers.
BLOCK_ROWS, BLOCK_COLUMNS = 32, 64
_WARPS, _STAGES = 4, 4

# In a launch: sums [32, 64] of four are 64 registers a thread in 4 warps.
MAX_FACTORS = 4


@triton.jit(do_not_specialize=["rows"])
def _dropped_products_kernel(
    x_ptr,  # [rows, columns]
    A,  # [rank, columns] each
    bits,  # of each projection's mask, or None
    scales,
    z,  # [rows, rank] each, written
    ranks,
    rows,
    columns,
    x_row_stride,
    A_row_stride,
    z_row_stride,
    COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    # int64: from 1,048,576 rows of 2,048 on, an int32 offset overflows
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = first + tl.arange(0, BLOCK_ROWS)[:, None]
    k = tl.arange(0, BLOCK_RANK)
    totals = (tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32),) * COUNT
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        x_tile = x_ptr + row * x_row_stride + column
        x = tl.load(x_tile, mask=(row < rows) & (column < columns), other=0.0)
        added = ()
        for i in tl.static_range(COUNT):
            kept = x
            if bits[i] is not None:
                is_one = is_kept(bits[i], first, row, column, columns)
                kept = tl.where(is_one, x, 0.0).to(x.dtype)
            A_tile = A[i] + k.to(tl.int64)[:, None] * A_row_stride + column
            factor = tl.load(A_tile, mask=(k < ranks[i])[:, None] & (column < columns), other=0.0)
            if IN_FP32:
                kept, factor = kept.to(tl.float32), factor.to(tl.float32)
            added += (tl.dot(kept, tl.trans(factor), totals[i], input_precision="ieee"),)  # type: ignore[assignment]
        totals = added
    for i in tl.static_range(COUNT):
        total = (totals[i] * scales[i]).to(z[i].dtype.element_ty)
        tl.store(
            z[i] + row * z_row_stride + k[None, :],
            total,
            mask=(row < rows) & (k < ranks[i])[None, :],
        )


@triton.jit(do_not_specialize=["rows"])
def _dropped_gradient_kernel(
    total_ptr,  # [rows, columns], written, or added to
    p,  # [rows, rank] each
    A,  # [rank, columns] each
    bits,  # of each projection's mask, or None
    scales,
    ranks,
    rows,
    columns,
    total_row_stride,
    p_row_stride,
    A_row_stride,
    ADDS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = first + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    place = total_ptr + row * total_row_stride + column
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    if ADDS:
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    k = tl.arange(0, BLOCK_RANK)
    for i in tl.static_range(COUNT):
        p_mask = (row < rows) & (k < ranks[i])[None, :]
        factor = tl.load(p[i] + row * p_row_stride + k[None, :], mask=p_mask, other=0.0)
        A_tile = A[i] + k.to(tl.int64)[:, None] * A_row_stride + column
        other = tl.load(A_tile, mask=(k < ranks[i])[:, None] & (column < columns), other=0.0)
        if IN_FP32:
            factor, other = factor.to(tl.float32), other.to(tl.float32)
        zeros = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        product = tl.dot(factor, other, zeros, input_precision="ieee")
        if bits[i] is not None:
            is_one = is_kept(bits[i], first, row, column, columns)
            product = tl.where(is_one, product * scales[i], 0.0)
        total += product
    tl.store(place, total.to(total_ptr.dtype.element_ty), mask=mask)


class _Factor(NamedTuple):
    """Some ranks of one projection: its columns of z or p [rows, rank], its A [rank, columns]."""

    columns: Tensor
    A: Tensor
    mask: Mask | None


def dropped_products(x: Tensor, A: Tensor, ranks: Sequence[int], masks: Masks, z: Tensor) -> None:
    """Write z [rows, width], the masked x times A' of each projection.

    Equivalent PyTorch, for x [rows, columns] and A [width, columns], in which `ranks` of the first
    projection come first, then those of the second, and zeros after the last::

        z.zero_()
        for columns, one_A, mask in zip(z.split(ranks, 1), A.split(ranks), masks):
            columns.copy_((x * unpacked(mask) * mask.scale) @ one_A.t())

    A mask that is None masks nothing. All of one dtype; rows may lie any stride apart.
    """
    rest = z[:, sum(ranks) :]
    if rest.shape[1]:
        rest.zero_()
    rows, columns = x.shape
    for factors in _launches(z, A, ranks, masks):
        z_parts, A_parts, bits, scales, counts, block_rank = _operands(factors)
        elements = BLOCK_COLUMNS * (BLOCK_ROWS + len(factors) * block_rank)
        kernel = _dropped_products_kernel
        with on_device_of(x):
            launch_by_triton(
                kernel, (cdiv(rows, BLOCK_ROWS),),
                x, A_parts, bits, scales, z_parts, counts, rows, columns,
                x.stride(0), A.stride(0), z.stride(0), len(factors),
                BLOCK_ROWS, BLOCK_COLUMNS, block_rank, dots_in_fp32(kernel, x),
                num_warps=_WARPS, num_stages=_stages(elements, x),
            )  # fmt: skip


def dropped_gradient(
    p: Tensor, A: Tensor, ranks: Sequence[int], masks: Masks, total: Tensor
) -> None:
    """Write the masked p A of all projections, added up, into total [rows, columns].

    Equivalent PyTorch, but that it rounds once for every four projections of up to 64 ranks, for p
    [rows, width], and A, ranks and masks as in `dropped_products`::

        total.zero_()
        for columns, one_A, mask in zip(p.split(ranks, 1), A.split(ranks), masks):
            total += (columns @ one_A) * unpacked(mask) * mask.scale
    """
    rows, columns = total.shape
    launches = _launches(p, A, ranks, masks)
    if not launches:
        total.zero_()
    for number, factors in enumerate(launches):
        p_parts, A_parts, bits, scales, counts, block_rank = _operands(factors)
        kernel = _dropped_gradient_kernel
        with on_device_of(total):
            launch_by_triton(
                kernel, (cdiv(rows, BLOCK_ROWS), cdiv(columns, BLOCK_COLUMNS)),
                total, p_parts, A_parts, bits, scales, counts, rows, columns,
                total.stride(0), p.stride(0), A.stride(0), number > 0, len(factors),
                BLOCK_ROWS, BLOCK_COLUMNS, block_rank, dots_in_fp32(kernel, total),
                num_warps=_WARPS,
            )  # fmt: skip


def _launches(sides: Tensor, A: Tensor, ranks: Sequence[int], masks: Masks) -> list[list[_Factor]]:
    """The factors of each launch: MAX_FACTORS of up to MAX_BLOCK_RANK ranks; none where there is
    nothing to do, for an empty grid cannot be launched."""
    if not sides.shape[0] or not A.shape[1]:
        return []
    factors = []
    used = sum(ranks)
    for columns, one_A, mask in zip(
        sides[:, :used].split_with_sizes(list(ranks), 1), A[:used].split_with_sizes(list(ranks)),
        masks, strict=True,
    ):  # fmt: skip
        for first in range(0, len(one_A), MAX_BLOCK_RANK):
            some = slice(first, first + MAX_BLOCK_RANK)
            factors.append(_Factor(columns[:, some], one_A[some], mask))
    return [factors[i : i + MAX_FACTORS] for i in range(0, len(factors), MAX_FACTORS)]


def _operands(factors: Sequence[_Factor]) -> tuple:
    """The columns, A, bits, scales and ranks of these, and the block that holds the ranks."""
    sides, A, masks = zip(*factors, strict=True)
    ranks = tuple(len(one) for one in A)
    bits = tuple(mask and mask.bits for mask in masks)
    scales = tuple(mask.scale if mask else 1.0 for mask in masks)
    return sides, A, bits, scales, ranks, max(next_power_of_2(max(ranks)), 16)  # tl.dot wants 16


def _stages(elements: int, x: Tensor) -> int:
    return max(min(_STAGES, SHARED_BYTES // (elements * x.element_size())), 1)
