"""Rows in FP8, for matmuls with an FP8 weight (`layer/fp8/`): e4m3 codes and one scale a row.

    fp8_rows    codes and scales of x [rows, columns], with room for its border

A matmul of codes adds x's border v times the weight's border w to what it computes anyway. As a
single e4m3 number each (four bits), v and w would lose small updates of an adapter. Each is
therefore hi + lo, both e4m3:

    v w = (vh + vl) (wh + wl) ~ vh wh + vl wh + vh wl      x: [codes | vh | vl | vh]
                                                           W: [codes | wh | wh | wl]

That is exact to eight bits, like bf16. A row of x has a single scale, so v should be about as large
as x, and w as W. For each column we therefore multiply v by a factor f and divide w by it
(`fp8_borders.py`). v is written once the codes are there (`fp8_products.py`).

Traffic in tensors of x's size in bf16: 1.5, and more for columns beyond 16,384. Arithmetic is fp32,
and rounds once to e4m3. Deterministic. Our own; e4m3: Micikevicius et al., arXiv 2209.05433.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, is_interpreted, launch

from .rows import ROW_BYTES, block_of

E4M3 = torch.float8_e4m3fn
SIZES = 16  # of a weight have to be multiples of it
# A weight's row is scaled as if its largest were at least the rows' mean largest divided by this.
# e4m3 numbers are floating-point: a row that much smaller than most loses no digits.
LEAST_OF_MEAN = 128
LARGEST = tl.constexpr(448.0)  # of e4m3
# A row's largest becomes half of that, which leaves room for a border that is not known yet. Scaled
# to all of it, 32% of rows passed 448 where sB was twice as large as W (of normal numbers), and had
# to be written again. Half of a code has the same digits unless it falls below 2^-6, 1/14,336 of
# the row's largest.
ROW_LARGEST = tl.constexpr(224.0)
SMALLEST = tl.constexpr(1e-30)  # bounds a row's largest from below: rows of zeros need a scale
# A program holds up to MAX_BLOCK elements of a row in registers, 32 a thread of 16 warps. The rest
# of the row is read twice, the second time for its codes. A program takes several short rows.
MAX_BLOCK, ELEMENTS = 16_384, 2048


@triton.jit
def nearest_e4m3(x):
    """Round x, of at most 448, to the nearest e4m3, in fp32."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    normal = bits.to(tl.float32, bitcast=True)
    # below 2^-6 all are 2^-9 apart, as fp32 are from 2^14 on
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)


@triton.jit
def e4m3(x, ROUND: tl.constexpr):
    """Cast x, of at most 448, to the nearest e4m3. ROUND: round by arithmetic first, because the
    cast of Triton's interpreter cuts off."""
    if ROUND:
        x = nearest_e4m3(x)
    return x.to(tl.float8e4nv)


@triton.jit
def row_codes(x, largest, ROUND: tl.constexpr):
    """Return codes of some of a row's elements, scaled by the row's largest."""
    return e4m3(x * (ROW_LARGEST / largest), ROUND)


@triton.jit
def store_row(y, codes_ptr, scale_ptr, columns, mask, ROUND: tl.constexpr):
    """Write the codes and the scale of a row y, which is 0 past its end."""
    largest = tl.maximum(tl.max(tl.abs(y), 0), SMALLEST)
    not_finite = tl.sum(y * 0.0, 0)  # or NaN, which maxima and casts may lose
    tl.store(codes_ptr + columns, row_codes(y, largest, ROUND), mask=mask)
    tl.store(scale_ptr, largest / ROW_LARGEST + not_finite)


@triton.jit
def halves(v, ROUND: tl.constexpr):
    """Split v, of at most 448, into e4m3 (hi, lo).

    hi is rounded by arithmetic, and not cast and cast back: where codes are packed four to a
    register, ptxas 12.8 unpacks a register that was never written.
    """
    hi = nearest_e4m3(v)
    return hi.to(tl.float8e4nv), e4m3(v - hi, ROUND)


