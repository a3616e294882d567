"""Attention with RoPE on [q | k | v] in eager PyTorch, and what the fused one is tried on."""

import torch
from cases.reference import random
from cases.rope_case import angles
from cases.rope_case import eager as eager_rope

from fused_lora.kernels.causal_attention import Attention
from fused_lora.kernels.qkv_attention import attention_backward, attention_forward
from fused_lora.kernels.qkv_rope import rope_forward, split_heads

SCALING = 0.3


def make(
    batch, heads, kv_heads, positions, head_dim, angle_batch=1, rotated=None, *, dtype, device
):  # fmt: skip
    """qkv, cos, sin, and the gradient of what attention gives."""
    qkv = random(batch * positions, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    cos, sin = angles(angle_batch, positions, rotated or head_dim, dtype=dtype, device=device)
    grad = random(batch * positions, heads * head_dim, seed=1, dtype=dtype, device=device)
    return qkv, cos, sin, grad


def rotated_heads(qkv, cos, sin, heads, kv_heads):
    """q, k and v [batch, heads, positions, head_dim], k and v as many as q."""
    q, k, v = split_heads(qkv, cos.shape[1], heads, kv_heads)
    q, k = eager_rope(q, k, cos, sin)
    return q, *(t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))


def eager(case, heads, kv_heads, sinks=None, window=None):
    """attended, the logsumexp, and the gradient of what is rotated. sinks [heads] are one more
    score in each softmax; a window is how many keys a query sees."""
    qkv, cos, sin, grad = case
    leaf = qkv.detach().requires_grad_()
    q, k, v = rotated_heads(leaf, cos, sin, heads, kv_heads)
    behind = torch.ones(*[cos.shape[1]] * 2, dtype=torch.bool, device=qkv.device).triu(1)
    if window is not None:
        behind |= torch.ones_like(behind).tril(-window)
    scores = (SCALING * (q @ k.mT)).masked_fill(behind, float("-inf"))
    if sinks is not None:
        one_more = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, one_more), -1)
    p = scores.softmax(-1)[..., : cos.shape[1]]
    attended = (p @ v).transpose(1, 2).flatten(2).flatten(0, 1)
    gradient = torch.autograd.grad(attended, leaf, grad)[0]
    return attended.detach(), scores.logsumexp(-1).detach(), gradient


def fused(case, heads, kv_heads, mask=None, interleaved=False, sinks=None, window=None):
    """attended, and the gradient of what is rotated. mask: of booleans, or documents' bounds."""
    qkv, cos, sin, grad = case
    qkv = qkv.clone()
    rope_forward(qkv, cos, sin, heads, kv_heads, interleaved)
    attention = Attention(cos.shape[1], heads, kv_heads, SCALING, interleaved, window)
    attended, saved = attention_forward(qkv, mask, attention, sinks=sinks)
    gradient = torch.full_like(qkv, 7.0)
    attention_backward(grad, qkv, cos, sin, mask, attended, saved, gradient)
    return attended, gradient
