"""Borders of rows already in FP8, and adapters in two halves."""

import pytest
import torch
from cases.operands import BF16, FP32
from cases.pairwise import pairwise
from cases.reference import random, relative_error

from fused_lora.kernels.fp8_borders import Bordering, Halves, fp8_borders
from fused_lora.kernels.fp8_products import add_coded_border
from fused_lora.kernels.fp8_rows import E4M3, fp8_rows, padded_columns

EPS = torch.finfo(FP32).eps


def bordering(size, inputs, outputs, width, device):
    """Return the border of a weight with an adapter of rank 5 and room for a higher rank."""
    W = random(outputs, inputs, seed=3, device=device) * inputs**-0.5
    A = (random(width, inputs, seed=4, device=device) * inputs**-0.5).bfloat16()
    B = (random(outputs, width, seed=5, device=device) * size).bfloat16()
    A[5:], B[:, 5:] = 0, 0
    sizes = (outputs, inputs), (inputs, outputs)
    codes = [torch.zeros(n, padded_columns(k, width), device=device).to(E4M3) for n, k in sizes]
    both_codes = [torch.zeros(2, width, n, device=device).to(E4M3) for n in (outputs, inputs)]
    vectors = torch.empty(4, width, device=device)
    return Bordering(B, A, W.abs().amax(1) / 448, *codes, *vectors[:2],
                     *map(Halves, both_codes, vectors[2:]))  # fmt: skip


@pytest.mark.slow("0.0-300-200-8")
@pytest.mark.parametrize(("size", "inputs", "outputs", "width"), [
    (0.0, 300, 200, 8), (1e-5, 300, 200, 8), (1e-2, 256, 512, 64), (10.0, 256, 64, 32),
])  # fmt: skip
def test_an_adapter_in_two_halves_is_as_exact_as_in_bf16(size, inputs, outputs, width, device):
    """Check forward and backward against the codes alone, for an A and a B of any magnitude.

    A wider and longer weight in the same launch may only change the order of the sums."""
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
    B, A, scales, codes, codes_t, factors, factors_t, B_halves, A_halves = one
    for v_halves, of, exact in ((A_halves, "A", A), (B_halves, "B", (B / scales[:, None]).t())):
        got = v_halves.codes.double().sum(0) * v_halves.scales.double()[:, None]
        assert (got - exact.double()).norm() <= exact.double().norm() / 512, of
    for rows, v_halves, f, weight, column_scales, weight_scales, border in (
        (x, A_halves, factors, codes, None, scales, B),
        (dy, B_halves, factors_t, codes_t, scales, torch.ones(inputs, device=device), A.t()),
    ):
        got_codes, got_scales = fp8_rows(rows, weight.shape[1], column_scales)
        before = got_scales.clone()
        v = add_coded_border(got_codes, got_scales, v_halves, f, B.dtype)
        assert size > 1 or torch.equal(got_scales, before)  # no row is written twice
        first = rows.shape[1]
        got = got_codes.double()[:, first:] @ weight.double()[:, first:].t()
        got *= got_scales.double() * weight_scales.double()
        want = v.double() @ border.double().t()
        assert got.isfinite().all()
        if size:
            assert ((got - want).norm() / want.norm()).item() < 2**-9
        assert weight.double().abs().max() <= 448
    assert (size == 0) == (not codes.float().any())


@pytest.mark.slow(
    "0.0-(5, 300, 8)-bfloat16",
    "0.001-(150, 1100, 24)-bfloat16",
    "10000.0-(20, 40, 136)-bfloat16",
)
@pytest.mark.parametrize("case", pairwise(
    size=(0.0, 1e-3, 1e4),
    shape=((5, 300, 8), (150, 1100, 24), (20, 40, 136), (130, 70, 1), (40, 5000, 24)),
    dtype=(BF16, FP32),
))  # fmt: skip
def test_border_of_codes(case, device):
    size, (rows, columns, width), dtype = case.values()
    x = random(rows, columns, seed=1, device=device)
    scales = x.abs().amax(1, keepdim=True) / 448
    codes = torch.full((rows, padded_columns(columns, width)), 3.0, device=device).to(E4M3)
    codes[:, :columns] = (x / scales).to(E4M3)
    x = codes[:, :columns].double() * scales.double()
    hi, lo = (random(width, columns, seed=seed, device=device).to(E4M3) for seed in (2, 4))
    factor_scales = random(width, seed=5, device=device).abs() * size
    factor = Halves(torch.stack([hi, (lo.float() / 16).to(E4M3)]), factor_scales)
    factors = random(width, seed=3, device=device).abs() + 0.1
    before = codes.clone(), scales.clone()
    again = codes.clone(), scales.clone()
    z = add_coded_border(codes, scales, factor, factors, dtype)
    assert z.dtype == dtype
    z_scales = random(rows, 1, seed=6, device=device)
    times = add_coded_border(*again, factor, factors, dtype, z_scales)
    assert torch.equal(times, (z.float() * z_scales).to(dtype))
    assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again[1], scales)
    exact = x @ (factor.codes.double().sum(0) * factor_scales.double()[:, None]).t()
    # sums of codes have about 14 bits on Hopper's tensor cores, of the largest of what is summed
    most = 2**-8 if dtype == torch.bfloat16 else 1e-5 if device == "cpu" else 2**-11
    assert not z.any() if size == 0 else relative_error(z, exact) < most
    larger = scales / before[1]
    assert torch.equal(larger.log2(), larger.log2().round()) and (larger >= 1).all()
    assert (larger > 1).any() == (size > 1)
    was = before[0][:, :columns].double() * before[1].double()
    # powers of two change no digit, but of what becomes less than 2^-6
    assert (
        (codes[:, :columns].double() * scales.double() - was).abs() <= 2**-10 * scales.double()
    ).all()
    hi, lo, again, zeros = codes[:, columns:].split(
        [width, width, width, codes.shape[1] - columns - 3 * width], 1
    )
    assert torch.equal(hi.float(), again.float()) and not zeros.float().any()
    v = z.double() * factors.double() / scales.double()
    assert (v.abs() <= 448 * 1.001).all()
    assert ((hi.double() + lo.double() - v).abs() <= v.abs() / 256 + 2**-10).all()
