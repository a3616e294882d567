"""GeGLU, forward and backward, one Triton kernel each: `swiglu.py` with Gemma's activation.

    hidden = gelu(gate) * up,      gelu(g) = g (1 + tanh(u(g))) / 2,
                                   u(g) = sqrt(2 / pi) (g + 0.044715 g^3)

This is GELU approximated by tanh. Since (1 + tanh(u)) / 2 = sigmoid(2 u), it is SiLU with another
argument of the sigmoid. With s = sigmoid(2 u(gate)) and f = gate s the gradients are

    grad_up   = grad_hidden f
    grad_gate = grad_hidden up gelu'(gate),      gelu'(g) = s + f (1 - s) 2 u'(g)

Far from zero 1 + tanh loses digits, and so does 1 - s if computed as a difference. This form does
not. Traffic and rounding are SwiGLU's: 3 tensors forward, 6 backward, and fp32 arithmetic that
rounds once, at the store.

GELU: Hendrycks & Gimpel, arXiv 1606.08415. GeGLU: Shazeer, arXiv 2002.05202.
"""

import triton
import triton.language as tl
from torch import Tensor

from .swiglu import _backward, _forward

# 2 sqrt(2 / pi), and that times 0.044715 and times 3 * 0.044715
_LINEAR = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.07135481627260025)
_SLOPE = tl.constexpr(0.21406444881780076)


@triton.jit
def sigmoids(x):
    """Return sigmoid(x) and sigmoid(-x). As 1 - the larger, the smaller would lose its digits."""
    # The division rounds to nearest. In fp32 that of tl.sigmoid would be all of the error.
    e = tl.exp(-tl.abs(x))
    larger = tl.div_rn(1.0, 1.0 + e)
    smaller = e * larger
    return tl.where(x < 0, smaller, larger), tl.where(x < 0, larger, smaller)


@triton.jit
def gelu_argument(gate):
    """Return 2 u(gate): gelu(gate) is gate times its sigmoid."""
    return gate * (_LINEAR + _CUBIC * (gate * gate))


@triton.jit
def gelu_slope(gate, sigmoid, rest):
    """Return gelu'(gate), for sigmoid(2 u) and rest = 1 - sigmoid(2 u)."""
    return sigmoid + gate * sigmoid * rest * (_LINEAR + _SLOPE * (gate * gate))


@triton.jit
def _geglu_forward_kernel(
    gate_ptr,  # [num_elements]
    up_ptr,  # [num_elements]
    hidden_ptr,  # [num_elements], written
    num_elements,
    BLOCK: tl.constexpr,
):
    # int64, as in SwiGLU
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    sigmoid, _ = sigmoids(gelu_argument(gate))
    hidden = gate * sigmoid * up
    tl.store(hidden_ptr + offsets, hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _geglu_backward_kernel(
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
    sigmoid, rest = sigmoids(gelu_argument(gate))
    gelu, grad_gelu = gate * sigmoid, gelu_slope(gate, sigmoid, rest)
    dtype = hidden_ptr.dtype.element_ty
    tl.store(hidden_ptr + offsets, (gelu * up).to(dtype), mask=mask)
    tl.store(grad_gate_ptr + offsets, (grad_hidden * up * grad_gelu).to(dtype), mask=mask)
    tl.store(grad_up_ptr + offsets, (grad_hidden * gelu).to(dtype), mask=mask)


def geglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with GELU approximated by tanh.

    Equivalent PyTorch: ``F.gelu(gate, approximate="tanh") * up``.

    Arguments, result and errors are those of `swiglu_forward`.
    """
    return _forward("geglu_forward", _geglu_forward_kernel, gate, up)


def geglu_backward(grad_hidden: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `geglu_forward`, and its output recomputed in the same pass.

    Equivalent PyTorch::

        hidden = F.gelu(gate, approximate="tanh") * up
        grad_gate, grad_up = torch.autograd.grad(hidden, (gate, up), grad_hidden)

    Arguments, results and errors are those of `swiglu_backward`.
    """
    return _backward("geglu_backward", _geglu_backward_kernel, grad_hidden, gate, up)
