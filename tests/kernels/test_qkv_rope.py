"""RoPE on [q | k | v] against eager PyTorch in float64."""

import pytest
import torch
from reference import relative_error
from rope_case import SIZES, assert_equal, make

from fused_lora.kernels.qkv_rope import rope_backward, rope_forward, rope_together, split_heads


def by_token(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def side_by_side(q, k, v):
    """[q | k | v]."""
    return torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], dim=-1).flatten(0, 1)


def fused(inputs, gradients, layout=torch.clone):
    """As `run`, and that v and its gradient come through."""
    q, k, cos, sin = inputs
    grad_q, grad_k = gradients
    v, grad_v = 2 * k, 3 * grad_k
    qkv = layout(side_by_side(q, k, v))
    assert rope_forward(qkv, cos, sin, q.shape[1], k.shape[1]) is None
    grad_qkv = layout(torch.full_like(qkv, 7.0))
    rope_backward(*map(by_token, (grad_q, grad_k, grad_v)), cos, sin, grad_qkv)
    results = []
    for rows, kept in ((qkv, v), (grad_qkv, grad_v)):
        *turned, value = split_heads(rows, q.shape[2], q.shape[1], k.shape[1])
        assert torch.equal(value, kept)
        results += turned
    return results


@pytest.mark.parametrize(
    ("size", "dtype"), [*((size, torch.bfloat16) for size in SIZES), ("GQA", torch.float32)]
)
def test_three_tensors_are_turned_as_they_are_side_by_side(dtype, size, device):
    (q, k, cos, sin), _ = make(size, dtype=dtype, device=device)
    v = 2 * k
    want = side_by_side(q, k, v)
    rope_forward(want, cos, sin, q.shape[1], k.shape[1])
    for layout in LAYOUTS.values():
        got = torch.full_like(want, 7.0)
        assert rope_together(*map(layout, (q, k, v)), cos, sin, got) is None
        if dtype == torch.float32:  # of which a GPU gave other last bits here and there
            assert relative_error(got, want) <= torch.finfo(dtype).eps
        else:
            assert torch.equal(got, want)


LAYOUTS = {
    "by head": torch.clone,
    "within wider rows": lambda t: by_token(torch.cat((t, t), dim=1))[:, t.shape[1] :],
    "features apart": lambda t: torch.repeat_interleave(t, 2, dim=-1)[..., ::2],
    "positions outermost": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
}


def test_cos_and_sin_may_have_any_layout_and_another_dtype(device):
    (q, k, cos, sin), gradients = make(dtype=torch.bfloat16, device=device)
    cos, sin = cos.float(), sin.float()
    apart = [t.mT.contiguous().mT for t in (cos, sin)]
    got = fused((q, k, *apart), gradients)
    assert_equal(got, fused((q, k, cos, sin), gradients))
