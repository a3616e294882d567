"""The border of a weight in FP8 (`fp8.py`), in two halves (`fp8_rows.py`), from its adapters.

Of a weight W [outputs, inputs] of codes and scales s, with A [width, inputs] and B [outputs,
width], there are two borders, one for each direction of its product:

    forward     w = B / s    beside W's codes                 for v = z = x A'
    gradient    w = A'       beside those of its transpose    for v = p = dy B, of codes of dy s

Each column of w is divided by a factor f, by which v is multiplied. f makes both about as large,
from what is known before any token is: the root of the largest w over the expected v, which is that
of an x of independent elements, an eighth of the largest in the mean. But v is expected to be at
most 16, where it has all its digits, unless w were more than 448 then: a row whose v passes 448 has
to be written again.

What makes v, A or (B / s)', is in halves, too (`Halves`), each column by its own largest.

A kernel for what is summed over rows, in blocks of them, and one that adds these up, every program
for itself, and writes: both for all weights of a layer at once, since each program is soon done and
waits for most of its time. Arithmetic is fp32, and rounds once to e4m3. Deterministic.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, on_device_of

from .fp8_rows import LARGEST, SMALLEST, halves, rounds

EXPECTED = tl.constexpr(56.0)  # of x's codes: an eighth of LARGEST
LARGE = tl.constexpr(16.0)  # of v's, in the mean
BLOCK_ROWS, BLOCK_COLUMNS = 256, 32
SUMMED = 64  # blocks whose sums are added up at once: gate's and up's of Qwen2.5-3B are 86


@triton.jit
def _border_sums_kernel(
    borders,  # B [outputs, width] and A' [inputs, width], of one weight after another: SIDES
    scales,  # [outputs], and None for ones
    sums_ptr,  # [SIDES, blocks, 3, widest]: the largest |w|, sums of squares of w s and s; written
    row_strides,
    column_strides,
    counts,
    widths,
    widest,
    SIDES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for side in tl.static_range(SIDES):
        if (tl.program_id(2) == side) & (block * ROWS < counts[side]):
            width = widths[side]
            w, scale = _border(
                borders[side], scales[side], row, j, row_strides[side], column_strides[side],
                counts[side], width,
            )  # fmt: skip
            of_scales = tl.where(row < counts[side], scale * scale, 0.0)
            here = sums_ptr + (side * blocks + block) * 3 * widest + j
            tl.store(here, tl.max(tl.abs(w) / scale[:, None], 0), mask=j < width)
            tl.store(here + widest, tl.sum(w * w, 0), mask=j < width)
            all_scales = tl.zeros([COLUMNS], tl.float32) + tl.sum(of_scales, 0)
            tl.store(here + 2 * widest, all_scales, mask=j < width)


@triton.jit
def _fp8_borders_kernel(
    borders,
    scales,
    sums_ptr,
    codes,  # [outputs, padded] and [inputs, padded_t], from the border's first column on; written
    factors,  # [width] each, written
    halves_of,  # [2, width, outputs] and [2, width, inputs], the same as `Halves`; written
    scales_of,  # [width] each, written
    row_strides,
    column_strides,
    codes_strides,
    counts,
    widths,
    widest,
    SIDES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMMED: tl.constexpr,
    ROUND: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for side in tl.static_range(SIDES):
        if (tl.program_id(2) == side) & (block * ROWS < counts[side]):
            width, count = widths[side], counts[side]
            other_side: tl.constexpr = side + 1 - 2 * (side % 2)  # of the same weight
            other_count = counts[other_side]
            here = sums_ptr + side * blocks * 3 * widest
            other = sums_ptr + other_side * blocks * 3 * widest
            others = tl.cdiv(other_count, ROWS)
            largest = _over_blocks(
                here, tl.cdiv(count, ROWS), j, width, widest, False, SUMMED, COLUMNS
            )
            squares = _over_blocks(other + widest, others, j, width, widest, True, SUMMED, COLUMNS)
            of_scales = _over_blocks(
                other + 2 * widest, others, j, width, widest, True, SUMMED, COLUMNS
            )
            spread = of_scales / other_count
            expected = tl.sqrt(squares / tl.maximum(spread, SMALLEST)) * EXPECTED
            factor = _factor(largest, expected)
            own = tl.maximum(largest, SMALLEST) / LARGEST
            if block == 0:
                tl.store(factors[side] + j, factor, mask=j < width)
                tl.store(scales_of[side] + j, own, mask=j < width)
            w, scale = _border(
                borders[side], scales[side], row, j, row_strides[side], column_strides[side],
                count, width,
            )  # fmt: skip
            w /= scale[:, None]
            inside = (row < count)[:, None] & (j < width)[None, :]
            hi, lo = halves(w / own[None, :], ROUND)
            tile = halves_of[side] + j.to(tl.int64)[None, :] * count + row[:, None]
            tl.store(tile, hi, mask=inside)
            tl.store(tile + width * count, lo, mask=inside)
            hi, lo = halves(w / factor[None, :], ROUND)
            tile = codes[side] + row[:, None] * codes_strides[side] + j[None, :]
            tl.store(tile, hi, mask=inside)
            tl.store(tile + width, hi, mask=inside)
            tl.store(tile + 2 * width, lo, mask=inside)


@triton.jit
def _border(border_ptr, scales_ptr, row, j, row_stride, column_stride, count, width):
    """(the border's tile, 0 outside, and these rows' scales)."""
    inside = (row < count)[:, None] & (j < width)[None, :]
    tile = border_ptr + row[:, None] * row_stride + j[None, :].to(tl.int64) * column_stride
    w = tl.load(tile, mask=inside, other=0.0).to(tl.float32)
    if scales_ptr is None:
        scale = tl.full(row.shape, 1.0, tl.float32)
    else:
        scale = tl.load(scales_ptr + row, mask=row < count, other=1.0)
    return w, scale


@triton.jit
def _over_blocks(
    sums_ptr, blocks, j, width, widest, IS_SUM: tl.constexpr, SUMMED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum, or the largest, of what all blocks have of these columns, 0 or more each."""
    total = tl.zeros([SUMMED, COLUMNS], tl.float32)
    for start in range(0, blocks, SUMMED):
        block = start + tl.arange(0, SUMMED)[:, None]
        mask = (block < blocks) & (j < width)[None, :]
        some = tl.load(sums_ptr + block * 3 * widest + j[None, :], mask=mask, other=0.0)
        total = total + some if IS_SUM else tl.maximum(total, some)
    return tl.sum(total, 0) if IS_SUM else tl.max(total, 0)


