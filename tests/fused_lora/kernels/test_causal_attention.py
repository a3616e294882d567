"""Causal attention with RoPE in its backward, against eager PyTorch in float64."""

import pytest
import torch
from cases import qkv_attention_case
from cases.qkv_attention_case import SCALING
from cases.reference import assert_within_budget

from fused_lora.kernels.causal_attention import Attention, causal_attention_forward, fits_kernels
from fused_lora.kernels.causal_attention_backward import causal_attention_backward
from fused_lora.kernels.qkv_rope import rope_forward

NAMES = ("attended", "logsumexp", "gradient")
# batch, heads, kv_heads, positions, head_dim, sequences of cos and sin
SIZES = {
    "GQA": (2, 4, 2, 40, 32, 1),
    "MQA, angles of each sequence": (3, 3, 1, 17, 32, 3),
    "MHA, a whole tile": (1, 2, 2, 64, 32, 1),
    "one token": (2, 2, 1, 1, 32, 1),
    "Qwen2.5-3B": (1, 8, 1, 20, 128, 1),
    "two tiles": (1, 2, 1, 128, 32, 1),
    "not whole tiles, angles of each sequence": (2, 2, 1, 70, 32, 2),
    "three tiles, GQA": (1, 4, 2, 130, 32, 1),
}


def make(size, dtype, device):
    return qkv_attention_case.make(*SIZES[size], dtype=dtype, device=device)


def eager(size, case):
    """attended, the logsumexp, and the gradient of what is rotated."""
    return qkv_attention_case.eager(case, *SIZES[size][1:3])


def fused(size, case, layout=torch.clone):
    qkv, cos, sin, grad = case
    _, heads, kv_heads, positions, *_ = SIZES[size]
    qkv = layout(qkv)
    rope_forward(qkv, cos, sin, heads, kv_heads)
    attention = Attention(positions, heads, kv_heads, SCALING)
    attended, logsumexp = causal_attention_forward(qkv, attention)
    gradient = layout(torch.full_like(qkv, 7.0))
    causal_attention_backward(
        layout(grad), qkv, (cos, sin), layout(attended), logsumexp, attention, gradient
    )
    return attended, logsumexp, gradient


def check(size, case):
    truth = eager(size, [t.double() for t in case])
    for name, *row in zip(NAMES, fused(size, case), eager(size, case), truth, strict=True):
        assert_within_budget(name, *row)


@pytest.mark.parametrize("size", ["three tiles, GQA", "not whole tiles, angles of each sequence"])
def test_fp32_is_within_the_error_budget(size, device):
    if device == "cuda":
        pytest.skip("in fp32 PyTorch attends")
    check(size, make(size, torch.float32, device))


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [64, 128, 333, 512])
def test_a_models_own_sizes_are_within_the_error_budget(positions, device, monkeypatch):
    monkeypatch.setitem(SIZES, "model", (3, 16, 2, positions, 128, 1))
    check("model", make("model", torch.bfloat16, device))


@pytest.mark.slow("MHA, a whole tile-32")
@pytest.mark.parametrize(
    ("size", "last"),
    [("MHA, a whole tile", 32), ("not whole tiles, angles of each sequence", 65)],
)
def test_what_comes_later_is_not_seen(size, last, device):
    """From this token of the first sequence on."""
    qkv, cos, sin, grad = case = make(size, torch.bfloat16, device)
    end = SIZES[size][3]
    changed, zeroed = qkv.clone(), grad.clone()
    changed[last:end], zeroed[last:end] = 3.0, 0.0
    attended, _, _ = fused(size, (changed, cos, sin, grad))
    assert torch.equal(attended[:last], fused(size, case)[0][:last])
    # no gradient reaches a token that comes after all that have one
    assert not fused(size, (qkv, cos, sin, zeroed))[2][last:end].any()


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
        attention = Attention(positions, heads, kv_heads, SCALING)
        assert fits_kernels(qkv, attention) == want, (shape, positions)
    documents = torch.empty(1, 1, 2, 513, dtype=torch.int32, device=device)
    for head_dim, want in ((256, True), (512, False)):
        qkv = torch.empty(513, 4 * head_dim, dtype=dtype, device=device)
        assert fits_kernels(qkv, Attention(513, 2, 1, SCALING), documents) == want, head_dim
    fp32 = torch.empty(64, 128, device=device)
    assert fits_kernels(fp32, Attention(64, 2, 1, SCALING)) == (device == "cpu")
