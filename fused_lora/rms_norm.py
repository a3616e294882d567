"""RMSNorm, alone or with the residual's addition before it, one Triton kernel each way.

    y = x r w,      r = 1 / sqrt(mean(x^2) + eps)      mean over the last dimension, of N elements

where w is the weight, or 1 + weight if that is zero-centred, as Gemma's.

In a decoder layer x is itself a sum, total = x + delta, which goes on as the residual.
`add_rms_norm` returns both, so that no kernel writes total only for the next to read it.

With n = x r and g = grad_y w, and since dr/dx_j = -r^3 x_j / N,

    grad_x_j = r g_j + sum_i(g_i x_i) dr/dx_j = r (g_j - n_j mean(g n))
    grad_w   = sum over rows of grad_y n

An incoming gradient of total is added to grad_x, which is then the gradient of x and of delta.

Traffic in tensors of x's size: 2 forward (x, y), 4 with the addition (x, delta, total, y); 3
backward (grad_y, x, grad_x), 4 with the addition. Eager PyTorch moves 7 forward, and in bf16 as
much as 18, because it takes x to fp32 and back. Arithmetic is fp32 and rounds once, at the store,
where eager rounds n before it multiplies by w. Only total is rounded before it is normalised: the
rounded one is what the rest of the model sees.

RMSNorm: Zhang & Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, check_runnable, launch, next_power_of_2

# One program holds a row in registers, which is what the mean of its squares wants. From 16,384 on
# backward spills some of it: right, but no longer at the speed of memory.
MAX_HIDDEN = 65_536

# A weight gradient is summed in two stages, first by at most this many programs, each over rows of
# its own: at 16,384 x 2,048 the partial sums are 4 MB beside 67 MB of bf16 x, and an H200 has 132
# multiprocessors to keep busy. A constant, so that every card adds in the same order.
MAX_PARTIAL_SUMS = 512


@triton.jit
def rstd_of(x, hidden, eps):
    """1 / sqrt(mean(x^2) + eps) of a row in fp32, which is 0 behind its `hidden` elements."""
    # rounded to nearest, which once a row costs nothing: `/` and tl.rsqrt are only near, and an
    # error that all rows share adds up over the layers. Compiled code passes eps in fp64
    mean = tl.div_rn(tl.sum(x * x, axis=0), 1.0 * hidden)
    return tl.div_rn(1.0, tl.sqrt_rn((mean + eps).to(tl.float32)))


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
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_row_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(total_ptr.dtype.element_ty)
    if total_ptr is not None:
        tl.store(total_ptr + row * total_row_stride + columns, x, mask=mask)
    x = x.to(tl.float32)
    rstd = rstd_of(x, hidden, eps)
    y = x * rstd * weight
    tl.store(y_ptr + row * y_row_stride + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
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
    program = tl.program_id(0).to(tl.int64)
    first = program * rows_per_program
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    partial = tl.zeros([BLOCK], tl.float32)
    for index in range(tl.minimum(rows - first, rows_per_program)):
        row = first + index
        x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + row * grad_y_row_stride + columns, mask=mask, other=0.0)
        grad_y = grad_y.to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normalised = x * rstd
        grad_normalised = grad_y * weight
        mean = tl.div_rn(tl.sum(grad_normalised * normalised, axis=0), 1.0 * hidden)
        grad_x = rstd * (grad_normalised - normalised * mean)
        if grad_total_ptr is not None:
            grad_total_row = grad_total_ptr + row * grad_total_row_stride
            grad_x += tl.load(grad_total_row + columns, mask=mask).to(tl.float32)
        grad_x_row = grad_x_ptr + row * grad_x_row_stride
        tl.store(grad_x_row + columns, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if partial_ptr is not None:
            partial += grad_y * normalised
    if partial_ptr is not None:
        tl.store(partial_ptr + program * hidden + columns, partial, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """x over the root of its mean square, times weight.

    Equivalent PyTorch::

        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        weight * (x.float() * rstd).to(x.dtype)
        # zero_centered: ((1 + weight.float()) * (x.float() * rstd)).to(x.dtype)

    Args:
        x: [..., hidden], bf16, fp16 or fp32; hidden at most 65,536. Any strides: it is copied only
            if its rows are not one stride apart, or their elements not side by side.
        weight: [hidden], in x's dtype. What is not contiguous is copied first.
        zero_centered: the weight is what is added to one, as in Gemma.

    Returns:
        A new contiguous tensor of x's shape and dtype, computed in fp32; grad_x is another. The
        weight's gradient is summed in fp32, and only if the weight requires one.

    Saved for backward: x, weight and [rows] fp32. No input, no incoming gradient and no saved
    tensor is written, so x may have other consumers and a second backward through a retained graph
    is right. Deterministic. Not twice differentiable. Autocast changes nothing.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or no kernel can run on them.
        RuntimeError: from backward, under create_graph=True.
    """
    return RMSNorm.apply(x, weight, eps, zero_centered)


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, total): the sum of x and delta, normalised, and the sum itself.

    Equivalent PyTorch::

        total = x + delta
        rms_norm(total, weight, eps, zero_centered), total

    Args:
        x, weight, eps, zero_centered: as for `rms_norm`.
        delta: as x, of its shape and dtype.

    Returns:
        (y, total), two new contiguous tensors of x's shape and dtype.

    Saved for backward: total, weight and [rows] fp32; neither x nor delta. An output that nobody
    uses counts as one with a gradient of zero. Everything else is as for `rms_norm`.
    """
    return AddRMSNorm.apply(x, delta, weight, eps, zero_centered)


