"""MXFP4, OCP's format in which OpenAI ships gpt-oss: 32 values along `in` share a power of two.

A code is a sign and one of eight magnitudes, 0 to 6 (E2M1). A scale is a byte (E8M0):

    w = values[code] 2^(scale - 127)

bf16 and fp32 hold such weights exactly, up to 2^128. fp16 does unless they are tiny or huge.
"""

import math

import torch
from torch import Tensor

from fused_mlp.launching import next_power_of_2

from ..kernels.packed_4bit import FP32, Nested, Packed4bit

BLOCK = 32
BIAS = 127  # of a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
POWERS = (*(2.0 ** (scale - BIAS) for scale in range(255)), math.nan)  # of scales
# The largest value that rounds to each magnitude but the last. A value halfway between two goes to
# the one with an even code.
LARGEST = 0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0


def packed_in_mxfp4(blocks: Tensor, scales: Tensor) -> Packed4bit:
    """Return a checkpoint's blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32],
    both uint8, as the weight [experts out, in]. The bytes stay where they are."""
    device, scales = scales.device, scales.reshape(-1)
    experts, outs, blocks_of_row, _ = blocks.shape
    values = torch.tensor(MAGNITUDES + tuple(-one for one in MAGNITUDES), device=device)
    powers = torch.tensor(POWERS, device=device)
    one, none = torch.ones(1, device=device), torch.zeros((), device=device)
    return Packed4bit(
        blocks.reshape(-1),
        (experts * outs, blocks_of_row * BLOCK),
        values,
        scales,
        BLOCK,
        Nested(powers, one, none, next_power_of_2(max(1, scales.numel()))),
        is_low_first=True,
    )


def encoded_in_mxfp4(weight: Tensor) -> Packed4bit:
    """Return a weight [experts, out, in] rounded to MXFP4, exactly if it is in MXFP4 already. Each
    scale is the smallest power of two with which no value exceeds 6."""
    if weight.shape[-1] % BLOCK:
        raise ValueError(
            f"quantize_experts: in MXFP4 {BLOCK} values of a row share a scale, but rows have "
            f"{weight.shape[-1]}: take quant_type='nf4'"
        )
    return packed_in_mxfp4(*map(torch.stack, zip(*map(_encoded, weight), strict=True)))


def _encoded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks [out, in / 32, 16] and scales [out, in / 32] of one expert [out, in]."""
    blocks = weight.unflatten(-1, (-1, BLOCK)).to(FP32)
    largest, exponent = torch.frexp(blocks.abs().amax(-1))  # 6 is 0.75 * 2^3
    exponent = (exponent - 3 + (largest > 0.75)).clamp(-BIAS, BIAS)
    scaled = blocks.abs() * torch.tensor(POWERS, device=weight.device)[BIAS - exponent, None]
    codes = torch.bucketize(scaled, torch.tensor(LARGEST, device=weight.device), out_int32=True)
    codes |= torch.signbit(blocks).int() << 3
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return pairs.to(torch.uint8), (exponent + BIAS).to(torch.uint8)
