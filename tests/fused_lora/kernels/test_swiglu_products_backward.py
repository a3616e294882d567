"""SwiGLU's backward with the adapters' products in it, against eager PyTorch in float64."""

import pytest
import torch
from cases.reference import GATED, dropped, mask_of, random

from fused_lora.kernels import swiglu_products_backward as module
from fused_lora.kernels.magnitudes import ColumnScale
from fused_lora.kernels.products import Product, SwiGLUProducts
from fused_lora.kernels.swiglu_products_backward import swiglu_backward_products
from fused_lora.kernels.tiling import Tiling, stages
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


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Split a few rows into several tiles and ranges, the last of each partial."""
    for name in ("BACKWARD_TILING", "SCALED_TILING"):
        monkeypatch.setattr(module, name, Tiling(16, 32, 2, 4, 2))


def make(case, dtype, device):
    rows, intermediate, ranks = CASES[case]
    gate_up = random(rows, 2 * intermediate, seed=1, scale=2.0, dtype=dtype, device=device)
    grad_hidden = random(rows, intermediate, seed=2, dtype=dtype, device=device)
    factors = [
        random(rows, rank, seed=3 + i, dtype=dtype, device=device) for i, rank in enumerate(ranks)
    ]
    return grad_hidden, gate_up, *factors


def scale_of(gate_up):
    """Return the factors of gate and up, the inverse norms and the biases."""
    columns = gate_up.shape[1]
    return [random(columns, seed=seed).to(gate_up) for seed in (11, 12, 13)]


def fused(
    grad_hidden, gate_up, *factors, dtype=None, layout=torch.clone, activation="silu", dropout=0.0,
    has_scale=False,
):  # fmt: skip
    """Return grad_gate_up and the three products, the first of them transposed, as A is; then,
    with a scale, the gradients of magnitudes."""
    gradients = []
    for i, factor in enumerate(factors):
        intermediate, rank = grad_hidden.shape[1], factor.shape[1]
        shape = (intermediate, rank) if i else (rank, intermediate)
        empty = torch.full(shape, 7.0, dtype=dtype or factor.dtype, device=factor.device)
        gradients.append(layout(empty) if i else layout(empty).t())
    mask = mask_of(*grad_hidden.shape, grad_hidden.device, dropout) if dropout else None
    products = map(Product, map(layout, factors), gradients, SCALINGS, (mask, None, None))
    grad = layout(torch.full_like(gate_up, 7.0))
    products, scale = SwiGLUProducts(*products), None
    if has_scale:
        factor, inverse_norm, bias = scale_of(gate_up)
        scale = ColumnScale(factor.float(), inverse_norm.float(), bias)
        magnitudes = [factor.new_full((len(factor) // 2,), 7.0) for _ in range(2)]
        products, gradients = products._replace(magnitudes=magnitudes), [*gradients, *magnitudes]
    operands = map(layout, (grad_hidden, gate_up))
    swiglu_backward_products(*operands, products, grad, activation, scale=scale)
    return grad, *gradients


def eager(grad_hidden, gate_up, *factors, activation="silu", dropout=0.0, has_scale=False):
    if has_scale:
        factor, inverse_norm, bias = scale_of(gate_up)
        scaled = factor * gate_up + bias
        grad, *products = eager(grad_hidden, scaled, *factors, activation=activation)
        magnitudes = ((grad * gate_up).sum(0) * inverse_norm).chunk(2)
        hidden, *others = products
        parts = factor.chunk(2)
        others = [one * part[:, None] for one, part in zip(others, parts, strict=True)]
        return grad * factor, hidden, *others, *magnitudes
    gate_up = gate_up.clone().requires_grad_()
    hidden = GATED[activation](*gate_up.chunk(2, dim=1))
    (grad,) = torch.autograd.grad(hidden, gate_up, grad_hidden)
    tensors = dropped(hidden.detach(), dropout), *grad.chunk(2, dim=1)
    return grad, *(s * (x.t() @ f) for s, x, f in zip(SCALINGS, tensors, factors, strict=True))


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


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (False,) * 3])
def test_only_what_is_wanted_is_computed(wanted, device):
    grad_hidden, gate_up, *factors = make("odd", torch.float32, device)
    want = fused(grad_hidden, gate_up, *factors)
    products = [
        Product(f, torch.empty_like(g), s) if is_wanted else None
        for is_wanted, f, g, s in zip(wanted, factors, want[1:], SCALINGS, strict=True)
    ]
    grad = torch.empty_like(gate_up)
    swiglu_backward_products(grad_hidden, gate_up, SwiGLUProducts(*products), grad)
    assert torch.equal(grad, want[0])
    for product, gradient in zip(products, want[1:], strict=True):
        assert product is None or torch.equal(product.gradient, gradient)


@pytest.mark.parametrize(
    ("dtype", "rank", "fit"),
    [(torch.bfloat16, 32, 4), (torch.bfloat16, 64, 3), (torch.float32, 64, 1)],
)
def test_tiles_on_their_way_fit_into_the_shared_memory_of_small_gpus(dtype, rank, fit):
    elements = 3 * 32 * (64 + rank)
    tiling = Tiling(32, 64, 2, 4, 4)
    assert stages(tiling, elements, torch.empty(0, dtype=dtype)) == fit
