"""Causal attention with RoPE in its backward, against eager PyTorch in float64."""

import pytest
import torch
from reference import assert_within_budget, random, relative_error
from rms_norm_case import Kernel
from rope_case import angles
from rope_case import eager as eager_rope
from test_residual_kernels import wide

from fused_lora.kernels import causal_attention
from fused_lora.kernels import causal_attention_backward as backward
from fused_lora.kernels.causal_attention import causal_attention_forward, fits_kernels
from fused_lora.kernels.causal_attention_backward import causal_attention_backward
from fused_lora.kernels.qkv_rope import rope_forward, split_heads
from fused_mlp.launching import DTYPES

SCALING = 0.3
NAMES = ("attended", "logsumexp", "gradient")
# batch, heads, kv_heads, positions, head_dim, sequences of cos and sin
SIZES = {
    "GQA": (2, 4, 2, 40, 32, 1),
    "MQA, angles of each sequence": (3, 3, 1, 17, 32, 3),
    "MHA, a whole tile": (1, 2, 2, 64, 32, 1),
    "one token": (2, 2, 1, 1, 32, 1),
    "Qwen2.5-3B": (1, 8, 1, 20, 128, 1),
    "two tiles": (2, 2, 1, 128, 32, 1),
    "not whole tiles, angles of each sequence": (2, 2, 2, 70, 32, 2),
    "three tiles, GQA": (1, 4, 2, 130, 32, 1),
}


def make(size, dtype, device):
    """qkv, cos, sin, and the gradient of what attention gives."""
    batch, heads, kv_heads, positions, head_dim, angle_batch = SIZES[size]
    qkv = random(batch * positions, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    cos, sin = angles(angle_batch, positions, head_dim, dtype=dtype, device=device)
    grad = random(batch * positions, heads * head_dim, seed=1, dtype=dtype, device=device)
    return qkv, cos, sin, grad


def eager(size, case):
    """attended, the logsumexp, and the gradient of what is turned."""
    qkv, cos, sin, grad = case
    _, heads, kv_heads, positions, *_ = SIZES[size]
    leaf = qkv.detach().requires_grad_()
    q, k, v = split_heads(leaf, positions, heads, kv_heads)
    q, k = eager_rope(q, k, cos, sin)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    behind = torch.ones(positions, positions, dtype=torch.bool, device=qkv.device).triu(1)
    scores = (SCALING * (q @ k.mT)).masked_fill(behind, float("-inf"))
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2).flatten(0, 1)
    gradient = torch.autograd.grad(attended, leaf, grad)[0]
    return attended.detach(), scores.logsumexp(-1).detach(), gradient


def fused(size, case, layout=torch.clone):
    qkv, cos, sin, grad = case
    _, heads, kv_heads, positions, *_ = SIZES[size]
    qkv = layout(qkv)
    rope_forward(qkv, cos, sin, heads, kv_heads)
    attended, logsumexp = causal_attention_forward(qkv, positions, heads, kv_heads, SCALING)
    gradient = layout(torch.full_like(qkv, 7.0))
    causal_attention_backward(
        layout(grad), qkv, cos, sin, layout(attended), logsumexp, kv_heads, SCALING, gradient
    )
    return attended, logsumexp, gradient


def check(size, dtype, device):
    case = make(size, dtype, device)
    before = [t.clone() for t in case]
    got, budget = fused(size, case), eager(size, case)
    truth = eager(size, [t.double() for t in case])
    for name, *row in zip(NAMES, got, budget, truth, strict=True):
        assert_within_budget(name, *row)
    assert all(map(torch.equal, case, before))


