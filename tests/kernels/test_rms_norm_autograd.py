"""RMSNorm as a citizen of autograd: what it saves, writes, skips and refuses."""

from itertools import product

import pytest
import torch
import triton
from reference import CHECKPOINTS, checkpointed
from rms_norm_case import (
    BOTH,
    EAGER,
    EPS,
    Kernel,
    as_tuple,
    assert_equal,
    assert_right,
    eager_add_rms_norm,
    eager_rms_norm,
    make,
    run,
)

import fused_lora.rms_norm as module
from fused_lora.rms_norm import AddRMSNorm, RMSNorm, add_rms_norm, rms_norm
from fused_mlp.launching import DTYPES


@pytest.fixture
def case(function, device):
    return make(function, 2, 3, 139, dtype=torch.bfloat16, device=device)


# --- autograd -------------------------------------------------------------------------------------


@BOTH
def test_nothing_that_came_in_or_was_saved_is_written(function, case):
    inputs, gradients = case
    leaves = [t.requires_grad_() for t in inputs]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = as_tuple(function(*leaves, EPS))
    everything = [*leaves, *gradients, *saved, *outputs]
    before = [t.detach().clone() for t in everything]
    torch.autograd.backward(outputs, gradients)
    assert_equal(everything, before)


@BOTH
def test_saved_are_what_was_normalised_the_weight_and_one_number_a_row(function, case):
    leaves = [t.requires_grad_() for t in case[0]]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = as_tuple(function(*leaves, EPS))
    normalised, weight, rstd = saved
    if function is rms_norm:
        assert normalised is leaves[0]
    else:
        assert normalised.data_ptr() == outputs[1].data_ptr()
    assert weight is leaves[-1]
    want = torch.rsqrt(normalised.detach().float().pow(2).mean(-1) + EPS)
    torch.testing.assert_close(rstd.view(want.shape), want)


@BOTH
def test_a_second_backward_through_a_retained_graph_gives_the_same(function, case):
    inputs, gradients = case
    leaves = [t.requires_grad_() for t in inputs]
    outputs = function(*leaves, EPS)
    first = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)
    assert_equal(torch.autograd.grad(outputs, leaves, gradients), first)


@BOTH
def test_differentiating_twice_is_a_clear_error(function, case):
    inputs, gradients = case
    outputs = function(*(t.requires_grad_() for t in inputs), EPS)
    with pytest.raises(RuntimeError, match=f"^{function.__name__} is not twice differentiable"):
        torch.autograd.grad(outputs, inputs[0], gradients, create_graph=True)


def test_a_sum_beside_the_norm_keeps_the_gradient_that_both_share(case_of_two):
    """z = norm(x) + w: the norm must not write its own into the tensor that w gets as well."""
    (x, weight), gradients = case_of_two

    def block(norm):
        def with_other(x, weight, eps):
            other = x * 3
            return norm(x, weight, eps) + other + x

        return with_other

    assert_right(block(rms_norm), (x, weight), gradients, block(eager_rms_norm))
    leaves = [t.clone().requires_grad_() for t in (x, weight, x)]
    (rms_norm(*leaves[:2], EPS) + leaves[2]).backward(gradients[0])
    assert torch.equal(leaves[2].grad, gradients[0])


@pytest.fixture
def case_of_two(device):
    return make(rms_norm, 2, 3, 139, dtype=torch.bfloat16, device=device)


def residual_blocks(add_norm):
    """Two in a row as a decoder has them: total goes on beside y, and to the next addition."""

    def blocks(x, delta, weight, eps):
        y, total = add_norm(x, delta, weight, eps)
        y, total = add_norm(total, y * 0.5 + delta, weight, eps)
        return y + total, total

    return blocks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_stream_through_two_norms_is_right(dtype, device):
    inputs, gradients = make(add_rms_norm, 2, 3, 139, dtype=dtype, device=device)
    fused, eager = residual_blocks(add_rms_norm), residual_blocks(eager_add_rms_norm)
    assert_right(fused, inputs, gradients, eager)


def test_leaves_x_and_delta_do_not_share_the_memory_of_their_gradients(device):
    (*tensors, weight), gradients = make(add_rms_norm, 5, 52, dtype=torch.float32, device=device)
    x, delta = (t.requires_grad_() for t in tensors)
    for repetition in (1, 2):  # the second adds in place to the first
        torch.autograd.backward(add_rms_norm(x, delta, weight, EPS), gradients)
        assert x.grad.data_ptr() != delta.grad.data_ptr()
        want, _, _ = run(add_rms_norm, (x, delta, weight), gradients)[2:]
        assert torch.equal(x.grad, repetition * want) and torch.equal(delta.grad, x.grad)


@pytest.mark.parametrize("used", [0, 1], ids=["y", "total"])
def test_an_output_that_nobody_uses_counts_as_one_with_a_gradient_of_zero(used, device):
    inputs, gradients = make(add_rms_norm, 5, 52, dtype=torch.bfloat16, device=device)
    leaves = [t.requires_grad_() for t in inputs]
    got = torch.autograd.grad(add_rms_norm(*leaves, EPS)[used], leaves, gradients[used])
    gradients[1 - used] = torch.zeros_like(gradients[1 - used])
    assert_equal(got, run(add_rms_norm, inputs, gradients)[2:])
    if used == 1:
        assert torch.equal(got[0], gradients[1]) and not got[2].any()


