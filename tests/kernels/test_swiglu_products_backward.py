"""SwiGLU's backward with the adapters' products in it, against eager PyTorch in float64."""

import pytest
import torch
from reference import assert_within_budget, random
from rms_norm_case import Kernel
from test_residual_kernels import wide

from fused_lora.kernels import swiglu_products_backward as module
from fused_lora.kernels.swiglu_products_backward import Product, swiglu_backward_products
from fused_lora.kernels.tiling import Tiling, stages
from fused_mlp.launching import DTYPES
from fused_mlp.swiglu import swiglu_backward

# rows, intermediate, ranks of hidden's product, of gate's and of up's
CASES = {
    "odd": (39, 139, (8, 8, 8)),
    "one row": (1, 52, (12, 12, 12)),
    "one column": (3, 1, (8, 8, 8)),
    "whole tiles": (64, 128, (32, 32, 32)),
    "rank 1": (39, 20, (1, 1, 1)),
    "each its own": (39, 20, (1, 24, 8)),
    "more than a block": (39, 20, (72, 8, 136)),
}
SCALINGS = 1.0, 2.0, 0.75
NAMES = "grad_gate_up", "of hidden", "of gate", "of up"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that a few rows are several tiles in several ranges, the last of each not full."""
    monkeypatch.setattr(module, "BACKWARD_TILING", Tiling(16, 32, 2, 4, 2))


def make(case, dtype, device):
    rows, intermediate, ranks = CASES[case]
    gate_up = random(rows, 2 * intermediate, seed=1, scale=2.0, dtype=dtype, device=device)
    grad_hidden = random(rows, intermediate, seed=2, dtype=dtype, device=device)
    factors = [
        random(rows, rank, seed=3 + i, dtype=dtype, device=device) for i, rank in enumerate(ranks)
    ]
    return grad_hidden, gate_up, *factors


def fused(grad_hidden, gate_up, *factors, dtype=None, layout=torch.clone):
    """grad_gate_up and the three products, of which the first lies as A does."""
    gradients = []
    for i, factor in enumerate(factors):
        intermediate, rank = grad_hidden.shape[1], factor.shape[1]
        shape = (intermediate, rank) if i else (rank, intermediate)
        empty = torch.full(shape, 7.0, dtype=dtype or factor.dtype, device=factor.device)
        gradients.append(layout(empty) if i else layout(empty).t())
    products = map(Product, map(layout, factors), gradients, SCALINGS)
    grad = layout(torch.full_like(gate_up, 7.0))
    swiglu_backward_products(*map(layout, (grad_hidden, gate_up)), *products, grad)
    return grad, *gradients


def eager(grad_hidden, gate_up, *factors):
    gate_up = gate_up.clone().requires_grad_()
    gate, up = gate_up.chunk(2, dim=1)
    hidden = torch.nn.functional.silu(gate) * up
    (grad,) = torch.autograd.grad(hidden, gate_up, grad_hidden)
    tensors = hidden.detach(), *grad.chunk(2, dim=1)
    return grad, *(s * (x.t() @ f) for s, x, f in zip(SCALINGS, tensors, factors, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_and_products_are_within_the_error_budget(dtype, case, device):
    operands = make(case, dtype, device)
    before = [t.clone() for t in operands]
    budget, truth = eager(*operands), eager(*(t.double() for t in operands))
    for name, *row in zip(NAMES, fused(*operands), budget, truth, strict=True):
        assert_within_budget(name, *row)
    assert all(torch.equal(*pair) for pair in zip(operands, before, strict=True))


def test_it_is_the_gradient_that_the_plain_kernel_gives_and_fp32_sums_of_it(device):
    grad_hidden, gate_up, *factors = make("odd", torch.bfloat16, device)
    got = fused(grad_hidden, gate_up, *factors, dtype=torch.float32)
    tensors = swiglu_backward(grad_hidden, *gate_up.chunk(2, dim=1))
    assert torch.equal(got[0], torch.cat(tensors[1:], dim=1))
    for scaling, x, factor, gradient in zip(SCALINGS, tensors, factors, got[1:], strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(
            gradient.double(), scaling * x.double().t() @ factor.double(), rtol=1e-5, atol=1e-5
        )


def test_rows_any_stride_apart_give_what_contiguous_ones_do_and_nothing_else_is_written(device):
    operands = make("odd", torch.bfloat16, device)
    want = fused(*operands)
    for more in (24, 1):
        seen = []

        def noted(t, more=more, seen=seen):
            copy = wide(t, more)
            seen.append((copy, copy._base.clone()))
            return copy

        got = fused(*operands, layout=noted)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
        for view, before in seen:
            columns = view.shape[1]
            assert torch.equal(view._base[:, columns:], before[:, columns:])
        assert sum(not torch.equal(v, b[:, : v.shape[1]]) for v, b in seen) == 4


@pytest.mark.parametrize("ranks", [(8, 8, 8), (8, 72, 8)])
def test_the_gradient_goes_into_columns_of_wider_rows_and_nothing_else_is_written(ranks, device):
    """[dgu | p], as a product that grows in K takes it, whatever lies there."""
    operands = [random(39, n, seed=n, dtype=torch.bfloat16, device=device) for n in (139, 278)]
    factors = [random(39, rank, seed=5, dtype=torch.bfloat16, device=device) for rank in ranks]
    rows = torch.full((39, 278 + 24), float("nan"), dtype=torch.bfloat16, device=device)
    products = [Product(f, torch.empty(139, f.shape[1], device=device)) for f in factors]
    swiglu_backward_products(*operands, *products, rows[:, :278])
    _, *want = swiglu_backward(operands[0], *operands[1].chunk(2, dim=1))
    assert torch.equal(rows[:, :278], torch.cat(want, dim=1))
    assert rows[:, 278:].isnan().all()


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (False,) * 3])
def test_only_what_is_wanted_is_computed(wanted, device):
    grad_hidden, gate_up, *factors = make("odd", torch.float32, device)
    want = fused(grad_hidden, gate_up, *factors)
    products = [
        Product(f, torch.empty_like(g), s) if is_wanted else None
        for is_wanted, f, g, s in zip(wanted, factors, want[1:], SCALINGS, strict=True)
    ]
    grad = torch.empty_like(gate_up)
    swiglu_backward_products(grad_hidden, gate_up, *products, grad)
    assert torch.equal(grad, want[0])
    for product, gradient in zip(products, want[1:], strict=True):
        assert product is None or torch.equal(product.gradient, gradient)


@pytest.mark.parametrize("tiling", [module.BACKWARD_TILING, Tiling(16, 16, 4, 4, 1)])
def test_repetition_is_bitwise_equal_and_tiles_do_not_matter(tiling, device, monkeypatch):
    operands = make("odd", torch.float32, device)
    want = eager(*(t.double() for t in operands))
    monkeypatch.setattr(module, "BACKWARD_TILING", tiling)
    one, other = fused(*operands), fused(*operands)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    for got, truth in zip(one, want, strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


def test_no_rows_give_products_of_zero_and_launch_nothing(device, monkeypatch):
    kernel = Kernel()
    for name in ("_swiglu_backward_products_kernel", "_sum_products_kernel"):
        monkeypatch.setattr(module, name, kernel)
    sizes = (0, 10), (0, 20), (0, 4), (0, 4), (0, 4)
    grad, *products = fused(*(torch.empty(*size, device=device) for size in sizes))
    assert grad.shape == (0, 20) and not kernel.launches
    assert not any(product.any() for product in products)


@pytest.mark.parametrize(
    ("dtype", "rank", "fit"),
    [(torch.bfloat16, 32, 4), (torch.bfloat16, 64, 3), (torch.float32, 64, 1)],
)
def test_tiles_on_their_way_fit_into_the_shared_memory_of_small_gpus(dtype, rank, fit):
    elements = 3 * 32 * (64 + rank)
    tiling = Tiling(32, 64, 2, 4, 4)
    assert stages(tiling, elements, torch.empty(0, dtype=dtype)) == fit


BAD = {
    r"of_hidden: factor is \[38, 8\], should be \[39, 8\]": (0, lambda f, g: (f[:38], g)),
    r"of_gate: factor is torch.float16": (1, lambda f, g: (f.half(), g)),
    "of_up: factor has elements 39 apart": (2, lambda f, g: (f.t().contiguous().t(), g)),
    r"of_up: gradient is \[139, 7\], should be \[139, 8\]": (2, lambda f, g: (f, g[:, :7])),
    "of_gate: gradient is torch.float64 on": (1, lambda f, g: (f, g.double())),
}


@pytest.mark.parametrize("message", BAD)
def test_products_that_do_not_fit_are_a_value_error(message, device):
    grad_hidden, gate_up, *factors = make("odd", torch.float32, device)
    products = [Product(f, torch.ones(139, 8, device=device)) for f in factors]
    index, change = BAD[message]
    products[index] = Product(*change(*products[index][:2]))
    with pytest.raises(ValueError, match=message):
        swiglu_backward_products(grad_hidden, gate_up, *products, torch.empty_like(gate_up))


def test_tensors_that_do_not_fit_are_a_value_error(device):
    grad_hidden, gate_up, factor, *_ = make("odd", torch.float32, device)
    product = Product(factor, torch.ones(139, 8, device=device))
    grad = gate_up.clone()
    good = [grad_hidden, gate_up, product, None, None, grad]
    for index, bad, message in (
        (0, grad_hidden[:, :10], r"grad_hidden is \[39, 10\], should be \[39, 139\]"),
        (0, grad_hidden.half(), "grad_hidden is torch.float16"),
        (1, gate_up[:, :277], r"\[39, 277\], should be \[rows, 2 intermediate\]"),
        (5, grad[:, :277], r"grad_gate_up is \[39, 277\], should be \[39, 278\]"),
        (5, grad.half(), "grad_gate_up is torch.float16"),
        (5, grad.t().contiguous().t(), "grad_gate_up has elements 39 apart"),
    ):
        with pytest.raises(ValueError, match=message):
            swiglu_backward_products(*good[:index], bad, *good[index + 1 :])
