"""SwiGLU, forward and backward, one Triton kernel each.

    hidden = silu(gate) * up,      silu(g) = g sigmoid(g)

With s = sigmoid(gate) and f = gate s the gradients for an incoming grad_hidden are

    grad_up   = grad_hidden f
    grad_gate = grad_hidden up silu'(gate),      silu'(g) = s + f (1 - s)

Both kernels read each input once and write each output once. Their floor is that traffic over the
card's memory bandwidth: 3 tensors forward, 6 backward (the backward also returns `hidden`, which
LoRA_MLP does not save). Arithmetic is fp32 and rounds once, at the store. That is more accurate
than eager PyTorch, which rounds silu(gate) to bf16 before it multiplies.

SwiGLU: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import cdiv, check_runnable, launch

# 2,048 elements over 8 warps: one 16-byte load of 8 bf16 values per thread and tensor.
BLOCK_ELEMENTS = 2048
_NUM_WARPS = 8


@triton.jit
def _swiglu_forward_kernel(
    gate_ptr,  # [num_elements]
    up_ptr,  # [num_elements]
    hidden_ptr,  # [num_elements], written
    num_elements,
    BLOCK: tl.constexpr,
):
    # int64: an int32 offset overflows from 195,084 tokens of 11,008 features on
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + offsets, hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(
    grad_hidden_ptr,  # [num_elements]
    gate_ptr,  # [num_elements]
    up_ptr,  # [num_elements]
    hidden_ptr,  # [num_elements], written
    grad_gate_ptr,  # [num_elements], written
    grad_up_ptr,  # [num_elements], written
    num_elements,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    grad_hidden = tl.load(grad_hidden_ptr + offsets, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_silu = sigmoid + silu * (1.0 - sigmoid)
    dtype = hidden_ptr.dtype.element_ty
    tl.store(hidden_ptr + offsets, (silu * up).to(dtype), mask=mask)
    tl.store(grad_gate_ptr + offsets, (grad_hidden * up * grad_silu).to(dtype), mask=mask)
    tl.store(grad_up_ptr + offsets, (grad_hidden * silu).to(dtype), mask=mask)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Equivalent PyTorch: ``F.silu(gate) * up``.

    Args:
        gate, up: of one shape (any) and one dtype (bf16, fp16 or fp32), on a GPU, or on the CPU
            in Triton's interpreter. Any strides: a non-contiguous tensor is copied first.

    Returns:
        A new contiguous tensor of that shape and dtype, computed in fp32. Writes to no input.

    Raises:
        ValueError: shapes, dtypes or devices differ, or no kernel can run on them.
    """
    return _forward("swiglu_forward", _swiglu_forward_kernel, gate, up)


def swiglu_backward(grad_hidden: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `swiglu_forward`, and its output recomputed in the same pass.

    Equivalent PyTorch::

        hidden = F.silu(gate) * up
        grad_gate, grad_up = torch.autograd.grad(hidden, (gate, up), grad_hidden)

    Args:
        grad_hidden, gate, up: as for `swiglu_forward`.

    Returns:
        (hidden, grad_gate, grad_up), three new contiguous tensors. Writes to no input.

    Raises:
        ValueError: shapes, dtypes or devices differ, or no kernel can run on them.
    """
    return _backward("swiglu_backward", _swiglu_backward_kernel, grad_hidden, gate, up)


def _forward(name: str, kernel, gate: Tensor, up: Tensor) -> Tensor:
    _check(name, gate=gate, up=up)
    gate, up = gate.contiguous(), up.contiguous()
    hidden = torch.empty_like(gate)
    _launch(kernel, gate, up, hidden)
    return hidden


def _backward(
    name: str, kernel, grad_hidden: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    _check(name, grad_hidden=grad_hidden, gate=gate, up=up)
    grad_hidden, gate, up = grad_hidden.contiguous(), gate.contiguous(), up.contiguous()
    hidden, grad_gate, grad_up = (torch.empty_like(gate) for _ in range(3))
    _launch(kernel, grad_hidden, gate, up, hidden, grad_gate, grad_up)
    return hidden, grad_gate, grad_up


def _check(name: str, **tensors: Tensor) -> None:
    """Raise ValueError unless the tensors agree and a kernel can run on them."""
    first, *others = tensors.values()
    shape, dtype, device = first.shape, first.dtype, first.device
    if any((t.shape, t.dtype, t.device) != (shape, dtype, device) for t in others):
        given = ", ".join(
            f"{key} {list(value.shape)} {value.dtype} on {value.device}"
            for key, value in tensors.items()
        )
        raise ValueError(f"{name} needs tensors of one shape, dtype and device, got {given}")
    check_runnable(name, _swiglu_forward_kernel, first)


def _launch(kernel, *tensors: Tensor) -> None:
    num_elements = tensors[0].numel()
    if num_elements:  # an empty grid cannot be launched
        grid = (cdiv(num_elements, BLOCK_ELEMENTS),)
        launch(kernel, grid, *tensors, num_elements, BLOCK_ELEMENTS, num_warps=_NUM_WARPS)
