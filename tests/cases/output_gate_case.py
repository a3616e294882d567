"""Attention's output gate in eager PyTorch, and what the kernels are tried on."""

import torch
from cases.reference import random

from fused_lora.kernels.output_gate import gate_backward, gate_forward

SIZES = {  # rows, heads, head_dim, columns behind
    "odd": (7, 3, 10, 20),
    "one row": (1, 2, 1, 0),
    "more than a block": (3, 9, 130, 4),
}


def make(size, dtype, device):
    rows, heads, head_dim, more = SIZES[size]
    columns = heads * head_dim
    return tuple(
        random(rows, width, seed=seed, dtype=dtype, device=device)
        for seed, width in enumerate((columns, 2 * columns + more, columns))
    )


def gates_of(size, raw):
    _, heads, head_dim, _ = SIZES[size]
    by_head = raw[:, : 2 * heads * head_dim].unflatten(1, (heads, 2, head_dim))
    return by_head[:, :, 1].flatten(1)


def fused(size, case, layout=torch.clone):
    attended, raw, grad = map(layout, case)
    out, grad_raw = (layout(torch.full_like(t, 7.0)) for t in case[:2])
    head_dim = SIZES[size][2]
    gated = gate_forward(attended, raw, head_dim, out)
    grad_attended = gate_backward(grad, attended, raw, head_dim, grad_raw)
    return gated, grad_attended, gates_of(size, grad_raw)


def eager(size, case):
    attended, gate = (t.clone().requires_grad_() for t in (case[0], gates_of(size, case[1])))
    gated = attended * torch.sigmoid(gate)
    return gated.detach(), *torch.autograd.grad(gated, (attended, gate), case[2])
