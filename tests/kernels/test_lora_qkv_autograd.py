"""LoRA_QKV as a citizen of autograd: what it saves, writes and skips, and the GPU's own traps."""

from itertools import product

import pytest
import torch
from attention_case import (
    IN,
    Calls,
    assert_all_within_budget,
    assert_equal,
    assert_right,
    lora_qkv,
    make_case,
    names_of,
    raw_gradients,
    run,
    saved_for_backward,
    truth_of,
)
from cuda_graph import capture
from reference import CHECKPOINTS, checkpointed, random

from fused_lora.lora_linear import LoRA_QKV

fused = LoRA_QKV.apply
OUTPUTS, INPUTS = names_of(range(6))
FP32 = (torch.float32,) * 6


@pytest.fixture
def case(device):
    return make_case(3, 13, device=device)


# --- autograd -------------------------------------------------------------------------------------


def test_a_second_backward_through_a_retained_graph_gives_the_same(case):
    x, adapters, frozen, grad_outputs = case
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    outputs = fused(*leaves, frozen)
    first = torch.autograd.grad(outputs, leaves, grad_outputs, retain_graph=True)
    second = torch.autograd.grad(outputs, leaves, grad_outputs)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_backward_through_one_output_after_another_adds_up_to_all_at_once(case):
    x, adapters, frozen, grad_outputs = case
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    outputs = fused(*leaves, frozen)
    for output, grad in zip(outputs, grad_outputs, strict=True):
        output.backward(grad, retain_graph=True)
    got = dict(zip(INPUTS, (leaf.grad for leaf in leaves), strict=True))
    want, truth = run(lora_qkv, *case), truth_of(lora_qkv, *case)
    assert_all_within_budget(got, *({name: of[name] for name in INPUTS} for of in (want, truth)))


def test_differentiating_twice_is_a_clear_error(case):
    x, adapters, frozen, grad_outputs = case
    outputs = fused(x.requires_grad_(), *adapters, frozen)
    with pytest.raises(RuntimeError, match="LoRA_QKV is not twice differentiable"):
        torch.autograd.grad(outputs, x, grad_outputs, create_graph=True)


def test_nothing_that_came_in_or_was_saved_is_written(case):
    x, adapters, frozen, grad_outputs = case
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    tensors = [*leaves, *frozen[:6], *grad_outputs]
    before = [t.detach().clone() for t in tensors]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = fused(*leaves, frozen)
    tensors += [*saved, *outputs]
    before += [t.detach().clone() for t in (*saved, *outputs)]
    torch.autograd.backward(outputs, grad_outputs)
    assert all(torch.equal(now, old) for now, old in zip(tensors, before, strict=True))


def test_x_may_have_other_consumers_and_outputs_may_be_changed_in_place(case):
    x = case[0]
    other = random(*x.shape, dtype=x.dtype, device=x.device, seed=5)

    def block(function):
        def block(x, *rest):
            q, k, v = function(x, *rest)
            side = (x * other.to(x.dtype)).sum(-1, keepdim=True)
            return q.mul_(3), k + side, v.add_(side)

        return block

    got, want = run(block(fused), *case), run(block(lora_qkv), *case)
    assert_all_within_budget(got, want, truth_of(block(lora_qkv), *case))


@pytest.mark.parametrize("changed", ["x", "q_B", "v_weight"])
def test_an_input_changed_in_place_before_backward_is_autograds_error(changed, case):
    x, adapters, frozen, grad_outputs = case
    x = x.requires_grad_() * 1
    adapters = [t.requires_grad_() for t in adapters]
    outputs = fused(x, *adapters, frozen)
    with torch.no_grad():
        {"x": x, "q_B": adapters[1], "v_weight": frozen.v_weight}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, grad_outputs)


def test_every_subset_of_frozen_inputs_gives_none_there_and_the_same_values_elsewhere(case):
    x, adapters, frozen, grad_outputs = case
    full = run(fused, *case)
    for needs in product((False, True), repeat=7):
        leaves = [
            t.clone().requires_grad_(need) for t, need in zip((x, *adapters), needs, strict=True)
        ]
        outputs = fused(*leaves, frozen)
        for name, output in zip(OUTPUTS, outputs, strict=True):
            assert torch.equal(output, full[name]) and output.requires_grad == any(needs)
        if not any(needs):
            continue
        gradients = raw_gradients(outputs, grad_outputs)
        for name, need, gradient in zip(INPUTS, needs, gradients, strict=True):
            if need:
                assert torch.equal(gradient, full[name]), (name, needs)
            else:
                assert gradient is None, (name, needs)


# --- what runs and what is kept -------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_calls_with_fp32_adapters_under_autocast(bias, device):
    """All that launches a kernel: the products, one copy of all adapters, and on the CPU a cast
    of their gradients."""
    x, adapters, frozen, grad_outputs = make_case(39, bias=bias, adapter_dtypes=FP32, device=device)
    x, *adapters = (t.requires_grad_() for t in (x, *adapters))
    with Calls() as forward, torch.autocast(device, dtype=torch.bfloat16):
        outputs = fused(x, *adapters, frozen)
    with Calls() as backward:
        raw_gradients(outputs, grad_outputs)
    assert forward.counted == {"GEMM": 7, "_foreach_copy_": 1}
    assert backward.counted == {"GEMM": 11} | ({"cast": 4} if device == "cpu" else {})


