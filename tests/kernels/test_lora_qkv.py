"""LoRA_QKV, its three outputs and seven gradients, against eager PyTorch in float64."""

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
    lora_qkv,
    make_case,
    names_of,
    raw_gradients,
    run,
    truth_of,
)
from reference import use_poisoned_memory

from fused_lora.lora_linear import LoRA_QKV

fused = LoRA_QKV.apply
right = partial(assert_right, fused, lora_qkv)
OUTPUTS, INPUTS = names_of(range(6))
ADAPTERS = INPUTS[1:]
MIXED = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float16, torch.float32)


@pytest.fixture
def case(device):
    return make_case(3, 13, device=device)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [*((r, r, r) for r in RANKS), (1, 12, 64), (64, 4, 1)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_are_within_the_error_budget(dtype, bias, r, device):
    right(*make_case(3, 13, dtype=dtype, bias=bias, r=r, device=device))


@pytest.mark.parametrize("missing", ["q_bias", "k_bias", "v_bias"])
def test_one_projection_without_a_bias_is_right(missing, case):
    x, adapters, frozen, grad_outputs = case
    right(x, adapters, frozen._replace(**{missing: None}), grad_outputs)


@pytest.mark.parametrize("shape", [(), (1,), (13,), (1, 1), (2, 13), (2, 1, 3, 5)], ids=str)
def test_any_number_of_leading_dimensions_is_right(shape, device):
    right(*make_case(*shape, device=device))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0)], ids=str)
