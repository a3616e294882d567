"""RoPE on [q | k | v], alone and after norms of heads, against eager PyTorch in float64."""

from functools import partial

import pytest
import torch
from cases.lora_attention_case import eager_head_norm
from cases.reference import assert_near, random, relative_error
from cases.rope_case import SIZES, assert_equal, eager, interleaved_order, make, run

from fused_lora.functions.rope import rope
from fused_lora.kernels.head_norms import HeadNorms, head_norms_backward
from fused_lora.kernels.qkv_rope import (
    norm_rope_together,
    rope_backward,
    rope_forward,
    rotate_back,
    split_heads,
)


def by_token(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def side_by_side(q, k, v):
    """Return [q | k | v]."""
    return torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], dim=-1).flatten(0, 1)


def fused(inputs, gradients, layout=torch.clone):
    """Do as `run` does, and check that v and its gradient pass through unchanged."""
    q, k, cos, sin = inputs
    grad_q, grad_k = gradients
    v, grad_v = 2 * k, 3 * grad_k
    qkv = layout(side_by_side(q, k, v))
    assert rope_forward(qkv, cos, sin, q.shape[1], k.shape[1]) is None
    grad_qkv = layout(torch.full_like(qkv, 7.0))
    rope_backward(*map(by_token, (grad_q, grad_k, grad_v)), cos, sin, grad_qkv)
    results = []
    for rows, kept in ((qkv, v), (grad_qkv, grad_v)):
        *rotated, value = split_heads(rows, q.shape[2], q.shape[1], k.shape[1])
        assert torch.equal(value, kept)
        results += rotated
    return results


def make_normed(size, dtype, device, together=False):
    """Return q, k, cos, sin, the gradients of normed q and k, and the norms' weights."""
    inputs, gradients = make(size, dtype=dtype, device=device)
    options = {"scale": 0.5, "dtype": dtype, "device": device}
    counts = [t.shape[1] if together else 1 for t in inputs[:2]]
    weights = (
        1 + random(count * inputs[0].shape[-1], seed=seed, **options)
        for seed, count in zip((8, 9), counts, strict=True)
    )
    return *inputs, *gradients, *weights


EPS = 1e-6, 1e-2  # of q's norm and of k's


def fused_normed(case, layout=torch.clone, zero_centered=False):
    """Do as `eager_normed` does. Check that v and its gradient pass through, and raw q, k, v stay
    unchanged."""
    q, k, cos, sin, grad_q, grad_k, *weights = case
    v, grad_v = 2 * k, 3 * grad_k
    raw, norms = layout(side_by_side(q, k, v)), HeadNorms(*weights, *EPS, zero_centered)
    sizes = q.shape[2], q.shape[1], k.shape[1]
    qkv = layout(torch.full_like(raw, 7.0))
    assert norm_rope_together(*split_heads(raw, *sizes), norms, cos, sin, qkv) is None
    grad_qkv = layout(side_by_side(grad_q, grad_k, grad_v))
    assert head_norms_backward(*split_heads(raw, *sizes), norms, grad_qkv) is None
    assert torch.equal(raw, side_by_side(q, k, v))
    results = []
    for rows, kept in ((qkv, v), (grad_qkv, grad_v)):
        *changed, value = split_heads(rows, *sizes)
        assert torch.equal(value, kept)
        results += changed
    return results


def eager_normed(case, zero_centered=False):
    """Return q and k, normed and rotated, and their gradients from those of the normed ones."""
    q, k, cos, sin, grad_q, grad_k, *weights = case
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    normed = list(map(eager_head_norm, leaves, weights, EPS, [zero_centered] * 2))
    rotated = [t.detach() for t in eager(*normed, cos, sin)]
    return *rotated, *torch.autograd.grad(normed, leaves, (grad_q, grad_k))


@pytest.mark.parametrize(
    ("size", "dtype"), [*((size, torch.bfloat16) for size in SIZES), ("GQA", torch.float32)]
)
def test_three_gradients_are_rotated_back_as_they_are_side_by_side(dtype, size, device):
    (q, k, cos, sin), _ = make(size, dtype=dtype, device=device)
    v = 2 * k
    want = side_by_side(q, k, v)
    rotate_back(want, cos, sin, q.shape[1], k.shape[1])
    for layout in LAYOUTS.values():
        got = torch.full_like(want, 7.0)
        assert rope_backward(*map(layout, (q, k, v)), cos, sin, got) is None
        if dtype == torch.float32:  # on a GPU a few last bits differ
            assert_near(got, want, torch.finfo(dtype).eps)
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize("size", ["GQA", "a part of each head"])
def test_interleaved_pairs_are_rotated_as_halves_are(size, device):
    (q, k, cos, sin), gradients = make(size, dtype=torch.bfloat16, device=device)
    order = interleaved_order(cos.shape[-1], q.shape[-1], device)
    norms = HeadNorms(*make_normed(size, torch.bfloat16, device, True)[-2:], *EPS)
    ordered = norms._replace(
        q_weight=norms.q_weight.view(-1, q.shape[-1])[:, order].flatten(),
        k_weight=norms.k_weight.view(-1, q.shape[-1])[:, order].flatten(),
    )
    heads, none = (q, k, 2 * k), torch.full_like(side_by_side(q, k, k), 7.0)

    def normed(q, k, v, cos, sin, out, interleaved=False):
        by_order = ordered if interleaved else norms
        norm_rope_together(q, k, v, by_order, cos, sin, out, interleaved)

    for write in (rope_backward, normed):
        got, want = none.clone(), none.clone()
        write(*(t[..., order] for t in heads), cos, sin, got, interleaved=True)
        write(*heads, cos, sin, want)
        assert torch.equal(got, want.unflatten(1, (-1, q.shape[-1]))[..., order].flatten(1))
    # where they lie, and one by one
    got, want = side_by_side(*heads), none.clone()
    rotate_back(got, cos, sin, q.shape[1], k.shape[1], interleaved=True)
    rope_backward(*heads, cos, sin, want, interleaved=True)
    assert torch.equal(got, want)
    alone = run(partial(rope, interleaved=True), (q, k, cos, sin), gradients)
    want = side_by_side(*heads)
    rope_forward(want, cos, sin, q.shape[1], k.shape[1], interleaved=True)
    assert_equal(alone[:2], split_heads(want, q.shape[2], q.shape[1], k.shape[1])[:2])
    rope_backward(*gradients, 2 * k, cos, sin, want, interleaved=True)
    assert_equal(alone[2:], split_heads(want, q.shape[2], q.shape[1], k.shape[1])[:2])


