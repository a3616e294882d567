"""Rows in FP8, for products with a weight in FP8 (`fp8.py`): e4m3 codes and one scale a row.

    fp8_rows    codes and scales of x [rows, columns], with its border in two halves

A product of codes adds x's border v times the weight's border w to what it computes anyway. As one
e4m3 number each (four bits) they would lose small updates of an adapter; as hi + lo, both e4m3,

    v w = (vh + vl) (wh + wl) ~ vh wh + vl wh + vh wl      x: [codes | vh | vl | vh]
                                                           W: [codes | wh | wh | wl]

they are exact to eight bits, as in bf16. A row of x has one scale for all of it, so that v wants to
be of a size with x, and w with W: for each column v is multiplied by a factor f, and w divided by
it (`fp8_borders.py`). A row whose v is still larger than its x takes its scale from v. So nothing
passes 448.

Traffic in tensors of x's size in bf16: 1.5. Arithmetic is fp32, and rounds once to e4m3.
Deterministic. Our own; e4m3: Micikevicius et al., arXiv 2209.05433.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, launch, next_power_of_2

from .rows import ROW_BYTES, check_rows

E4M3 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)  # of e4m3
SMALLEST = tl.constexpr(1e-30)  # that a row's largest counts as, so that rows of zeros have a scale
# A program has so many elements of rows in registers, 32 a thread of 16 warps at most; what of a
# row is beyond is read a second time for its codes. Of short rows it has several.
MAX_BLOCK, ELEMENTS = 16_384, 8192


@triton.jit
def nearest_e4m3(x):
    """x, of at most 448, rounded to the nearest e4m3, in fp32."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    of_normal = bits.to(tl.float32, bitcast=True)
    # below 2^-6 all are 2^-9 apart, as fp32 are from 2^14 on
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, of_normal)


@triton.jit
def e4m3(x, ROUND: tl.constexpr):
    """x, of at most 448, to the nearest e4m3. ROUND: by arithmetic first, for the cast of Triton's
    interpreter cuts off."""
    if ROUND:
        x = nearest_e4m3(x)
    return x.to(tl.float8e4nv)


@triton.jit
def halves(v, ROUND: tl.constexpr):
    """v, of at most 448, as e4m3 (hi, lo).

    hi is rounded by arithmetic and not cast and cast back: of codes that are packed four to a
    register ptxas 12.8 unpacks a register that was never written.
    """
    hi = nearest_e4m3(v)
    return hi.to(tl.float8e4nv), e4m3(v - hi, ROUND)


@triton.jit
def _fp8_rows_kernel(
    x_ptr,  # [rows, columns]
    of_columns_ptr,  # [columns], what x is multiplied by, or None
    v_ptr,  # [rows, width], or None
    factors_ptr,  # [width], what v is multiplied by
    codes_ptr,  # [rows, columns + 3 width and padding], written
    scales_ptr,  # [rows], written
    rows,
    columns,
    width,
    padded,
    x_stride,
    v_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_PADDING: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    there = row < rows
    codes_ptr += row * padded
    x_ptr += row * x_stride
    lane = tl.arange(0, BLOCK)[None, :]
    x = _columns_of(x_ptr, of_columns_ptr, lane, columns, there)
    most = tl.abs(x)
    nothing = x * 0.0  # or NaN, which may get lost of maxima and casts
    if not IS_WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            more = _columns_of(x_ptr, of_columns_ptr, start + lane, columns, there)
            most = tl.maximum(most, tl.abs(more))
            nothing += more * 0.0
    largest = tl.maximum(tl.max(most, 1), SMALLEST)[:, None]
    not_finite = tl.sum(nothing, 1)[:, None]
    if v_ptr is not None:
        j = tl.arange(0, BLOCK_WIDTH)[None, :]
        in_border = there & (j < width)
        v = tl.load(v_ptr + row * v_stride + j, mask=in_border, other=0.0).to(tl.float32)
        v *= tl.load(factors_ptr + j, mask=j < width, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(v), 1)[:, None])
        not_finite += tl.sum(v * 0.0, 1)[:, None]
        store_halves(codes_ptr + columns + j, v * (LARGEST / largest), width, in_border, ROUND)
    codes = e4m3(x * (LARGEST / largest), ROUND)
    tl.store(codes_ptr + lane, codes, mask=there & (lane < columns))
    if not IS_WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            at = start + lane
            more = _columns_of(x_ptr, of_columns_ptr, at, columns, there)
            codes = e4m3(more * (LARGEST / largest), ROUND)
            tl.store(codes_ptr + at, codes, mask=there & (at < columns))
    after = columns + 3 * width + tl.arange(0, BLOCK_PADDING)[None, :]
    zero = tl.zeros([ROWS, BLOCK_PADDING], tl.float32).to(tl.float8e4nv)
    tl.store(codes_ptr + after, zero, mask=there & (after < padded))
    tl.store(scales_ptr + row, largest / LARGEST + not_finite, mask=there)


