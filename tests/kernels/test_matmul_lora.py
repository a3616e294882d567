"""matmul_lora and its helpers, compared with eager PyTorch in float64. As parts of LoRA_MLP and
LoRA_QKV, test_contract.py covers any rank, size and dtype, groups of layers, and gradients."""

import pytest
import torch
import torch.nn.functional as F
from cases.reference import adapted_linear, assert_within_budget, random

from fused_mlp import matmul_lora
from fused_mlp.utils import cast_adapters, scaled_matmul

SCALING = 1.75


def inputs(tokens=37, in_features=53, out_features=71, r=8, *, dtype=torch.bfloat16, device):
    """Return x, weight, A and B. B is not zero: otherwise A would not matter."""
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


@pytest.mark.parametrize("position", range(4), ids=("x", "weight", "A", "B"))
def test_transposed_operands_are_within_the_error_budget(position, device):
    tensors = inputs(device=device)
    tensors[position] = tensors[position].t().contiguous().t()
    assert not tensors[position].is_contiguous()
    assert_right(*tensors)


def test_a_zero_B_or_scaling_leaves_the_frozen_product_bitwise(device):
    x, weight, A, B = inputs(device=device)
    frozen = F.linear(x, weight)
    assert torch.equal(product(x, weight, A, torch.zeros_like(B)), frozen)
    assert torch.equal(product(x, weight, A, B, 0.0), frozen)
    assert not torch.equal(product(x, weight, A, B), frozen)


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