def check_one_token(size, device):
    """q and k get 0, where g v' and D, summed in two orders, cancel but for fp32's rounding."""
    case = make(size, torch.float32, device)
    got, want = fused(size, case), eager(size, case)
    assert torch.equal(got[0], want[0]) and relative_error(got[1], want[1]) < 1e-6
    _, heads, kv_heads, _, head_dim, _ = SIZES[size]
    turned = (heads + kv_heads) * head_dim
    assert torch.equal(want[2][:, :turned], torch.zeros_like(want[2][:, :turned]))
    assert relative_error(got[2][:, turned:], want[2][:, turned:]) < 1e-6
    terms = case[3].norm() * case[0].norm() ** 2  # g v' times the scale and k
    assert got[2][:, :turned].norm() <= torch.finfo(torch.float32).eps * terms


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_within_the_error_budget(dtype, size, device):
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("in fp32 PyTorch attends")
    if dtype == torch.float32 and size == "one token":
        return check_one_token(size, device)  # eager's own error is exactly 0 there
    check(size, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [64, 128, 333, 512])
def test_a_models_own_sizes_are_within_the_error_budget(positions, device, monkeypatch):
    monkeypatch.setitem(SIZES, "model", (3, 16, 2, positions, 128, 1))
    check("model", torch.bfloat16, device)


def test_halves_of_a_head_need_not_share_their_angles(device):
    qkv, cos, _, grad = make("GQA", torch.bfloat16, device)
    case = qkv, *(random(*cos.shape, seed=s, dtype=cos.dtype, device=device) for s in (8, 9)), grad
    got, budget = fused("GQA", case), eager("GQA", case)
    truth = eager("GQA", [t.double() for t in case])
    for name, *row in zip(NAMES, got, budget, truth, strict=True):
        assert_within_budget(name, *row)