@triton.jit(do_not_specialize=["rows"])
def _fp8_rows_kernel(
    x_ptr,  # [rows, columns]
    column_scales_ptr,  # [columns], what x is multiplied by, or None
    codes_ptr,  # [rows, padded], its first columns are written
    scales_ptr,  # [rows], written
    rows,
    columns,
    padded,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    there = row < rows
    x_ptr += row * x_stride
    codes_ptr += row * padded
    lane = tl.arange(0, BLOCK)[None, :]
    x = _columns_of(x_ptr, column_scales_ptr, lane, columns, there)
    most = tl.abs(x)
    nothing = x * 0.0  # or NaN, which maxima and casts may lose
    if not IS_WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            more = _columns_of(x_ptr, column_scales_ptr, start + lane, columns, there)
            most = tl.maximum(most, tl.abs(more))
            nothing += more * 0.0
    largest = tl.maximum(tl.max(most, 1), SMALLEST)[:, None]
    codes = row_codes(x, largest, ROUND)
    tl.store(codes_ptr + lane, codes, mask=there & (lane < columns))
    if not IS_WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            at = start + lane
            more = _columns_of(x_ptr, column_scales_ptr, at, columns, there)
            codes = row_codes(more, largest, ROUND)
            tl.store(codes_ptr + at, codes, mask=there & (at < columns))
    tl.store(scales_ptr + row, largest / ROW_LARGEST + tl.sum(nothing, 1)[:, None], mask=there)


@triton.jit
def _columns_of(x_ptr, column_scales_ptr, at, columns, there):
    x = tl.load(x_ptr + at, mask=there & (at < columns), other=0.0).to(tl.float32)
    if column_scales_ptr is not None:
        x *= tl.load(column_scales_ptr + at, mask=at < columns, other=0.0)
    return x


@triton.jit
def store_halves(first_ptr, v, width, mask, ROUND: tl.constexpr):
    """Write v, of at most 448, as hi, lo and hi again, width columns apart."""
    hi, lo = halves(v, ROUND)
    tl.store(first_ptr, hi, mask=mask)
    tl.store(first_ptr + width, lo, mask=mask)
    tl.store(first_ptr + 2 * width, hi, mask=mask)


def padded_columns(columns: int, width: int) -> int:
    """Return the columns of codes, x's and its border's, in whole lines of 128 bytes: other sizes
    take cuBLAS up to 16% longer, and it needs multiples of 16."""
    return -(-(columns + 3 * width) // ROW_BYTES) * ROW_BYTES


def fp8_rows(
    x: Tensor, padded: int, column_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return new (codes [rows, padded] in e4m3, scales [rows, 1] in fp32) of x [rows, columns].

    Only the first columns of the codes are written.

    Equivalent PyTorch::

        x = x.float() * column_scales
        scales = x.abs().amax(1, keepdim=True) / 224
        codes[:, :columns] = (x / scales).to(torch.float8_e4m3fn)

    x: bf16, fp16 or fp32, with rows any stride apart. column_scales [columns]: fp32, contiguous.
    The scale of a row with NaN or infinity in it is NaN, and so is everything that a matmul makes
    of the row.
    """
    rows, columns = x.shape
    codes, scales = new_codes(x, padded)
    if rows == 0:
        return codes, scales
    block, _ = block_of(min(columns, MAX_BLOCK))
    at_once = max(ELEMENTS // block, 1)
    _, warps = block_of(block * at_once)
    launch(
        _fp8_rows_kernel, (cdiv(rows, at_once),), x, column_scales, codes, scales, rows, columns,
        padded, x.stride(0), at_once, block, block >= columns, is_interpreted(_fp8_rows_kernel),
        num_warps=warps,
    )  # fmt: skip
    return codes, scales


def new_codes(like: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """Room for codes [rows, padded] and scales [rows, 1] of as many rows as like has."""
    codes = torch.empty(len(like), padded, dtype=E4M3, device=like.device)
    return codes, torch.empty(len(like), 1, dtype=torch.float32, device=like.device)


def codes_and_scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes [out, in] in e4m3, scales [out] in fp32) of a weight, a scale for each row.

    A row that is tiny beside the others, or 0, gets a larger scale than its largest would give. An
    adapter's B is divided by the scale, and would otherwise leave the other rows no digits.
    """
    weight = weight.float()
    largest = weight.abs().amax(1)
    least = largest.mean() / LEAST_OF_MEAN
    scales = torch.maximum(largest, torch.where(least > 0, least, 1.0)) / LARGEST.value
    return (weight / scales[:, None]).to(E4M3), scales
