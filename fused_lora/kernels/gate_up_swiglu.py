"""SwiGLU on [gate | up], the rows that one product of both writes and one takes gradients of.

    swiglu_forward   hidden = silu(gate) up
    swiglu_backward  [grad_gate | grad_up]

(`fused_mlp/swiglu.py` has the mathematics.) Traffic: 3 [rows, intermediate] tensors forward, 5
backward. Arithmetic is fp32 and rounds once, at the store. Deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, launch

from .rows import as_rows, check_alike, check_rows

# 8 bf16 values, one 16-byte load, per thread and tensor. At 11,008 columns the last of 11 programs
# a row is 3/4 full; of 6 with twice as much it would be 3/8.
BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def _swiglu_forward_kernel(
    gate_up_ptr,  # [rows, 2 intermediate]
    hidden_ptr,  # [rows, intermediate], written
    gate_up_row_stride,
    hidden_row_stride,
    intermediate,
    BLOCK: tl.constexpr,
):
    # int64: from 97,542 rows of 2 x 11,008 on, an int32 offset overflows
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    gate_row = gate_up_ptr + row * gate_up_row_stride
    gate = tl.load(gate_row + columns, mask=mask).to(tl.float32)
    up = tl.load(gate_row + intermediate + columns, mask=mask).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    hidden_row = hidden_ptr + row * hidden_row_stride
    tl.store(hidden_row + columns, hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(
    grad_hidden_ptr,  # [rows, intermediate]
    gate_up_ptr,  # [rows, 2 intermediate]
    grad_gate_up_ptr,  # [rows, 2 intermediate], written
    grad_hidden_row_stride,
    gate_up_row_stride,
    grad_gate_up_row_stride,
    intermediate,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    grad_hidden_row = grad_hidden_ptr + row * grad_hidden_row_stride
    gate_row = gate_up_ptr + row * gate_up_row_stride
    grad_gate_row = grad_gate_up_ptr + row * grad_gate_up_row_stride
    grad_hidden = tl.load(grad_hidden_row + columns, mask=mask).to(tl.float32)
    gate = tl.load(gate_row + columns, mask=mask).to(tl.float32)
    up = tl.load(gate_row + intermediate + columns, mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_silu = sigmoid + silu * (1.0 - sigmoid)
    dtype = grad_gate_up_ptr.dtype.element_ty
    tl.store(grad_gate_row + columns, (grad_hidden * up * grad_silu).to(dtype), mask=mask)
    tl.store(grad_gate_row + intermediate + columns, (grad_hidden * silu).to(dtype), mask=mask)


def swiglu_forward(gate_up: Tensor, hidden: Tensor | None = None) -> Tensor:
    """silu(gate) * up, [rows, intermediate], for gate_up [rows, 2 intermediate].

    Equivalent PyTorch: ``gate, up = gate_up.chunk(2, dim=1); F.silu(gate) * up``. Written into
    hidden, if that is given, which has elements of a row side by side.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or no kernel can run on them.
    """
    rows, intermediate = _rows_and_intermediate("swiglu_forward", gate_up)
    if hidden is None:
        hidden = gate_up.new_empty(rows, intermediate)
    check_rows("swiglu_forward", _swiglu_forward_kernel, (rows, intermediate), hidden=hidden)
    check_alike("swiglu_forward", "hidden", hidden, gate_up)
    if rows:
        launch(
            _swiglu_forward_kernel, (rows, cdiv(intermediate, BLOCK)),
            gate_up, hidden, gate_up.stride(0), hidden.stride(0), intermediate,
            BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return hidden


def swiglu_backward(grad_hidden: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate_up [rows, 2 intermediate], new, for one of what `swiglu_forward` gave.

    Equivalent PyTorch: ``torch.autograd.grad(swiglu_forward(gate_up), gate_up, grad_hidden)[0]``.

    Raises:
        ValueError: as `swiglu_forward`.
    """
    name, kernel = "swiglu_backward", _swiglu_backward_kernel
    rows, intermediate = _rows_and_intermediate(name, gate_up)
    check_rows(name, kernel, (rows, intermediate), grad_hidden=grad_hidden)
    check_alike(name, "grad_hidden", grad_hidden, gate_up)
    grad_gate_up = gate_up.new_empty(rows, 2 * intermediate)
    if rows:
        launch(
            kernel, (rows, cdiv(intermediate, BLOCK)),
            grad_hidden, gate_up, grad_gate_up,
            grad_hidden.stride(0), gate_up.stride(0), grad_gate_up.stride(0), intermediate,
            BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return grad_gate_up


class SwiGLU(torch.autograd.Function):
    """``SwiGLU.apply(gate_up)``: silu(gate) * up for gate_up [..., 2 intermediate], differentiably.

    Saved for backward: gate_up. Nothing is written that came in or was saved; not twice
    differentiable. Errors are those of `swiglu_forward`.
    """

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        rows = as_rows(gate_up)
        # not a view itself, or autograd would forbid to change it in place
        hidden = rows.new_empty(*gate_up.shape[:-1], rows.shape[1] // 2)
        swiglu_forward(rows, hidden.view(rows.shape[0], hidden.shape[-1]))
        return hidden

    @staticmethod
    def backward(ctx, grad_hidden):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "SwiGLU is not twice differentiable: call backward without create_graph=True, or "
                "use the unfused MLP"
            )
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward(as_rows(grad_hidden), as_rows(gate_up)).view(gate_up.shape)


def _rows_and_intermediate(name: str, gate_up: Tensor) -> tuple[int, int]:
    check_rows(name, _swiglu_forward_kernel, gate_up.shape, gate_up=gate_up)
    rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(
            f"{name}: gate_up is {list(gate_up.shape)}, should be [rows, 2 intermediate]"
        )
    return rows, columns // 2