@BOTH
def test_every_subset_of_inputs_may_need_a_gradient(function, case):
    inputs, gradients = case
    full = run(function, inputs, gradients)[len(gradients) :]
    for needs in product((False, True), repeat=len(inputs)):
        leaves = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
        outputs = as_tuple(function(*leaves, EPS))
        assert all(output.requires_grad == any(needs) for output in outputs)
        if not any(needs):
            continue
        torch.autograd.backward(outputs, gradients)
        for leaf, need, want in zip(leaves, needs, full, strict=True):
            if need:
                assert torch.equal(leaf.grad, want), needs
            else:
                assert leaf.grad is None, needs


@BOTH
def test_a_frozen_weight_costs_no_partial_sums(function, case, monkeypatch):
    inputs, gradients = case
    kernel = Kernel()
    monkeypatch.setattr(module, "MAX_PARTIAL_SUMS", 2)
    monkeypatch.setattr(module, "_rms_norm_backward_kernel", kernel)
    for need in (True, False):
        *leaves, weight = (t.clone().requires_grad_() for t in inputs)
        outputs = function(*leaves, weight.requires_grad_(need), EPS)
        torch.autograd.backward(outputs, gradients)
    (trained_grid, trained), (frozen_grid, frozen) = kernel.launches
    assert trained_grid == (2,) and trained[6].shape == (2, 139)
    assert frozen_grid == (6,) and frozen[6] is None  # a program for each of the 2 x 3 rows


@BOTH
def test_outputs_may_be_changed_in_place(function, device):
    inputs, gradients = make(function, 5, 52, dtype=torch.float32, device=device)

    def scaled(*inputs):
        y, *rest = as_tuple(function(*inputs))
        return y.mul_(0.5), *rest

    def eager_scaled(*inputs):
        y, *rest = as_tuple(EAGER[function](*inputs))
        return y * 0.5, *rest

    assert_right(scaled, inputs, gradients, eager_scaled)


@BOTH
@pytest.mark.parametrize("changed", ["normalised", "weight"])
def test_what_is_saved_changed_in_place_before_backward_is_autograds_error(changed, function, case):
    (x, *rest), gradients = case
    x = x.requires_grad_() * 1
    outputs = as_tuple(function(x, *rest, EPS))
    normalised = x if function is rms_norm else outputs[1]
    with torch.no_grad():
        {"normalised": normalised, "weight": rest[-1]}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, gradients)


@BOTH
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_gradients_are_bitwise_equal(kind, function, case):
    def backward(function):  # a reentrant checkpoint allows backward() alone
        leaves = [t.clone().requires_grad_() for t in case[0]]
        outputs = as_tuple(function(*leaves, EPS))
        torch.autograd.backward(outputs, case[1])
        return *outputs, *(t.grad for t in leaves)

    assert_equal(backward(checkpointed(function, kind)), backward(function))


@BOTH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_outputs_are_the_same(mode, function, case):
    leaves = [t.requires_grad_() for t in case[0]]
    want = as_tuple(function(*leaves, EPS))
    with mode():
        got = as_tuple(function(*leaves, EPS))
    assert_equal(got, want)
    assert not any(t.requires_grad for t in got)


# --- errors ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": lambda w: w[1:]}, r"weight is \[138\], should be \[139\] as x is \[2, 3, 139"),
        ({"weight": lambda w: w[None]}, r"weight is \[1, 139\], should be \[139\]"),
        ({"weight": lambda w: w.float()}, r"weight is torch.float32 on .* and x torch.bfloat16"),
        ({"weight": lambda w: w.to("meta")}, r"weight is torch.bfloat16 on meta and x"),
        ({"x": lambda x: x[0, 0, 0]}, r"x is \[\], should be \[\.\.\., hidden\]"),
        ({"x": lambda x: x[..., :0]}, r"x is \[2, 3, 0\], should be .*hidden from 1 to 65536"),
        ({"x": lambda x: x.new_empty(1, 65_537)}, r"x is \[1, 65537\], should be .* 65536"),
    ],
)
def test_what_does_not_fit_is_a_value_error(changed, message, function, case):
    inputs = dict(zip(("x", "delta", "weight")[:: 4 - len(case[0])], case[0], strict=True))
    for name, change in changed.items():
        inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
        function(**inputs, eps=EPS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:1], r"delta is \[1, 3, 139\], should be \[2, 3, 139\]"),
        (lambda t: t.half(), r"delta is torch.float16 on .* and x torch.bfloat16"),
        (lambda t: t.to("meta"), r"delta is torch.bfloat16 on meta and x torch.bfloat16"),
    ],
    ids=("shape", "dtype", "device"),
)
def test_a_delta_that_does_not_fit_is_a_value_error(change, message, device):
    options = {"dtype": torch.bfloat16, "device": device}
    (x, delta, weight), _ = make(add_rms_norm, 2, 3, 139, **options)
    with pytest.raises(ValueError, match=f"^add_rms_norm: {message}"):
        add_rms_norm(x, change(delta), weight, EPS)


@BOTH
def test_a_dtype_without_a_kernel_is_a_value_error(function, device):
    inputs, _ = make(function, 3, 52, dtype=torch.float64, device=device)
    message = f"^{function.__name__} computes in bfloat16, float16 or float32, got torch.float64"
    with pytest.raises(ValueError, match=message):
        function(*inputs, EPS)


@pytest.mark.parametrize("autograd", [RMSNorm, AddRMSNorm])
def test_cpu_tensors_without_the_interpreter_are_a_value_error(autograd, monkeypatch):
    compiled = triton.JITFunction(module._rms_norm_forward_kernel.fn)
    monkeypatch.setattr(module, "_rms_norm_forward_kernel", compiled)
    function = rms_norm if autograd is RMSNorm else add_rms_norm
    inputs, _ = make(function, 3, 52, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match=r"rms_norm got tensors on the CPU.*TRITON_INTERPRET=1"):
        autograd.apply(*inputs, EPS)
