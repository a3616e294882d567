"""Norms, SwiGLU and its gradient as codes, and the borders of rows that are codes already."""

import pytest
import torch
import torch.nn.functional as F
from cases.reference import random, relative_error

from fused_lora.kernels.fp8_borders import Halves
from fused_lora.kernels.fp8_norm import norm_backward_codes, norm_codes
from fused_lora.kernels.fp8_products import add_coded_border
from fused_lora.kernels.fp8_rows import E4M3, fp8_rows, padded_columns
from fused_lora.kernels.fp8_swiglu import (
    guess_gradient_scales,
    new_codes,
    repair_gradient_codes,
    swiglu_codes,
)
from fused_lora.kernels.residual import residual_norm_backward
from fused_lora.kernels.swiglu_products_backward import Product, swiglu_backward_products

DTYPES = [torch.bfloat16, torch.float32]


def swiglu(gate_up, activation="silu"):
    gate, up = gate_up.double().chunk(2, 1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate * up


def assert_codes_of(codes, scales, exact):
    """Each the nearest e4m3 to exact over its row's scale, or beside it where fp32's rounding of
    the quotient decides: half of an eighth of it, or of 2^-9 where that is more."""
    off = (codes.double() - exact / scales.double()).abs()
    allowed = torch.maximum(codes.double().abs() / 16, torch.tensor(2.0**-10, device=codes.device))
    assert (off <= 1.001 * allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "zero_centered", "size"), [
    (300, False, 1.0), (2048, True, 1e3), (17, True, 1e-6),
])  # fmt: skip
def test_norm_codes(hidden, zero_centered, size, dtype, device):
    x = random(6, hidden + 3, seed=1, dtype=dtype, device=device)[:, :hidden] * size
    x[2] = 0
    x[3, 5] *= 1e4  # an outlier
    weight, eps = random(hidden, seed=2, dtype=dtype, device=device), 1e-6
    clean, *_ = norm_codes(x, weight, eps, 2 * hidden, zero_centered)
    x[1, 7], x[4, 0] = float("nan"), float("inf")
    codes, scales, rstd = norm_codes(x, weight, eps, 2 * hidden, zero_centered)
    assert scales[[1, 4]].isnan().all()
    keep = [0, 2, 3, 5]
    assert torch.equal(codes[keep, :hidden].float(), clean[keep, :hidden].float())
    x, codes, scales, rstd = x[keep].double(), codes[keep, :hidden], scales[keep], rstd[keep]
    want = (x.square().mean(1) + eps).rsqrt()
    torch.testing.assert_close(rstd.double(), want, rtol=1e-6, atol=0)
    exact = x * want[:, None] * (weight.double() + zero_centered)
    assert_codes_of(codes, scales, exact)
    largest = exact.abs().amax(1, keepdim=True).clamp(min=1e-30) / 224
    torch.testing.assert_close(scales.double(), largest, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "zero_centered"), [(40, False), (300, True)])
