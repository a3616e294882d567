"""LoRA_Attention as autograd, checkpointing and CUDA graphs use it, and what it runs and keeps."""

import math
from functools import partial

import pytest
import torch
from attention_case import Calls, assert_all_within_budget, assert_equal
from cuda_graph import capture
from lora_attention_case import FP32, IN, NAMES, eager, exact, fused, make, run
from reference import CHECKPOINTS, checkpointed, random

from fused_lora.step.recompute import recomputed

# --- what autograd asks ---------------------------------------------------------------------------


@pytest.fixture
def case(device):
    """With our own attention's backward, which a GPU repeats bit for bit."""
    inputs, grad = make(device=device, head_dim=32)
    leaves = [t.requires_grad_() for t in (inputs[0], *inputs[4:-1])]
    return inputs, leaves, grad


def test_a_second_backward_through_a_retained_graph_is_bitwise_equal(case):
    inputs, leaves, grad = case
    output = fused(*inputs)
    first = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(output, leaves, grad)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_nothing_that_came_in_or_was_saved_is_written(case):
    inputs, _, grad = case
    frozen = inputs[-1]
    watched = [t for t in (*inputs[:-1], *frozen.qkv[:6], *frozen.o[:2], grad) if t is not None]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: watched.append(t) or t, lambda t: t):
        output = fused(*inputs)
    watched.append(output)
    before = [t.detach().clone() for t in watched]
    output.backward(grad)
    assert len(watched) > 30
    assert all(torch.equal(t, old) for t, old in zip(watched, before, strict=True))


def test_x_may_have_other_consumers_and_the_output_may_be_changed_in_place(device):
    def block(function):
        return lambda x, *rest: function(x, *rest).mul_(2).add_(x.sum(-1, keepdim=True))

    inputs, grad = make(device=device)
    truth = exact(inputs, grad)  # of the function itself, whose x the block uses once more
    got, want = run(block(fused), inputs, grad), run(block(eager), inputs, grad)
    beside = grad.double().sum(-1, keepdim=True)
    truth = {name: 2 * tensor for name, tensor in truth.items()}
    truth["x"] = truth["x"] + beside
    truth["output"] = truth["output"] + inputs[0].double().sum(-1, keepdim=True)
    assert_all_within_budget(got, want, truth)


@pytest.mark.parametrize("changed", ["x", "k_B", "o_A", "v_weight", "cos"])
def test_an_input_changed_in_place_before_backward_is_autograds_error(changed, case):
    inputs, _, grad = case
    inputs[0] = inputs[0] * 1
    output = fused(*inputs)
    tensors = {"x": inputs[0], "cos": inputs[1], "v_weight": inputs[-1].qkv.v_weight}
    tensors |= dict(zip(NAMES, inputs[4:-1], strict=True))
    with torch.no_grad():
        tensors[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(grad)


def test_only_what_asks_for_a_gradient_gets_one(case):
    inputs, leaves, grad = case
    want = dict(
        zip(map(id, leaves), torch.autograd.grad(fused(*inputs), leaves, grad), strict=True)
    )
    for trained in ([0], [1], [2, 3], [1, 3, 5], [7], [8], [7, 8], [0, 8], range(1, 9)):
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(index in trained)
        some = [leaves[index] for index in trained]
        got = torch.autograd.grad(fused(*inputs), some, grad)
        for leaf, gradient in zip(some, got, strict=True):
            assert gradient.dtype == leaf.dtype
            assert torch.equal(gradient, want[id(leaf)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same_and_nothing_is_saved(mode, case):
    inputs, _, _ = case
    want, saved = fused(*inputs), []
    with (
        mode(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        output = fused(inputs[0] * 1, *inputs[1:])
    assert not saved and torch.equal(output, want) and not output.requires_grad


def test_create_graph_is_an_error(case):
    inputs, leaves, grad = case
    with pytest.raises(RuntimeError, match="LoRA_Attention is not twice differentiable"):
        torch.autograd.grad(fused(*inputs), leaves, grad, create_graph=True)


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


@pytest.mark.parametrize("kind", [*CHECKPOINTS, "ours"])
def test_checkpointed_gradients_are_bitwise_equal(kind, device):
    again = partial(recomputed, fused) if kind == "ours" else checkpointed(fused, kind)
    case = make(device=device, head_dim=32)
    assert_equal(run(again, *case), run(fused, *case))


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_captured_cuda_graph_is_right_on_new_data(device):
    inputs, grad = make(device=device, head_dim=32, adapter_dtypes=FP32)
    leaves = [t.requires_grad_() for t in (inputs[0], *inputs[4:-1])]

    def step():
        # the cache of casts outlives neither this block nor, so, the capture
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
            output = fused(*inputs)
        return output, *torch.autograd.grad(output, leaves, grad)

    replay, results = capture(step)
    with torch.no_grad():
        for number, tensor in enumerate((*leaves, grad)):
            scale = tensor.float().std().item()
            tensor.copy_(random(*tensor.shape, seed=60 + number, scale=scale))
    replay()
    got = dict(zip(["output", "x", *NAMES], (t.detach() for t in results), strict=True))
    now = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
    with torch.autocast(device, dtype=torch.bfloat16):
        want = run(eager, now, grad)
    assert_all_within_budget(got, want, exact(now, grad))
    assert math.isfinite(sum(t.float().sum().item() for t in got.values()))