@triton.jit
def _factor(largest, expected):
    alike = tl.sqrt(largest / tl.maximum(expected, SMALLEST))
    # of a border of zeros v, which is multiplied by them, may be small, and where v is 0 w
    alike = tl.where(largest > 0, alike, 1.0 / tl.maximum(expected, SMALLEST))
    alike = tl.minimum(alike, LARGE / tl.maximum(expected, SMALLEST))
    return tl.maximum(tl.where(expected > 0, alike, 1.0), largest / LARGEST)


class Halves(NamedTuple):
    """A matrix [width, count] as codes [2, width, count] in e4m3, hi and lo, times scales [width]
    in fp32."""

    codes: Tensor
    scales: Tensor


class Bordering(NamedTuple):
    """The operands of the border of a weight [outputs, inputs], and where it is written.

    B: [outputs, width], scaled, and A: [width, inputs], of one dtype. scales: the weight's,
        [outputs].
    codes: the weight's, [outputs, padded_columns of inputs], and codes_t: those of its transpose
        [inputs, padded_columns of outputs]. factors, factors_t: [width], what z and p are to be
        multiplied by. of_B, of_A: what p and z are made with.
    """

    B: Tensor
    A: Tensor
    scales: Tensor
    codes: Tensor
    codes_t: Tensor
    factors: Tensor
    factors_t: Tensor
    of_B: Halves
    of_A: Halves


def fp8_borders(weights: Sequence[Bordering]) -> None:
    """Write the borders of weights, up to a layer's four.

    Equivalent PyTorch, for each::

        w, squares = B / scales[:, None], scales.square().mean()
        of_B.scales.copy_(w.abs().amax(0) / 448)
        of_B.codes.copy_(torch.stack(halves(w.t() / of_B.scales[:, None])))
        factors = factor(w.abs().amax(0), 56 * A.norm(dim=1))
        hi, lo = halves(w / factors)
        codes[:, inputs : inputs + 3 * width] = torch.cat([hi, hi, lo], 1)
        of_A.scales.copy_(A.abs().amax(1) / 448)
        of_A.codes.copy_(torch.stack(halves(A / of_A.scales[:, None])))
        factors_t = factor(A.abs().amax(1), 56 * B.norm(dim=0) / squares.sqrt())
        hi, lo = halves(A.t() / factors_t)
        codes_t[:, outputs : outputs + 3 * width] = torch.cat([hi, hi, lo], 1)

    where `factor(largest, expected)` is the root of their ratio, but 1 / expected of a largest that
    is 0 and 1 of an expected that is, at most 16 / expected and at least largest / 448; and
    `halves` are as `fp8_rows` has them. Not checked: it is given what `fp8.py` has made.
    """
    borders, of_rows, codes, factors, halves_of, scales_of = zip(*chain.from_iterable(
        (
            (one.B, one.scales, one.codes[:, one.A.shape[1] :], one.factors, *one.of_B),
            (one.A.t(), None, one.codes_t[:, len(one.B) :], one.factors_t, *one.of_A),
        )
        for one in weights
    ), strict=True)  # fmt: skip
    row_strides, column_strides = zip(*(border.stride() for border in borders), strict=True)
    counts, widths = zip(*(border.shape for border in borders), strict=True)
    widest, sides = max(widths), len(borders)
    blocks = cdiv(max(counts), BLOCK_ROWS)
    grid = blocks, cdiv(widest, BLOCK_COLUMNS), sides
    sums = borders[0].new_empty(sides, blocks, 3, widest, dtype=torch.float32)
    with on_device_of(sums):
        _border_sums_kernel[grid](
            borders, of_rows, sums, row_strides, column_strides, counts, widths, widest, sides,
            BLOCK_ROWS, BLOCK_COLUMNS, num_warps=8,
        )  # fmt: skip
        _fp8_borders_kernel[grid](
            borders, of_rows, sums, codes, factors, halves_of, scales_of, row_strides,
            column_strides, tuple(one.stride(0) for one in codes), counts, widths, widest, sides,
            BLOCK_ROWS, BLOCK_COLUMNS, SUMMED, rounds(_fp8_borders_kernel), num_warps=8,
        )  # fmt: skip