@triton.jit
def _columns_of(x_ptr, of_columns_ptr, at, columns, there):
    x = tl.load(x_ptr + at, mask=there & (at < columns), other=0.0).to(tl.float32)
    if of_columns_ptr is not None:
        x *= tl.load(of_columns_ptr + at, mask=at < columns, other=0.0)
    return x


@triton.jit
def store_halves(first_ptr, v, width, mask, ROUND: tl.constexpr):
    """Write v, of at most 448, as hi, lo and hi again, width columns apart."""
    hi, lo = halves(v, ROUND)
    tl.store(first_ptr, hi, mask=mask)
    tl.store(first_ptr + width, lo, mask=mask)
    tl.store(first_ptr + 2 * width, hi, mask=mask)


def padded_columns(columns: int, width: int) -> int:
    """The columns of codes: x's and its border's, whole lines of 128 bytes (other sizes take cuBLAS
    up to 16% longer, and it wants multiples of 16)."""
    return -(-(columns + 3 * width) // ROW_BYTES) * ROW_BYTES


def fp8_rows(
    x: Tensor, v: Tensor | None = None, factors: Tensor | None = None,
    of_columns: Tensor | None = None, padded: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(codes [rows, padded] in e4m3, scales [rows, 1] in fp32) of x [rows, columns], new.

    Equivalent PyTorch::

        x, v = x.float() * of_columns, v.float() * factors
        scales = torch.cat([x, v], 1).abs().amax(1, keepdim=True) / 448
        v = v / scales
        hi = v.to(torch.float8_e4m3fn)
        lo = (v - hi.float()).to(torch.float8_e4m3fn)
        codes = torch.cat([(x / scales).to(torch.float8_e4m3fn), hi, lo, hi, zeros], 1)

    x and v [rows, width]: bf16, fp16 or fp32, with rows any stride apart; without v there is no
    border. factors [width] and of_columns [columns]: fp32, contiguous. padded: columns of codes,
    `padded_columns` if not given. The scale of a row with NaN or infinity in it is NaN, as all is
    that a product makes of such a row.
    Raises ValueError for other shapes or dtypes.
    """
    name = "fp8_rows"
    check_rows(name, _fp8_rows_kernel, x.shape, x=x)
    rows, columns = x.shape
    width = 0
    if v is not None:
        width = v.shape[-1]
        check_rows(name, _fp8_rows_kernel, (rows, width), v=v)
        _check_vector(name, "factors", factors, width, x)
    if of_columns is not None:
        _check_vector(name, "of_columns", of_columns, columns, x)
    padded = padded_columns(columns, width) if padded is None else padded
    codes = torch.empty(rows, padded, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows == 0:
        return codes, scales
    block = min(next_power_of_2(columns), MAX_BLOCK)
    at_once = max(ELEMENTS // block, 1)
    launch(
        _fp8_rows_kernel, (cdiv(rows, at_once),), x, of_columns, v, factors, codes, scales, rows,
        columns, width, padded, x.stride(0), 0 if v is None else v.stride(0), at_once, block,
        next_power_of_2(max(width, 1)), next_power_of_2(max(padded - columns - 3 * width, 1)),
        block >= columns, rounds(_fp8_rows_kernel),
        num_warps=min(max(block * at_once // 1024, 4), 16),
    )  # fmt: skip
    return codes, scales


def rounds(kernel) -> bool:
    return not isinstance(kernel, triton.JITFunction)


def _check_vector(name: str, key: str, vector: Tensor | None, count: int, like: Tensor) -> None:
    if (
        vector is None
        or vector.shape != (count,)
        or vector.dtype != torch.float32
        or vector.device != like.device
        or not vector.is_contiguous()
    ):
        given = None if vector is None else f"{list(vector.shape)} in {vector.dtype}"
        raise ValueError(f"{name}: {key} is {given}, should be [{count}] in torch.float32")
