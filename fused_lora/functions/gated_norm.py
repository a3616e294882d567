"""RMSNorm times the SiLU of a gate, as behind a gated delta net, one Triton kernel each way.

    y = n w s,    n = x r,    r = 1 / sqrt(mean(x^2) + eps),    s = silu(gate)

with a mean over the last dimension, which is one head: 128 elements in Qwen3.5. A program therefore
takes several rows at once.

With g = grad_y w s, and where silu' is the slope of SiLU,

    grad_x    = r (g - n mean(g n))        as in `rms_norm.py`
    grad_gate = grad_y w n silu'(gate)
    grad_w    = sum over rows of grad_y s n

Traffic in tensors of x's size: 3 forward (x, gate, y), 5 backward (grad_y, x, gate, grad_x,
grad_gate). Eager PyTorch in bf16 moves the equivalent of 33 forward: it casts x and gate to fp32,
and multiplies by w in bf16 in between. Arithmetic is fp32 and rounds once, at the store.

RMSNorm: Zhang & Sennrich, arXiv 1910.07467. Behind a gated delta net: Yang, Kautz & Hatamizadeh,
"Gated Delta Networks", arXiv 2412.06464.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, check_runnable, launch, next_power_of_2
from fused_mlp.utils import refuse_second_derivative

from ..kernels.activation import activate
from ..kernels.row_norm import MAX_HIDDEN, MAX_PARTIAL_SUMS, load_weight, rstd_of_mean
from ..kernels.rows import as_rows
from ..kernels.tiling import dots_in_fp32

TILE = 2048  # elements of a program, unless a row is longer


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square, multiply by weight and by the SiLU of gate.

    Equivalent PyTorch::

        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        y = weight * (x.float() * rstd).to(x.dtype)
        (y * F.silu(gate.float())).to(x.dtype)

    Args:
        x: [..., hidden], bf16, fp16 or fp32; hidden at most 65,536. Any strides: it is copied only
            if its rows are not evenly spaced, or their elements not contiguous.
        gate: like x, in any of these dtypes.
        weight: [hidden], in any of these dtypes. Copied if not contiguous.

    Returns:
        A new contiguous tensor of x's shape and dtype, computed in fp32. Gradients are others, each
        in the dtype of its tensor. The weight's is summed in fp32, and only if it requires one.

    Saved for backward: x, gate, weight and [rows] fp32. It writes to no input, incoming gradient or
    saved tensor. Deterministic. Not twice differentiable. Autocast changes nothing.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or no kernel can run on them.
        RuntimeError: from backward, under create_graph=True.
    """
    return GatedRMSNorm.apply(x, gate, weight, eps)


class GatedRMSNorm(torch.autograd.Function):
    """``GatedRMSNorm.apply(x, gate, weight, eps)``; see `gated_rms_norm`."""

    @staticmethod
    def forward(ctx, x, gate, weight, eps):
        _check(x, gate, weight)
        y, rstd = gated_rms_norm_forward(x, gate, weight, eps)
        ctx.save_for_backward(x, gate, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        refuse_second_derivative("gated_rms_norm", "the unfused norm")
        x, gate, weight, rstd = ctx.saved_tensors
        need_weight = ctx.needs_input_grad[2]
        return *gated_rms_norm_backward(grad_y, x, gate, weight, rstd, need_weight), None


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm_forward_kernel(
    x_ptr,  # [rows, hidden]
    gate_ptr,  # [rows / gate_heads, gate_heads * hidden]
    weight_ptr,  # [hidden]
    y_ptr,  # [rows / y_heads, y_heads * hidden], written
    rstd_ptr,  # [rows] fp32, written
    x_row_stride,
    gate_token_stride,
    y_token_stride,
    gate_heads,  # rows of a token, side by side
    y_heads,
    rows,
    hidden,
    eps,
    IN_FP32: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # int64: from 16,777,216 rows of 128 on, an int32 offset overflows
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (columns < hidden)
    # 0.0 behind the end, which adds nothing to the sum of squares
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = gate_ptr + row // gate_heads * gate_token_stride + row % gate_heads * hidden + columns
    gate = tl.load(gate, mask=mask, other=0.0)
    weight = load_weight(weight_ptr, columns, columns < hidden, False)
    silu, _ = activate(gate.to(tl.float32), False, IN_FP32)
    mean = tl.div_rn(tl.sum(x * x, axis=1)[:, None], 1.0 * hidden)
    rstd = rstd_of_mean(mean, eps)
    y = x * rstd * weight * silu
    y_ptr += row // y_heads * y_token_stride + row % y_heads * hidden + columns
    tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "tiles_per_program"])
