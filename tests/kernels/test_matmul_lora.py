"""matmul_lora and its helpers against eager PyTorch in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from reference import adapted_linear, assert_within_budget, random, use_poisoned_memory

from fused_mlp import matmul_lora
from fused_mlp.utils import (
    Group,
    adapter_gradients,
    cast_adapters,
    compute_dtype,
    input_gradient,
    scaled_matmul,
)

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


def product(x, weight, A, B, scaling=SCALING):
    return matmul_lora(x, weight, x @ A.t(), B, scaling)


def assert_right(*tensors):
    fused, eager = product(*tensors), adapted_linear(*tensors, SCALING)
    truth = adapted_linear(*(t.double() for t in tensors), SCALING)
    assert fused.dtype == tensors[0].dtype
    assert_within_budget("matmul_lora", fused, eager, truth)


def gradients_by_hand(grad_output, x, weight, A, B, needs=(True, True, True), dtype=None):
    """(dx, dA, dB) of one layer, a group by itself."""
    group = Group([weight], A, [B], [SCALING])
    need_x, *needs = needs
    grad_x, grad_z = input_gradient(group, [grad_output], need_x, needs[:1])
    dtypes = (dtype or A.dtype, dtype or B.dtype)
    return grad_x, *adapter_gradients(group, x, x @ A.t(), [grad_output], grad_z, needs, dtypes)


def eager_gradients(grad_output, x, weight, A, B):
    x, A, B = (t.detach().clone().requires_grad_() for t in (x, A, B))
    return torch.autograd.grad(adapted_linear(x, weight, A, B, SCALING), (x, A, B), grad_output)


@pytest.mark.parametrize("r", [1, 4, 8, 12, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_and_gradients_are_within_the_error_budget(dtype, r, device):
    tensors = inputs(r=r, dtype=dtype, device=device)
    assert_right(*tensors)
    tensors.insert(0, random(37, 71, dtype=dtype, device=device, seed=9))
    fused, eager = gradients_by_hand(*tensors), eager_gradients(*tensors)
    truth = eager_gradients(*(t.double() for t in tensors))
    for row in zip(("x", "A", "B"), fused, eager, truth, strict=True):
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


def test_a_bias_is_added(device):
    x, weight, A, B = inputs(device=device)
    bias = random(71, dtype=x.dtype, device=device, seed=8)
    got = matmul_lora(x, weight, x @ A.t(), B, SCALING, bias)
    eager = adapted_linear(x, weight, A, B, SCALING) + bias
    truth = adapted_linear(*(t.double() for t in (x, weight, A, B)), SCALING) + bias
    assert_within_budget("bias", got, eager, truth)


def test_a_zero_B_or_scaling_leaves_the_frozen_product_bitwise(device):
    x, weight, A, B = inputs(device=device)
    frozen = F.linear(x, weight)
    assert torch.equal(product(x, weight, A, torch.zeros_like(B)), frozen)
    assert torch.equal(product(x, weight, A, B, 0.0), frozen)
    assert not torch.equal(product(x, weight, A, B), frozen)


def test_inputs_are_not_written(device):
    tensors = inputs(device=device)
    tensors.insert(0, random(37, 71, dtype=tensors[0].dtype, device=device, seed=9))
    before = [t.clone() for t in tensors]
    product(*tensors[1:])
    gradients_by_hand(*tensors)
    assert all(torch.equal(t, old) for t, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)), ids=str)
def test_gradients_are_none_exactly_where_they_are_not_needed(needs, device):
    tensors = inputs(device=device)
    tensors.insert(0, random(37, 71, dtype=tensors[0].dtype, device=device, seed=9))
    full, some = gradients_by_hand(*tensors), gradients_by_hand(*tensors, needs)
    for needed, got, want in zip(needs, some, full, strict=True):
        assert torch.equal(got, want) if needed else got is None


def test_gradients_of_a_group_are_those_of_each_layer(device):
    """Two layers of unlike rank and size on one x, the second one's A in fp32."""
    x, weight, A, B = inputs(device=device)
    _, weight_2, A_2, B_2 = inputs(out_features=29, r=3, device=device)
    grads = [random(37, n, dtype=x.dtype, device=device, seed=n) for n in (71, 29)]
    stacked, both_B = cast_adapters((A, B, A_2.float(), B_2), x.dtype)
    group = Group([weight, weight_2], stacked, both_B, [SCALING, 0.5])
    assert group.ranks == [8, 3]
    grad_x, grad_z = input_gradient(group, grads, True, [True, True])
    dtypes = (A.dtype, B.dtype, torch.float32, B.dtype)
    z = x @ stacked.t()
    got = adapter_gradients(group, x, z, grads, grad_z, [True] * 4, dtypes)
    assert tuple(one.dtype for one in got) == dtypes

    def eager(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, A, B, A_2, B_2)]
        x_, A_, B_, A_2_, B_2_ = leaves
        outputs = (
            adapted_linear(x_, weight.to(dtype), A_, B_, SCALING),
            adapted_linear(x_, weight_2.to(dtype), A_2_, B_2_, 0.5),
        )
        return torch.autograd.grad(outputs, leaves, [grad.to(dtype) for grad in grads])

    names = ("x", "A", "B", "A 2", "B 2")
    rows = zip(names, (grad_x, *got), eager(x.dtype), eager(torch.float64), strict=True)
    for row in rows:
        assert_within_budget(*row)


def test_zero_tokens_give_an_empty_product_and_zero_gradients(monkeypatch, device):
    x, weight, A, B = inputs(tokens=0, device=device)
    assert product(x, weight, A, B).shape == (0, 71)
    use_poisoned_memory(monkeypatch)
    _, grad_A, grad_B = gradients_by_hand(x.new_empty(0, 71), x, weight, A, B)
    assert torch.equal(grad_A, torch.zeros_like(A)) and torch.equal(grad_B, torch.zeros_like(B))


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_scaled_matmul_does_not_read_the_memory_it_is_given(dtype, monkeypatch, device):
    a, b = (random(*s, dtype=torch.bfloat16, device=device) for s in ((37, 53), (53, 71)))
    use_poisoned_memory(monkeypatch)
    truth = a.double() @ b.double() * SCALING
    got = scaled_matmul(a, b, SCALING, dtype)
    assert got.dtype == (dtype or a.dtype)
    assert_within_budget("scaled_matmul", got, a @ b * SCALING, truth)


@pytest.mark.gpu
def test_a_product_stored_in_fp32_is_not_rounded_to_bf16(device):
    a, b = (random(*s, dtype=torch.bfloat16, device=device) for s in ((37, 53), (53, 71)))
    truth = a.double() @ b.double() * SCALING
    got = scaled_matmul(a, b, SCALING, torch.float32)
    assert ((got - truth).norm() / truth.norm()).item() < 1e-5


def test_adapters_in_the_dtype_of_the_computation_are_not_copied(device):
    _, _, A, B = inputs(device=device)
    stacked, (same,) = cast_adapters((A, B), A.dtype)
    assert stacked is A and same is B
    stacked, (other,) = cast_adapters((A.float(), B), A.dtype)
    assert torch.equal(stacked, A) and other is B


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compute_dtype_is_that_of_a_linear_layer(dtype, device):
    x = random(2, 3, dtype=dtype, device=device)
    for enabled in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            # under autocast a linear layer casts its weight too, else it needs one of x's dtype
            assert compute_dtype(x) == F.linear(x, x).dtype