@pytest.mark.parametrize(
    ("trained", "used", "in_backward"),
    [
        (INPUTS, OUTPUTS, {"GEMM": 11}),
        (INPUTS[1:], OUTPUTS, {"GEMM": 7}),  # the first layer: 4 products of dx less
        (("x",), OUTPUTS, {"GEMM": 7}),
        (("q_A", "k_A", "v_A"), OUTPUTS, {"GEMM": 4}),
        (("q_B", "k_B", "v_B"), OUTPUTS, {"GEMM": 3}),
        (("q_A", "q_B"), OUTPUTS, {"GEMM": 3, "zero_": 2}),
        (INPUTS, ("q", "v"), {"GEMM": 8, "zero_": 1}),
        (("k_A", "k_B"), ("q", "v"), {}),
    ],
    ids=("all", "adapters", "x", "A", "B", "q", "k unused", "only k, unused"),
)
def test_only_what_is_needed_runs(trained, used, in_backward, case):
    x, adapters, frozen, grad_outputs = case
    for name, tensor in zip(INPUTS, (x, *adapters), strict=True):
        tensor.requires_grad_(name in trained)
    with Calls() as forward:
        outputs = fused(x, *adapters, frozen)
    grads = [
        grad if name in used else None for name, grad in zip(OUTPUTS, grad_outputs, strict=True)
    ]
    with Calls() as backward:
        raw_gradients(outputs, grads)
    assert forward.counted == {"GEMM": 7, "_foreach_copy_": 1}
    assert backward.counted == in_backward


# eager keeps three x A' of rank 8 and x; where adapters are fp32 it keeps x for each of the three,
# as it was cast for that one
EAGER_BYTES = {
    (torch.bfloat16, False): 2 * (IN + 3 * 8),
    (torch.float32, True): 2 * (3 * IN + 3 * 8),
    (torch.float32, False): 4 * (3 * IN + 3 * 8),
}


@pytest.mark.parametrize(("adapter_dtype", "autocast"), EAGER_BYTES, ids=str)
def test_bytes_saved_per_token(adapter_dtype, autocast, device):
    x, adapters, frozen, _ = make_case(39, adapter_dtypes=(adapter_dtype,) * 6, device=device)
    x, *adapters = (t.requires_grad_() for t in (x, *adapters))
    saved_bytes = {}
    for function in (fused, lora_qkv):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            saved, outputs = saved_for_backward(function, x, adapters, frozen)
        saved = [t for t in saved if t.shape[0] == 39]
        saved_bytes[function] = sum(t.nbytes for t in saved)
        assert any(t is x for t in saved) or function is lora_qkv  # not a copy
        del outputs  # it held them
    assert saved_bytes[fused] == 39 * 2 * (IN + 3 * 8)
    assert saved_bytes[lora_qkv] == 39 * EAGER_BYTES[adapter_dtype, autocast]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_gradients_are_bitwise_equal(kind, case):
    assert_equal(run(checkpointed(fused, kind), *case), run(fused, *case))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_outputs_are_the_same_and_nothing_is_saved(mode, case):
    x, adapters, frozen, _ = case
    adapters = [t.requires_grad_() for t in adapters]
    want = fused(x, *adapters, frozen)
    with mode():
        saved, outputs = saved_for_backward(fused, x * 1, adapters, frozen)
    assert not saved
    for one, other in zip(outputs, want, strict=True):
        assert torch.equal(one, other) and not one.requires_grad


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_in_one_graph_is_bitwise_equal(autocast, device):
    case = make_case(3, 13, adapter_dtypes=FP32 if autocast else None, device=device)
    compiled = torch.compile(lambda *inputs: fused(*inputs), backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        got, want = run(compiled, *case), run(fused, *case)
    if autocast and device == "cuda":
        # fp32 gradients of A and B are stored by the product itself, but not in compiled code
        got, want = ({k: t.bfloat16() for k, t in one.items()} for one in (got, want))
    assert_equal(got, want)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_compiled_is_within_the_error_budget(case):
    got = run(torch.compile(lambda *inputs: fused(*inputs)), *case)
    assert_all_within_budget(got, run(lora_qkv, *case), truth_of(lora_qkv, *case))


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_a_captured_cuda_graph_is_right_on_new_data(autocast, device):
    case = make_case(3, 13, adapter_dtypes=FP32 if autocast else None, device=device)
    x, adapters, frozen, grad_outputs = case
    leaves = [t.clone().requires_grad_() for t in (x, *adapters)]

    def step():
        # the cache of casts outlives neither this block nor, so, the capture
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
            outputs = fused(*leaves, frozen)
        return *outputs, *torch.autograd.grad(outputs, leaves, grad_outputs)

    replay, results = capture(step)
    for seed in (60, 80):
        with torch.no_grad():
            for number, tensor in enumerate((*leaves, *grad_outputs)):
                scale = tensor.float().std().item()
                tensor.copy_(random(*tensor.shape, seed=seed + number, scale=scale))
        replay()
        got = {
            name: result.detach() for name, result in zip((*OUTPUTS, *INPUTS), results, strict=True)
        }
        now = leaves[0].detach(), [t.detach() for t in leaves[1:]], frozen, grad_outputs
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            want = run(lora_qkv, *now)
        assert_all_within_budget(got, want, truth_of(lora_qkv, *now))


@pytest.mark.gpu
def test_a_second_gpu_is_right():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    assert_right(fused, lora_qkv, *make_case(3, 13, device="cuda:1"))
    assert torch.cuda.current_device() == 0
