"""Rotary position embedding of q and k, forward and backward, one Triton launch each.

Split a head's vector into halves. Each pair (x1[i], x2[i]) is a point in a plane, and RoPE rotates
it by an angle that grows with the token's position. `kernels/qkv_rope.py` has the equations, the
kernel and its traffic.

RoPE: Su et al., "RoFormer", arXiv 2104.09864. Like transformers, we pair halves, not neighbours.
"""

import torch
from torch import Tensor

from fused_mlp.launching import DTYPES, check_runnable
from fused_mlp.utils import refuse_second_derivative

from ..kernels.head_norms import HeadNorms
from ..kernels.qkv_rope import _qkv_rope_kernel, rotate


# torch 2.11 fails to trace the launch where sizes vary
@torch.compiler.disable
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate every head of q and k by the angles of its position.

    Equivalent PyTorch, with ``rotate_half(x) = torch.cat((-x2, x1), -1)`` for ``x1, x2 =
    x.chunk(2, -1)``, and the same for k::

        (q * cos.unsqueeze(1) + rotate_half(q) * sin.unsqueeze(1)).to(q.dtype)

    If cos is narrower than a head, only that many of its first features are rotated.

    Args:
        q: [batch, heads, seq, head_dim], bf16, fp16 or fp32, head_dim even. Any strides: it is
            copied only if its last dimension is not contiguous.
        k: [batch, kv_heads, seq, head_dim], likewise, in q's dtype. It may have no heads.
        cos, sin: [batch or 1, seq, head_dim or less], each in bf16, fp16 or fp32. They are copied
            if not contiguous, and get no gradient.
        interleaved: pair neighbours (2 i, 2 i + 1), as GLM-4 does. The i-th angle rotates them.

    Returns:
        (q_rotated, k_rotated), new tensors with the shapes and dtype of q and k, computed in fp32.
        In memory they are always [batch, seq, heads, head_dim], which puts a token's heads side by
        side for attention. Gradients have the same layout.

    Saved for backward: cos and sin. It writes to no input, incoming gradient or saved tensor, so a
    second backward through a retained graph is right. Deterministic. Not twice differentiable.
    Autocast changes nothing. An unused output counts as one with a zero gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, cos or sin requires a gradient, or no
            kernel can run on them.
        RuntimeError: from backward, under create_graph=True.
    """
    return RoPE.apply(q, k, cos, sin, interleaved)


class RoPE(torch.autograd.Function):
    """``RoPE.apply(q, k, cos, sin, interleaved)``; see `rope`."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved=False):
        _check(q, k, cos, sin)
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotate(q, k, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad_q_rotated, grad_k_rotated):
        refuse_second_derivative("rope", "the unfused rotary embedding")
        cos, sin = ctx.saved_tensors
        gradients = rotate(grad_q_rotated, grad_k_rotated, cos, sin, ctx.interleaved, backward=True)
        return *gradients, None, None, None


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError where shapes, dtypes or devices do not fit together, naming the tensor."""
    if q.ndim != 4 or q.shape[-1] % 2 or q.shape[-1] == 0 or q.shape[1] == 0:
        raise ValueError(
            f"rope: q is {list(q.shape)}, should be [batch, heads, seq, head_dim], head_dim even"
        )
    batch, _, positions, head_dim = q.shape
    if k.ndim != 4 or k.shape != (batch, k.shape[1], positions, head_dim):
        raise ValueError(
            f"rope: k is {list(k.shape)}, should be [{batch}, kv_heads, {positions}, {head_dim}] "
            f"as q is {list(q.shape)}"
        )
    if (k.dtype, k.device) != (q.dtype, q.device):
        raise ValueError(
            f"rope: k is {k.dtype} on {k.device} and q {q.dtype} on {q.device}: give both one "
            "dtype and device"
        )
    check_angles("rope", cos, sin, (batch, positions, head_dim), q.device)
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle.requires_grad:
            raise ValueError(
                f"rope: {name} requires a gradient, which it would not get: detach it, or use the "
                "unfused rotary embedding"
            )
    check_runnable("rope", _qkv_rope_kernel, q)


def check_angles(
    name: str, cos: Tensor | None, sin: Tensor | None, sizes: tuple[int, int, int],
    device: torch.device,
) -> None:  # fmt: skip
    """Raise ValueError, in the name of the public function `name`, unless cos and sin fit heads of
    sizes (batch, positions, head_dim) on this device, or both are None."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError(f"{name}: only one of cos and sin is given, should be both or neither")
    batch, positions, head_dim = sizes
    for key, angle in (("cos", cos), ("sin", sin)):
        rotated = angle.shape[-1]
        if angle.shape[:-1] not in ((1, positions), (batch, positions)) or rotated > head_dim:
            raise ValueError(
                f"{name}: {key} is {list(angle.shape)}, should be [1 or {batch}, {positions}, "
                f"{head_dim}], or less than {head_dim} to rotate a part of each head"
            )
        if rotated % 2 or rotated == 0:
            raise ValueError(f"{name}: {key} has {rotated} angles, should have 2 of each pair")
        if angle.shape != cos.shape:
            raise ValueError(f"{name}: sin is {list(sin.shape)} and cos {list(cos.shape)}")
        if angle.dtype not in DTYPES or angle.device != device:
            raise ValueError(
                f"{name}: {key} is {angle.dtype} on {angle.device}, should be bfloat16, float16 or "
                f"float32 on {device}"
            )


def check_head_norms(
    name: str, norms: HeadNorms, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    """Raise ValueError, in the name of the public function `name`, unless the weights fit these
    heads: both have a value for each of a head's features, or both one for each of a token's."""
    counts = (1, 1) if not norms.are_together(head_dim) else (heads, kv_heads)
    weights = (("q_norm", norms.q_weight, counts[0]), ("k_norm", norms.k_weight, counts[1]))
    for key, weight, count in weights:
        if weight.shape != (count * head_dim,):
            raise ValueError(
                f"{name}: {key} is {list(weight.shape)}, should be [{head_dim}], or of all heads "
                f"together [{heads * head_dim}] for q and [{kv_heads * head_dim}] for k"
            )
        if weight.dtype not in DTYPES or weight.device != device:
            raise ValueError(
                f"{name}: {key} is {weight.dtype} on {weight.device}, should be bfloat16, float16 "
                f"or float32 on {device}"
            )
