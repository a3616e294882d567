"""fused_mlp: matmul_lora and its helpers beyond what test_contract.py tries as a part of LoRA_MLP,
a copy of the folder, and more than 2^31 elements."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases.lora_mlp_case import mlp
from cases.operands import BF16, Case
from cases.reference import (
    ADAPTER_NAMES,
    BUDGET,
    adapted_linear,
    assert_near,
    assert_within_budget,
    random,
    relative_error,
)
from contract import OPERATIONS, run, truth_of

import fused_mlp
from fused_mlp import matmul_lora
from fused_mlp.utils import cast_adapters, scaled_matmul

MLP = OPERATIONS["LoRA_MLP"]


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


@pytest.mark.slow
def test_a_copy_of_the_folder_works_elsewhere_with_torch_and_triton_alone(tmp_path, device):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(fused_mlp.__file__).parent, tmp_path / "borrowed", ignore=ignored)
    program = f"""
import sys
import torch
import borrowed
weights = [torch.randn(*size, device="{device}") for size in ((6, 4), (6, 4), (4, 6))]
adapters = [torch.randn(*size, device="{device}", requires_grad=True)
            for size in ((2, 4), (6, 2), (2, 4), (6, 2), (2, 6), (4, 2))]
frozen = borrowed.FrozenMLP(*weights, 1.0, 1.0, 1.0)
borrowed.LoRA_MLP.apply(torch.randn(3, 4, device="{device}"), *adapters, frozen).sum().backward()
assert all(adapter.grad.isfinite().all() for adapter in adapters)
print(*{{"peft", "transformers", "fused_mlp", "fused_lora"}} & set(sys.modules))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.gpu
@pytest.mark.alone
def test_more_than_2_to_the_31_gate_elements(device):
    """Repeat a few tokens: eager PyTorch on just those gives the reference."""
    count, intermediate, hidden, pattern = 195_100, 11_008, 64, 256
    assert count * intermediate > 2**31
    # gate and up, hidden, their three gradients, and room
    if torch.cuda.mem_get_info()[0] < 7 * 2 * count * intermediate:
        pytest.skip("needs 31 GB of free GPU memory")
    adapters, frozen = mlp(BF16, device, hidden=hidden, intermediate=intermediate)
    layer = {**dict(zip(ADAPTER_NAMES, adapters, strict=True)), "frozen": frozen}
    x, grad = (random(pattern, hidden, dtype=BF16, device=device, seed=seed) for seed in (1, 2))
    which = torch.arange(count, device=device) % pattern
    got = run(MLP, Case({"x": x[which], **layer}, [grad[which]]))
    # each token's output and dx equal its pattern's. The adapters' gradients are sums: each pattern
    # counts as often as it occurs
    often = torch.bincount(which, minlength=pattern)[:, None]
    few = Case({"x": x, **layer}, [grad])
    eager, truth = run(MLP, few, MLP.eager), truth_of(MLP, few)
    truth_of_sums = truth_of(MLP, replace(few, gradients=[grad.double() * often]))
    for name in ("output 0", "gradient of x"):
        assert got[name].isfinite().all()
        for window in (slice(0, 256), slice(-256, None), slice(195_083 - 128, 195_083 + 17)):
            rows = which[window]
            assert_within_budget(name, got[name][window], eager[name][rows], truth[name][rows])
    for name in (f"gradient of {one}" for one in ADAPTER_NAMES):
        allowed = BUDGET * relative_error(eager[name], truth[name])
        assert_near(got[name], truth_of_sums[name], allowed, name)
