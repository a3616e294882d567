"""RoPE in eager PyTorch, and what the fused one is tried on."""

import torch
from cases.reference import random

# batch, heads, kv_heads, positions, head_dim; sequences of cos and sin; features that are rotated,
# if not all
SIZES = {
    "GQA": (2, 6, 2, 5, 12, 1),
    "MQA, angles of each sequence": (3, 3, 1, 4, 6, 3),
    "Qwen2.5-3B": (1, 16, 2, 3, 128, 1),
    "MHA": (2, 4, 4, 2, 64, 2),
    "more kv_heads than heads": (1, 1, 3, 2, 2, 1),
    "one token": (1, 2, 1, 1, 64, 1),
    "a part of each head": (2, 3, 1, 5, 22, 2, 12),
    "half of each head": (1, 2, 2, 3, 16, 1, 8),
}
EMPTY = {
    "no batch": (0, 2, 1, 5, 12, 1),
    "no positions": (2, 2, 1, 0, 12, 2),
    "no angles": (0, 2, 1, 5, 12, 0),
}


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def eager(q, k, cos, sin, interleaved=False):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = cos.shape[-1]
    if interleaved:
        order = interleaved_order(rotated, q.shape[-1], q.device)
        q, k = (x[..., order.argsort()] for x in (q, k))
        return tuple(x[..., order] for x in eager(q, k, cos[:, 0], sin[:, 0]))
    return tuple(
        torch.cat(
            [x[..., :rotated] * cos + rotate_half(x[..., :rotated]) * sin, x[..., rotated:]], -1
        ).to(x.dtype)
        for x in (q, k)
    )


def interleaved_order(rotated, head_dim, device):
    """Return where each feature of a head with interleaved pairs is in one with paired halves."""
    pairs = torch.arange(rotated).view(2, -1).t().flatten()
    return torch.cat([pairs, torch.arange(rotated, head_dim)]).to(device)


def angles(batch, positions, head_dim, *, dtype, device):
    """cos and sin as a model has them; every sequence of a batch begins somewhere else."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    starts = 7 * torch.arange(batch, dtype=torch.float64)[:, None] + 1
    rotated = (starts + torch.arange(positions))[..., None] * frequencies
    rotated = torch.cat((rotated, rotated), -1)
    return rotated.cos().to(device, dtype), rotated.sin().to(device, dtype)


def make(size="GQA", *, dtype, device, angle_dtype=None):
    """(q, k, cos, sin), (grad_q_rotated, grad_k_rotated); all contiguous."""
    batch, heads, kv_heads, positions, head_dim, angle_batch, *part = (SIZES | EMPTY)[size]
    q, k, grad_q_rotated, grad_k_rotated = (
        random(batch, h, positions, head_dim, dtype=dtype, device=device, seed=seed)
        for seed, h in enumerate((heads, kv_heads, heads, kv_heads))
    )
    rotated = part[0] if part else head_dim
    cos, sin = angles(angle_batch, positions, rotated, dtype=angle_dtype or dtype, device=device)
    return (q, k, cos, sin), (grad_q_rotated, grad_k_rotated)


def run(function, inputs, gradients):
    """q_rotated, k_rotated, grad_q, grad_k. q and k keep their layout, as do the gradients."""
    q, k = (t.detach().requires_grad_() for t in inputs[:2])
    rotated = function(q, k, *inputs[2:])
    return *(t.detach() for t in rotated), *torch.autograd.grad(rotated, (q, k), gradients)


def assert_equal(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
