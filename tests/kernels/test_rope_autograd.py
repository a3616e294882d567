"""RoPE as a citizen of autograd: what it saves, writes, skips and refuses."""

import pytest
import torch
import triton
from reference import CHECKPOINTS, checkpointed
from rope_case import assert_equal, assert_right, eager, make, run

import fused_lora.rope as module
from fused_lora.rope import RoPE, rope


@pytest.fixture
def case(device):
    return make(dtype=torch.bfloat16, device=device)


# --- autograd -------------------------------------------------------------------------------------


def test_nothing_that_came_in_is_written(case):
    everything = [t for tensors in case for t in tensors]
    before = [t.clone() for t in everything]
    run(rope, *case)
    assert_equal(everything, before)


def test_cos_and_sin_are_all_that_is_saved(case):
    (q, k, cos, sin), _ = case
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = rope(q.requires_grad_(), k, cos, sin)
    assert len(saved) == 2 and saved[0] is cos and saved[1] is sin
    del outputs  # they held them


def test_a_second_backward_through_a_retained_graph_gives_the_same(case):
    (q, k, cos, sin), gradients = case
    leaves = q.requires_grad_(), k.requires_grad_()
    outputs = rope(*leaves, cos, sin)
    first = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)
    assert_equal(torch.autograd.grad(outputs, leaves, gradients), first)


def test_differentiating_twice_is_a_clear_error(case):
    (q, k, cos, sin), gradients = case
    outputs = rope(q.requires_grad_(), k, cos, sin)
    with pytest.raises(RuntimeError, match="rope is not twice differentiable"):
        torch.autograd.grad(outputs, q, gradients, create_graph=True)


@pytest.mark.parametrize("used", [0, 1], ids=["q", "k"])
def test_an_output_that_nobody_uses_changes_nothing_for_the_other(used, case):
    (q, k, cos, sin), gradients = case
    want = run(rope, *case)[2 + used]
    leaves = q.requires_grad_(), k.requires_grad_()
    rope(*leaves, cos, sin)[used].backward(gradients[used])
    assert torch.equal(leaves[used].grad, want)
    assert not leaves[1 - used].grad.any()


@pytest.mark.parametrize("trained", [0, 1], ids=["q", "k"])
def test_q_or_k_alone_may_need_a_gradient(trained, case):
    (q, k, cos, sin), gradients = case
    want = run(rope, *case)[2 + trained]
    leaves = q, k
    leaves[trained].requires_grad_()
    torch.autograd.backward(rope(q, k, cos, sin), gradients)
    assert torch.equal(leaves[trained].grad, want) and leaves[1 - trained].grad is None


def test_inputs_and_incoming_gradients_may_have_other_consumers(device):
    # k is of q's shape: one gradient tensor reaches the rotation of both, and both sums
    inputs, gradients = make("MHA", dtype=torch.bfloat16, device=device)

    def with_residuals(function):
        def block(q, k, cos, sin):
            q_rotated, k_rotated = function(q, k, cos, sin)
            both = q_rotated + k_rotated + q + k
            return both, both * 2

        return block

    assert_right(inputs, gradients, with_residuals(rope), with_residuals(eager))


def test_outputs_may_be_changed_in_place(case):
    def scaled(*inputs):
        return [x.mul_(0.5) for x in rope(*inputs)]

    def eager_scaled(*inputs):
        return [x * 0.5 for x in eager(*inputs)]

    assert_right(*case, scaled, eager_scaled)


def test_an_angle_changed_in_place_before_backward_is_autograds_error(case):
    (q, k, cos, sin), gradients = case
    outputs = rope(q.requires_grad_(), k, cos, sin)
    cos.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, gradients)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_gradients_are_bitwise_equal(kind, case):
    def backward(function):  # a reentrant checkpoint allows backward() alone
        (q, k, cos, sin), gradients = case
        leaves = [t.clone().requires_grad_() for t in (q, k)]
        outputs = function(*leaves, cos, sin)
        torch.autograd.backward(outputs, gradients)
        return *outputs, *(t.grad for t in leaves)

    assert_equal(backward(checkpointed(rope, kind)), backward(rope))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_outputs_are_the_same(mode, case):
    (q, k, cos, sin), _ = case
    want = rope(q.requires_grad_(), k, cos, sin)
    with mode():
        got = rope(q, k, cos, sin)
    assert_equal(got, want)
    assert not any(t.requires_grad for t in got)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": lambda q: q[0]}, r"q is \[6, 5, 12\], should be \[batch, heads, seq, head_dim\]"),
        ({"q": lambda q: q[..., 1:]}, r"q is \[2, 6, 5, 11\], .* head_dim even"),
        ({"q": lambda q: q[..., :0]}, r"q is \[2, 6, 5, 0\], .* head_dim even"),
        ({"q": lambda q: q[:, :0]}, r"q is \[2, 0, 5, 12\], should be \[batch, heads, seq"),
        ({"k": lambda k: k[0]}, r"k is \[2, 5, 12\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k[:1]}, r"k is \[1, 2, 5, 12\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k[:, :, 1:]}, r"k is \[2, 2, 4, 12\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k[..., 2:]}, r"k is \[2, 2, 5, 10\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k[:, :0]}, r"k is \[2, 0, 5, 12\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k.half()}, r"k is torch.float16 on .* and q torch.bfloat16"),
        ({"k": lambda k: k.to("meta")}, r"k is torch.bfloat16 on meta and q torch.bfloat16"),
        ({"cos": lambda t: t[..., :6]}, r"cos is \[1, 5, 6\], .*all of head_dim is rotated"),
        ({"sin": lambda t: t[..., :6]}, r"sin is \[1, 5, 6\], .*all of head_dim is rotated"),
        ({"cos": lambda t: t[0]}, r"cos is \[5, 12\], should be \[1 or 2, 5, 12\]"),
        ({"cos": lambda t: t[:, 1:]}, r"cos is \[1, 4, 12\], should be \[1 or 2, 5, 12\]"),
        ({"sin": lambda t: t.repeat(3, 1, 1)}, r"sin is \[3, 5, 12\], should be \[1 or 2, 5"),
        ({"sin": lambda t: t.repeat(2, 1, 1)}, r"sin is \[2, 5, 12\] and cos \[1, 5, 12\]"),
        ({"cos": lambda t: t.double()}, r"cos is torch.float64 .* should be bfloat16, float16"),
        ({"sin": lambda t: t.to("meta")}, r"sin is torch.bfloat16 on meta, should be"),
        ({"cos": lambda t: t.requires_grad_()}, r"cos requires a gradient.* detach it"),
        ({"sin": lambda t: t.requires_grad_()}, r"sin requires a gradient.* detach it"),
        (
            {"q": lambda q: q.double(), "k": lambda k: k.double()},
            r"rope computes in bfloat16, float16 or float32, got torch.float64",
        ),
    ],
)
def test_what_does_not_fit_is_a_value_error(changed, message, case):
    inputs = dict(zip(("q", "k", "cos", "sin"), case[0], strict=True))
    for name, change in changed.items():
        inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        rope(**inputs)


def test_cpu_tensors_without_the_interpreter_are_a_value_error(monkeypatch):
    compiled = triton.JITFunction(module._rope_kernel.fn)
    monkeypatch.setattr(module, "_rope_kernel", compiled)
    inputs, _ = make(dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match=r"rope got tensors on the CPU.*TRITON_INTERPRET=1"):
        RoPE.apply(*inputs)