class RMSNorm(torch.autograd.Function):
    """``RMSNorm.apply(x, weight, eps, zero_centered)``; see `rms_norm`."""

    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered):
        _check("rms_norm", x, None, weight)
        y, _, rstd = rms_norm_forward(x, None, weight, eps, zero_centered)
        ctx.zero_centered = zero_centered
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        _refuse_second_derivative("rms_norm")
        x, weight, rstd = ctx.saved_tensors
        needed = ctx.needs_input_grad[1]
        grad_x, grad_weight = rms_norm_backward(
            grad_y, None, x, weight, rstd, needed, ctx.zero_centered
        )
        return grad_x, grad_weight, None, None


class AddRMSNorm(torch.autograd.Function):
    """``AddRMSNorm.apply(x, delta, weight, eps, zero_centered)``; see `add_rms_norm`."""

    @staticmethod
    def forward(ctx, x, delta, weight, eps, zero_centered):
        _check("add_rms_norm", x, delta, weight)
        y, total, rstd = rms_norm_forward(x, delta, weight, eps, zero_centered)
        ctx.zero_centered = zero_centered
        ctx.save_for_backward(total, weight, rstd)
        return y, total

    @staticmethod
    def backward(ctx, grad_y, grad_total):
        _refuse_second_derivative("add_rms_norm")
        total, weight, rstd = ctx.saved_tensors
        needed = ctx.needs_input_grad[2]
        grad_x, grad_weight = rms_norm_backward(
            grad_y, grad_total, total, weight, rstd, needed, ctx.zero_centered
        )
        # one tensor for both, as an addition gives: autograd adds into none that somebody else has
        return grad_x, grad_x, grad_weight, None, None


def rms_norm_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, zero_centered: bool = False
):
    """(y, total, rstd) of `add_rms_norm`; without delta those of `rms_norm`, total None."""
    (x_rows, x_stride), (delta_rows, delta_stride) = _rows(x), _rows(delta)
    hidden = x.shape[-1]
    y = x.new_empty(x.shape)
    total = None if delta is None else x.new_empty(x.shape)
    rstd = x.new_empty(x.numel() // hidden, dtype=torch.float32)
    if x.numel():  # an empty grid cannot be launched
        block, warps = block_of(hidden)
        launch(
            _rms_norm_forward_kernel, (rstd.numel(),),
            x_rows, delta_rows, weight.contiguous(), total, y, rstd,
            x_stride, delta_stride, hidden, hidden, hidden, eps, zero_centered, block,
            num_warps=warps,
        )  # fmt: skip
    return y, total, rstd


def rms_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    need_weight: bool,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(grad_x, grad_weight) for what was normalised, `total`; grad_weight None unless needed."""
    (grad_y_rows, grad_y_stride), (total_rows, total_stride) = _rows(grad_y), _rows(total)
    grad_total_rows, grad_total_stride = _rows(grad_total)
    rows, hidden = rstd.numel(), total.shape[-1]
    rows_per_program = max(cdiv(rows, MAX_PARTIAL_SUMS), 1) if need_weight else 1
    programs = cdiv(rows, rows_per_program)
    grad_x = total.new_empty(total.shape)
    partial = rstd.new_empty(programs, hidden) if need_weight else None
    if rows:
        block, warps = block_of(hidden)
        launch(
            _rms_norm_backward_kernel, (programs,),
            grad_y_rows, grad_total_rows, total_rows, weight.contiguous(), rstd, grad_x, partial,
            grad_y_stride, grad_total_stride, total_stride, hidden,
            rows, hidden, rows_per_program, zero_centered, block, num_warps=warps,
        )  # fmt: skip
    return grad_x, None if partial is None else partial.sum(0).to(weight.dtype)


def _rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """x as [rows, hidden] with contiguous rows, a view where there is one; and their stride."""
    if x is None:
        return None, 0
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def block_of(hidden: int) -> tuple[int, int]:
    """(BLOCK, num_warps) of a kernel that takes a row of so many elements."""
    block = next_power_of_2(hidden)
    # 8 bf16 values, one 16-byte load, per thread and tensor
    return block, min(max(block // 256, 1), 16)


def _refuse_second_derivative(name: str) -> None:
    # autograd leaves gradients on in a backward only where it should build a graph of it
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} is not twice differentiable: call backward without create_graph=True, or use "
            "the unfused norm"
        )


def _check(name: str, x: Tensor, delta: Tensor | None, weight: Tensor) -> None:
    """Raise ValueError where shapes, dtypes or devices do not fit together, naming the tensor."""
    if x.ndim == 0 or not 1 <= x.shape[-1] <= MAX_HIDDEN:
        raise ValueError(
            f"{name}: x is {list(x.shape)}, should be [..., hidden], hidden from 1 to {MAX_HIDDEN}"
        )
    wanted = {"weight": (weight, x.shape[-1:]), "delta": (delta, x.shape)}
    for other, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: {other} is {list(tensor.shape)}, should be {list(shape)} as x is "
                f"{list(x.shape)}"
            )
        if (tensor.dtype, tensor.device) != (x.dtype, x.device):
            raise ValueError(
                f"{name}: {other} is {tensor.dtype} on {tensor.device} and x {x.dtype} on "
                f"{x.device}: give both one dtype and device, or use the unfused norm"
            )
    check_runnable(name, _rms_norm_forward_kernel, x)
