"""Codes and scales of rows in FP8, and the borders of adapters in two halves."""

import pytest
import torch
from cases.reference import random

from fused_lora.kernels.fp8_borders import Bordering, Halves, fp8_borders
from fused_lora.kernels.fp8_products import add_coded_border
from fused_lora.kernels.fp8_rows import E4M3, fp8_rows, padded_columns

EPS = torch.finfo(torch.float32).eps


def halves(v):
    hi = v.to(E4M3)
    return hi, (v - hi.float()).to(E4M3)


def assert_codes_near(got, exact):
    """Each code is the nearest e4m3 but where fp32's rounding of its quotient decides."""
    nearest = exact.float().to(E4M3)
    off = got.float() != nearest.float()
    below, above = ((exact * (1 + s * 8 * EPS)).float().to(E4M3).float() for s in (-1, 1))
    assert ((got.float() == below) | (got.float() == above))[off].all()
    assert off.float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("columns", "of_columns"), [
    (17_000, True), (256, False), (64, True), (1000, True), (37, False), (1, False),
])  # fmt: skip
def test_codes_are_the_nearest_and_the_largest_of_a_row_is_224(columns, of_columns, dtype, device):
    x = random(7, columns + 5, seed=1, dtype=dtype, device=device)[:, :columns]
    x[3] = 0
    times = random(columns, seed=3, device=device).abs() if of_columns else None
    codes, scales = fp8_rows(x, columns + 11, times)
    assert codes.shape == (7, columns + 11)
    codes, x = codes[:, :columns], x.double() * (1 if times is None else times.double())
    largest = x.abs().amax(1, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(scales.double(), largest / 224, rtol=4 * EPS, atol=0)
    assert_codes_near(codes, x / scales.double())
    assert (codes.float().abs().amax(1)[x.any(1)] == 224).all()
    assert not codes.float()[3].any()


def test_what_lies_between_two_codes_becomes_the_even_one(device):
    codes = torch.arange(0x77, dtype=torch.uint8, device=device).view(E4M3).float()  # up to 224
    x = torch.cat([(codes[1:] + codes[:-1]) / 2, codes[-1:]])
    x = torch.stack([x, -x])
    got, scales = fp8_rows(x, x.shape[1])
    assert (scales == 1).all() and torch.equal(got.float(), x.to(E4M3).float())


def test_nan_and_inf_stay_in_their_rows(device):
    x = random(4, 40, seed=1, device=device)
    clean, _ = fp8_rows(x, 48)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    codes, scales = fp8_rows(x, 48)
    assert scales[:2].isnan().all()
    assert torch.equal(codes[2:, :40].float(), clean[2:, :40].float())


def bordering(size, inputs, outputs, width, device):
    """Of a weight with an adapter of rank 5, where there is room for more."""
    W = random(outputs, inputs, seed=3, device=device) * inputs**-0.5
    A = (random(width, inputs, seed=4, device=device) * inputs**-0.5).bfloat16()
    B = (random(outputs, width, seed=5, device=device) * size).bfloat16()
    A[5:], B[:, 5:] = 0, 0
    sizes = (outputs, inputs), (inputs, outputs)
    codes = [torch.zeros(n, padded_columns(k, width), device=device).to(E4M3) for n, k in sizes]
    of_both = [torch.zeros(2, width, n, device=device).to(E4M3) for n in (outputs, inputs)]
    of_each = torch.empty(4, width, device=device)
    return Bordering(B, A, W.abs().amax(1) / 448, *codes, *of_each[:2],
                     *map(Halves, of_both, of_each[2:]))  # fmt: skip


@pytest.mark.slow("0.0-300-200-8")
@pytest.mark.parametrize(("size", "inputs", "outputs", "width"), [
    (0.0, 300, 200, 8), (1e-5, 300, 200, 8), (1e-2, 256, 512, 64), (10.0, 256, 64, 32),
])  # fmt: skip
def test_an_adapter_in_two_halves_is_as_exact_as_in_bf16(size, inputs, outputs, width, device):
    """Forward and backward, as the codes alone have it, for an A and a B of any size; beside a
    wider and a longer weight, which changes no more than the order that sums are added up in."""
    tokens = 40
    x = random(tokens, inputs, seed=1, dtype=torch.bfloat16, device=device)
    dy = random(tokens, outputs, seed=2, dtype=torch.bfloat16, device=device)
    one, alone = (bordering(size, inputs, outputs, width, device) for _ in range(2))
    fp8_borders([bordering(0.1, 40, 700, width + 40, device), one])
    fp8_borders([alone])
    for name in ("factors", "factors_t"):
        torch.testing.assert_close(getattr(one, name), getattr(alone, name), rtol=8 * EPS, atol=0)
    for each, other in ((one.codes, alone.codes), (one.codes_t, alone.codes_t)):
        assert (each.float() != other.float()).float().mean() < 0.01
    B, A, scales, codes, codes_t, factors, factors_t, of_B, of_A = one
    for of_v, of, exact in ((of_A, "A", A), (of_B, "B", (B / scales[:, None]).t())):
        got = of_v.codes.double().sum(0) * of_v.scales.double()[:, None]
        assert (got - exact.double()).norm() <= exact.double().norm() / 512, of
    for rows, of_v, f, weight, of_columns, of_rows, border in (
        (x, of_A, factors, codes, None, scales, B),
        (dy, of_B, factors_t, codes_t, scales, torch.ones(inputs, device=device), A.t()),
    ):
        got_codes, got_scales = fp8_rows(rows, weight.shape[1], of_columns)
        before = got_scales.clone()
        v = add_coded_border(got_codes, got_scales, of_v, f, B.dtype)
        assert size > 1 or torch.equal(got_scales, before)  # no row is written twice
        first = rows.shape[1]
        got = got_codes.double()[:, first:] @ weight.double()[:, first:].t()
        got *= got_scales.double() * of_rows.double()
        want = v.double() @ border.double().t()
        assert got.isfinite().all()
        if size:
            assert ((got - want).norm() / want.norm()).item() < 2**-9
        assert weight.double().abs().max() <= 448
    assert (size == 0) == (not codes.float().any())
