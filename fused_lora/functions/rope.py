"""Rotary position embedding of q and k, forward and backward, one Triton launch each.

Split a head's vector into halves, x = (x1, x2). Each pair (x1[i], x2[i]) is a point in a plane, and
RoPE rotates it by an angle that grows with the token's position. With cos = (c1, c2) and
sin = (s1, s2) split the same way,

    y1 = x1 c1 - x2 s1
    y2 = x2 c2 + x1 s2

(c1 = c2 and s1 = s2 in every embedding we know of, but nothing here needs it). The gradients for an
incoming g = (g1, g2) are

    grad_x1 = g1 c1 + g2 s2
    grad_x2 = g2 c2 - g1 s1

the same formula with -s2 for s1 and -s1 for s2. So one kernel does both, and backward flips the
angle's sign.

Traffic: q and k are each read once and written once, 2 tensors, forward and backward. One program
does all heads of a token, so it reads cos and sin once per token, not once per head. Eager PyTorch
moves 10 tensors forward: 1 for -x2, 2 for the concatenation, 2 for each product, 3 for the sum.
Arithmetic is fp32 and rounds once, at the store; eager rounds both products and the sum.

RoPE: Su et al., "RoFormer", arXiv 2104.09864. Like transformers, we pair halves, not neighbours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import DTYPES, check_runnable, launch, next_power_of_2
from fused_mlp.utils import refuse_second_derivative

from ..kernels.qkv_rope import block_of_rest, rotated_features
from ..kernels.rotation import load_angles, rotate_heads


@triton.jit(do_not_specialize=["positions"])
def _rope_kernel(
    q_ptr,  # [batch, Q_HEADS, positions, HEAD_DIM]
    k_ptr,  # [batch, K_HEADS, positions, HEAD_DIM]
    cos_ptr,  # [batch or 1, positions, 2 HALF], contiguous
    sin_ptr,  # like cos
    q_rotated_ptr,  # like q, in memory [batch, positions, heads, HEAD_DIM], written
    k_rotated_ptr,  # like k, in the same order, written
    positions,
    q_batch_stride,
    q_head_stride,
    q_position_stride,
    k_batch_stride,
    k_head_stride,
    k_position_stride,
    cos_batch_stride,  # 0: all sequences share their angles
    BACKWARD: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch = token // positions
    position = token % positions
    cos_1, cos_2, sin_1, sin_2 = load_angles(
        cos_ptr, sin_ptr, cos_batch_stride, batch, position, BACKWARD, HALF, BLOCK_HALF
    )
    rotate_heads(
        q_ptr + batch * q_batch_stride + position * q_position_stride,
        q_rotated_ptr + token * (Q_HEADS * HEAD_DIM),
        q_head_stride,
        cos_1, cos_2, sin_1, sin_2, Q_HEADS, HALF, HEAD_DIM, INTERLEAVED, BLOCK_Q_HEADS, BLOCK_HALF,
        BLOCK_REST,
    )  # fmt: skip
    if K_HEADS > 0:
        rotate_heads(
            k_ptr + batch * k_batch_stride + position * k_position_stride,
            k_rotated_ptr + token * (K_HEADS * HEAD_DIM),
            k_head_stride,
            cos_1, cos_2, sin_1, sin_2, K_HEADS, HALF, HEAD_DIM, INTERLEAVED, BLOCK_K_HEADS,
            BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


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


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute `rope`'s q and k; with `backward`, their gradients from those of its outputs."""
    batch, _, positions, head_dim = q.shape
    q_rotated, k_rotated = _empty_by_token(q), _empty_by_token(k)
    if batch * positions == 0:
        return q_rotated, k_rotated  # an empty grid cannot be launched
    q, k = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    rotated = rotated_features(cos, head_dim)
    block_q_heads, block_k_heads, block_half, block_dim = (
        next_power_of_2(max(size, 1)) for size in (q.shape[1], k.shape[1], rotated // 2, head_dim)
    )
    launch(
        _rope_kernel, (batch * positions,),
        q, k, cos, sin, q_rotated, k_rotated,
        positions,
        *q.stride()[:3], *k.stride()[:3],
        0 if cos.shape[0] == 1 else cos.stride(0),
        backward, q.shape[1], k.shape[1], rotated // 2, head_dim, interleaved,
        block_q_heads, block_k_heads, block_half, block_of_rest(rotated, head_dim),
        # 8 bf16 values, one 16-byte load, per thread and half of q
        num_warps=min(max(block_q_heads * block_dim // 512, 1), 16),
    )  # fmt: skip
    return q_rotated, k_rotated


def _empty_by_token(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape [batch, heads, positions, head_dim] that has a token's
    heads side by side in memory."""
    _, heads, positions, head_dim = x.shape
    # not a transposed view: a view returned by an autograd function cannot be changed in place
    strides = (positions * heads * head_dim, head_dim, heads * head_dim, 1)
    return x.new_empty_strided(x.shape, strides)


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
    for name, angle in (("cos", cos), ("sin", sin)):
        rotated = angle.shape[-1]
        if angle.shape[:-1] not in ((1, positions), (batch, positions)) or rotated > head_dim:
            raise ValueError(
                f"rope: {name} is {list(angle.shape)}, should be [1 or {batch}, {positions}, "
                f"{head_dim}], or less than {head_dim} to rotate a part of each head"
            )
        if rotated % 2 or rotated == 0:
            raise ValueError(f"rope: {name} has {rotated} angles, should have 2 of each pair")
        if angle.shape != cos.shape:
            raise ValueError(f"rope: sin is {list(sin.shape)} and cos {list(cos.shape)}")
        if angle.dtype not in DTYPES or angle.device != q.device:
            raise ValueError(
                f"rope: {name} is {angle.dtype} on {angle.device}, should be bfloat16, float16 or "
                f"float32 on {q.device} as q is"
            )
        if angle.requires_grad:
            raise ValueError(
                f"rope: {name} requires a gradient, which it would not get: detach it, or use the "
                "unfused rotary embedding"
            )
    check_runnable("rope", _rope_kernel, q)
