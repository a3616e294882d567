"""LoRA_MLP, its output and its seven gradients, against eager PyTorch in float64."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_mlp_case import (
    DTYPES,
    HIDDEN,
    NAMES,
    assert_equal,
    assert_right,
    fused,
    mlp,
    raw_gradients,
    run,
    tokens,
    truth_of,
)
from reference import ADAPTER_NAMES, assert_within_budget, lora_mlp

import fused_mlp

# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [(1, 1, 1), (4, 4, 4), (8, 8, 8), (12, 12, 12), (32, 32, 32),
                               (64, 64, 64), (1, 12, 64), (64, 4, 1)], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradients_are_within_the_error_budget(dtype, r, device):
    x, grad_output = tokens(3, 13, dtype=dtype, device=device)
    assert_right(x, *mlp(dtype, device, r=r), grad_output)


@pytest.mark.parametrize("shape", [(), (1,), (13,), (1, 1), (2, 13), (2, 1, 3, 5)], ids=str)
def test_any_number_of_leading_dimensions_is_right(shape, device):
    x, grad_output = tokens(*shape, dtype=torch.bfloat16, device=device)
    assert_right(x, *mlp(torch.bfloat16, device), grad_output)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0)], ids=str)
def test_zero_tokens_give_an_empty_output_and_zero_gradients(shape, device):
    x, grad_output = tokens(*shape, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device)
    got = run(fused, x, adapters, frozen, grad_output)
    assert got["output"].shape == got["x"].shape == (*shape, HIDDEN)
    for name, adapter in zip(ADAPTER_NAMES, adapters, strict=True):
        assert torch.equal(got[name], torch.zeros_like(adapter))


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1),
    "sliced": lambda t: torch.cat([t, t, t], dim=-1)[..., 1 : 1 + t.shape[-1]],
    "every second token": lambda t: torch.repeat_interleave(t, 2, dim=1)[:, ::2],
    "expanded": lambda t: t[:1].expand(5, *t.shape[1:]),
    "features first": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_x_is_right(name, case):
    x, adapters, frozen, grad_output = case
    layout = LAYOUTS[name]
    assert not layout(x).is_contiguous()
    assert_right(x, adapters, frozen, layout(grad_output).contiguous(), layout=layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_incoming_gradient_gives_what_a_contiguous_one_does(name, case):
    x, adapters, frozen, grad_output = case
    grad_output = LAYOUTS[name](grad_output)
    x = LAYOUTS[name](x).contiguous()
    assert not grad_output.is_contiguous()
    assert_right(x, adapters, frozen, grad_output)


def test_gradient_of_a_sum_is_right(case):
    x, adapters, frozen, _ = case
    one = torch.ones((), dtype=x.dtype, device=x.device)
    assert_right(x, adapters, frozen, one.expand(x.shape))  # strides 0, 0, 0, as sum() gives


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy, in the interpreter
def test_large_gates_give_finite_and_right_values(case):
    x, adapters, frozen, grad_output = case
    frozen = frozen._replace(gate_weight=frozen.gate_weight * 60)
    gate = x.float() @ frozen.gate_weight.float().t()
    assert gate.min() < -100 and gate.max() > 100
    assert_right(x, adapters, frozen, grad_output)


def test_with_B_zero_A_gets_exactly_zero_and_B_does_not(case):
    x, adapters, frozen, grad_output = case
    adapters[1::2] = [torch.zeros_like(B) for B in adapters[1::2]]
    got = run(fused, x, adapters, frozen, grad_output)
    for name in ADAPTER_NAMES:
        assert (got[name] == 0).all() if name.endswith("A") else (got[name] != 0).any()


def test_repetition_is_bitwise_equal(case):
    assert_equal(run(fused, *case), run(fused, *case))


def test_accumulated_micro_batches_are_within_the_error_budget_of_one_batch(device):
    x, grad_output = tokens(4, 13, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device)

    def accumulate(function):
        leaves = [t.clone().requires_grad_() for t in adapters]
        for micro_x, micro_gradient in zip(x.split(1), grad_output.split(1), strict=True):
            function(micro_x, *leaves, frozen).backward(micro_gradient)
        return [leaf.grad for leaf in leaves]

    truth = truth_of(x, adapters, frozen, grad_output)
    for name, got, eager in zip(
        ADAPTER_NAMES, accumulate(fused), accumulate(lora_mlp), strict=True
    ):
        assert_within_budget(name, got, eager, truth[name])


# --- dtypes and autocast --------------------------------------------------------------------------


@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_is_right_and_gives_dtypes_as_eager_does(
    dtype, weight_dtype, adapter_dtype, device
):
    x, grad_output = tokens(3, 13, dtype=dtype, device=device)
    case = (x, *mlp(weight_dtype, device, adapter_dtype=adapter_dtype), grad_output)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, eager = run(fused, *case), run(lora_mlp, *case)
    truth = truth_of(*case)
    assert got["output"].dtype == torch.bfloat16
    for name in NAMES:
        assert got[name].dtype == eager[name].dtype
        assert_within_budget(name, got[name], eager[name], truth[name])


def test_fp32_adapters_without_autocast_are_right(device):
    x, grad_output = tokens(3, 13, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device, adapter_dtype=torch.float32)
    assert run(fused, x, adapters, frozen, grad_output)["output"].dtype == torch.bfloat16
    assert_right(x, adapters, frozen, grad_output)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_backward_itself_returns_each_gradient_in_its_tensors_dtype(
    adapter_dtype, autocast, device
):
    x, grad_output = tokens(3, 13, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device, adapter_dtype=adapter_dtype)
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        output = fused(*leaves, frozen)
        gradients = raw_gradients(output, grad_output)  # autograd's engine would cast
    assert [t.dtype for t in gradients] == [leaf.dtype for leaf in leaves]


def test_autocast_around_backward_alone_changes_nothing(device):
    x, grad_output = tokens(3, 13, dtype=torch.float32, device=device)
    adapters, frozen = mlp(torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    want = torch.autograd.grad(fused(*leaves, frozen), leaves, grad_output)
    output = fused(*leaves, frozen)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = torch.autograd.grad(output, leaves, grad_output)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


# --- errors ---------------------------------------------------------------------------------------


def with_weight(**changes):
    def change(x, adapters, frozen):
        return (
            x,
            adapters,
            frozen._replace(**{k: f(getattr(frozen, k)) for k, f in changes.items()}),
        )

    return change


def with_adapter(index, function):
    def change(x, adapters, frozen):
        adapters[index] = function(adapters[index])
        return x, adapters, frozen

    return change


ERRORS = {
    "x narrow": (
        lambda x, *rest: (x[..., 1:], *rest), r"x is \[3, 13, 51\].* should be 52"
    ),
    "x without dimensions": (
        lambda x, *rest: (x[0, 0, 0], *rest), r"x is \[\].* should be 52"
    ),
    "up_weight": (
        with_weight(up_weight=lambda t: t[1:]), r"up_weight is \[138, 52\], should be \[139, 52\]"
    ),
    "down_weight": (
        with_weight(down_weight=lambda t: t.t()), r"down_weight is \[139, 52\].* \[52, 139\]"
    ),
    "gate_A": (
        with_adapter(0, lambda t: t[:, 1:]),
        r"gate_A is \[8, 51\] and gate_B \[139, 8\], should be \[r, 52\] and \[139, r\] of one r",
    ),
    "up_B": (
        with_adapter(3, lambda t: t[:, 1:]), r"up_A is \[8, 52\] and up_B \[139, 7\], should be"
    ),
    "down_A": (
        with_adapter(4, lambda t: t.t()), r"down_A is \[139, 8\] .*should be \[r, 139\]"
    ),
    "weight trained": (
        with_weight(up_weight=lambda t: t.requires_grad_()),
        r"up_weight requires a gradient.*requires_grad_\(False\)",
    ),
    "weight dtype": (
        with_weight(down_weight=lambda t: t.float()),
        "down_weight is torch.float32 and x torch.bfloat16: give both one dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_a_value_error_that_names_it(name, case):
    change, message = ERRORS[name]
    x, adapters, frozen = change(*case[:3])
    with pytest.raises(ValueError, match="LoRA_MLP: " + message):
        fused(x, *adapters, frozen)


# --- the folder on its own ------------------------------------------------------------------------


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
