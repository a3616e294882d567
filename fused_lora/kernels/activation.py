"""The activation of an MLP's gate and its slope, for kernels that have the gate in registers: SiLU,
or GELU by tanh, which is SiLU with another argument of its sigmoid (`fused_mlp/geglu.py`)."""

import triton
import triton.language as tl
from triton.language.extra.libdevice import fast_dividef

from fused_mlp.geglu import gelu_argument, gelu_slope, sigmoids


@triton.jit
def activate(gate, IS_GELU: tl.constexpr, IN_FP32: tl.constexpr):
    """Return the activation of gate, in fp32, and its slope there."""
    if IS_GELU:
        if IN_FP32:
            share, rest = sigmoids(gelu_argument(gate))
        else:
            # where this loses digits the slope is near 1, and in bf16 or fp16 has fewer
            share = sigmoid(gelu_argument(gate), IN_FP32)
            rest = 1.0 - share
        value, slope = gate * share, gelu_slope(gate, share, rest)
    else:
        share = sigmoid(gate, IN_FP32)
        value = gate * share
        slope = share + value * (1.0 - share)
    return value, slope


@triton.jit
def sigmoid(x, IN_FP32: tl.constexpr):
    """Compute 1 / (1 + exp(-x)) of x in fp32.

    Unless IN_FP32, x was bf16 or fp16 before. Then the result is 0 below -87, and otherwise within
    2^-18 of its value, like tl.sigmoid's, in 5 instructions. tl.sigmoid takes 12, most of them for
    a division by more than 2^126. Each one slows down a GPU at its power limit, even in a kernel
    that waits for memory.
    """
    if IN_FP32:
        return tl.sigmoid(x)
    return fast_dividef(1.0, 1.0 + tl.exp2(x * -1.4426950408889634))  # log2(e)
