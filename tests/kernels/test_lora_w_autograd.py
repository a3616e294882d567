"""LoRA_W as autograd and checkpointing use it, and what it runs and keeps."""

from functools import partial

import pytest
import torch
from attention_case import (
    IN,
    Calls,
    assert_equal,
    names_of,
    raw_gradients,
    run,
    saved_for_backward,
)
from attention_case import make_case as make_any_case

from fused_lora.lora_linear import LoRA_W

fused = LoRA_W.apply
make_case = partial(make_any_case, layers=1)
_, INPUTS = names_of(range(2))
FP32 = (torch.float32,) * 2


@pytest.fixture
def case(device):
    return make_case(3, 13, device=device)


# --- what autograd asks ---------------------------------------------------------------------------


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


def test_compiled_in_one_graph_is_bitwise_equal(case):
    compiled = torch.compile(lambda *inputs: fused(*inputs), backend="aot_eager", fullgraph=True)
    assert_equal(run(compiled, *case), run(fused, *case))
