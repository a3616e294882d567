"""LoRA_Attention as autograd, checkpointing and CUDA graphs use it, and what it runs and keeps."""

from functools import partial

import pytest
import torch
from attention_case import Calls, assert_equal
from lora_attention_case import IN, fused, make, run

from fused_lora.step.recompute import recomputed

# --- what autograd asks ---------------------------------------------------------------------------


@pytest.fixture
def case(device):
    """With our own attention's backward, which a GPU repeats bit for bit."""
    inputs, grad = make(device=device, head_dim=32)
    leaves = [t.requires_grad_() for t in (inputs[0], *inputs[4:-1])]
    return inputs, leaves, grad


# --- what runs and what is kept -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "products"), [(range(9), 16), (range(1, 9), 12), ([7], 2), ([8], 1)], ids=str
)
def test_no_product_is_made_for_what_wants_no_gradient(trained, products, case):
    inputs, leaves, grad = case
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in trained)
    with Calls() as forward:
        output = fused(*inputs)
    some = [leaves[index] for index in trained]
    with Calls() as backward:
        torch.autograd.grad(output, some, grad)
    assert forward.counted["GEMM"] == 10
    assert backward.counted["GEMM"] == products


def test_what_is_saved_is_what_the_docstring_counts(device):
    inputs, _ = make(device=device, head_dim=32)
    for tensor in (inputs[0], *inputs[4:-1]):
        tensor.requires_grad_()
    found = {}

    def pack(t):
        if t.shape[0] in (18, 2) and t.dim() > 1:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = fused(*inputs)
    assert output.requires_grad
    # x, z, [q | k | v], a and a Ao' of each token in bf16; of each of its heads a log-sum-exp
    assert sum(found.values()) == 18 * (2 * (IN + 24 + 8 * 32 + 4 * 32 + 8) + 4 * 4)


def test_gradients_with_our_own_checkpointing_are_bitwise_equal(device):
    case = make(device=device, head_dim=32)
    assert_equal(run(partial(recomputed, fused), *case), run(fused, *case))


# --- on the GPU -----------------------------------------------------------------------------------
