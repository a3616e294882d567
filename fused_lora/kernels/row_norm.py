"""RMSNorm of rows, and its gradient: alone, beside an addition, and in FP8 codes.

    rms_norm_forward       y = x r w,   r = 1 / sqrt(mean(x^2) + eps), of x, or of x + delta
    add_normed             total = residual + x r w
    norm_codes             y = x r w as codes alone (`fp8_rows.py`)
    rms_norm_backward      grad_x = r (g - n mean(g n)) + grad_residual,   n = x r,  g = grad_y w,
                           and where w is trained, its gradient
    norm_backward_codes    grad_x, and times W's scales as codes: the gradient that o takes

where w is the weight, or 1 + weight if that is zero-centred (`functions/rms_norm.py` derives the
gradients). Operands are [rows, hidden], their rows any stride apart. Those that are written may
have more dimensions if they are contiguous. A bordered matmul reads its input as [x | x A'], so the
norm writes y into the first columns of that buffer, and no copy is made. A matmul that is added to
the residual adds to a copy of it, which the norm before it writes as well.

A program holds a row in registers to average its squares, so it can also find the row's largest
element for its codes. Traffic in tensors of x's size in bf16: 2, or 3 with a copy of x and with an
addition, 1.5 for codes, where a separate pass that codes y takes another 1.5. Backward: 3, 4 with
grad_residual, 4.5 with codes beside it.

Arithmetic is fp32 and rounds once, at the store. Deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, is_interpreted, launch

from .fp8_rows import new_codes, store_row
from .rows import block_of

# One program holds a row in registers, which is what the mean of its squares wants. From 16,384 on
# backward spills some of it: right, but no longer at the speed of memory.
MAX_HIDDEN = 65_536

# A weight gradient is summed in two stages. The first uses at most this many programs, each for a
# range of rows. At 16,384 x 2,048 their partial sums are 4 MB beside 67 MB of bf16 x, and an H200
# has 132 multiprocessors to keep busy. It is a constant: every card adds in the same order.
MAX_PARTIAL_SUMS = 512


@triton.jit
def rstd_of(x, hidden, eps):
    """1 / sqrt(mean(x^2) + eps) of a row in fp32, which is 0 behind its `hidden` elements."""
    # rounded to nearest, which once a row costs nothing: `/` and tl.rsqrt are only near, and an
    # error that all rows share adds up over the layers. Compiled code passes eps in fp64
    return rstd_of_mean(tl.div_rn(tl.sum(x * x, axis=0), 1.0 * hidden), eps)


@triton.jit
def rstd_of_mean(mean, eps):
    """1 / sqrt(mean + eps)."""
    return tl.div_rn(1.0, tl.sqrt_rn((mean + eps).to(tl.float32)))


@triton.jit
def load_weight(weight_ptr, columns, mask, ZERO_CENTERED: tl.constexpr):
    """A norm's factors in fp32, and 0 or 1 behind the end."""
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    return weight


