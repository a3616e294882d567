"""LoRA_MLP, its output and its seven gradients, against eager PyTorch in float64."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_mlp_case import (
    assert_right,
    fused,
    mlp,
    run,
    tokens,
)

import fused_mlp

# --- values ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy, in the interpreter
def test_large_gates_give_finite_and_right_values(case):
    x, adapters, frozen, grad_output = case
    frozen = frozen._replace(gate_weight=frozen.gate_weight * 60)
    gate = x.float() @ frozen.gate_weight.float().t()
    assert gate.min() < -100 and gate.max() > 100
    assert_right(x, adapters, frozen, grad_output)


# --- dtypes and autocast --------------------------------------------------------------------------


def test_fp32_adapters_without_autocast_are_right(device):
    x, grad_output = tokens(3, 13, dtype=torch.bfloat16, device=device)
    adapters, frozen = mlp(torch.bfloat16, device, adapter_dtype=torch.float32)
    assert run(fused, x, adapters, frozen, grad_output)["output"].dtype == torch.bfloat16
    assert_right(x, adapters, frozen, grad_output)


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