def test_without_angles_nothing_is_rotated(device):
    """Compare with angles of 0. The tensors still go side by side."""
    (q, k, cos, sin), _ = make("GQA", dtype=torch.bfloat16, device=device)
    v, norms = 2 * k, HeadNorms(*make_normed("GQA", torch.bfloat16, device)[-2:], *EPS)
    none, zero = (None, None), (torch.ones_like(cos), torch.zeros_like(sin))
    for write in (
        lambda angles, out: rope_backward(q, k, v, *angles, out),
        lambda angles, out: norm_rope_together(q, k, v, norms, *angles, out),
    ):
        got, want = (torch.full_like(side_by_side(q, k, v), 7.0) for _ in range(2))
        write(none, got), write(zero, want)
        assert torch.equal(got, want)


def test_norms_of_heads_read_any_layout(device):
    q, k, cos, sin, *gradients, q_weight, k_weight = make_normed("GQA", torch.bfloat16, device)
    norms, v = HeadNorms(q_weight, k_weight, *EPS), 2 * k
    apart = HeadNorms(*(torch.stack((w, w), 1)[:, 0] for w in norms[:2]), *EPS)
    want, grad = torch.full((2, *side_by_side(q, k, v).shape), 7.0, dtype=q.dtype, device=device)
    norm_rope_together(q, k, v, norms, cos, sin, want)
    grad.copy_(side_by_side(*gradients, v))
    given = grad.clone()
    head_norms_backward(q, k, None, norms, grad)
    for layout in LAYOUTS.values():
        got, gradient = torch.full_like(want, 7.0), given.clone()
        norm_rope_together(*map(layout, (q, k, v)), apart, layout(cos[None])[0], sin, got)
        head_norms_backward(layout(q), layout(k), None, apart, gradient)
        assert torch.equal(got, want) and torch.equal(gradient, grad)


def test_v_is_normed_as_k_is_by_weights_of_1(device):
    q, k, _, _, grad_q, grad_k, weight, _ = make_normed("GQA", torch.float32, device)
    norms = HeadNorms(weight, torch.ones_like(weight), *EPS, v_eps=EPS[1])
    qkv, grad = torch.full_like(side_by_side(q, k, k), 7.0), side_by_side(grad_q, grad_k, grad_k)
    v = by_token(k)
    norm_rope_together(q, k, v, norms, None, None, qkv)
    head_norms_backward(q, k, v, norms, grad)
    for rows, start in ((qkv, k), (grad, grad_k)):
        _, as_k, as_v = split_heads(rows, q.shape[2], q.shape[1], k.shape[1])
        assert relative_error(as_v, as_k) < 1e-6 < 1e-2 < relative_error(as_v, start)


def test_heads_are_normed_together_where_k_has_only_one(device):
    case = make_normed("MQA, angles of each sequence", torch.float32, device, together=True)
    for got, want in zip(fused_normed(case), eager_normed(case), strict=True):
        assert relative_error(got, want) < 1e-6


def test_weights_of_norms_may_be_of_another_dtype(device):
    """Use fp32 and fp16 weights, as under autocast."""
    *others, q_weight, k_weight = make_normed("GQA", torch.bfloat16, device)
    want = fused_normed((*others, q_weight, k_weight))
    assert_equal(fused_normed((*others, q_weight.float(), k_weight.half())), want)


@pytest.mark.gpu
def test_norms_of_heads_are_right_where_int32_offsets_overflow(device):
    """Use three rows, 2^30 elements apart."""
    case = make_normed("MQA, angles of each sequence", torch.bfloat16, device)
    case = [*(t[:1, :, :3] for t in case[:2]), *(t[:1, :3] for t in case[2:4]),
            *(t[:1, :, :3] for t in case[4:6]), *case[6:]]  # fmt: skip

    def far_apart(t):
        memory = torch.empty(2 * 2**30 + t.shape[1], dtype=t.dtype, device=device)
        return memory.as_strided(t.shape, (2**30, 1)).copy_(t)

    assert_equal(fused_normed(case, far_apart), fused_normed(case))


LAYOUTS = {
    "by head": torch.clone,
    "within wider rows": lambda t: by_token(torch.cat((t, t), dim=1))[:, t.shape[1] :],
    "features apart": lambda t: torch.repeat_interleave(t, 2, dim=-1)[..., ::2],
    "positions outermost": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
}