def test_zero_tokens_give_empty_outputs_and_zero_gradients(shape, monkeypatch, device):
    case = make_case(*shape, device=device)
    use_poisoned_memory(monkeypatch)
    got = run(fused, *case)
    assert [got[name].shape for name in OUTPUTS] == [(*shape, out) for out in OUT]
    assert got["x"].shape == (*shape, IN)
    for name, adapter in zip(ADAPTERS, case[1], strict=True):
        assert torch.equal(got[name], torch.zeros_like(adapter))


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_x_is_right(name, case):
    x, adapters, frozen, grad_outputs = case
    layout = LAYOUTS[name]
    assert not layout(x).is_contiguous()
    grad_outputs = [layout(grad).contiguous() for grad in grad_outputs]
    right(x, adapters, frozen, grad_outputs, layout=layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_incoming_gradients_are_right(name, case):
    x, adapters, frozen, grad_outputs = case
    grad_outputs = [LAYOUTS[name](grad) for grad in grad_outputs]
    assert not any(grad.is_contiguous() for grad in grad_outputs)
    right(LAYOUTS[name](x).contiguous(), adapters, frozen, grad_outputs)


def test_gradient_of_a_sum_is_right(case):
    x, adapters, frozen, grad_outputs = case
    one = torch.ones((), dtype=x.dtype, device=x.device)
    # strides 0, 0, 0, as sum() gives
    right(x, adapters, frozen, [one.expand(grad.shape) for grad in grad_outputs])


@pytest.mark.parametrize("used", list(product((False, True), repeat=3))[1:], ids=str)
def test_an_output_in_no_loss_gives_its_adapter_no_gradient_as_eager_does(used, case):
    *case, grad_outputs = case
    grad_outputs = [grad if use else None for grad, use in zip(grad_outputs, used, strict=True)]
    right(*case, grad_outputs)


def test_what_new_memory_holds_does_not_matter(monkeypatch, case):
    x, adapters, frozen, (grad_q, grad_k, _) = case
    want = run(fused, x, adapters, frozen, (grad_q, grad_k, None))
    use_poisoned_memory(monkeypatch)
    got = run(fused, x, adapters, frozen, (grad_q, grad_k, None))
    assert got.pop("v_A") is want.pop("v_A") is got.pop("v_B") is want.pop("v_B") is None
    assert_equal(got, want)


def test_with_B_zero_A_gets_exactly_zero_and_B_does_not(case):
    x, adapters, frozen, grad_outputs = case
    adapters[1::2] = [torch.zeros_like(B) for B in adapters[1::2]]
    got = run(fused, x, adapters, frozen, grad_outputs)
    for name in ADAPTERS:
        assert (got[name] == 0).all() if name.endswith("A") else (got[name] != 0).any()


def test_repetition_is_bitwise_equal(case):
    assert_equal(run(fused, *case), run(fused, *case))


def test_accumulated_micro_batches_are_within_the_error_budget_of_one_batch(device):
    """The gradients of the three A lie in one storage, and are added to in place."""
    case = x, adapters, frozen, grad_outputs = make_case(4, 13, device=device)

    def accumulate(function):
        leaves = [t.clone().requires_grad_() for t in adapters]
        for i in range(4):
            micro_gradients = [grad[i] for grad in grad_outputs]
            torch.autograd.backward(function(x[i], *leaves, frozen), micro_gradients)
        return dict(zip(ADAPTERS, (leaf.grad for leaf in leaves), strict=True))

    truth = truth_of(lora_qkv, *case)
    assert_all_within_budget(
        accumulate(fused), accumulate(lora_qkv), {name: truth[name] for name in ADAPTERS}
    )


# --- dtypes and autocast --------------------------------------------------------------------------


@pytest.mark.parametrize("adapter_dtypes", [(torch.bfloat16,) * 6, (torch.float32,) * 6, MIXED],
                         ids=("bf16", "fp32", "mixed"))  # fmt: skip
@pytest.mark.parametrize("frozen_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_is_right_and_gives_dtypes_as_eager_does(
    dtype, frozen_dtype, adapter_dtypes, device
):
    options = {"dtype": dtype, "frozen_dtype": frozen_dtype, "adapter_dtypes": adapter_dtypes}
    case = make_case(3, 13, device=device, **options)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = run(fused, *case), run(lora_qkv, *case)
    assert all(got[name].dtype == torch.bfloat16 for name in OUTPUTS)
    assert_all_within_budget(got, want, truth_of(lora_qkv, *case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_adapters_without_autocast_are_right_for_a_computation_in_the_dtype_of_x(
    dtype, device
):
    case = make_case(3, 13, dtype=dtype, adapter_dtypes=(torch.float32,) * 6, device=device)

    def eager(x, *rest):  # PEFT would compute the adapters' part in fp32
        *adapters, frozen = rest
        return lora_qkv(x, *(t.to(dtype) for t in adapters), frozen)

    got = run(fused, *case)
    assert all(got[name].dtype == dtype for name in OUTPUTS)
    assert_all_within_budget(got, run(eager, *case), truth_of(lora_qkv, *case))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter_dtypes", [(torch.bfloat16,) * 6, (torch.float32,) * 6, MIXED],
                         ids=("bf16", "fp32", "mixed"))  # fmt: skip
def test_backward_itself_returns_each_gradient_in_its_tensors_dtype(
    adapter_dtypes, autocast, device
):
    x, adapters, frozen, grad_outputs = make_case(3, adapter_dtypes=adapter_dtypes, device=device)
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        # autograd's engine would cast
        gradients = raw_gradients(fused(*leaves, frozen), grad_outputs)
    assert [t.dtype for t in gradients] == [leaf.dtype for leaf in leaves]


def test_a_bf16_gradient_takes_no_precision_from_an_fp32_one(device):
    """One cast serves the three dA, so it has to keep what the widest of their dtypes keeps."""
    dtypes = (torch.bfloat16, *(torch.float32,) * 5)
    case = make_case(3, 13, dtype=torch.float32, adapter_dtypes=dtypes, device=device)
    got, truth = run(fused, *case), truth_of(lora_qkv, *case)
    # bf16 adapters in an fp32 computation: the reference computes in fp32 too
    x, adapters, frozen, grad_outputs = case
    want = run(lora_qkv, x, [t.float() for t in adapters], frozen, grad_outputs)
    for name in ("k_A", "v_A"):
        assert_all_within_budget(*({name: results[name]} for results in (got, want, truth)))


def test_autocast_around_backward_alone_changes_nothing(device):
    x, adapters, frozen, grad_outputs = make_case(3, 13, dtype=torch.float32, device=device)
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    want = torch.autograd.grad(fused(*leaves, frozen), leaves, grad_outputs)
    outputs = fused(*leaves, frozen)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = torch.autograd.grad(outputs, leaves, grad_outputs)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


# --- errors ---------------------------------------------------------------------------------------


def with_frozen(**changes):
    def change(x, adapters, frozen):
        changed = {name: function(getattr(frozen, name)) for name, function in changes.items()}
        return x, adapters, frozen._replace(**changed)

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
    "k_weight": (
        with_frozen(k_weight=lambda t: t[:, 1:]),
        r"k_weight is \[23, 51\], should be \[23, 52\] as x is \[3, 13, 52\]",
    ),
    "v_bias": (with_frozen(v_bias=lambda t: t[1:]), r"v_bias is \[36\], should be \[37\]"),
    "q_bias": (with_frozen(q_bias=lambda t: t[None]), r"q_bias is \[1, 71\], should be \[71\]"),
    "q_A": (
        with_adapter(0, lambda t: t[:, 1:]),
        r"q_A is \[8, 51\] and q_B \[71, 8\], should be \[r, 52\] and \[71, r\] of one r",
    ),
    "k_B": (
        with_adapter(3, lambda t: t[:, 1:]), r"k_A is \[8, 52\] and k_B \[23, 7\], should be"
    ),
    "v_B": (
        with_adapter(5, lambda t: t[1:]), r"v_A is \[8, 52\] and v_B \[36, 8\], should be"
    ),
    "weight trained": (
        with_frozen(k_weight=lambda t: t.requires_grad_()),
        r"k_weight requires a gradient.*requires_grad_\(False\)",
    ),
    "bias trained": (
        with_frozen(v_bias=lambda t: t.requires_grad_()),
        r"v_bias requires a gradient.*requires_grad_\(False\)",
    ),
    "weight dtype": (
        with_frozen(q_weight=lambda t: t.float()),
        "q_weight is torch.float32 and x torch.bfloat16: give both one dtype",
    ),
    "bias dtype": (
        with_frozen(k_bias=lambda t: t.half()),
        "k_bias is torch.float16 and x torch.bfloat16: give both one dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_a_value_error_that_names_it(name, case):
    change, message = ERRORS[name]
    x, adapters, frozen = change(*case[:3])
    with pytest.raises(ValueError, match="LoRA_QKV: " + message):
        fused(x, *adapters, frozen)