@triton.jit
def _rms_norm_forward_kernel(
    x_ptr,  # [rows, hidden]
    addend_ptr,  # [rows, hidden]; it is added to x if there is a total, else to the norm; or None
    weight_ptr,  # [hidden]
    total_ptr,  # [rows, hidden], written: what is normed; or None
    y_ptr,  # [rows, hidden or more], its first columns written, in e4m3 if there are scales
    scales_ptr,  # [rows] fp32, written; or None
    rstd_ptr,  # [rows] fp32, written
    x_row_stride,
    addend_row_stride,
    total_row_stride,
    y_row_stride,
    hidden,
    eps,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,  # see `fp8_rows.e4m3`
):
    # int64: from 1,048,576 rows of 2,048 on, an int32 offset overflows
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    # 0.0 behind the end, which adds nothing to the sum of squares
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0)
    weight = load_weight(weight_ptr, columns, mask, ZERO_CENTERED)
    if addend_ptr is not None:
        addend = tl.load(addend_ptr + row * addend_row_stride + columns, mask=mask, other=0.0)
        addend = addend.to(tl.float32)
        if total_ptr is not None:
            x = (x.to(tl.float32) + addend).to(total_ptr.dtype.element_ty)
    if total_ptr is not None:
        tl.store(total_ptr + row * total_row_stride + columns, x, mask=mask)
    x = x.to(tl.float32)
    rstd = rstd_of(x, hidden, eps)
    y = x * rstd * weight
    if addend_ptr is not None and total_ptr is None:
        y = addend + y
    y_ptr += row * y_row_stride
    if scales_ptr is None:
        tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        y = tl.where(mask, y, 0.0)  # not 0 times an rstd of infinity
        store_row(y, y_ptr, scales_ptr + row, columns, mask, ROUND)
    tl.store(rstd_ptr + row, rstd)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def _rms_norm_backward_kernel(
    grad_y_ptr,  # [rows, hidden]
    grad_residual_ptr,  # [rows, hidden], or None
    x_ptr,  # [rows, hidden], what was normed
    weight_ptr,  # [hidden]
    rstd_ptr,  # [rows] fp32
    grad_x_ptr,  # [rows, hidden], written
    partial_ptr,  # [programs, hidden] fp32, grad_weight of each program's rows, written; or None
    column_scales_ptr,  # [hidden] fp32, what codes are multiplied by; None: no codes
    codes_ptr,  # [rows, hidden or more], its first columns written
    scales_ptr,  # [rows] fp32, written
    grad_y_row_stride,
    grad_residual_row_stride,
    x_row_stride,
    grad_x_row_stride,
    codes_row_stride,
    rows,
    hidden,
    rows_per_program,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,  # see `fp8_rows.e4m3`
):
    if partial_ptr is None:  # as a constant, which Triton does not see in a number of rows
        rows_per_program = 1
    program = tl.program_id(0).to(tl.int64)
    first = program * rows_per_program
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    weight = load_weight(weight_ptr, columns, mask, ZERO_CENTERED)
    if column_scales_ptr is not None:
        column_scales = tl.load(column_scales_ptr + columns, mask=mask, other=0.0)
    partial = tl.zeros([BLOCK], tl.float32)
    for index in range(tl.minimum(rows - first, rows_per_program)):
        row = first + index
        x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + row * grad_y_row_stride + columns, mask=mask, other=0.0)
        # early, it hides behind the sum; in a loop over rows it costs registers, and 40% more time
        if column_scales_ptr is not None:
            residual_row = grad_residual_ptr + row * grad_residual_row_stride
            grad_residual = tl.load(residual_row + columns, mask=mask, other=0.0)
        grad_y = grad_y.to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = x * rstd
        grad_normed = grad_y * weight
        mean = tl.div_rn(tl.sum(grad_normed * normed, axis=0), 1.0 * hidden)
        grad_x = rstd * (grad_normed - normed * mean)
        if grad_residual_ptr is not None:
            if column_scales_ptr is None:
                residual_row = grad_residual_ptr + row * grad_residual_row_stride
                grad_residual = tl.load(residual_row + columns, mask=mask)
            grad_x += grad_residual.to(tl.float32)
        grad_x = grad_x.to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + row * grad_x_row_stride + columns, grad_x, mask=mask)
        if partial_ptr is not None:
            partial += grad_y * normed
        if column_scales_ptr is not None:
            y = tl.where(mask, grad_x.to(tl.float32) * column_scales, 0.0)
            codes_row = codes_ptr + row * codes_row_stride
            store_row(y, codes_row, scales_ptr + row, columns, mask, ROUND)
    if partial_ptr is not None:
        tl.store(partial_ptr + program * hidden + columns, partial, mask=mask)


def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, y: Tensor, total: Tensor | None = None,
    zero_centered: bool = False, delta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the norm of x, or of x + delta, into y, and what is normed into total, which has to be
    there with delta. Return rstd, [rows] fp32.

    Equivalent PyTorch, for x, y, total and delta [rows, hidden] and weight [hidden], of one dtype,
    which y need not have::

        total.copy_(x + delta)
        rstd = torch.rsqrt(total.float().pow(2).mean(-1) + eps)
        y.copy_(total.float() * rstd[:, None] * weight.float())  # zero_centered: 1 + weight.float()
    """
    return _forward(x, weight, eps, zero_centered, y, total, delta)


def add_normed(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, total: Tensor,
    zero_centered: bool = False,
) -> Tensor:  # fmt: skip
    """Write the residual plus the norm of x into total. Return rstd, [rows] fp32.

    Equivalent PyTorch, for [rows, hidden] tensors of one dtype, and a sum that rounds once::

        rstd = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        total.copy_(residual.float() + x.float() * rstd[:, None] * weight.float())
        # zero_centered: 1 + weight.float()

    `rms_norm_backward` without grad_residual has x's gradient from total's.
    """
    return _forward(x, weight, eps, zero_centered, total, None, residual)


def norm_codes(
    x: Tensor, weight: Tensor, eps: float, padded: int, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new (codes [rows, padded] in e4m3, scales [rows, 1] and rstd [rows], both in fp32) of
    the norm of x [rows, hidden]. Only the first columns of the codes are written.

    Equivalent PyTorch, for x and weight [hidden] of one dtype, bf16, fp16 or fp32::

        rstd = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        y = x.float() * rstd[:, None] * weight.float()  # zero_centered: 1 + weight.float()
        scales = y.abs().amax(1, keepdim=True) / 224
        codes[:, :hidden] = (y / scales).to(torch.float8_e4m3fn)

    The scale of a row with NaN or infinity in it is NaN.
    """
    codes, scales = new_codes(x, padded)
    rstd = _forward(x, weight, eps, zero_centered, codes, scales=scales)
    return codes, scales, rstd


