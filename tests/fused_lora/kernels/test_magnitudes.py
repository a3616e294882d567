"""DoRA's factors and what they scale: cases for test_launchers.py."""

import pytest
import torch
from cases.reference import random
from test_row_norm import random_like

from fused_lora.kernels import magnitudes as module
from fused_lora.kernels.fp8_rows import codes_and_scales
from fused_lora.kernels.magnitudes import (
    ColumnScale,
    Rescaled,
    magnitude_factors,
    scale_columns,
    scale_columns_backward,
    sum_magnitudes,
)

# outputs, inputs, rank
WEIGHTS = {
    "odd": (39, 139, 8),
    "one output": (1, 52, 12),
    "one input": (20, 1, 1),
    "whole tiles": (32, 256, 32),
    "rank 0": (7, 52, 0),
    "more than a block": (20, 140, 136),
}
SIZES = {"odd": (39, 139), "one row": (1, 52), "one column": (20, 1), "whole tiles": (96, 256)}
MULTIPLIER = 0.5


@pytest.fixture(autouse=True)
def few_ranges(monkeypatch):
    """Give a program several tiles of rows, the last of them partial."""
    monkeypatch.setattr(module, "MAX_RANGES", 2)
    monkeypatch.setattr(module, "RANGE_ROWS", 16)


def factors_case(size, dtype, device):
    outputs, inputs, rank = WEIGHTS[size]
    W = random(outputs, inputs, seed=1, dtype=dtype, device=device)
    A = random(rank, inputs, seed=2, dtype=dtype, device=device)
    sB = random(outputs, rank, seed=3, dtype=dtype, device=device)
    return W, A, sB, random(outputs, seed=4, dtype=dtype, device=device)


def fused_factors(W, A, sB, magnitude, layout=torch.clone, row_scales=None):
    factor, inverse_norm = torch.empty(2, len(W), device=W.device)
    projections = [Rescaled(magnitude, 0, len(W), 0, len(A))]
    magnitude_factors(*map(layout, (W, A, sB)), row_scales, projections, factor, inverse_norm)
    return factor, inverse_norm


def eager_factors(W, A, sB, magnitude):
    norm = torch.linalg.vector_norm(W + sB @ A, dim=1)
    return magnitude / norm, 1 / norm


def scaled_case(size, dtype, device):
    u, residual, grad = random_like(SIZES[size], 3, dtype, device)
    factor, inverse_norm, bias = (
        random(SIZES[size][1], seed=seed, dtype=dtype, device=device) for seed in (4, 5, 6)
    )
    return u, residual, grad, factor, inverse_norm, bias


def fused_scaled(u, residual, grad, factor, inverse_norm, bias, layout=torch.clone):
    """Scale beside a residual, and the gradient in place."""
    scale = ColumnScale(factor.float(), inverse_norm.float(), bias)
    y, copy, grad_u = layout(torch.full_like(u, 7.0)), layout(torch.full_like(u, 7.0)), layout(grad)
    scale_columns(layout(u), scale, y, copy, layout(residual), MULTIPLIER)
    assert torch.equal(copy, u)
    sums = scale_columns_backward(grad_u, copy, scale.factor, grad_u, MULTIPLIER)
    gradient = torch.full_like(factor, 7.0, dtype=torch.float32)
    sum_magnitudes(sums, scale, (len(factor),), (gradient,))
    return y, grad_u, gradient


def eager_scaled(u, residual, grad, factor, inverse_norm, bias):
    y = residual + MULTIPLIER * (factor * u + bias)
    return y, MULTIPLIER * grad * factor, MULTIPLIER * (grad * u).sum(0) * inverse_norm


def test_a_residual_a_bias_and_a_gradient_in_place_are_options(device):
    u, _, grad, factor, inverse_norm, _ = scaled_case("odd", torch.float32, device)
    y, copy, grad_u = torch.empty_like(u), torch.empty_like(u), torch.empty_like(u)
    scale_columns(u, ColumnScale(factor, inverse_norm, None), y, copy)
    scale_columns_backward(grad, u, factor, grad_u)
    assert torch.equal(y, u * factor) and torch.equal(grad_u, grad * factor)


def test_gradients_go_to_the_projections_that_want_one_each_in_its_dtype(device):
    sums, inverse_norm = random(3, 10, device=device), random(10, seed=1, device=device)
    got = torch.empty(4, dtype=torch.bfloat16, device=device), None, torch.empty(1, device=device)
    sum_magnitudes(sums, ColumnScale(inverse_norm, inverse_norm, None), (4, 5, 1), got)
    want = sums.sum(0) * inverse_norm
    torch.testing.assert_close(got[0].float(), want[:4], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(got[2], want[9:])


def test_the_norm_is_that_of_what_codes_stand_for(device):
    W, A, sB, magnitude = factors_case("whole tiles", torch.bfloat16, device)
    codes, scales = codes_and_scales(W)
    stands_for = codes.float() * scales.view(-1, 1)
    got = fused_factors(codes, A, sB, magnitude, row_scales=scales.flatten())
    want = eager_factors(stands_for.double(), *(t.double() for t in (A, sB, magnitude)))
    for one, exact in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [8, 256])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_norms_are_as_exact_as_fp32_whatever_the_adapters_size(rank, scale, device):
    """B A may cancel W: nothing is squared before both are added."""
    W, A = random(20, 300, device=device), random(rank, 300, seed=1, device=device)
    sB = -W @ torch.linalg.pinv(A) * scale
    got, _ = fused_factors(W, A, sB, torch.ones(20, device=device))
    want, _ = eager_factors(W.double(), A.double(), sB.double(), torch.ones(20, device=device))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
