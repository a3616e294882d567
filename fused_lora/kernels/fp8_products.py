"""Matmuls of FP8 codes (`layer/fp8/`), and the border of rows that are already coded.

For codes of x, or of dy s, as the weight's own matmul reads them:

    z = x A',  or  p = dy B          and its columns after x's, in two halves (`fp8_rows.py`)

A row's scale is set before z is known. If the row's border would pass 448, the scale grows by a
power of two and the row's codes shrink by it. That changes no digits, except in codes that fall
below 2^-6.

A program of the first kernel owns some rows and a range of what is summed over. The second kernel
adds up the ranges, and writes z and its halves. It can multiply each row of the z that it writes by
a number. For p these are the scales of x's codes, because dA sums p times those codes.

Codes are read once (for each 128 columns of a border), a byte an element. The factor, A or B / s,
is also in two halves. Both operands then go from memory to the tensor cores as they are: converting
codes to bf16 took twice as long as reading them. Within BLOCK_K the tensor cores add up, which on
Hopper keeps about 14 bits. We add up these sums in fp32. Deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, is_interpreted, launch, next_power_of_2

from .fp8_borders import Halves
from .fp8_rows import LARGEST, e4m3, store_halves

# A tile of 128 rows reads the factor from L2 rarely enough. A multiprocessor runs two programs. On
# an H100, for a layer of Qwen2.5-3B at 16,384 and 2,048 rows, the best of seven takes 0.367 and
# 0.093 ms. With 64 for BLOCK_K it takes 0.470 and 0.102. Borders wider than 64 need that, because
# 128 does not fit into 99 kB there. A single kernel that sums up and writes leaves most of the card
# idle at 2,048 rows, where all of these take 1.7 times as long in a step.
MAX_BLOCK_ROWS, PROGRAMS = 128, 264
MAX_BLOCK_WIDTH = 128
LEAST_OF_A_SPLIT = 256  # columns: with fewer, the sums have more bytes than the codes
BORDER_ROWS = 16
BORDER_COLUMNS = 4096  # of a row that are rescaled at once


@triton.jit(do_not_specialize=["rows"])
def _coded_product_kernel(
    codes_ptr,  # [rows, padded] e4m3
    factor_ptr,  # [2, width, columns] e4m3
    partials_ptr,  # [splits, rows, width] fp32, written
    rows,
    columns,
    columns_of_a_split,
    width,
    padded,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    j = (tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH))[None, :]
    split = tl.program_id(2)
    total = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    first = split * columns_of_a_split
    end = tl.minimum(first + columns_of_a_split, columns)
    for start in range(first, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = (row < rows) & (k < end)[None, :]
        x = tl.load(codes_ptr + row * padded + k[None, :], mask=x_mask, other=0.0)
        factor_tile = factor_ptr + j.to(tl.int64) * columns + k[:, None]
        mask = (k < end)[:, None] & (j < width)
        hi = tl.load(factor_tile, mask=mask, other=0.0)
        lo = tl.load(factor_tile + width * columns, mask=mask, other=0.0)
        if IN_FP32:  # in Triton's interpreter
            x, hi, lo = x.to(tl.float32), hi.to(tl.float32), lo.to(tl.float32)
        total += tl.dot(x, lo, tl.dot(x, hi, input_precision="ieee"), input_precision="ieee")
    tile = partials_ptr + (split.to(tl.int64) * rows + row) * width + j
    tl.store(tile, total, mask=(row < rows) & (j < width))


@triton.jit(do_not_specialize=["rows", "splits"])
def _coded_border_kernel(
    partials_ptr,  # [splits, rows, width]
    codes_ptr,  # [rows, padded], the first columns already written
    scales_ptr,  # [rows], written where they have to be larger
    factor_scales_ptr,  # [width], what the sum of partials is multiplied by
    factors_ptr,  # [width], what the border is multiplied by
    z_scales_ptr,  # [rows], what z is multiplied by where it is written, or None
    z_ptr,  # [rows, width], written
    rows,
    columns,
    width,
    splits,
    padded,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDING: tl.constexpr,
    ROUND: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = (first + tl.arange(0, ROWS))[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (j < width)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    # unrolled: the loads overlap
    for split in tl.range(0, splits, loop_unroll_factor=4):
        total += tl.load(partials_ptr + (row + split * rows) * width + j, mask=inside, other=0.0)
    scale = tl.load(scales_ptr + row, mask=row < rows, other=1.0)
    factor_scale = tl.load(factor_scales_ptr + j, mask=j < width, other=0.0)
    z = (total * scale * factor_scale).to(z_ptr.dtype.element_ty)
    written = z
    if z_scales_ptr is not None:
        z_scales = tl.load(z_scales_ptr + row, mask=row < rows, other=0.0)
        written = (z.to(tl.float32) * z_scales).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + row * width + j, written, mask=inside)
    v = z.to(tl.float32) * tl.load(factors_ptr + j, mask=j < width, other=0.0)
    passed = tl.max(tl.abs(v), 1)[:, None] / (LARGEST * scale)
    larger = tl.exp2(tl.ceil(tl.log2(tl.maximum(passed, 1.0)))).to(tl.float32)
    if tl.max(tl.max(larger, 1), 0) > 1.0:
        # only the rows that passed: to rewrite all of a program's rows would hold up the launch
        for i in range(ROWS):
            growth = tl.max(tl.max(tl.where(tl.arange(0, ROWS)[:, None] == i, larger, 1.0), 1), 0)
            if growth > 1.0:
                for start in range(0, columns, COLUMNS):
                    at = start + tl.arange(0, COLUMNS)
                    here = codes_ptr + (first + i) * padded + at
                    x = tl.load(here, mask=at < columns, other=0.0).to(tl.float32)
                    tl.store(here, e4m3(x * (1.0 / growth), ROUND), mask=at < columns)
    scale *= larger
    codes_row = codes_ptr + row * padded
    store_halves(codes_row + columns + j, v / scale, width, inside, ROUND)
    after = columns + 3 * width + tl.arange(0, PADDING)[None, :]
    zero = tl.zeros([ROWS, PADDING], tl.float32).to(tl.float8e4nv)
    tl.store(codes_row + after, zero, mask=(row < rows) & (after < padded))
    not_finite = tl.sum(v * 0.0, 1)[:, None]
    tl.store(scales_ptr + row, scale + not_finite, mask=row < rows)


def add_coded_border(
    codes: Tensor, scales: Tensor, factor: Halves, factors: Tensor, dtype: torch.dtype,
    z_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the border of codes [rows, padded] in e4m3, whose first columns are already there, and
    update scales [rows, 1]. Return z [rows, width], new, in dtype, or z times z_scales [rows, 1].

    Equivalent PyTorch, for a factor [width, columns] in halves, and factors [width]::

        exact = factor.codes.float().sum(0) * factor.scales[:, None]
        z = (scales * codes[:, :columns].float() @ exact.t()).to(dtype)
        v = z.float() * factors
        larger = (v.abs().amax(1, keepdim=True) / (448 * scales)).log2().ceil().clamp(min=0).exp2()
        scales.mul_(larger)
        codes[:, :columns] = (codes[:, :columns].float() / larger).to(torch.float8_e4m3fn)
        hi = (v / scales).to(torch.float8_e4m3fn)
        lo = (v / scales - hi.float()).to(torch.float8_e4m3fn)
        codes[:, columns:] = torch.cat([hi, lo, hi, zeros], 1)

    Nothing is checked: the arguments come from `layer/fp8/`.
    """
    (rows, padded), (_, width, columns) = codes.shape, factor.codes.shape
    z = torch.empty(rows, width, dtype=dtype, device=codes.device)
    if rows == 0:
        return z
    block_rows = min(max(next_power_of_2(rows), 16), MAX_BLOCK_ROWS)
    block_width = min(max(next_power_of_2(width), 16), MAX_BLOCK_WIDTH)
    block_k, stages, warps = (64, 4, 8) if block_width > 64 else (128, 3, 4)
    tiles = cdiv(rows, block_rows), cdiv(width, block_width)
    splits = max(PROGRAMS // (tiles[0] * tiles[1]), 1)
    columns_of_a_split = max(cdiv(cdiv(columns, splits), block_k) * block_k, LEAST_OF_A_SPLIT)
    splits = cdiv(columns, columns_of_a_split)
    partials = torch.empty(splits, rows, width, dtype=torch.float32, device=codes.device)
    launch(
        _coded_product_kernel, (*tiles, splits),
        codes, factor.codes, partials, rows, columns, columns_of_a_split, width, padded,
        block_rows, block_k, block_width, is_interpreted(_coded_product_kernel),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _write_border(codes, columns, scales, partials, factor.scales, factors, z, z_scales)
    return z


def add_border(codes: Tensor, columns: int, scales: Tensor, z: Tensor, factors: Tensor) -> None:
    """Write the border of codes, whose first `columns` are there, for a given z [rows, width].

    It is `add_coded_border` for a z that comes from masked rows.
    """
    if len(z):
        partials = (z.float() / scales)[None]  # times scales it is z again
        ones = torch.ones_like(factors)
        _write_border(codes, columns, scales, partials, ones, factors, torch.empty_like(z))


def _write_border(
    codes: Tensor, columns: int, scales: Tensor, partials: Tensor, factor_scales: Tensor,
    factors: Tensor, z: Tensor, z_scales: Tensor | None = None,
) -> None:  # fmt: skip
    (splits, rows, width), padded = partials.shape, codes.shape[1]
    launch(
        _coded_border_kernel, (cdiv(rows, BORDER_ROWS),),
        partials, codes, scales, factor_scales, factors, z_scales, z, rows, columns, width, splits,
        padded, BORDER_ROWS, BORDER_COLUMNS, next_power_of_2(width),
        next_power_of_2(max(padded - columns - 3 * width, 1)), is_interpreted(_coded_border_kernel),
        num_warps=8 if width > 64 else 4,
    )  # fmt: skip


def product_of_codes(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None,
    dtype: torch.dtype, sums_in_fp32: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply codes [T, k] and weight [out, k], with the scales of the rows of both, into dtype.

    Hopper's tensor cores add up with 14 bits and cut off the rest, once for each 32 of k. With
    sums_in_fp32 they do so only within 128 of k, and these sums are added in fp32. A gradient whose
    k is a vocabulary needs that (`fp8_head.py`), and so does a forward with a small adapter. Fast
    sums show 0.003 to 0.004 of a delta of 1e-6 of the output, 0.03 of 1e-5 and 0.2 to 0.3 of 1e-4.
    sums_in_fp32 shows all of it (H100, multiples of 128). If k without the border is no multiple of
    128, the border shares a block with x, and some may still be lost: not measured. Matmuls take 7
    to 25% longer.
    """
    if codes.is_cuda and dtype == torch.bfloat16:
        return torch._scaled_mm(
            codes, weight.t(), scales, weight_scales[None], bias, out_dtype=dtype,
            use_fast_accum=not sums_in_fp32,
        )  # fmt: skip
    product = (codes.float() @ weight.float().t()) * scales * weight_scales
    return (product if bias is None else product + bias.float()).to(dtype)