def test_what_comes_later_is_not_seen(device):
    """Not even where it is not a number, as in memory that nobody has written."""
    for size, positions in (("two tiles", 128), ("MHA, a whole tile", 64)):
        case = qkv, *_, grad = make(size, torch.bfloat16, device)
        want = fused(size, case)
        for last in (positions // 2, positions - 1)[: 2 if positions < 128 else 1]:
            changed, zeroed = qkv.clone(), grad.clone()
            changed[last:positions] = 3.0
            zeroed[last:positions] = 0.0
            got = fused(size, (changed, *case[1:3], grad))
            assert torch.equal(got[0][:last], want[0][:last])
            # no gradient reaches a token that comes after all that have one
            gradient = fused(size, (qkv, *case[1:3], zeroed))[2]
            assert not gradient[last:positions].any()


@pytest.mark.parametrize("size", ["GQA", "two tiles"])
def test_rows_any_stride_apart_give_what_contiguous_ones_do_and_nothing_else_is_written(
    size, device
):
    case = make(size, torch.bfloat16, device)
    want, budget = fused(size, case), eager(size, case)
    truth = eager(size, [t.double() for t in case])
    for more in (24, 1):
        seen = []

        def layout(t, more=more, seen=seen):
            copy = wide(t, more)
            seen.append((copy, copy._base.clone()))
            return copy

        got = fused(size, case, layout)
        if device == "cpu":
            assert all(map(torch.equal, got, want))
        # unaligned, a GPU's threads hold other elements and add in another order
        for name, *row in zip(NAMES, got, budget, truth, strict=True):
            assert_within_budget(name, *row)
        for view, before in seen:
            assert torch.equal(view._base[:, view.shape[1] :], before[:, view.shape[1] :])


@pytest.mark.parametrize("size", ["GQA", "two tiles"])
def test_repetition_is_bitwise_equal(size, device):
    case = make(size, torch.bfloat16, device)
    assert all(map(torch.equal, fused(size, case), fused(size, case)))


def test_cos_and_sin_may_have_any_layout_and_another_dtype(device):
    qkv, cos, sin, grad = make("GQA", torch.bfloat16, device)
    cos, sin = cos.float(), sin.float()
    apart = [t.mT.contiguous().mT for t in (cos, sin)]
    got, want = (fused("GQA", (qkv, *these, grad)) for these in (apart, (cos, sin)))
    assert all(map(torch.equal, got, want))


def test_no_sequences_launch_nothing(device, monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(causal_attention, "fits_kernels", lambda *_: True)
    monkeypatch.setattr(causal_attention, "_attention_forward_kernel", kernel)
    for name in ("queries", "keys"):
        monkeypatch.setattr(backward, f"_attention_{name}_backward_kernel", kernel)
    qkv, cos = torch.empty(0, 4 * 32, device=device), torch.ones(1, 5, 32, device=device)
    attended, logsumexp = causal_attention_forward(qkv, 5, 2, 1, SCALING)
    assert (attended.shape, logsumexp.shape) == ((0, 64), (0, 2, 5))
    operands = attended, qkv, cos, cos, attended, logsumexp
    causal_attention_backward(*operands, 1, SCALING, qkv.clone())
    assert not kernel.launches


def test_what_they_are_for(device):
    dtype = torch.bfloat16
    for shape, positions, heads, kv_heads, want in (
        ((128, 128), 64, 2, 1, True),
        ((1024, 128), 512, 2, 1, True),
        ((513, 128), 513, 2, 1, False),
        ((0, 128), 0, 2, 1, False),
        ((64, 4 * 128), 64, 2, 1, True),
        ((64, 4 * 256), 64, 2, 1, False),  # heads of 256
        ((64, 4 * 48), 64, 2, 1, False),  # of 48
        ((64, 4 * 16), 64, 2, 1, False),  # of 16
        ((64, 7 * 32), 64, 3, 2, False),  # which of two would the second share?
    ):
        qkv = torch.empty(*shape, dtype=dtype, device=device)
        assert fits_kernels(qkv, positions, heads, kv_heads) == want, (shape, positions)
    fp32 = torch.empty(64, 128, device=device)
    assert fits_kernels(fp32, 64, 2, 1) == (device == "cpu")


def test_what_does_not_fit_is_a_value_error(device):
    qkv, cos, sin, grad = make("GQA", torch.bfloat16, device)
    for bad, message in (
        (
            (qkv[:79], 40, 4, 2),
            r"\[79, 256\] in .*, should be \[batch \* 40, 8 \* head_dim",
        ),
        ((qkv[:, :255], 40, 4, 2), r"\[80, 255\]"),
        ((qkv, 40, 2, 3), "as many heads for each of k and v"),
        ((qkv, 0, 4, 2), r"batch \* 0"),
        ((qkv[:1].expand(513, 256), 513, 4, 2), "up to 512 positions"),
        ((qkv.double(), 40, 4, 2), "computes in bfloat16"),
        ((qkv.t().contiguous().t(), 40, 4, 2), "has elements 80 apart"),
    ):
        with pytest.raises(ValueError, match=message):
            causal_attention_forward(*bad, SCALING)
    attended, logsumexp = causal_attention_forward(qkv, 40, 4, 2, SCALING)
    for change, message in (
        ({"grad": grad[:, :96]}, r"grad is \[80, 96\], should be \[80, 128\]"),
        ({"grad": grad.half(), "attended": attended.half()}, "grad is torch.float16"),
        ({"attended": attended[:79]}, r"attended is \[79, 128\]"),
        ({"grad_qkv": qkv[:, :250]}, r"grad_qkv is \[80, 250\]"),
        ({"cos": cos.long()}, "cos is torch.int64"),
        ({"cos": cos[:, :20], "sin": sin[:, :20]}, r"should be \[4, 4, 20\]"),
        ({"logsumexp": logsumexp.half()}, "should be .* in torch.float32"),
        ({"logsumexp": logsumexp.mT.contiguous().mT}, "and contiguous"),
    ):
        given = {"grad": grad, "qkv": qkv, "cos": cos, "sin": sin, "attended": attended,
                 "logsumexp": logsumexp, "kv_heads": 2, "scaling": SCALING,
                 "grad_qkv": qkv.clone()} | change  # fmt: skip
        with pytest.raises(ValueError, match=message):
            causal_attention_backward(**given)
