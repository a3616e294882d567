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
    Calls,
    assert_all_within_budget,
    assert_equal,
    assert_right,
    lora_w,
    names_of,
    raw_gradients,
    run,
    saved_for_backward,
    truth_of,
)
from attention_case import make_case as make_any_case
from reference import CHECKPOINTS, checkpointed, random, use_poisoned_memory

from fused_lora.attention import LoRA_W

fused = LoRA_W.apply
right = partial(assert_right, fused, lora_w)
make_case = partial(make_any_case, layers=1)
_, INPUTS = names_of(range(2))
FP32 = (torch.float32,) * 2


@pytest.fixture
def case(device):
    return make_case(3, 13, device=device)


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

    def eager(x, A, B, frozen):  # PEFT would compute the adapter's part in fp32
        return lora_w(x, A.to(dtype), B.to(dtype), frozen)

    got = run(fused, *case)
    assert got["output"].dtype == dtype
    assert_all_within_budget(got, run(eager, *case), truth_of(lora_w, *case))


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


# --- autograd -------------------------------------------------------------------------------------


def test_a_second_backward_through_a_retained_graph_gives_the_same(case):
    x, adapters, frozen, grad_outputs = case
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    output = fused(*leaves, frozen)
    first = torch.autograd.grad(output, leaves, grad_outputs, retain_graph=True)
    second = torch.autograd.grad(output, leaves, grad_outputs)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_differentiating_twice_is_a_clear_error(case):
    x, adapters, frozen, grad_outputs = case
    output = fused(x.requires_grad_(), *adapters, frozen)
    with pytest.raises(RuntimeError, match="LoRA_W is not twice differentiable"):
        torch.autograd.grad(output, x, grad_outputs, create_graph=True)


def test_nothing_that_came_in_or_was_saved_is_written(case):
    x, adapters, frozen, grad_outputs = case
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    tensors = [*leaves, *frozen[:2], *grad_outputs]
    before = [t.detach().clone() for t in tensors]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = fused(*leaves, frozen)
    tensors += [*saved, output]
    before += [t.detach().clone() for t in (*saved, output)]
    output.backward(*grad_outputs)
    assert all(torch.equal(now, old) for now, old in zip(tensors, before, strict=True))


def test_x_may_have_other_consumers_and_the_output_may_be_changed_in_place(case):
    x = case[0]
    other = random(*x.shape, dtype=x.dtype, device=x.device, seed=5)

    def block(function):
        def block(x, *rest):
            side = (x * other.to(x.dtype)).sum(-1, keepdim=True)
            return function(x, *rest).mul_(3).add_(side)

        return block

    got, want = run(block(fused), *case), run(block(lora_w), *case)
    assert_all_within_budget(got, want, truth_of(block(lora_w), *case))


@pytest.mark.parametrize("changed", ["x", "A", "B", "weight"])
def test_an_input_changed_in_place_before_backward_is_autograds_error(changed, case):
    x, adapters, frozen, grad_outputs = case
    x = x.requires_grad_() * 1
    A, B = (t.requires_grad_() for t in adapters)
    output = fused(x, A, B, frozen)
    with torch.no_grad():
        {"x": x, "A": A, "B": B, "weight": frozen.weight}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(*grad_outputs)


PRODUCTS = {  # of x, A and B: which need a gradient -> products in backward
    (False, False, True): 1,
    (False, True, False): 2,
    (False, True, True): 3,
    (True, False, False): 3,
    (True, False, True): 4,
    (True, True, False): 4,
    (True, True, True): 5,
}


@pytest.mark.parametrize("needs", PRODUCTS, ids=str)
def test_frozen_inputs_get_none_and_their_products_do_not_run(needs, case):
    x, adapters, frozen, grad_outputs = case
    full = run(fused, *case)
    leaves = [t.requires_grad_(need) for t, need in zip((x, *adapters), needs, strict=True)]
    with Calls() as forward:
        output = fused(*leaves, frozen)
    with Calls() as backward:
        gradients = raw_gradients(output, grad_outputs)
    assert torch.equal(output, full["output"])
    for name, need, gradient in zip(INPUTS, needs, gradients, strict=True):
        assert torch.equal(gradient, full[name]) if need else gradient is None, name
    assert forward.counted == {"GEMM": 3}
    assert backward.counted == {"GEMM": PRODUCTS[needs]}


@pytest.mark.parametrize("bias", [False, True])
def test_calls_and_saved_activations_with_fp32_adapters_under_autocast(bias, device):
    """All that launches a kernel: the products, one copy of A and B, and on the CPU a cast of
    their gradients."""
    x, adapters, frozen, grad_outputs = make_case(39, bias=bias, adapter_dtypes=FP32, device=device)
    x, *adapters = (t.requires_grad_() for t in (x, *adapters))
    with Calls() as forward, torch.autocast(device, dtype=torch.bfloat16):
        saved, output = saved_for_backward(fused, x, adapters, frozen)
    with Calls() as backward:
        raw_gradients(output, grad_outputs)
    assert forward.counted == {"GEMM": 3, "_foreach_copy_": 1}
    assert backward.counted == {"GEMM": 5} | ({"cast": 2} if device == "cpu" else {})
    saved = [t for t in saved if t.shape[0] == 39]
    assert saved[0] is x and [t.shape[1] for t in saved] == [IN, 8]
    assert torch.equal(saved[1], x @ adapters[0].bfloat16().t())


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_gradients_are_bitwise_equal(kind, case):
    assert_equal(run(checkpointed(fused, kind), *case), run(fused, *case))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same_and_nothing_is_saved(mode, case):
    x, adapters, frozen, _ = case
    adapters = [t.requires_grad_() for t in adapters]
    want = fused(x, *adapters, frozen)
    with mode():
        saved, output = saved_for_backward(fused, x * 1, adapters, frozen)
    assert torch.equal(output, want) and not output.requires_grad and not saved


def test_compiled_in_one_graph_is_bitwise_equal(case):
    compiled = torch.compile(lambda *inputs: fused(*inputs), backend="aot_eager", fullgraph=True)
    assert_equal(run(compiled, *case), run(fused, *case))


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
