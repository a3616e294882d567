"""LoRA_W as autograd and checkpointing use it, and what it runs and keeps."""

from functools import partial

import pytest
import torch
from attention_case import (
    IN,
    Calls,
    assert_all_within_budget,
    assert_equal,
    lora_w,
    names_of,
    raw_gradients,
    run,
    saved_for_backward,
    truth_of,
)
from attention_case import make_case as make_any_case
from reference import CHECKPOINTS, checkpointed, random

from fused_lora.lora_linear import LoRA_W

fused = LoRA_W.apply
make_case = partial(make_any_case, layers=1)
_, INPUTS = names_of(range(2))
FP32 = (torch.float32,) * 2


@pytest.fixture
def case(device):
    return make_case(3, 13, device=device)


# --- what autograd asks ---------------------------------------------------------------------------


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
