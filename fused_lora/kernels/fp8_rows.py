"""Rows in FP8, for products with a weight in FP8 (`fp8.py`): e4m3 codes and one scale a row.

    fp8_rows       codes and scales of x [rows, columns], with its border in two halves
    fp8_borders    the adapters' borders of a weight, and what they are divided by

A product of codes adds x's border v times the weight's border w to what it computes anyway. As one
e4m3 number each (four bits) they would lose small updates of an adapter; as hi + lo, both e4m3,

    v w = (vh + vl) (wh + wl) ~ vh wh + vl wh + vh wl      x: [codes | vh | vl | vh]
                                                           W: [codes | wh | wh | wl]

they are exact to eight bits, as in bf16. A row of x has one scale for all of it, so that v wants to
be of a size with x, and w with W: for each column v is multiplied by a factor f, and w divided by
it. f makes both about as large, from what is known before any token is: the root of the largest w
over the expected v, which is that of an x of independent elements, an eighth of the largest in the
mean. A row whose v is still larger than its x takes its scale from v. So nothing passes 448.

Traffic in tensors of x's size in bf16: 1.5. Arithmetic is fp32, and rounds once to e4m3.
Deterministic. Our own; e4m3: Micikevicius et al., arXiv 2209.05433.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import launch, next_power_of_2

from .rows import ROW_BYTES, check_rows

E4M3 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)  # of e4m3
SMALLEST = tl.constexpr(1e-30)  # that a row's largest counts as, so that rows of zeros have a scale
EXPECTED = tl.constexpr(56.0)  # an eighth of LARGEST
MAX_COLUMNS = 65_536
# As many rows of a border's column at a time: a program waits for memory once for each block.
BORDER_BLOCK = tl.constexpr(4096)


@triton.jit
def _e4m3(x, ROUND: tl.constexpr):
    """x, of at most 448, to the nearest e4m3. ROUND: by arithmetic first, for the cast of Triton's
    interpreter cuts off."""
    if ROUND:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        of_normal = bits.to(tl.float32, bitcast=True)
        # below 2^-6 all are 2^-9 apart, as fp32 are from 2^14 on
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, of_normal)
    return x.to(tl.float8e4nv)


@triton.jit
def _fp8_rows_kernel(
    x_ptr,  # [rows, columns]
    of_columns_ptr,  # [columns], what x is multiplied by, or None
    v_ptr,  # [rows, width], or None
    factors_ptr,  # [width], what v is multiplied by
    codes_ptr,  # [rows, columns + 3 width and padding], written
    scales_ptr,  # [rows], written
    columns,
    width,
    padded,
    x_stride,
    v_stride,
    BLOCK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_PADDING: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    codes_ptr += row * padded
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if of_columns_ptr is not None:
        x *= tl.load(of_columns_ptr + at, mask=inside, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(x), 0), SMALLEST)
    not_finite = tl.sum(x * 0.0, 0)  # of maxima and casts NaN and infinity may get lost
    if v_ptr is not None:
        j = tl.arange(0, BLOCK_WIDTH)
        in_border = j < width
        v = tl.load(v_ptr + row * v_stride + j, mask=in_border, other=0.0).to(tl.float32)
        v *= tl.load(factors_ptr + j, mask=in_border, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(v), 0))
        not_finite += tl.sum(v * 0.0, 0)
        v *= LARGEST / largest
        hi = _e4m3(v, ROUND)
        lo = _e4m3(v - hi.to(tl.float32), ROUND)
        tl.store(codes_ptr + columns + j, hi, mask=in_border)
        tl.store(codes_ptr + columns + width + j, lo, mask=in_border)
        tl.store(codes_ptr + columns + 2 * width + j, hi, mask=in_border)
    tl.store(codes_ptr + at, _e4m3(x * (LARGEST / largest), ROUND), mask=inside)
    after = columns + 3 * width + tl.arange(0, BLOCK_PADDING)
    zero = tl.zeros([BLOCK_PADDING], tl.float32).to(tl.float8e4nv)
    tl.store(codes_ptr + after, zero, mask=after < padded)
    tl.store(scales_ptr + row, largest / LARGEST + not_finite)


@triton.jit
def _factor(largest, expected):
    factor = tl.maximum(tl.sqrt(largest / tl.maximum(expected, SMALLEST)), largest / LARGEST)
    return tl.where((largest > 0) & (expected > 0), factor, 1.0)


@triton.jit
def _write_border(
    border_ptr, border_stride, scales_ptr, codes_ptr, count, width, padded, factor,
    ROUND: tl.constexpr,
):  # fmt: skip
    for start in range(0, count, BORDER_BLOCK):
        at = (start + tl.arange(0, BORDER_BLOCK)).to(tl.int64)
        inside = at < count
        w = tl.load(border_ptr + at * border_stride, mask=inside, other=0.0).to(tl.float32)
        if scales_ptr is not None:
            w /= tl.load(scales_ptr + at, mask=inside, other=1.0)
        w /= factor
        hi = _e4m3(w, ROUND)
        lo = _e4m3(w - hi.to(tl.float32), ROUND)
        row_ptr = codes_ptr + at * padded
        tl.store(row_ptr, hi, mask=inside)
        tl.store(row_ptr + width, hi, mask=inside)
        tl.store(row_ptr + 2 * width, lo, mask=inside)


@triton.jit
def _fp8_borders_kernel(
    B_ptr,  # [outputs, width], scaled
    A_ptr,  # [width, inputs]
    scales_ptr,  # [outputs], of W's rows
    codes_ptr,  # [outputs, padded], from the border's first column on, written
    codes_t_ptr,  # [inputs, padded_t], likewise
    factors_ptr,  # [width], written
    factors_t_ptr,  # [width], written
    outputs,
    inputs,
    width,
    B_stride,
    A_stride,
    padded,
    padded_t,
    ROUND: tl.constexpr,
):
    column = tl.program_id(0)
    B_ptr += column
    A_ptr += column.to(tl.int64) * A_stride
    largest_B, sum_B, sum_scales = 0.0, 0.0, 0.0
    for start in range(0, outputs, BORDER_BLOCK):
        at = (start + tl.arange(0, BORDER_BLOCK)).to(tl.int64)
        inside = at < outputs
        b = tl.load(B_ptr + at * B_stride, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales_ptr + at, mask=inside, other=1.0)
        largest_B = tl.maximum(largest_B, tl.max(tl.abs(b) / scale, 0))
        sum_B += tl.sum(b * b, 0)
        sum_scales += tl.sum(tl.where(inside, scale * scale, 0.0), 0)
    largest_A, sum_A = 0.0, 0.0
    for start in range(0, inputs, BORDER_BLOCK):
        at = start + tl.arange(0, BORDER_BLOCK)
        a = tl.load(A_ptr + at, mask=at < inputs, other=0.0).to(tl.float32)
        largest_A = tl.maximum(largest_A, tl.max(tl.abs(a), 0))
        sum_A += tl.sum(a * a, 0)
    factor = _factor(largest_B, EXPECTED * tl.sqrt(sum_A))
    factor_t = _factor(largest_A, EXPECTED * tl.sqrt(sum_B * outputs / sum_scales))
    tl.store(factors_ptr + column, factor)
    tl.store(factors_t_ptr + column, factor_t)
    _write_border(
        B_ptr, B_stride, scales_ptr, codes_ptr + column, outputs, width, padded, factor, ROUND
    )
    _write_border(
        A_ptr, 1, None, codes_t_ptr + column, inputs, width, padded_t, factor_t, ROUND
    )  # fmt: skip


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
    Raises ValueError for other shapes or dtypes, and for more than 65,536 columns.
    """
    name = "fp8_rows"
    check_rows(name, _fp8_rows_kernel, x.shape, x=x)
    rows, columns = x.shape
    if columns > MAX_COLUMNS:
        raise ValueError(f"{name}: x has {columns} columns, more than {MAX_COLUMNS}")
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
    block = next_power_of_2(columns)
    launch(
        _fp8_rows_kernel, (rows,), x, of_columns, v, factors, codes, scales, columns, width, padded,
        x.stride(0), 0 if v is None else v.stride(0), block, next_power_of_2(max(width, 1)),
        next_power_of_2(max(padded - columns - 3 * width, 1)), _rounds(_fp8_rows_kernel),
        num_warps=min(max(block // 2048, 4), 16),
    )  # fmt: skip
    return codes, scales


def fp8_borders(
    B: Tensor, A: Tensor, scales: Tensor, codes: Tensor, codes_t: Tensor, factors: Tensor,
    factors_t: Tensor,
) -> None:  # fmt: skip
    """Write the border of a weight [outputs, inputs] into its codes [outputs, padded_columns of
    inputs] and into those of its transpose [inputs, padded_columns of outputs]; what z and p are to
    be multiplied by into factors and factors_t [width].

    Equivalent PyTorch, for B [outputs, width] scaled, A [width, inputs] and W's scales [outputs]::

        w = B / scales[:, None]
        factors = factor(w.abs().amax(0), 56 * A.norm(dim=1))
        hi, lo = halves(w / factors)
        codes[:, inputs : inputs + 3 * width] = torch.cat([hi, hi, lo], 1)
        factors_t = factor(A.abs().amax(1), 56 * B.norm(dim=0) / scales.square().mean().sqrt())
        hi, lo = halves(A.t() / factors_t)
        codes_t[:, outputs : outputs + 3 * width] = torch.cat([hi, hi, lo], 1)

    where `factor(largest, expected)` is the root of their ratio, at least largest / 448, and 1
    where either is 0, and `halves` are as `fp8_rows` has them. A and B: one dtype, elements side by
    side. Not checked: it is given what `fp8.py` has made.
    """
    outputs, width = B.shape
    inputs = A.shape[1]
    launch(
        _fp8_borders_kernel, (width,), B, A, scales, codes[:, inputs:], codes_t[:, outputs:],
        factors, factors_t, outputs, inputs, width, B.stride(0), A.stride(0), codes.stride(0),
        codes_t.stride(0), _rounds(_fp8_borders_kernel), num_warps=8,
    )  # fmt: skip


def _rounds(kernel) -> bool:
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
