"""A row's RMSNorm and its gradient, for every kernel that has one (`rms_norm.py` derives both).

y      = x r w,    r = 1 / sqrt(mean(x^2) + eps)
grad_x = r (g w - n mean(g w n)),    n = x r
"""

import triton
import triton.language as tl

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
def norm_row(x, weight, hidden, eps):
    """(the norm of a row x, its rstd), in fp32."""
    rstd = rstd_of(x, hidden, eps)
    return x * rstd * weight, rstd


@triton.jit
def norm_row_backward(grad_y, x, weight, rstd, hidden):
    """(the gradient of a row x from that of its norm, x rstd), in fp32."""
    normed = x * rstd
    grad_normed = grad_y * weight
    mean = tl.div_rn(tl.sum(grad_normed * normed, axis=0), 1.0 * hidden)
    return rstd * (grad_normed - normed * mean), normed


@triton.jit
def _rms_norm_forward_kernel(
    x_ptr,  # [rows, hidden]
    delta_ptr,  # [rows, hidden], or None
    weight_ptr,  # [hidden]
    total_ptr,  # [rows, hidden], written: what is normalised; may be None without delta
    y_ptr,  # [rows, hidden], written
    rstd_ptr,  # [rows] fp32, written
    x_row_stride,
    delta_row_stride,
    total_row_stride,
    y_row_stride,
    hidden,
    eps,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # int64: from 1,048,576 rows of 2,048 on, an int32 offset overflows
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    # 0.0 behind the end, which adds nothing to the sum of squares
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0)
    weight = load_weight(weight_ptr, columns, mask, ZERO_CENTERED)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_row_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(total_ptr.dtype.element_ty)
    if total_ptr is not None:
        tl.store(total_ptr + row * total_row_stride + columns, x, mask=mask)
    x = x.to(tl.float32)
    y, rstd = norm_row(x, weight, hidden, eps)
    tl.store(y_ptr + row * y_row_stride + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def _rms_norm_backward_kernel(
    grad_y_ptr,  # [rows, hidden]
    grad_total_ptr,  # [rows, hidden], or None
    x_ptr,  # [rows, hidden], what was normalised
    weight_ptr,  # [hidden]
    rstd_ptr,  # [rows] fp32
    grad_x_ptr,  # [rows, hidden], written
    partial_ptr,  # [programs, hidden] fp32, grad_weight of each program's rows, written; or None
    grad_y_row_stride,
    grad_total_row_stride,
    x_row_stride,
    grad_x_row_stride,
    rows,
    hidden,
    rows_per_program,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if partial_ptr is None:  # as a constant, which Triton does not see in a number of rows
        rows_per_program = 1
    program = tl.program_id(0).to(tl.int64)
    first = program * rows_per_program
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    weight = load_weight(weight_ptr, columns, mask, ZERO_CENTERED)
    partial = tl.zeros([BLOCK], tl.float32)
    for index in range(tl.minimum(rows - first, rows_per_program)):
        row = first + index
        x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + row * grad_y_row_stride + columns, mask=mask, other=0.0)
        grad_y = grad_y.to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        grad_x, normed = norm_row_backward(grad_y, x, weight, rstd, hidden)
        if grad_total_ptr is not None:
            grad_total_row = grad_total_ptr + row * grad_total_row_stride
            grad_x += tl.load(grad_total_row + columns, mask=mask).to(tl.float32)
        grad_x_row = grad_x_ptr + row * grad_x_row_stride
        tl.store(grad_x_row + columns, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if partial_ptr is not None:
            partial += grad_y * normed
    if partial_ptr is not None:
        tl.store(partial_ptr + program * hidden + columns, partial, mask=mask)
