"""LoRA_QKV as a citizen of autograd: what it saves, writes and skips, and the GPU's own traps."""

import pytest
import torch
from attention_case import (
    IN,
    Calls,
    assert_all_within_budget,
    assert_equal,
    lora_qkv,
    make_case,
    names_of,
    raw_gradients,
    run,
    saved_for_backward,
    truth_of,
)

from fused_lora.lora_linear import LoRA_QKV

fused = LoRA_QKV.apply
OUTPUTS, INPUTS = names_of(range(6))
FP32 = (torch.float32,) * 6


@pytest.fixture
def case(device):
    return make_case(3, 13, device=device)


# --- autograd -------------------------------------------------------------------------------------


def test_backward_through_one_output_after_another_adds_up_to_all_at_once(case):
    x, adapters, frozen, grad_outputs = case
    leaves = [t.requires_grad_() for t in (x, *adapters)]
    outputs = fused(*leaves, frozen)
    for output, grad in zip(outputs, grad_outputs, strict=True):
        output.backward(grad, retain_graph=True)
    got = dict(zip(INPUTS, (leaf.grad for leaf in leaves), strict=True))
    want, truth = run(lora_qkv, *case), truth_of(lora_qkv, *case)
    assert_all_within_budget(got, *({name: of[name] for name in INPUTS} for of in (want, truth)))


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
