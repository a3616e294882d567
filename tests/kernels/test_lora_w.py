"""LoRA_W, its output and three gradients, against eager PyTorch in float64."""

from functools import partial
from itertools import product

import pytest
import torch
from attention_case import (
    DTYPES,
    IN,
    LAYOUTS,
    OUT,
    RANKS,
    assert_all_within_budget,
    assert_equal,
    assert_right,
    lora_w,
    raw_gradients,
    run,
    truth_of,
)
from attention_case import make_case as make_any_case
from reference import assert_within_budget, random, use_poisoned_memory

from fused_lora.lora_linear import FrozenLinear, LoRA_W

fused = LoRA_W.apply
right = partial(assert_right, fused, lora_w)
make_case = partial(make_any_case, layers=1)
FP32 = (torch.float32,) * 2


@pytest.fixture
def case(device):
    return make_case(3, 13, device=device)


def in_dtype_of_x(x, A, B, frozen):
    """PEFT would compute the part of an adapter of another dtype in that."""
    return lora_w(x, A.to(x.dtype), B.to(x.dtype), frozen)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", RANKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradients_are_within_the_error_budget(dtype, bias, r, device):
    right(*make_case(3, 13, dtype=dtype, bias=bias, r=(r,), device=device))


@pytest.mark.parametrize("shape", [(), (1,), (13,), (1, 1), (2, 13), (2, 1, 3, 5)], ids=str)
def test_any_number_of_leading_dimensions_is_right(shape, device):
    right(*make_case(*shape, device=device))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0)], ids=str)
def test_zero_tokens_give_an_empty_output_and_zero_gradients(shape, monkeypatch, device):
    case = make_case(*shape, device=device)
    use_poisoned_memory(monkeypatch)
    got = run(fused, *case)
    assert got["output"].shape == (*shape, OUT[0]) and got["x"].shape == (*shape, IN)
    for name, adapter in zip(("A", "B"), case[1], strict=True):
        assert torch.equal(got[name], torch.zeros_like(adapter))


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_x_is_right(name, case):
    x, adapters, frozen, (grad_output,) = case
    layout = LAYOUTS[name]
    assert not layout(x).is_contiguous()
    right(x, adapters, frozen, [layout(grad_output).contiguous()], layout=layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_incoming_gradient_is_right(name, case):
    x, adapters, frozen, (grad_output,) = case
    grad_output = LAYOUTS[name](grad_output)
    assert not grad_output.is_contiguous()
    right(LAYOUTS[name](x).contiguous(), adapters, frozen, [grad_output])


def test_gradient_of_a_sum_is_right(case):
    x, adapters, frozen, (grad_output,) = case
    one = torch.ones((), dtype=x.dtype, device=x.device)
    right(x, adapters, frozen, [one.expand(grad_output.shape)])  # strides 0, 0, 0, as sum() gives


def test_what_new_memory_holds_does_not_matter(monkeypatch, case):
    want = run(fused, *case)
    use_poisoned_memory(monkeypatch)
    assert_equal(run(fused, *case), want)


def test_with_B_zero_A_gets_exactly_zero_and_B_does_not(case):
    x, (A, B), frozen, grad_outputs = case
    got = run(fused, x, (A, torch.zeros_like(B)), frozen, grad_outputs)
    assert (got["A"] == 0).all() and (got["B"] != 0).any()


def test_repetition_is_bitwise_equal(case):
    assert_equal(run(fused, *case), run(fused, *case))


# --- dtypes and autocast --------------------------------------------------------------------------


@pytest.mark.parametrize("adapter_dtypes", list(product((torch.bfloat16, torch.float32), repeat=2)),
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("frozen_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_is_right_and_gives_dtypes_as_eager_does(
    dtype, frozen_dtype, adapter_dtypes, device
):
    options = {"dtype": dtype, "frozen_dtype": frozen_dtype, "adapter_dtypes": adapter_dtypes}
    case = make_case(3, 13, device=device, **options)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = run(fused, *case), run(lora_w, *case)
    assert got["output"].dtype == torch.bfloat16
    assert_all_within_budget(got, want, truth_of(lora_w, *case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_adapters_without_autocast_are_right_for_a_computation_in_the_dtype_of_x(
    dtype, device
):
    case = make_case(3, 13, dtype=dtype, adapter_dtypes=FP32, device=device)

    got = run(fused, *case)
    assert got["output"].dtype == dtype
    assert_all_within_budget(got, run(in_dtype_of_x, *case), truth_of(lora_w, *case))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter_dtypes", list(product((torch.bfloat16, torch.float32), repeat=2)),
                         ids=str)  # fmt: skip
def test_backward_itself_returns_each_gradient_in_its_tensors_dtype(
    adapter_dtypes, autocast, device
):
    x, adapters, frozen, grad_outputs = make_case(3, adapter_dtypes=adapter_dtypes, device=device)
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        # autograd's engine would cast
        gradients = raw_gradients(fused(*leaves, frozen), grad_outputs)
    assert [t.dtype for t in gradients] == [leaf.dtype for leaf in leaves]


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
