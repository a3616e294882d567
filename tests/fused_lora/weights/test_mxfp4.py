"""Weights rounded to MXFP4: the nearest there is, and exact where they are in it already."""

import pytest
import torch
from cases.operands import BF16, DTYPES
from cases.reference import random, seeded

from fused_lora.kernels.packed_4bit import dequantized
from fused_lora.weights.mxfp4 import MAGNITUDES, encoded_in_mxfp4, packed_in_mxfp4

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@EACH_DTYPE
def test_weights_are_rounded_to_the_nearest(dtype, device):
    """With the smallest power of two that keeps the largest of 32 values within 6. A value halfway
    between two goes to the one with an even code."""
    weight = random(3, 8, 64, dtype=dtype, device=device)
    weight[0] = torch.arange(512, device=device).view(8, 64) / 64  # with every value halfway
    weight[1, 0], weight[2, 0, :32] = -weight[0, 0], -0.0
    blocks = weight.double().view(-1, 32)
    largest = blocks.abs().amax(1, keepdim=True).clamp_min(1e-9)
    steps = 2.0 ** torch.ceil(torch.log2(largest / 6))
    away = (blocks.abs() / steps)[..., None] - torch.tensor(MAGNITUDES, device=device)
    odd = torch.arange(8, device=device) % 2
    nearest = (away.abs() + 1e-9 * odd).argmin(-1)
    want = torch.tensor(MAGNITUDES, device=device)[nearest] * steps * blocks.sign()
    got = dequantized(encoded_in_mxfp4(weight), dtype)
    assert torch.equal(got.double(), want.view_as(got).double())


def test_what_is_in_mxfp4_is_exact(device):
    codes = torch.randint(256, (3, 8, 4, 16), dtype=torch.uint8, generator=seeded(0))
    codes[0, 0] %= 2  # magnitudes up to 0.5, and none
    codes[1] &= 0b10111011  # up to 1.5
    scales = torch.randint(10, 240, (3, 8, 4), dtype=torch.uint8, generator=seeded(1))
    weight = dequantized(packed_in_mxfp4(codes.to(device), scales.to(device)), BF16)
    again = dequantized(encoded_in_mxfp4(weight.view(3, 8, 128)), BF16)
    assert torch.equal(weight.view(torch.int16), again.view(torch.int16))  # and zeros keep signs


def test_rows_of_other_lengths_are_refused(device):
    with pytest.raises(ValueError, match="but rows have 48: take quant_type='nf4'"):
        encoded_in_mxfp4(torch.ones(2, 8, 48, device=device))
