"""Attention forward and backward as two calls, against scaled_dot_product_attention's autograd."""

import pytest
import torch
import torch.nn.functional as F
from reference import assert_within_budget, random

import fused_lora.sdpa as module
from fused_lora.sdpa import CUDNN, FLASH, attention_backward, attention_forward

NAMES = ("attended", "grad_q", "grad_k", "grad_v")
# batch, heads, kv_heads, positions, head_dim
SIZES = {
    "GQA": (2, 4, 2, 9, 16),
    "MHA": (1, 2, 2, 5, 26),
    "MQA": (3, 3, 1, 7, 8),
    "one token": (2, 2, 1, 1, 16),
    "Qwen2.5-3B": (2, 16, 2, 40, 128),
}


def make(size, dtype, device):
    batch, heads, kv_heads, positions, head_dim = SIZES[size]
    qkv = random(batch, positions, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    q, k, v = qkv.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
    grad = random(batch, positions, heads, head_dim, seed=1, dtype=dtype, device=device)
    return q, k, v, grad.transpose(1, 2)


def mask_of(q, masked):
    if not masked:
        return None
    positions = q.shape[2]
    mask = torch.ones(q.shape[0], 1, positions, positions, dtype=torch.bool, device=q.device).tril()
    mask[-1, :, :, 0] = False  # as left padding does
    mask[-1, :, 0, 0] = True
    return mask


def by_hand(q, k, v, grad, masked=False):
    mask, scaling = mask_of(q, masked), 0.3
    attended, saved, attention = attention_forward(q, k, v, mask, scaling)
    return attended, *attention_backward(grad, q, k, v, mask, attended, saved, attention)


def by_autograd(q, k, v, grad, masked=False):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    repeats = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(repeats, dim=1) for t in leaves[1:])
    attended = F.scaled_dot_product_attention(
        leaves[0], keys, values, mask_of(q, masked), is_causal=not masked, scale=0.3
    )
    return attended.detach(), *torch.autograd.grad(attended, leaves, grad)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("masked", [False, True], ids=("causal", "masked"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_within_the_error_budget(dtype, masked, size, device):
    case = make(size, dtype, device)
    got, eager = by_hand(*case, masked), by_autograd(*case, masked)
    truth = by_autograd(*(t.double() for t in case), masked)
    for name, *row in zip(NAMES, got, eager, truth, strict=True):
        assert row[0].dtype == dtype
        assert_within_budget(name, *row)


@pytest.mark.parametrize("backend", [FLASH, CUDNN], ids=("flash", "cuDNN"))
def test_the_backends_calls_have_their_arguments_in_order(backend, monkeypatch):
    """On the meta device, where they compute shapes alone."""
    monkeypatch.setattr(module, "_backend", lambda *_: backend)
    q, k, v, grad = (t.to("meta") for t in make("Qwen2.5-3B", torch.bfloat16, "cpu"))
    attended, *gradients = by_hand(q, k, v, grad)
    assert attended.shape == q.shape and attended.transpose(1, 2).is_contiguous()
    assert [t.shape for t in gradients] == [t.shape for t in (q, k, v)]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [FLASH, CUDNN], ids=("flash", "cuDNN"))
@pytest.mark.parametrize("size", ["GQA", "MQA", "Qwen2.5-3B"])
def test_either_backend_is_within_the_error_budget(size, backend, device, monkeypatch):
    monkeypatch.setattr(module, "_backend", lambda *_: backend)
    case = make(size, torch.bfloat16, device)
    got, eager = by_hand(*case), by_autograd(*case)
    truth = by_autograd(*(t.double() for t in case))
    for name, *row in zip(NAMES, got, eager, truth, strict=True):
        assert_within_budget(name, *row)
    assert got[0].transpose(1, 2).is_contiguous()


@pytest.mark.gpu
def test_the_backend_is_the_one_that_pytorch_would_use(device):
    q, k, v, _ = make("Qwen2.5-3B", torch.bfloat16, device)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert attention_forward(q, k, v, None, 0.3)[2].backend == FLASH
        one_token = (t[:, :, :1] for t in (q, k, v))  # of which cuDNN has no backward
        assert attention_forward(*one_token, None, 0.3)[2].backend is None
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_forward(q, k, v, None, 0.3)[2].backend is None
