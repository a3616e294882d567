"""The backward of a layer's attention: from the gradient of o's input to those of the outputs of
the projections q, k and v."""

import torch
from torch import Tensor

from ..kernels.head_norms import head_norms_backward
from ..kernels.output_gate import gate_backward, split_gated_heads
from ..kernels.qkv_attention import attention_backward
from ..kernels.qkv_rope import scale_q, split_heads
from .saved import Saved


def attention_gradient(grad: Tensor, saved: Saved, grad_qkv: Tensor) -> None:
    """Write the gradient of q, k and v (with a gate beside each head of q, if there are gates) into
    grad_qkv [T, out], given that of o's input."""
    frozen, attended = saved.frozen, saved.attended
    heads, kv_heads, positions = frozen.heads, frozen.kv_heads, saved.hidden.shape[1]
    target, attended_output = grad_qkv, attended.added.x
    if frozen.has_gate:
        assert saved.raw is not None and attended.before_gate is not None
        attended_output = attended.before_gate
        head_dim = attended_output.shape[1] // heads
        grad = gate_backward(grad, attended_output, saved.raw, head_dim, grad_qkv)
        target = torch.empty_like(saved.qkv)
    attention_backward(
        grad, saved.qkv, saved.cos, saved.sin, saved.mask, attended_output, attended.saved, target
    )
    scale_q(target, frozen.q_scale, attended_output.shape[1])
    if saved.raw is not None:
        assert frozen.head_norms is not None
        split = split_gated_heads if frozen.has_gate else split_heads
        q, k, v = split(saved.raw, positions, heads, kv_heads)
        head_norms_backward(q, k, v, frozen.head_norms, target)
    if frozen.has_gate:
        parts = split_gated_heads(grad_qkv, positions, heads, kv_heads)
        for part, one in zip(parts, split_heads(target, positions, heads, kv_heads), strict=True):
            part.copy_(one)