def _gated_rms_norm_backward_kernel(
    grad_y_ptr,  # [rows, hidden]
    x_ptr,  # [rows, hidden]
    gate_ptr,  # [rows / gate_heads, gate_heads * hidden]
    weight_ptr,  # [hidden]
    rstd_ptr,  # [rows] fp32
    grad_x_ptr,  # [rows, hidden], contiguous, written
    grad_gate_ptr,  # [rows, hidden], contiguous, written
    partial_ptr,  # [programs, hidden] fp32, grad_weight of each program's rows, written; or None
    grad_y_row_stride,
    x_row_stride,
    gate_token_stride,
    gate_heads,  # rows of a token, side by side
    rows,
    hidden,
    tiles_per_program,
    IN_FP32: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if partial_ptr is None:  # as a constant, which Triton does not see in a number of tiles
        tiles_per_program = 1
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    weight = load_weight(weight_ptr, columns, columns < hidden, False)
    partial = tl.zeros([1, BLOCK], tl.float32)
    for tile in range(tiles_per_program):
        its_rows = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        # loaded once a row: for [ROWS, 1] each of a thread's elements would load it
        rstd = tl.load(rstd_ptr + its_rows, mask=its_rows < rows, other=0.0)[:, None]
        row = its_rows[:, None]
        mask = (row < rows) & (columns < hidden)
        grad_y = tl.load(grad_y_ptr + row * grad_y_row_stride + columns, mask=mask, other=0.0)
        x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        gate = gate_ptr + row // gate_heads * gate_token_stride + row % gate_heads * hidden
        gate = tl.load(gate + columns, mask=mask, other=0.0)
        silu, slope = activate(gate.to(tl.float32), False, IN_FP32)
        grad_y = grad_y.to(tl.float32)
        normed = x * rstd
        grad_normed = grad_y * weight * silu
        mean = tl.div_rn(tl.sum(grad_normed * normed, axis=1)[:, None], 1.0 * hidden)
        grad_x = rstd * (grad_normed - normed * mean)
        grad_gate = grad_y * weight * normed * slope
        offsets = row * hidden + columns
        tl.store(grad_x_ptr + offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        tl.store(grad_gate_ptr + offsets, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
        if partial_ptr is not None:
            partial += tl.sum(grad_y * normed * silu, axis=0)[None, :]
    if partial_ptr is not None:
        tl.store(partial_ptr + program * hidden + columns, partial, mask=columns < hidden)


def gated_rms_norm_forward(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (y, rstd) of `gated_rms_norm`, or write y to out, which may lie as gate may: the rows
    of its last dimension but one side by side, of those before it evenly spaced."""
    x_rows = as_rows(x)
    gate_rows, gate_heads = _by_token(gate)
    rows, hidden = x_rows.shape
    y = x.new_empty(x.shape) if out is None else out
    y_rows, y_heads = _by_token(y)
    rstd = x.new_empty(rows, dtype=torch.float32)
    if rows:  # an empty grid cannot be launched
        tile_rows, block, warps = _tile_of(hidden)
        launch(
            _gated_rms_norm_forward_kernel, (cdiv(rows, tile_rows),),
            x_rows, gate_rows, weight.contiguous(), y_rows, rstd, x_rows.stride(0),
            gate_rows.stride(0), y_rows.stride(0), gate_heads, y_heads, rows, hidden, eps,
            dots_in_fp32(_gated_rms_norm_forward_kernel, gate), tile_rows, block, num_warps=warps,
        )  # fmt: skip
    return y, rstd


def gated_rms_norm_backward(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (grad_x, grad_gate, grad_weight), the last None if not needed."""
    grad_y_rows, x_rows = as_rows(grad_y), as_rows(x)
    gate_rows, gate_heads = _by_token(gate)
    rows, hidden = x_rows.shape
    tile_rows, block, warps = _tile_of(hidden)
    tiles = cdiv(rows, tile_rows)
    tiles_per_program = max(cdiv(tiles, MAX_PARTIAL_SUMS), 1) if need_weight else 1
    programs = cdiv(tiles, tiles_per_program)
    grad_x, grad_gate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    partial = rstd.new_empty(programs, hidden) if need_weight else None
    if rows:
        launch(
            _gated_rms_norm_backward_kernel, (programs,),
            grad_y_rows, x_rows, gate_rows, weight.contiguous(), rstd, grad_x, grad_gate, partial,
            grad_y_rows.stride(0), x_rows.stride(0), gate_rows.stride(0), gate_heads, rows,
            hidden, tiles_per_program, dots_in_fp32(_gated_rms_norm_backward_kernel, gate),
            tile_rows, block, num_warps=warps,
        )  # fmt: skip
    return grad_x, grad_gate, None if partial is None else partial.sum(0).to(weight.dtype)


def _by_token(x: Tensor) -> tuple[Tensor, int]:
    """Return x [..., heads, hidden] as [tokens, heads * hidden], a view where heads lie side by
    side, and heads; all else as `as_rows` does, as 1 head."""
    if x.ndim > 2 and x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] and x.numel():
        return as_rows(x.flatten(-2)), x.shape[-2]
    return as_rows(x), 1


def _tile_of(hidden: int) -> tuple[int, int, int]:
    """Return (ROWS, BLOCK, num_warps) of a program."""
    block = next_power_of_2(hidden)
    rows = max(TILE // block, 1)
    # 8 bf16 values, one 16-byte load, per thread and tensor
    return rows, block, min(rows * block // 256, 16)


def _check(x: Tensor, gate: Tensor, weight: Tensor) -> None:
    """Raise ValueError where shapes, dtypes or devices do not fit together, naming the tensor."""
    if x.ndim == 0 or not 1 <= x.shape[-1] <= MAX_HIDDEN:
        raise ValueError(
            f"gated_rms_norm: x is {list(x.shape)}, should be [..., hidden], hidden from 1 to "
            f"{MAX_HIDDEN}"
        )
    for name, tensor, shape in (("gate", gate, x.shape), ("weight", weight, x.shape[-1:])):
        if tensor.shape != shape:
            raise ValueError(
                f"gated_rms_norm: {name} is {list(tensor.shape)}, should be {list(shape)} as x is "
                f"{list(x.shape)}"
            )
        if tensor.device != x.device:
            raise ValueError(
                f"gated_rms_norm: {name} is on {tensor.device} and x on {x.device}: give both one"
            )
    for tensor in (x, gate, weight):
        check_runnable("gated_rms_norm", _gated_rms_norm_forward_kernel, tensor)
