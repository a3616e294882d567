"""Border of an FP8 weight (`layer/fp8/`), made from its adapters in two halves (`fp8_rows.py`).

A weight W [outputs, inputs] is stored as codes and scales s, one for each of its rows. A is [width,
inputs], and B [outputs, width] already includes LoRA's scaling. There are two borders, one for each
direction of W's matmul:

    forward     w = B / s    beside W's codes                 for v = z = x A'
    gradient    w = A'       beside those of its transpose    for v = p = dy B, of codes of dy s

Each column of w is divided by a factor f, and v is multiplied by it. f makes both about equally
large: it is the root of (the largest w / the expected v). The expected v assumes that the elements
of x are independent, with a mean size of an eighth of their row's largest. But f v is expected to
be at most 16, unless w / f would then exceed 448. That leaves v room for 28 times as much. A row
whose v exceeds 448 all the same is written again.

The matrix that v is computed with, A or (B / s)', is in halves as well (`Halves`). Each of its rows
is scaled by its own largest element.

There are three kernels. One sums over blocks of rows, one adds up these sums and makes the factors,
and one writes. Each launch covers all weights of a layer, because a program is soon done and spends
most of its time waiting. Arithmetic is fp32, and rounds once to e4m3. Deterministic.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, is_interpreted, launch_by_triton, on_device_of

from .fp8_rows import LARGEST, SMALLEST, halves

EXPECTED = tl.constexpr(28.0)  # of x's codes: an eighth of ROW_LARGEST
LARGE = tl.constexpr(16.0)  # of v's, in the mean
BLOCK_ROWS, BLOCK_COLUMNS, NUM_WARPS = 128, 32, 4
SUMMED = 256  # blocks whose sums are added up at once: gate's and up's of Qwen2.5-3B are 172


@triton.jit
def _border_sums_kernel(
    borders,  # B [outputs, width] and A [width, inputs], of one weight after another
    scales,  # [outputs] of each weight
    sums_ptr,  # [2 WEIGHTS, blocks, 3, widest]: the largest |w|, sums of squares of w s and s;
    # written
    counts,  # outputs and inputs, of one weight after another
    widths,  # of each weight
    blocks,  # of rows, at most
    widest,
    WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    place, block, row, j, count, width = _tile(counts, widths, WEIGHTS, ROWS, COLUMNS)
    weight, side = place // 2, place % 2
    for is_A in tl.static_range(2):
        if side == is_A:
            border_ptr = _of(borders, place, 2 * WEIGHTS)
            scales_ptr = _of(scales, weight, WEIGHTS)
            w, over_scale = _border(border_ptr, scales_ptr, row, j, count, width, is_A)
            scale_squares = tl.where(row < count, 1.0 / (over_scale * over_scale), 0.0)
            here = sums_ptr + (place * blocks + block) * 3 * widest + j
            tl.store(here, tl.max(tl.abs(w) * over_scale[:, None], 0), mask=j < width)
            tl.store(here + widest, tl.sum(w * w, 0), mask=j < width)
            all_scales = tl.zeros([COLUMNS], tl.float32) + tl.sum(scale_squares, 0)
            tl.store(here + 2 * widest, all_scales, mask=j < width)


@triton.jit
def _border_factors_kernel(
    sums_ptr,  # as they have been written
    counts,
    widths,
    factors,  # [width], of one side after another; written
    scales_of,  # [width] likewise, those of `Halves`; written
    blocks,
    widest,
    WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMMED: tl.constexpr,
):
    weight, side = tl.program_id(1) // 2, tl.program_id(1) % 2
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    width = _of(widths, weight, WEIGHTS)
    other_side = 2 * weight + 1 - side
    other_count = _of(counts, other_side, 2 * WEIGHTS)
    here = sums_ptr + (2 * weight + side) * blocks * 3 * widest
    other = sums_ptr + other_side * blocks * 3 * widest
    mine = tl.cdiv(_of(counts, 2 * weight + side, 2 * WEIGHTS), ROWS)
    others = tl.cdiv(other_count, ROWS)
    largest = _over_blocks(here, mine, j, width, widest, False, SUMMED, COLUMNS)
    squares = _over_blocks(other + widest, others, j, width, widest, True, SUMMED, COLUMNS)
    scales = _over_blocks(other + 2 * widest, others, j, width, widest, True, SUMMED, COLUMNS)
    spread = scales / other_count
    expected = tl.sqrt(squares / tl.maximum(spread, SMALLEST)) * EXPECTED
    factors_ptr = _of(factors, 2 * weight + side, 2 * WEIGHTS)
    tl.store(factors_ptr + j, _factor(largest, expected), mask=j < width)
    scales_ptr = _of(scales_of, 2 * weight + side, 2 * WEIGHTS)
    tl.store(scales_ptr + j, tl.maximum(largest, SMALLEST) / LARGEST, mask=j < width)


@triton.jit
def _fp8_borders_kernel(
    borders,
    scales,
    factors,
    scales_of,
    codes,  # [outputs, padded] and [inputs, padded_t], from the border's first column on; written
    halves_of,  # [2, width, outputs] and [2, width, inputs], the same as `Halves`; written
    codes_strides,
    counts,
    widths,
    WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROUND: tl.constexpr,
):
    place, _, row, j, count, width = _tile(counts, widths, WEIGHTS, ROWS, COLUMNS)
    weight, side = place // 2, place % 2
    for is_A in tl.static_range(2):
        if side == is_A:
            border_ptr = _of(borders, place, 2 * WEIGHTS)
            scales_ptr = _of(scales, weight, WEIGHTS)
            w, over_scale = _border(border_ptr, scales_ptr, row, j, count, width, is_A)
            w *= over_scale[:, None]
            there = j < width
            inside = (row < count)[:, None] & there[None, :]
            own = tl.load(_of(scales_of, place, 2 * WEIGHTS) + j, mask=there, other=1.0)
            factor = tl.load(_of(factors, place, 2 * WEIGHTS) + j, mask=there, other=1.0)
            hi, lo = halves(w * (1.0 / own)[None, :], ROUND)
            tile = _of(halves_of, place, 2 * WEIGHTS)
            tile += j.to(tl.int64)[None, :] * count + row[:, None]
            tl.store(tile, hi, mask=inside)
            tl.store(tile + width * count, lo, mask=inside)
            hi, lo = halves(w * (1.0 / factor)[None, :], ROUND)
            tile = _of(codes, place, 2 * WEIGHTS)
            tile += row[:, None] * _of(codes_strides, place, 2 * WEIGHTS) + j[None, :]
            tl.store(tile, hi, mask=inside)
            tl.store(tile + width, hi, mask=inside)
            tl.store(tile + 2 * width, lo, mask=inside)


@triton.jit
def _tile(counts, widths, WEIGHTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's weight and side as one number, its block of rows, the indices of its
    rows and columns, and the counts of both."""
    tile = tl.program_id(0)
    place, before, end = tile * 0, tile * 0, tile * 0
    for i in tl.static_range(2 * WEIGHTS):
        place = tl.where(tile >= end, i, place)
        before = tl.where(tile >= end, end, before)
        end += tl.cdiv(counts[i], ROWS) * tl.cdiv(widths[i // 2], COLUMNS)
    count, width = _of(counts, place, 2 * WEIGHTS), _of(widths, place // 2, WEIGHTS)
    across = tl.cdiv(width, COLUMNS)
    block = (tile - before) // across
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = (tile - before) % across * COLUMNS + tl.arange(0, COLUMNS)
    return place, block, row, j, count, width


@triton.jit
def _of(values, place, COUNT: tl.constexpr):
    """Return values[place], chosen at run time.

    This way all weights of a layer share the same code. With separate code for each of them, most
    of the time was spent fetching it.
    """
    value = values[0]
    for i in tl.static_range(1, COUNT):
        if place == i:
            value = values[i]
    return value


@triton.jit
def _border(border_ptr, scales_ptr, row, j, count, width, IS_A: tl.constexpr):
    """Return the border's tile [rows, columns], 0 outside, and 1 over these rows' scales."""
    inside = (row < count)[:, None] & (j < width)[None, :]
    if IS_A:
        tile = border_ptr + row[:, None] + j[None, :].to(tl.int64) * count
        over_scale = tl.full(row.shape, 1.0, tl.float32)
    else:
        tile = border_ptr + row[:, None] * width + j[None, :]
        over_scale = 1.0 / tl.load(scales_ptr + row, mask=row < count, other=1.0)
    return tl.load(tile, mask=inside, other=0.0).to(tl.float32), over_scale


@triton.jit
def _over_blocks(
    sums_ptr, blocks, j, width, widest, IS_SUM: tl.constexpr, SUMMED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sum, or the largest, of all blocks' values of these columns, 0 or more each."""
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
        multiplied by. B_halves, A_halves: what p and z are made with.
    """

    B: Tensor
    A: Tensor
    scales: Tensor
    codes: Tensor
    codes_t: Tensor
    factors: Tensor
    factors_t: Tensor
    B_halves: Halves
    A_halves: Halves


def fp8_borders(weights: Sequence[Bordering]) -> None:
    """Write the borders of weights, up to a layer's four.

    Equivalent PyTorch, for each::

        w, squares = B / scales[:, None], scales.square().mean()
        B_halves.scales.copy_(w.abs().amax(0) / 448)
        B_halves.codes.copy_(torch.stack(halves(w.t() / B_halves.scales[:, None])))
        factors = factor(w.abs().amax(0), 28 * A.norm(dim=1))
        hi, lo = halves(w / factors)
        codes[:, inputs : inputs + 3 * width] = torch.cat([hi, hi, lo], 1)
        A_halves.scales.copy_(A.abs().amax(1) / 448)
        A_halves.codes.copy_(torch.stack(halves(A / A_halves.scales[:, None])))
        factors_t = factor(A.abs().amax(1), 28 * B.norm(dim=0) / squares.sqrt())
        hi, lo = halves(A.t() / factors_t)
        codes_t[:, outputs : outputs + 3 * width] = torch.cat([hi, hi, lo], 1)

    where `halves` are those of `fp8_rows`. `factor(largest, expected)` is the root of their ratio.
    It is 1 / expected if largest is 0, and 1 if expected is 0. It is at most 16 / expected, and at
    least largest / 448. Nothing is checked: the arguments come from `layer/fp8/`.
    """
    borders, codes, factors, halves_of, scales_of = zip(*chain.from_iterable(
        (
            (weight.B, weight.codes[:, weight.A.shape[1] :], weight.factors, *weight.B_halves),
            (weight.A, weight.codes_t[:, len(weight.B) :], weight.factors_t, *weight.A_halves),
        )
        for weight in weights
    ), strict=True)  # fmt: skip
    scales = tuple(weight.scales for weight in weights)
    counts = tuple(chain.from_iterable((len(weight.B), weight.A.shape[1]) for weight in weights))
    widths = tuple(len(weight.A) for weight in weights)
    blocks, widest = cdiv(max(counts), BLOCK_ROWS), max(widths)
    across = [cdiv(width, BLOCK_COLUMNS) for width in widths]
    tiles = sum(cdiv(count, BLOCK_ROWS) * across[i // 2] for i, count in enumerate(counts))
    sums = scales[0].new_empty(2 * len(weights), blocks, 3, widest)
    strides = tuple(code.stride(0) for code in codes)
    with on_device_of(sums):
        launch_by_triton(
            _border_sums_kernel, (tiles,),
            borders, scales, sums, counts, widths, blocks, widest, len(weights), BLOCK_ROWS,
            BLOCK_COLUMNS, num_warps=NUM_WARPS,
        )  # fmt: skip
        launch_by_triton(
            _border_factors_kernel, (max(across), 2 * len(weights)),
            sums, counts, widths, factors, scales_of, blocks, widest, len(weights), BLOCK_ROWS,
            BLOCK_COLUMNS, SUMMED, num_warps=NUM_WARPS,
        )  # fmt: skip
        launch_by_triton(
            _fp8_borders_kernel, (tiles,),
            borders, scales, factors, scales_of, codes, halves_of, strides, counts, widths,
            len(weights), BLOCK_ROWS, BLOCK_COLUMNS, is_interpreted(_fp8_borders_kernel),
            num_warps=NUM_WARPS,
        )  # fmt: skip
