"""The border of a weight in FP8 (`fp8.py`), in two halves (`fp8_rows.py`), from its adapters.

Of a weight W [outputs, inputs] of codes and scales s, with A [width, inputs] and B [outputs,
width], there are two borders, one for each direction of its product:

    forward     w = B / s    beside W's codes                 for v = z = x A'
    gradient    w = A'       beside those of its transpose    for v = p = dy B, of codes of dy s

Each column of w is divided by a factor f, by which v is multiplied. f makes both about as large,
from what is known before any token is: the root of the largest w over the expected v, which is that
of an x of independent elements, an eighth of the largest in the mean. But it makes v no larger than
has its digits, and room to be larger than expected, as long as w has room for that: a row whose v
does not fit has to be written again.

What makes v, A or (B / s)', is in halves, too (`Halves`), each column by its own largest.

A kernel for what is summed over rows, in blocks of them, and one that adds these up, every program
for itself, and writes. Arithmetic is fp32, and rounds once to e4m3. Deterministic.
"""

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
    borders,  # B [outputs, width] and A' [inputs, width]; so are all tuples
    scales,  # [outputs], and None for ones
    sums_ptr,  # [2, blocks, 3, width]: the largest |w|, sum of squares of w s, and of s; written
    row_strides,
    column_strides,
    counts,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for side in tl.static_range(2):
        if tl.program_id(2) == side:
            w, scale = _border(
                borders[side], scales[side], row, j, row_strides[side], column_strides[side],
                counts[side], width,
            )  # fmt: skip
            of_scales = tl.where(row < counts[side], scale * scale, 0.0)
            here = sums_ptr + (side * blocks + block) * 3 * width + j
            tl.store(here, tl.max(tl.abs(w) / scale[:, None], 0), mask=j < width)
            tl.store(here + width, tl.sum(w * w, 0), mask=j < width)
            all_scales = tl.zeros([COLUMNS], tl.float32) + tl.sum(of_scales, 0)
            tl.store(here + 2 * width, all_scales, mask=j < width)


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
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMMED: tl.constexpr,
    ROUND: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for side in tl.static_range(2):
        if tl.program_id(2) == side:
            here = sums_ptr + side * blocks * 3 * width
            other = sums_ptr + (1 - side) * blocks * 3 * width
            largest = _over_blocks(here, blocks, j, width, False, SUMMED, COLUMNS)
            squares = _over_blocks(other + width, blocks, j, width, True, SUMMED, COLUMNS)
            of_scales = _over_blocks(other + 2 * width, blocks, j, width, True, SUMMED, COLUMNS)
            spread = of_scales / counts[1 - side]
            expected = tl.sqrt(squares / tl.maximum(spread, SMALLEST)) * EXPECTED
            factor = _factor(largest, expected)
            own = tl.maximum(largest, SMALLEST) / LARGEST
            if block == 0:
                tl.store(factors[side] + j, factor, mask=j < width)
                tl.store(scales_of[side] + j, own, mask=j < width)
            w, scale = _border(
                borders[side], scales[side], row, j, row_strides[side], column_strides[side],
                counts[side], width,
            )  # fmt: skip
            w /= scale[:, None]
            inside = (row < counts[side])[:, None] & (j < width)[None, :]
            hi, lo = halves(w / own[None, :], ROUND)
            tile = halves_of[side] + j.to(tl.int64)[None, :] * counts[side] + row[:, None]
            tl.store(tile, hi, mask=inside)
            tl.store(tile + width * counts[side], lo, mask=inside)
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
    sums_ptr, blocks, j, width, IS_SUM: tl.constexpr, SUMMED: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sum, or the largest, of what all blocks have of these columns, 0 or more each."""
    total = tl.zeros([SUMMED, COLUMNS], tl.float32)
    for start in range(0, blocks, SUMMED):
        block = start + tl.arange(0, SUMMED)[:, None]
        mask = (block < blocks) & (j < width)[None, :]
        some = tl.load(sums_ptr + block * 3 * width + j[None, :], mask=mask, other=0.0)
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


def fp8_borders(
    B: Tensor, A: Tensor, scales: Tensor, codes: Tensor, codes_t: Tensor, factors: Tensor,
    factors_t: Tensor, of_B: Halves, of_A: Halves,
) -> None:  # fmt: skip
    """Write the border of a weight [outputs, inputs] into its codes [outputs, padded_columns of
    inputs] and into those of its transpose [inputs, padded_columns of outputs]; what z and p are to
    be multiplied by into factors and factors_t [width]; and what p and z are made with into of_B
    and of_A.

    Equivalent PyTorch, for B [outputs, width] scaled, A [width, inputs] and W's scales [outputs]::

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
    `halves` are as `fp8_rows` has them. A and B: one dtype. Not checked: it is given what `fp8.py`
    has made.
    """
    outputs, width = B.shape
    inputs = A.shape[1]
    borders, of_rows = (B, A.t()), (scales, None)
    strides = zip(*(border.stride() for border in borders), strict=True)
    row_strides, column_strides = map(tuple, strides)
    blocks = cdiv(max(outputs, inputs), BLOCK_ROWS)
    grid = blocks, cdiv(width, BLOCK_COLUMNS), 2
    sums = torch.empty(2, blocks, 3, width, dtype=torch.float32, device=B.device)
    counts = outputs, inputs
    with on_device_of(B):
        _border_sums_kernel[grid](
            borders, of_rows, sums, row_strides, column_strides, counts, width, BLOCK_ROWS,
            BLOCK_COLUMNS, num_warps=8,
        )  # fmt: skip
        _fp8_borders_kernel[grid](
            borders, of_rows, sums, (codes[:, inputs:], codes_t[:, outputs:]),
            (factors, factors_t), *zip(of_B, of_A, strict=True), row_strides, column_strides,
            (codes.stride(0), codes_t.stride(0)), counts, width, BLOCK_ROWS, BLOCK_COLUMNS, SUMMED,
            rounds(_fp8_borders_kernel), num_warps=8,
        )  # fmt: skip
