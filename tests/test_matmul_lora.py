"""matmul_lora and its helpers against eager PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F
from reference import adapted_linear, assert_within_budget, random

from fused_mlp import matmul_lora
from fused_mlp.utils import adapter_gradients, compute_dtype, scaled_matmul

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALING = 1.75


def inputs(tokens=37, in_features=53, out_features=71, r=8, *, dtype=torch.bfloat16, device):
    """x, weight, A and B, with B not zero, so that A matters too."""
    sizes = (
        (tokens, in_features, 1.0),
        (out_features, in_features, in_features**-0.5),
        (r, in_features, in_features**-0.5),
        (out_features, r, r**-0.5),
    )
    return [
        random(rows, columns, dtype=dtype, device=device, seed=seed, scale=scale)
        for seed, (rows, columns, scale) in enumerate(sizes)
    ]


def assert_right(*tensors):
    fused, eager = matmul_lora(*tensors, SCALING), adapted_linear(*tensors, SCALING)
    truth = adapted_linear(*(t.double() for t in tensors), SCALING)
    assert fused.dtype == tensors[0].dtype
    assert_within_budget("matmul_lora", fused, eager, truth)


def eager_adapter_gradients(x, grad_output, weight, A, B):
    A, B = (t.detach().clone().requires_grad_() for t in (A, B))
    return torch.autograd.grad(adapted_linear(x, weight, A, B, SCALING), (A, B), grad_output)


@pytest.mark.parametrize("r", [1, 4, 8, 12, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_and_adapter_gradients_are_within_the_error_budget(dtype, r, device):
    x, weight, A, B = inputs(r=r, dtype=dtype, device=device)
    assert_right(x, weight, A, B)
    grad_output = random(37, 71, dtype=dtype, device=device, seed=9)
    fused = adapter_gradients(x, grad_output, grad_output @ B, A, SCALING, True, True)
    tensors = (x, grad_output, weight, A, B)
    eager = eager_adapter_gradients(*tensors)
    truth = eager_adapter_gradients(*(t.double() for t in tensors))
    for row in zip(("A", "B"), fused, eager, truth, strict=True):
        assert_within_budget(*row)


@pytest.mark.parametrize("sizes", [(1, 53, 71), (37, 1, 71), (37, 53, 1), (64, 64, 64)], ids=str)
def test_any_size_is_within_the_error_budget(sizes, device):
    assert_right(*inputs(*sizes, dtype=torch.float32, device=device))


@pytest.mark.parametrize("position", range(4), ids=("x", "weight", "A", "B"))
def test_transposed_operands_are_within_the_error_budget(position, device):
    tensors = inputs(device=device)
    tensors[position] = tensors[position].t().contiguous().t()
    assert not tensors[position].is_contiguous()
    assert_right(*tensors)


def test_a_zero_B_or_scaling_leaves_the_frozen_product_bitwise(device):
    x, weight, A, B = inputs(device=device)
    frozen = F.linear(x, weight)
    assert torch.equal(matmul_lora(x, weight, A, torch.zeros_like(B), SCALING), frozen)
    assert torch.equal(matmul_lora(x, weight, A, B, 0.0), frozen)
    assert not torch.equal(matmul_lora(x, weight, A, B, SCALING), frozen)


def test_inputs_are_not_written(device):
    tensors = inputs(device=device)
    before = [t.clone() for t in tensors]
    x, _, A, B = tensors
    matmul_lora(*tensors, SCALING)
    grad_output = random(37, 71, dtype=x.dtype, device=device, seed=9)
    grad_rank = grad_output @ B
    tensors += [grad_output, grad_rank]
    before += [grad_output.clone(), grad_rank.clone()]
    adapter_gradients(x, grad_output, grad_rank, A, SCALING, True, True)
    assert all(torch.equal(t, old) for t, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("need_A", [False, True])
@pytest.mark.parametrize("need_B", [False, True])
def test_adapter_gradients_are_none_exactly_where_they_are_not_needed(need_A, need_B, device):
    x, _, A, B = inputs(device=device)
    grad_output = random(37, 71, dtype=x.dtype, device=device, seed=9)
    grad_rank = grad_output @ B if need_A else None
    full = adapter_gradients(x, grad_output, grad_output @ B, A, SCALING, True, True)
    some = adapter_gradients(x, grad_output, grad_rank, A, SCALING, need_A, need_B)
    for needed, got, want in zip((need_A, need_B), some, full, strict=True):
        assert torch.equal(got, want) if needed else got is None


def test_zero_tokens_give_an_empty_product_and_zero_gradients(monkeypatch, device):
    x, weight, A, B = inputs(tokens=0, device=device)
    assert matmul_lora(x, weight, A, B, SCALING).shape == (0, 71)
    use_poisoned_memory(monkeypatch)
    grad_output = x.new_empty(0, 71)
    grad_A, grad_B = adapter_gradients(x, grad_output, grad_output @ B, A, SCALING, True, True)
    assert torch.equal(grad_A, torch.zeros_like(A)) and torch.equal(grad_B, torch.zeros_like(B))


def test_scaled_matmul_does_not_read_the_memory_it_is_given(monkeypatch, device):
    a, b = random(37, 53, device=device), random(53, 71, device=device, seed=1)
    use_poisoned_memory(monkeypatch)
    truth = a.double() @ b.double() * SCALING
    assert_within_budget("scaled_matmul", scaled_matmul(a, b, SCALING), a @ b * SCALING, truth)


def use_poisoned_memory(monkeypatch):
    """torch.empty, as it may be at its worst."""
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: torch.full(size, torch.nan, **options)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compute_dtype_is_that_of_a_linear_layer(dtype, device):
    x = random(2, 3, dtype=dtype, device=device)
    for enabled in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            # under autocast a linear layer casts its weight too, else it needs one of x's dtype
            assert compute_dtype(x) == F.linear(x, x).dtype