def _forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, y: Tensor,
    total: Tensor | None = None, addend: Tensor | None = None, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, hidden = x.shape
    rstd = x.new_empty(rows, dtype=torch.float32)
    if rows:  # an empty grid cannot be launched
        block, warps = block_of(hidden)
        launch(
            _rms_norm_forward_kernel, (rows,),
            x, addend, weight, total, y, scales, rstd,
            x.stride(0), _row_stride(addend), _row_stride(total), _row_stride(y), hidden, eps,
            zero_centered, block, is_interpreted(_rms_norm_forward_kernel), num_warps=warps,
        )  # fmt: skip
    return rstd


def rms_norm_backward(
    grad_y: Tensor, grad_residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor,
    grad_x: Tensor, zero_centered: bool = False, grad_weight: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient of x, which was normed and goes on as the residual, into grad_x, and that
    of weight, where it is asked for, into grad_weight [hidden], which may have any dtype.

    Equivalent PyTorch, for [rows, hidden] tensors of one dtype, which grad_y and grad_x need not
    have, y being the norm of x::

        grad_x.copy_(torch.autograd.grad(y, x, grad_y)[0] + grad_residual)
        grad_weight.copy_(torch.autograd.grad(y, weight, grad_y)[0])  # summed in fp32

    Without grad_residual x goes on nowhere. weight, rstd and zero_centered are as
    `rms_norm_forward` or `add_normed` had and gave them.
    """
    rows, hidden = x.shape
    rows_per_program = 1 if grad_weight is None else max(cdiv(rows, MAX_PARTIAL_SUMS), 1)
    programs = cdiv(rows, rows_per_program)
    partial = None if grad_weight is None else rstd.new_empty(programs, hidden)
    if rows:
        block, warps = block_of(hidden)
        launch(
            _rms_norm_backward_kernel, (programs,),
            grad_y, grad_residual, x, weight, rstd, grad_x, partial, None, None, None,
            grad_y.stride(0), _row_stride(grad_residual), x.stride(0), _row_stride(grad_x), 0,
            rows, hidden, rows_per_program, zero_centered, block, False, num_warps=warps,
        )  # fmt: skip
    if grad_weight is not None and partial is not None:
        grad_weight.copy_(partial.sum(0))


def norm_backward_codes(
    grad_y: Tensor, grad_residual: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_x: Tensor,
    column_scales: Tensor, padded: int, zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the gradient of x, which was normed and goes on as the residual, into grad_x.

    Returns new (codes [rows, padded] in e4m3, scales [rows, 1] in fp32) of grad_x times
    column_scales. Only the first columns of the codes are written.

    Equivalent PyTorch, for [rows, hidden] tensors of one dtype and column_scales [hidden] in fp32::

        rms_norm_backward(grad_y, grad_residual, x, weight, rstd, grad_x, zero_centered)
        return fp8_rows(grad_x, padded, column_scales)
    """
    rows, hidden = x.shape
    codes, scales = new_codes(x, padded)
    if rows:
        block, warps = block_of(hidden)
        launch(
            _rms_norm_backward_kernel, (rows,),
            grad_y, grad_residual, x, weight, rstd, grad_x, None, column_scales, codes, scales,
            grad_y.stride(0), grad_residual.stride(0), x.stride(0), grad_x.stride(0), padded,
            rows, hidden, 1, zero_centered, block, is_interpreted(_rms_norm_backward_kernel),
            num_warps=warps,
        )  # fmt: skip
    return codes, scales


def _row_stride(x: Tensor | None) -> int:
    """Return the stride between rows [..., hidden]; 0 for a single row."""
    return 0 if x is None or x.ndim == 1 else x.stride(-2)
