"""FP8 codes of rows, of norms, of SwiGLU and of its gradient."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from cases.operands import BF16, FP16, FP32
from cases.reference import GATED, random
from cases.rms_norm_case import EPS

from fused_lora.kernels.fp8_rows import E4M3, fp8_rows, padded_columns
from fused_lora.kernels.fp8_swiglu import (
    guess_gradient_scales,
    new_codes,
    repair_gradient_codes,
    swiglu_codes,
)
from fused_lora.kernels.products import Product, SwiGLUProducts
from fused_lora.kernels.row_norm import norm_backward_codes, norm_codes, rms_norm_backward
from fused_lora.kernels.swiglu_products_backward import swiglu_backward_products

FP32_EPS = torch.finfo(FP32).eps

# --- what test_launchers.py tries, and what the codes stand for -----------------------------------

SIZES = {"odd": (39, 139), "a row": (1, 300), "columns of a border": (3, 40)}
NONE = (0, 8)
MORE = 24  # extra columns of codes that nobody writes


def quantised(x):
    """Return x rounded to its codes in fp32, or x itself in fp64."""
    if x.dtype == torch.float64:
        return x
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 224
    return (x.float() / scales).to(E4M3).float() * scales


def stand_for(codes, scales):
    return codes[:, :-MORE].float() * scales


def column_scales_for(x):
    return random(x.shape[1], seed=9, device=x.device).abs() + 0.1


def rows_case(size, dtype, device):
    return [random(*SIZES[size], seed=1, dtype=dtype, device=device)]


def fused_rows(x, layout=torch.clone):
    return [stand_for(*fp8_rows(layout(x), x.shape[1] + MORE, column_scales_for(x)))]


def eager_rows(x):
    return [quantised(x * column_scales_for(x))]


def norm_case(size, dtype, device):
    rows, hidden = SIZES[size]
    x, grad_y, residual = (
        random(rows, hidden, seed=i, dtype=dtype, device=device) for i in (1, 2, 3)
    )
    return x, random(hidden, seed=4, dtype=dtype, device=device), grad_y, residual


def fused_norm(x, weight, grad_y, residual, layout=torch.clone):
    """Return the values that the codes of the norm and its gradient stand for, and the gradient."""
    padded, x = x.shape[1] + MORE, layout(x)
    codes, scales, rstd = norm_codes(x, weight, EPS, padded)
    grad = layout(torch.full_like(grad_y, 7.0))
    coded = norm_backward_codes(
        layout(grad_y), layout(residual), x, weight, rstd, grad, column_scales_for(x), padded
    )
    return stand_for(codes, scales), stand_for(*coded), grad


def eager_norm(x, weight, grad_y, residual):
    x = x.detach().requires_grad_()
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.to(wide.dtype)
    (grad,) = torch.autograd.grad(y, x, grad_y.to(y.dtype))
    grad = (grad + residual).detach()
    return quantised(y.detach()), quantised(grad * column_scales_for(grad)), grad


def swiglu_case(size, dtype, device):
    rows, intermediate = SIZES[size]
    return [random(rows, 2 * intermediate, seed=1, scale=2.0, dtype=dtype, device=device)]


def fused_swiglu(gate_up, activation, layout=torch.clone):
    return [stand_for(*swiglu_codes(layout(gate_up), gate_up.shape[1] // 2 + MORE, activation))]


def eager_swiglu(gate_up, activation):
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    return [quantised(GATED[activation](*wide.chunk(2, dim=1)))]


# --- how near the codes are -----------------------------------------------------------------------


def swiglu(gate_up, activation="silu"):
    return GATED[activation](*gate_up.double().chunk(2, 1))


class Coded(NamedTuple):
    """columns: of its input, and of its codes. scale: of its input.
    codes: (x, vector of its columns, padded columns) -> codes, scales and whatever else.
    exact: (x and vector, in fp64) -> what the codes stand for."""

    columns: tuple[int, int]
    codes: Callable
    exact: Callable
    scale: float = 1.0
    dtypes: tuple = (BF16, FP32)


def exact_norm(x, w, zero_centered):
    return x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * (w + zero_centered)


CODED = {
    **{
        f"{n} columns, {'times a vector' if times else 'as they are'}": Coded(
            (n, n),
            lambda x, w, padded, times=times: fp8_rows(x, padded, w if times else None),
            lambda x, w, times=times: x * w if times else x,
            dtypes=(BF16, FP16, FP32),
        )
        for n, times in (
            (17_000, True), (256, False), (64, True), (1000, True), (37, False), (1, False)
        )
    },
    **{
        f"norm of {n}": Coded(
            (n, n),
            lambda x, w, padded, one=one: norm_codes(x, w.to(x.dtype), EPS, padded, one),
            partial(exact_norm, zero_centered=one),
            scale,
        )
        for n, one, scale in ((300, False, 1.0), (2048, True, 1e3), (17, True, 1e-6))
    },
    **{
        f"{activation} of {n}": Coded(
            (2 * n, n),
            lambda x, w, padded, activation=activation: swiglu_codes(x, padded, activation),
            lambda x, w, activation=activation: swiglu(x, activation),
        )
        for n, activation in ((300, "silu"), (17_000, "silu"), (48, "gelu_tanh"))
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, one in CODED.items() for dtype in one.dtypes]
)
def test_codes_are_the_nearest_the_largest_of_a_row_is_224_and_nan_stays_in_its_row(
    name, dtype, device
):
    (wide, columns), make, exact_of, scale, _ = CODED[name]
    x = random(7, wide + 5, seed=1, dtype=dtype, device=device)[:, :wide] * scale
    x[3], x[5, -1] = 0, x[5, -1] * 1e4 if dtype != FP16 else 1e4
    vector = random(columns, seed=3, device=device).abs().to(dtype).float()
    clean, *_ = make(x, vector, columns + 11)
    x[1, 0], x[4, -1] = float("nan"), float("inf")
    codes, scales, *others = make(x, vector, columns + 11)
    assert codes.shape == (7, columns + 11) and scales[[1, 4]].isnan().all()
    keep = [0, 2, 3, 5, 6]
    codes, scales, x = codes[keep, :columns], scales[keep].double(), x[keep].double()
    assert torch.equal(codes.float(), clean[keep, :columns].float())
    if name.startswith("norm"):
        want = (x.square().mean(1) + EPS).rsqrt()
        torch.testing.assert_close(others[0][keep].double(), want, rtol=1e-6, atol=0)
    exact = exact_of(x, vector.double())
    largest = exact.abs().amax(1, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(scales, largest / 224, rtol=1e-5, atol=0)
    assert_codes_of(codes, scales, exact)
    assert (codes.float().abs().amax(1) == 224 * exact.any(1)).all()
    if "columns" in name:
        torch.testing.assert_close(scales, largest / 224, rtol=4 * FP32_EPS, atol=0)
        assert_nearest(codes, exact / scales)


def test_a_tie_goes_to_the_even_code(device):
    codes = torch.arange(119, dtype=torch.uint8).view(E4M3).float()  # all from 0 to 224
    row = torch.cat((codes, (codes[1:] + codes[:-1]) / 2))[None].to(device)
    got, scales = fp8_rows(row, row.shape[1])
    assert scales == 1 and torch.equal(got.float(), row.to(E4M3).float())


def assert_nearest(got, exact):
    """Check that each code is the nearest e4m3, unless fp32 rounding of the quotient decides."""
    nearest = exact.float().to(E4M3)
    off = got.float() != nearest.float()
    below, above = ((exact * (1 + s * 8 * FP32_EPS)).float().to(E4M3).float() for s in (-1, 1))
    assert ((got.float() == below) | (got.float() == above))[off].all()
    assert off.float().mean() < 0.01


def assert_codes_of(codes, scales, exact):
    """Check that each code is nearest to exact / scale, or its neighbour if fp32 rounding decides:
    within half of an eighth of the code, or of 2^-9 if that is more."""
    off = (codes.double() - exact / scales.double()).abs()
    allowed = torch.maximum(codes.double().abs() / 16, torch.tensor(2.0**-10, device=codes.device))
    assert (off <= 1.001 * allowed).all()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("hidden", "zero_centered"), [(40, False), (300, True)])
def test_norm_backward_codes_are_those_of_the_gradient(hidden, zero_centered, dtype, device):
    wide = [random(5, hidden + 8, seed=seed, dtype=dtype, device=device) for seed in range(3)]
    grad_y, residual, x = (one[:, :hidden] for one in wide)
    weight = random(hidden, seed=3, dtype=dtype, device=device)
    column_scales = random(hidden, seed=4, device=device).abs()
    grad_y[2], residual[2] = 0, 0
    grad_y[3, 5] = float("nan")
    rstd = (x.float().square().mean(1) + 1e-6).rsqrt()
    grad_x, want = torch.zeros(2, 5, hidden + 16, dtype=dtype, device=device)
    norm_operands = grad_y, residual, x, weight, rstd
    codes, scales = norm_backward_codes(
        *norm_operands, grad_x[:, :hidden], column_scales, hidden + 40, zero_centered
    )
    rms_norm_backward(*norm_operands, want[:, :hidden], zero_centered)
    torch.testing.assert_close(grad_x, want, rtol=2**-8, atol=1e-6, equal_nan=True)
    assert torch.equal(grad_x[:, hidden:], want[:, hidden:])
    wanted = fp8_rows(grad_x[:, :hidden], hidden + 40, column_scales)
    there = [0, 1, 2, 4]
    assert torch.equal(codes[there, :hidden].float(), wanted[0][there, :hidden].float())
    torch.testing.assert_close(scales, wanted[1], rtol=1e-6, atol=0, equal_nan=True)
    assert scales[3].isnan() and not codes[2, :hidden].float().any()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("rows", "intermediate", "activation"), [
    (40, 300, "silu"), (3, 48, "gelu_tanh"),
])  # fmt: skip
def test_codes_of_the_gradient_whatever_was_guessed(rows, intermediate, activation, dtype, device):
    """Make rows again whose first columns hold little or nothing, and rows with a NaN or an inf.
    These stay in their rows."""
    gate_up = random(rows, 2 * intermediate, seed=1, dtype=dtype, device=device)
    grad = random(rows, intermediate, seed=2, dtype=dtype, device=device) * 1e-4
    column_scales = random(2 * intermediate, seed=3, device=device).abs() + 0.1
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
    coded = guess_gradient_scales(grad, gate_up, codes, scales, column_scales, activation)
    three = SwiGLUProducts(*products)
    swiglu_backward_products(grad, gate_up, three, in_rows, activation, coded)
    assert coded.passed.any(1).nonzero().flatten().tolist() == ([0, 1, *bad] if wide else [])
    repair_gradient_codes(grad, gate_up, coded, activation)
    want = gate_up.double().requires_grad_()
    swiglu(want, activation).backward(grad.double())
    exact = want.grad * column_scales.double()
    fine = [row for row in range(rows) if row not in bad]
    assert all(scales[row].isnan() for row in bad)
    assert_codes_of(codes[fine, : 2 * intermediate], scales[fine], exact[fine])
    most = exact.abs().amax(1, keepdim=True)[fine] / 448
    assert (scales[fine] >= most * (1 - 1e-5)).all() and (scales[fine] <= 65 * most + 1e-29).all()
    alone = [product._replace(gradient=torch.empty_like(product.gradient)) for product in products]
    swiglu_backward_products(grad, gate_up, SwiGLUProducts(*alone), in_rows, activation)
    for one, other in zip(products, alone, strict=True):
        torch.testing.assert_close(
            one.gradient, other.gradient, rtol=1e-4, atol=1e-5, equal_nan=True
        )
