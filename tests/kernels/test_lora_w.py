"""LoRA_W, its output and three gradients, against eager PyTorch in float64."""

from functools import partial

import pytest
import torch
from attention_case import (
    assert_all_within_budget,
    lora_w,
    run,
    truth_of,
)
from attention_case import make_case as make_any_case
from reference import assert_within_budget, random

from fused_lora.lora_linear import FrozenLinear, LoRA_W

fused = LoRA_W.apply
make_case = partial(make_any_case, layers=1)
FP32 = (torch.float32,) * 2


@pytest.fixture
def case(device):
    return make_case(3, 13, device=device)


def in_dtype_of_x(x, A, B, frozen):
    """PEFT would compute the part of an adapter of another dtype in that."""
    return lora_w(x, A.to(x.dtype), B.to(x.dtype), frozen)


# --- values ---------------------------------------------------------------------------------------


# --- dtypes and autocast --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_adapters_without_autocast_are_right_for_a_computation_in_the_dtype_of_x(
    dtype, device
):
    case = make_case(3, 13, dtype=dtype, adapter_dtypes=FP32, device=device)

    got = run(fused, *case)
    assert got["output"].dtype == dtype
    assert_all_within_budget(got, run(in_dtype_of_x, *case), truth_of(lora_w, *case))


# --- errors ---------------------------------------------------------------------------------------

ERRORS = {
    "x": (lambda x, A, B, frozen: (x[..., 1:], A, B, frozen), r"x is \[3, 13, 51\].* should be 52"),
    "bias": (
        lambda x, A, B, frozen: (x, A, B, frozen._replace(bias=frozen.bias[1:])),
        r"bias is \[70\], should be \[71\]",
    ),
    "A": (
        lambda x, A, B, frozen: (x, A[:, 1:], B, frozen),
        r"A is \[8, 51\] and B \[71, 8\], should be \[r, 52\] and \[71, r\] of one r",
    ),
    "B": (lambda x, A, B, frozen: (x, A, B.t(), frozen), r"A is \[8, 52\] and B \[8, 71\], should"),
    "weight trained": (
        lambda x, A, B, frozen: (x, A, B, frozen._replace(weight=frozen.weight.requires_grad_())),
        r"weight requires a gradient.*requires_grad_\(False\)",
    ),
    "bias trained": (
        lambda x, A, B, frozen: (x, A, B, frozen._replace(bias=frozen.bias.requires_grad_())),
        r"bias requires a gradient.*requires_grad_\(False\)",
    ),
    "dtype": (
        lambda x, A, B, frozen: (x.half(), A, B, frozen),
        "weight is torch.bfloat16 and x torch.float16: give both one dtype",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_a_value_error_that_names_it(name, case):
    change, message = ERRORS[name]
    x, adapters, frozen, _ = case
    with pytest.raises(ValueError, match="LoRA_W: " + message):
        fused(*change(x, *adapters, frozen))


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    """A few rows over and over, so that eager PyTorch on those few says what is right. Adapters in
    fp32, for sums over so many rows that are not rounded on their way."""
    rows, features, pattern = 1_050_000, 2048, 250
    assert rows * features > 2**31 and rows % pattern == 0
    # x twice, the output, its gradient, that of x, and room
    if torch.cuda.mem_get_info()[0] < 8 * 2 * rows * features:
        pytest.skip("needs 35 GB of free GPU memory")
    options = {"dtype": torch.bfloat16, "device": device}
    x, grad_output = (random(pattern, features, seed=seed, **options) for seed in (1, 2))
    weight = random(features, features, seed=3, scale=features**-0.5, **options)
    frozen = FrozenLinear(weight, random(features, seed=4, **options), 2.0)
    A = random(8, features, seed=5, scale=features**-0.5, device=device)
    adapters = A, random(features, 8, seed=6, scale=8**-0.5, device=device)
    which = torch.arange(rows, device=device) % pattern
    many = run(fused, x[which], adapters, frozen, [grad_output[which]])
    few = x, adapters, frozen, [grad_output]
    eager, truth = run(in_dtype_of_x, *few), truth_of(lora_w, *few)
    over = 2**31 // features
    for name in ("output", "x"):
        for window in (slice(0, 250), slice(over - 250, over + 250), slice(-250, None)):
            at = which[window]
            assert_within_budget(name, many[name][window], eager[name][at], truth[name][at])
    for name in ("A", "B"):
        assert_within_budget(name, many[name] / (rows // pattern), eager[name], truth[name])
