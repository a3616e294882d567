"""RoPE on [q | k | v] against eager PyTorch in float64."""

import pytest
import torch
from reference import assert_within_budget, random, relative_error
from rope_case import NAMES, SIZES, assert_equal, double, eager, make, run

from fused_lora.kernels.qkv_rope import rope_backward, rope_forward, rope_together, split_heads
from fused_lora.kernels.rows import empty_rows
from fused_mlp.launching import DTYPES


def by_token(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def side_by_side(q, k, v):
    """[q | k | v], in rows that are not contiguous."""
    rows = torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], dim=-1).flatten(0, 1)
    buffer = empty_rows(rows, rows.shape[0], rows.shape[1] + 8)[:, : rows.shape[1]]
    return buffer.copy_(rows)


def fused(inputs, gradients, layout=by_token):
    """As `run`, and that v and its gradient come through."""
    q, k, cos, sin = inputs
    grad_q, grad_k = gradients
    v, grad_v = 2 * k, 3 * grad_k
    qkv = side_by_side(q, k, v)
    assert rope_forward(qkv, cos, sin, q.shape[1], k.shape[1]) is None
    grad_qkv = side_by_side(*(torch.full_like(t, 7.0) for t in (q, k, v)))
    rope_backward(*map(layout, (grad_q, grad_k, grad_v)), cos, sin, grad_qkv)
    results = []
    for rows, kept in ((qkv, v), (grad_qkv, grad_v)):
        *turned, value = split_heads(rows, q.shape[2], q.shape[1], k.shape[1])
        assert torch.equal(value, kept)
        results += turned
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_within_the_error_budget(dtype, size, device):
    inputs, gradients = make(size, dtype=dtype, device=device)
    got, budget = fused(inputs, gradients), run(eager, inputs, gradients)
    truth = run(eager, double(inputs), double(gradients))
    for row in zip(NAMES, got, budget, truth, strict=True):
        assert_within_budget(*row)


def test_cos_and_sin_need_no_equal_halves(device):
    (q, k, *_), gradients = make(dtype=torch.float32, device=device)
    cos, sin = (random(1, 5, 12, device=device, seed=seed) for seed in (8, 9))
    inputs = q, k, cos, sin
    truth = run(eager, double(inputs), double(gradients))
    for row in zip(
        NAMES, fused(inputs, gradients), run(eager, inputs, gradients), truth, strict=True
    ):
        assert_within_budget(*row)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_may_lie_in_any_order(layout, device):
    case = make(dtype=torch.bfloat16, device=device)
    assert_equal(fused(*case, LAYOUTS[layout]), fused(*case))


def test_cos_and_sin_may_have_any_layout_and_another_dtype(device):
    (q, k, cos, sin), gradients = make(dtype=torch.bfloat16, device=device)
    cos, sin = cos.float(), sin.float()
    apart = [t.mT.contiguous().mT for t in (cos, sin)]
    got = fused((q, k, *apart), gradients)
    assert_equal(got, fused((q, k, cos, sin), gradients))


def test_no_tokens_are_no_error(device):
    qkv = torch.empty(0, 4 * 6, device=device)
    cos = torch.ones(1, 5, 6, device=device)
    rope_forward(qkv, cos, cos, 2, 1)
    three = [torch.empty(0, heads, 5, 6, device=device) for heads in (2, 1, 1)]
    rope_together(*three, cos, cos, qkv)
    rope_backward(*three, cos, cos, qkv)


def test_what_does_not_fit_is_a_value_error(device):
    qkv = torch.ones(10, 24, device=device)
    cos = torch.ones(1, 5, 6, device=device)
    q, k = torch.ones(2, 2, 5, 6, device=device), torch.ones(2, 1, 5, 6, device=device)
    for bad, message in (
        ((qkv[:9], cos, cos, 2, 1), r"\[9, 24\], should be \[batch \* 5, 4 \* 6\]"),
        ((qkv, cos, cos, 3, 1), r"\[10, 24\], should be \[batch \* 5, 5 \* 6\]"),
        ((qkv, cos[..., :5], cos[..., :5], 2, 1), "head_dim even"),
        ((qkv, cos, cos[:, :4], 2, 1), "should both be"),
        ((qkv, cos.expand(3, 5, 6), cos.expand(3, 5, 6), 2, 1), r"\[batch \* 5, 4 \* 6\]"),
        ((qkv, cos.long(), cos, 2, 1), "cos is torch.int64"),
        ((qkv.t().contiguous().t(), cos, cos, 2, 1), "has elements 10 apart"),
        ((qkv.double(), cos, cos, 2, 1), "computes in bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_forward(*bad)
    for bad, message in (
        ((q, k, k[:1], cos, cos, qkv), r"grad_v is \[1, 1, 5, 6\], should be \[2, 1, 5, 6\]"),
        ((q, k.half(), k, cos, cos, qkv), "grad_k is torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_backward(*bad)
        with pytest.raises(ValueError, match=message.removeprefix("grad_")):
            rope_together(*bad)
