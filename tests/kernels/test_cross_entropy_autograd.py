"""linear_cross_entropy as a citizen of autograd: what it gives, skips and refuses."""

from itertools import product

import pytest
import torch
import triton
from cross_entropy_case import (
    HIDDEN,
    IGNORED,
    NAMES,
    TOKENS,
    VOCABULARY,
    assert_equal,
    assert_matches,
    case,
    double,
    eager,
    inputs,
    run,
    small_blocks,
)
from reference import CHECKPOINTS, assert_within_budget, checkpointed, random

import fused_lora.cross_entropy as module
from fused_lora.cross_entropy import linear_cross_entropy

fixtures = case, small_blocks  # pytest finds them in this module


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_ignored", [True, False])
@pytest.mark.parametrize("grad_loss", [3.0, 1 / 3, -0.01])
def test_the_incoming_gradient_is_multiplied_in(grad_loss, drop_ignored, case):
    got = run(linear_cross_entropy, *case, grad_loss=grad_loss, drop_ignored=drop_ignored)
    assert_matches(got, case, grad_loss=grad_loss)


def test_the_scale_is_not_rounded_to_bf16(case):
    unscaled = run(linear_cross_entropy, *case, num_items_in_batch=1)
    scale = torch.tensor(1 / 3, device=case[0].device)
    got = run(linear_cross_entropy, *case, num_items_in_batch=1, grad_loss=1 / 3)
    assert torch.equal(got["hidden"], (unscaled["hidden"].float() * scale).bfloat16())


def test_a_second_backward_through_a_retained_graph_gives_the_same(case):
    *tensors, labels = case
    leaves = [t.requires_grad_() for t in tensors]
    loss = linear_cross_entropy(*leaves[:2], labels, bias=leaves[2])
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    doubled = torch.autograd.grad(loss, leaves, torch.full_like(loss, 2.0))
    for one, other, twice in zip(first, second, doubled, strict=True):
        assert one.data_ptr() != other.data_ptr()
        assert torch.equal(one, other) and torch.equal(2 * one, twice)


