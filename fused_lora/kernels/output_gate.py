"""Attention's output gate, as in Qwen3.5: its sigmoid multiplies attention's output in front of o.

    gate_forward     gated = attended sigmoid(gate)
    gate_backward    grad_attended = grad sigmoid(gate),
                     grad_gate = grad attended sigmoid(gate) (1 - sigmoid(gate))

q_proj gives both, head by head: raw is [q_1 | gate_1 | q_2 | gate_2 | ... | k | v]. The kernels
read the gate and write its gradient there. Arithmetic is fp32 and rounds once, at the store.
Traffic in tensors of attended's size: 3 forward, 5 backward.
"""

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, launch

from .activation import sigmoid
from .qkv_rope import split_heads
from .tiling import dots_in_fp32

BLOCK = 1024  # features of a program; 8 bf16 values, one 16-byte load, per thread and tensor
WARPS = 4


@triton.jit
def _output_gate_kernel(
    attended_ptr,  # [rows, columns]
    raw_ptr,  # [rows, 2 columns or more], each head of q with its gate
    gated_ptr,  # [rows, columns], written
    attended_row_stride,
    raw_row_stride,
    gated_row_stride,
    columns,
    HEAD_DIM: tl.constexpr,
    IN_FP32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = raw_ptr + row * raw_row_stride + column + (column // HEAD_DIM + 1) * HEAD_DIM
    gate = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    attended = tl.load(attended_ptr + row * attended_row_stride + column, mask=mask, other=0.0)
    gated = attended.to(tl.float32) * sigmoid(gate, IN_FP32)
    gated_ptr += row * gated_row_stride + column
    tl.store(gated_ptr, gated.to(gated_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _output_gate_backward_kernel(
    grad_ptr,  # [rows, columns], of gated
    attended_ptr,  # [rows, columns]
    raw_ptr,  # [rows, 2 columns or more], each head of q with its gate
    grad_attended_ptr,  # [rows, columns], written
    grad_raw_ptr,  # as raw, the gates' columns written
    grad_row_stride,
    attended_row_stride,
    raw_row_stride,
    grad_attended_row_stride,
    grad_raw_row_stride,
    columns,
    HEAD_DIM: tl.constexpr,
    IN_FP32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gates = column + (column // HEAD_DIM + 1) * HEAD_DIM
    gate = tl.load(raw_ptr + row * raw_row_stride + gates, mask=mask, other=0.0).to(tl.float32)
    attended = tl.load(attended_ptr + row * attended_row_stride + column, mask=mask, other=0.0)
    grad = tl.load(grad_ptr + row * grad_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    share = sigmoid(gate, IN_FP32)
    grad_attended = grad * share
    grad_gate = grad_attended * attended.to(tl.float32) * (1.0 - share)
    grad_attended_ptr += row * grad_attended_row_stride + column
    grad_raw_ptr += row * grad_raw_row_stride + gates
    tl.store(grad_attended_ptr, grad_attended.to(grad_attended_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_raw_ptr, grad_gate.to(grad_raw_ptr.dtype.element_ty), mask=mask)


def split_gated_heads(
    raw: Tensor, positions: int, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of raw [batch * positions, 2 (heads + kv_heads) head_dim], as views [batch,
    heads or kv_heads, positions, head_dim]."""
    both, k, v = split_heads(raw, positions, 2 * heads, kv_heads)
    return both[:, ::2], k, v


def gate_forward(attended: Tensor, raw: Tensor, head_dim: int, out: Tensor | None = None) -> Tensor:
    """Return attended [rows, heads * head_dim] times the sigmoid of its gates in raw, or write it
    to out.

    Equivalent PyTorch::

        gates = raw[:, : 2 * heads * head_dim].unflatten(1, (heads, 2, head_dim))[:, :, 1]
        attended * torch.sigmoid(gates.flatten(1))
    """
    kernel = _output_gate_kernel
    gated = attended.new_empty(attended.shape) if out is None else out
    rows, columns = attended.shape
    if rows:  # an empty grid cannot be launched
        launch(
            kernel, (rows, cdiv(columns, BLOCK)),
            attended, raw, gated, attended.stride(0), raw.stride(0), gated.stride(0), columns,
            head_dim, dots_in_fp32(kernel, raw), BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return gated


def gate_backward(
    grad: Tensor, attended: Tensor, raw: Tensor, head_dim: int, grad_raw: Tensor
) -> Tensor:
    """Return the gradient of attended, new, from that of gated. Write that of the gates into their
    columns of grad_raw, the caller's own memory.

    grad and attended are [rows, heads * head_dim], raw and grad_raw alike. All else is as for
    `gate_forward`.
    """
    kernel = _output_gate_backward_kernel
    rows, columns = attended.shape
    grad_attended = grad.new_empty(rows, columns)
    if rows:
        launch(
            kernel, (rows, cdiv(columns, BLOCK)),
            grad, attended, raw, grad_attended, grad_raw, grad.stride(0), attended.stride(0),
            raw.stride(0), columns, grad_raw.stride(0), columns, head_dim,
            dots_in_fp32(kernel, raw), BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return grad_attended