def test_norm_backward_codes_are_those_of_the_gradient(hidden, zero_centered, dtype, device):
    wide = [random(5, hidden + 8, seed=seed, dtype=dtype, device=device) for seed in range(3)]
    grad_y, residual, x = (one[:, :hidden] for one in wide)
    weight = random(hidden, seed=3, dtype=dtype, device=device)
    of_columns = random(hidden, seed=4, device=device).abs()
    grad_y[2], residual[2] = 0, 0
    grad_y[3, 5] = float("nan")
    rstd = (x.float().square().mean(1) + 1e-6).rsqrt()
    grad_x, want = torch.zeros(2, 5, hidden + 16, dtype=dtype, device=device)
    of_norm = grad_y, residual, x, weight, rstd
    codes, scales = norm_backward_codes(
        *of_norm, grad_x[:, :hidden], of_columns, hidden + 40, zero_centered
    )
    residual_norm_backward(*of_norm, want[:, :hidden], zero_centered)
    torch.testing.assert_close(grad_x, want, rtol=2**-8, atol=1e-6, equal_nan=True)
    assert torch.equal(grad_x[:, hidden:], want[:, hidden:])
    wanted = fp8_rows(grad_x[:, :hidden], hidden + 40, of_columns)
    there = [0, 1, 2, 4]
    assert torch.equal(codes[there, :hidden].float(), wanted[0][there, :hidden].float())
    torch.testing.assert_close(scales, wanted[1], rtol=1e-6, atol=0, equal_nan=True)
    assert scales[3].isnan() and not codes[2, :hidden].float().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "intermediate", "activation"), [
    (5, 300, "silu"), (3, 17_000, "silu"), (3, 48, "gelu_tanh"),
])  # fmt: skip
def test_swiglu_codes(rows, intermediate, activation, dtype, device):
    gate_up = random(rows, 2 * intermediate, seed=1, dtype=dtype, device=device)
    gate_up[2] = 0
    clean, _ = swiglu_codes(gate_up, 2 * intermediate, activation)
    gate_up[1, 7] = float("nan")
    codes, scales = swiglu_codes(gate_up, 2 * intermediate, activation)
    assert scales[1].isnan() and torch.equal(
        codes[0].float()[:intermediate], clean[0].float()[:intermediate]
    )
    exact = swiglu(gate_up, activation)
    keep = [0, *range(2, rows)]
    codes, scales, exact = codes[keep, :intermediate], scales[keep], exact[keep]
    assert_codes_of(codes, scales, exact)
    largest = exact.abs().amax(1, keepdim=True).clamp(min=1e-30) / 224
    torch.testing.assert_close(scales.double(), largest, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "intermediate", "activation"), [
    (40, 300, "silu"), (3, 48, "gelu_tanh"),
])  # fmt: skip
def test_codes_of_the_gradient_whatever_was_guessed(rows, intermediate, activation, dtype, device):
    """Rows in whose first columns there is little, or nothing, are made once more, and so are those
    of what is no number, which stays in its row."""
    gate_up = random(rows, 2 * intermediate, seed=1, dtype=dtype, device=device)
    grad = random(rows, intermediate, seed=2, dtype=dtype, device=device) * 1e-4
    of_columns = random(2 * intermediate, seed=3, device=device).abs() + 0.1
    wide = intermediate > 128
    if wide:
        grad[0, :128], grad[1, :128] = 0, grad[1, :128] * 1e-3
    grad[2] = 0
    bad = [5, 7] if wide else []
    if wide:
        grad[5, 290], gate_up[7, 3] = float("inf"), float("nan")
    codes, scales = new_codes(gate_up, padded_columns(2 * intermediate, 8))
    rank = 4
    products = [
        Product(random(rows, rank, seed=i, dtype=dtype, device=device),
                torch.empty(intermediate, rank, device=device)) for i in (4, 5, 6)
    ]  # fmt: skip
    in_rows = torch.empty_like(gate_up)
    coded = guess_gradient_scales(grad, gate_up, codes, scales, of_columns, activation)
    swiglu_backward_products(grad, gate_up, *products, in_rows, activation, coded)
    assert coded.passed.any(1).nonzero().flatten().tolist() == ([0, 1, *bad] if wide else [])
    repair_gradient_codes(grad, gate_up, coded, activation)
    want = gate_up.double().requires_grad_()
    swiglu(want, activation).backward(grad.double())
    exact = want.grad * of_columns.double()
    fine = [row for row in range(rows) if row not in bad]
    assert all(scales[row].isnan() for row in bad)
    assert_codes_of(codes[fine, : 2 * intermediate], scales[fine], exact[fine])
    most = exact.abs().amax(1, keepdim=True)[fine] / 448
    assert (scales[fine] >= most * (1 - 1e-5)).all() and (scales[fine] <= 65 * most + 1e-29).all()
    alone = [product._replace(gradient=torch.empty_like(product.gradient)) for product in products]
    swiglu_backward_products(grad, gate_up, *alone, in_rows, activation)
    for one, other in zip(products, alone, strict=True):
        torch.testing.assert_close(
            one.gradient, other.gradient, rtol=1e-4, atol=1e-5, equal_nan=True
        )


@pytest.mark.slow(
    "0.0-5-300-8-torch.bfloat16",
    "0.001-150-1100-24-torch.float32",
    "10000.0-20-40-136-torch.bfloat16",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "width"), [
    (5, 300, 8), (150, 1100, 24), (20, 40, 136), (130, 70, 1), (40, 5000, 24),
])  # fmt: skip
@pytest.mark.parametrize("size", [0.0, 1e-3, 1e4])
def test_border_of_codes(rows, columns, width, size, dtype, device):
    x = random(rows, columns, seed=1, device=device)
    scales = x.abs().amax(1, keepdim=True) / 448
    codes = torch.full((rows, padded_columns(columns, width)), 3.0, device=device).to(E4M3)
    codes[:, :columns] = (x / scales).to(E4M3)
    x = codes[:, :columns].double() * scales.double()
    hi, lo = (random(width, columns, seed=seed, device=device).to(E4M3) for seed in (2, 4))
    of_factor = random(width, seed=5, device=device).abs() * size
    factor = Halves(torch.stack([hi, (lo.float() / 16).to(E4M3)]), of_factor)
    factors = random(width, seed=3, device=device).abs() + 0.1
    before = codes.clone(), scales.clone()
    again = codes.clone(), scales.clone()
    z = add_coded_border(codes, scales, factor, factors, dtype)
    assert z.dtype == dtype
    of_rows = random(rows, 1, seed=6, device=device)
    times = add_coded_border(*again, factor, factors, dtype, of_rows)
    assert torch.equal(times, (z.float() * of_rows).to(dtype))
    assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again[1], scales)
    exact = x @ (factor.codes.double().sum(0) * of_factor.double()[:, None]).t()
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