def test_differentiating_twice_is_a_clear_error(case):
    hidden, weight, _, labels = case
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    with pytest.raises(RuntimeError, match="linear_cross_entropy is not twice differentiable"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("drop_ignored", [True, False])
def test_nothing_that_came_in_or_was_saved_is_written(drop_ignored, case):
    *tensors, labels = case
    leaves = [t.requires_grad_() for t in tensors]
    num_items = torch.tensor(9.0, device=labels.device)
    saved, grad_loss = [], torch.tensor(3.0, device=labels.device)
    options = {"bias": leaves[2], "num_items_in_batch": num_items, "drop_ignored": drop_ignored}
    before = [t.detach().clone() for t in (*leaves, labels, num_items, grad_loss)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(*leaves[:2], labels, **options)
    before += [t.clone() for t in saved]
    loss.backward(grad_loss)
    for now, old in zip((*leaves, labels, num_items, grad_loss, *saved), before, strict=True):
        assert torch.equal(now, old)


@pytest.mark.parametrize("drop_ignored", [True, False])
def test_every_subset_of_frozen_inputs_gives_the_same_values_elsewhere(drop_ignored, case):
    *tensors, labels = case
    full = run(linear_cross_entropy, *case, drop_ignored=drop_ignored)
    for needs in product((False, True), repeat=3):
        leaves = [t.clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        loss = linear_cross_entropy(*leaves[:2], labels, bias=leaves[2], drop_ignored=drop_ignored)
        assert torch.equal(loss, full["loss"]) and loss.requires_grad == any(needs)
        if any(needs):
            loss.backward()
        for name, need, leaf in zip(NAMES[1:], needs, leaves, strict=True):
            assert torch.equal(leaf.grad, full[name]) if need else leaf.grad is None, (name, needs)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_tied_to_the_embedding_gets_both_gradients(tied, device):
    """And an untied one its own; hidden comes from the embedding either way."""
    hidden, table, _, labels = inputs(*TOKENS, dtype=torch.bfloat16, device=device)
    head = random(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=device, seed=9)
    token_ids = torch.arange(21, device=device).view(TOKENS) % 5

    def model(function):
        def of_table(_, table, labels, bias=None):
            weight = table if tied else head.to(table.dtype)
            return function(table[token_ids] * 2, weight, labels)

        return of_table

    results = {"weight": run(model(linear_cross_entropy), hidden, table, None, labels)["weight"]}
    rounded = run(model(eager), hidden, table, None, labels)["weight"]
    truth = run(model(eager), hidden, table.double(), None, labels)["weight"]
    assert_within_budget("tied" if tied else "untied", results["weight"], rounded, truth)
    assert (truth[10:] == 0).all() != tied


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_the_product_is_bf16_and_gradients_have_their_inputs_dtype(
    weight_dtype, hidden_dtype, device
):
    hidden, weight, bias, labels = inputs(*TOKENS, dtype=torch.float32, device=device)
    case = hidden.to(hidden_dtype), weight.to(weight_dtype), bias.to(weight_dtype), labels
    with torch.autocast(device, dtype=torch.bfloat16):
        got = run(linear_cross_entropy, *case)
        rounded = run(eager, *case)
    truth = run(eager, *(t.double() for t in case[:3]), labels)
    for name, tensor in zip(NAMES[1:], case, strict=False):
        assert got[name].dtype == rounded[name].dtype == tensor.dtype
        assert_within_budget(name, got[name], rounded[name], truth[name])
    with torch.autocast(device, dtype=torch.bfloat16):
        # it is bf16, and not fp32, that was computed
        bf16 = run(linear_cross_entropy, *(t.bfloat16() for t in case[:3]), labels)
        leaves = [t.clone().requires_grad_() for t in case[:3]]
        loss = linear_cross_entropy(*leaves[:2], labels, bias=leaves[2])
    assert torch.equal(got["loss"], bf16["loss"])
    with torch.no_grad():  # its own backward, before autograd would cast
        gradients = loss.grad_fn.apply(torch.ones_like(loss))[:3]
    for name, gradient, leaf in zip(NAMES[1:], gradients, leaves, strict=True):
        assert gradient.dtype == leaf.dtype and torch.equal(gradient, got[name])


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_every_tokens_loss_is_within_the_error_budget(
    weight_dtype, hidden_dtype, device, monkeypatch
):
    """Of 112 tokens in eight batches: in the mean over a few, errors cancel or not by luck."""
    seen, launch = [], module.cross_entropy_
    monkeypatch.setattr(module, "cross_entropy_", lambda *a: seen.append(launch(*a)) or seen[-1])
    rounded, truth = [], []
    for seed in range(0, 80, 10):
        hidden, weight, bias, labels = inputs(
            *TOKENS, dtype=torch.float32, device=device, seed=seed
        )
        case = hidden.to(hidden_dtype), weight.to(weight_dtype), bias.to(weight_dtype), labels
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = linear_cross_entropy(*case[:2], labels, bias=case[2])
            for found, (h, w, b, _) in ((rounded, case), (truth, double(case))):
                losses = eager(h, w, labels, bias=b, reduction="none", num_items_in_batch=1)
                found.append(losses[labels.flatten() != IGNORED])
        torch.testing.assert_close(loss, seen[-1].mean())
    got, rounded, truth = (torch.cat(losses) for losses in (seen, rounded, truth))
    assert (got.dtype, got.shape, len(seen)) == (torch.float32, (112,), 8)
    assert_within_budget("losses", got, rounded, truth)


def test_fp16_gradients_outlive_a_large_batch_and_a_loss_scaler(device):
    """1 / 2^20 items times a softmax of 1 / 139 is 7e-9 and less than half of fp16's least number;
    eager scales it first, so this has to do as if."""
    options = {"num_items_in_batch": 2**20, "grad_loss": 2.0**16}
    case = inputs(*TOKENS, dtype=torch.float16, device=device)
    got = run(linear_cross_entropy, *case, **options)
    assert got["hidden"].count_nonzero() >= 14 * HIDDEN * 0.99
    assert_matches(got, case, **options)


def test_fp16_weight_gradients_whose_sum_over_a_chunk_overflows(device):
    hidden, weight, bias, labels = inputs(64, dtype=torch.float16, device=device)
    hidden = hidden * 0.01 + 2000.0  # 64 times that is 128,000
    assert_matches(
        {"weight": run(linear_cross_entropy, hidden, weight * 1e-3, bias, labels * 0)["weight"]},
        (hidden, weight * 1e-3, bias, labels * 0),
    )


# --- with the rest of PyTorch ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_gradients_are_bitwise_equal(kind, case):
    def loss(hidden, weight, labels, bias):
        again = checkpointed(lambda h, w, y, b: linear_cross_entropy(h, w, y, bias=b), kind)
        return again(hidden, weight, labels, bias)

    assert_equal(run(loss, *case), run(linear_cross_entropy, *case))


def test_compiled_around_it_is_right(case):
    """Compiled up to it and after it: it is one graph break."""

    def model(hidden, weight, labels, bias):
        return linear_cross_entropy(torch.sin(hidden), weight, labels, bias=bias) * 2

    compiled = torch.compile(model, backend="aot_eager")
    assert_equal(run(compiled, *case), run(model, *case))
    torch._dynamo.reset()


@pytest.mark.parametrize("drop_ignored", [True, False])
def test_repetition_is_bitwise_equal(drop_ignored, case):
    options = {"drop_ignored": drop_ignored, "chunk_tokens": 5}
    first = run(linear_cross_entropy, *case, **options)
    # fills what is empty with NaN; cuBLAS warns of a workspace setting that is the user's
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert_equal(run(linear_cross_entropy, *case, **options), first)
    finally:
        torch.use_deterministic_algorithms(False)


# --- errors ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": lambda t: t[..., 1:]}, r"hidden \[\.\.\., hidden\].*got hidden \[3, 7, 19\]"),
        ({"hidden": lambda t: t[0, 0, 0]}, r"hidden \[\.\.\., hidden\].*got hidden \[\]"),
        ({"weight": lambda t: t[0]}, r"weight \[vocabulary, hidden\].*weight \[20\]"),
        ({"weight": lambda t: t[:0]}, r"weight \[vocabulary, hidden\].*weight \[0, 20\]"),
        ({"labels": lambda t: t[:, 1:]}, r"labels \[\.\.\.\].*labels \[3, 6\]"),
        ({"labels": lambda t: t.view(-1)}, r"labels \[\.\.\.\].*labels \[21\]"),
        ({"bias": lambda t: t[1:]}, r"bias \[vocabulary\].*bias \[138\]"),
        ({"labels": lambda t: t.float()}, r"labels in int64 or int32, got.*labels .*float32"),
        ({"weight": lambda t: t.float()}, r"one dtype, or torch.autocast, got.*weight .*float32"),
        ({"bias": lambda t: t.float()}, r"one dtype, or torch.autocast, got.*bias .*float32"),
        ({"labels": lambda t: t.to("meta")}, r"on one device, got.*labels .* on meta"),
        ({"weight": lambda t: t.to("meta")}, r"on one device, got.*weight .* on meta"),
        ({"chunk_tokens": lambda t: 0}, r"chunk_tokens above 0, got 0"),
        ({"chunk_tokens": lambda t: -3}, r"chunk_tokens above 0, got -3"),
        ({"num_items_in_batch": lambda t: torch.ones(2)}, r"num_items_in_batch as a number.*\[2\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_inputs_that_do_not_fit_are_a_value_error(changed, message, case):
    arguments = dict(zip(("hidden", "weight", "bias", "labels"), case, strict=True))
    for name, change in changed.items():
        arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=r"linear_cross_entropy wants .*" + message) as error:
        linear_cross_entropy(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["label_smoothing", "z_loss"])
def test_label_smoothing_and_z_loss_are_refused_by_name(option, case):
    """And not ignored, as transformers does."""
    hidden, weight, _, labels = case
    with pytest.raises(TypeError, match=rf"linear_cross_entropy\(\).*'{option}'"):
        linear_cross_entropy(hidden, weight, labels, **{option: 0.1})


def test_a_dtype_without_a_kernel_is_a_value_error(case):
    hidden, weight, _, labels = case
    with pytest.raises(ValueError, match=r"linear_cross_entropy computes in .* got torch.float64"):
        linear_cross_entropy(hidden.double(), weight.double(), labels)


def test_cpu_tensors_without_the_interpreter_are_a_value_error(monkeypatch):
    compiled = triton.JITFunction(module._cross_entropy_kernel.fn)
    monkeypatch.setattr(module, "_cross_entropy_kernel", compiled)
    hidden, weight, _, labels = inputs(*TOKENS, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match=r"linear_cross_entropy got tensors on the CPU.*INTERPRET"):
        linear_cross_entropy(hidden, weight, labels)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_second_gpu_is_right():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = inputs(*TOKENS, dtype=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_matches(run(linear_cross_entropy, *case), case)
    assert torch.cuda.current_device() == 0
