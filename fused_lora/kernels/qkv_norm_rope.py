"""RoPE on [q | k | v] with norms of q and k before it, as Qwen3 has them.

    norm_rope_together    [RoPE(norm(q)) | RoPE(norm(k)) | v], from raw q, k and v
    head_norms_backward   the gradient of raw q and k, written over that of the normed ones

Where v has a norm too, it is normed without a weight (Gemma 4).

x is one head's raw elements, N of them, and all heads of q (or of k) share the weight w. OLMo 2
instead norms all heads of a token together, with a weight for every feature. w is the weight, or
1 + weight (Gemma 3):

    y      = x r w,    r = 1 / sqrt(mean(x^2) + eps)
    grad_x = r (g w - n mean(g w n)),    n = x r

as in `rms_norm.py`, and y is rotated as in `rope.py`. Attention's backward rotates its gradient
back as it writes it, which gives g. `head_norms_backward` recomputes r from raw x, so nothing else
is saved.

Traffic: forward reads q, k and v and writes them once. Backward reads g and x of what is normed and
writes grad_x over g, which must be the caller's own memory. Arithmetic is fp32 and rounds once, at
the store. The eager version rounds n, y, both of RoPE's terms and their sum. Deterministic.
"""

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import launch, next_power_of_2, previous_power_of_2

from .head_norms import HeadNorms, load_weights, mean_of_heads, weights_of
from .qkv_rope import (
    _features_together,
    angles_of,
    batch_of,
    block_of_rest,
    rotated_features,
)
from .rotation import load_angles, pair_of
from .row_norm import rstd_of_mean


@triton.jit
def _norm_rotate_heads(
    x_ptr,  # the first head of one token
    weight_ptr,  # [HEAD_DIM] or [HEADS HEAD_DIM], contiguous
    rotated_ptr,  # the first head of one token, contiguous, written
    head_stride,
    eps,
    cos_1, cos_2, sin_1, sin_2,  # [BLOCK_HALF], fp32
    TOGETHER: tl.constexpr, ZERO_CENTERED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, BLOCK_HEADS).to(tl.int64)[:, None]  # int64: see rotate_heads
    features = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < HEADS) & (features < HALF)
    first, second = pair_of(features, HALF, INTERLEAVED)
    x_ptr += heads * head_stride
    # 0.0 behind the end, which adds nothing to the sum of squares
    x_1 = tl.load(x_ptr + first, mask=mask, other=0.0).to(tl.float32)
    x_2 = tl.load(x_ptr + second, mask=mask, other=0.0).to(tl.float32)
    weight_1 = load_weights(weight_ptr, heads, first, mask, HEAD_DIM, TOGETHER, ZERO_CENTERED)
    weight_2 = load_weights(weight_ptr, heads, second, mask, HEAD_DIM, TOGETHER, ZERO_CENTERED)
    squares = tl.sum(x_1 * x_1 + x_2 * x_2, axis=1)[:, None]
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        is_rest = (heads < HEADS) & (rest < HEAD_DIM)
        x_rest = tl.load(x_ptr + rest, mask=is_rest, other=0.0).to(tl.float32)
        squares += tl.sum(x_rest * x_rest, axis=1)[:, None]
    rstd = rstd_of_mean(mean_of_heads(squares, HEADS, HEAD_DIM, TOGETHER), eps)
    x_1 = x_1 * rstd * weight_1
    x_2 = x_2 * rstd * weight_2
    rotated_1 = x_1 * cos_1[None, :] - x_2 * sin_1[None, :]
    rotated_2 = x_2 * cos_2[None, :] + x_1 * sin_2[None, :]
    rotated_ptr += heads * HEAD_DIM
    dtype = rotated_ptr.dtype.element_ty
    tl.store(rotated_ptr + first, rotated_1.to(dtype), mask=mask)
    tl.store(rotated_ptr + second, rotated_2.to(dtype), mask=mask)
    if BLOCK_REST > 0:
        weight = load_weights(weight_ptr, heads, rest, is_rest, HEAD_DIM, TOGETHER, ZERO_CENTERED)
        tl.store(rotated_ptr + rest, (x_rest * rstd * weight).to(dtype), mask=is_rest)


@triton.jit(do_not_specialize=["positions"])
def _qkv_norm_rope_kernel(
    q_ptr,  # [batch, HEADS, positions, HEAD_DIM]
    k_ptr,  # [batch, KV_HEADS, positions, HEAD_DIM]
    v_ptr,  # as k
    q_weight_ptr,  # [HEAD_DIM], contiguous; [HEADS HEAD_DIM] where Q_TOGETHER
    k_weight_ptr,  # likewise
    cos_ptr,  # [batch or 1, positions, 2 HALF], contiguous; None: nothing is rotated
    sin_ptr,  # as cos
    qkv_ptr,  # [batch * positions, (HEADS + 2 KV_HEADS) HEAD_DIM], written
    positions,
    q_eps,
    k_eps,
    v_eps,  # None: v is not normed
    q_batch_stride,
    q_head_stride,
    q_position_stride,
    k_batch_stride,
    k_head_stride,
    k_position_stride,
    v_batch_stride,
    v_head_stride,
    v_position_stride,
    cos_batch_stride,  # 0 where all sequences share their angles
    qkv_row_stride,
    Q_TOGETHER: tl.constexpr,
    K_TOGETHER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch = token // positions
    position = token % positions
    cos_1, cos_2, sin_1, sin_2 = load_angles(
        cos_ptr, sin_ptr, cos_batch_stride, batch, position, False, HALF, BLOCK_HALF
    )
    row = qkv_ptr + token * qkv_row_stride
    _norm_rotate_heads(
        q_ptr + batch * q_batch_stride + position * q_position_stride, q_weight_ptr, row,
        q_head_stride, q_eps,
        cos_1, cos_2, sin_1, sin_2, Q_TOGETHER, ZERO_CENTERED, HEADS, HALF, HEAD_DIM, INTERLEAVED,
        BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    _norm_rotate_heads(
        k_ptr + batch * k_batch_stride + position * k_position_stride, k_weight_ptr,
        row + HEADS * HEAD_DIM,
        k_head_stride, k_eps,
        cos_1, cos_2, sin_1, sin_2, K_TOGETHER, ZERO_CENTERED, KV_HEADS, HALF, HEAD_DIM,
        INTERLEAVED, BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    head = tl.arange(0, BLOCK_KV_HEADS).to(tl.int64)[:, None]
    feature = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (head < KV_HEADS) & (feature < HEAD_DIM)
    v = v_ptr + batch * v_batch_stride + position * v_position_stride
    v_row = row + (HEADS + KV_HEADS) * HEAD_DIM
    value = tl.load(v + head * v_head_stride + feature, mask=mask, other=0.0)
    if v_eps is not None:
        value = value.to(tl.float32)
        mean = tl.div_rn(tl.sum(value * value, axis=1)[:, None], 1.0 * HEAD_DIM)
        value = (value * rstd_of_mean(mean, v_eps)).to(qkv_ptr.dtype.element_ty)
    tl.store(v_row + head * HEAD_DIM + feature, value, mask=mask)


@triton.jit
def _norm_heads_backward(
    grad_ptr,  # the first head of one token, contiguous, read and written
    x_ptr,  # likewise, of any stride
    weight_ptr,  # [HEAD_DIM] or [HEADS HEAD_DIM], contiguous; None: all are 1
    head_stride,
    eps,
    TOGETHER: tl.constexpr, ZERO_CENTERED: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, BLOCK_HEADS).to(tl.int64)[:, None]
    features = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (heads < HEADS) & (features < HEAD_DIM)
    x = tl.load(x_ptr + heads * head_stride + features, mask=mask, other=0.0).to(tl.float32)
    grad_ptr += heads * HEAD_DIM + features
    grad = tl.load(grad_ptr, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        grad *= load_weights(weight_ptr, heads, features, mask, HEAD_DIM, TOGETHER, ZERO_CENTERED)
    squares = tl.sum(x * x, axis=1)[:, None]
    rstd = rstd_of_mean(mean_of_heads(squares, HEADS, HEAD_DIM, TOGETHER), eps)
    normed = x * rstd
    products = tl.sum(grad * normed, axis=1)[:, None]
    grad = rstd * (grad - normed * mean_of_heads(products, HEADS, HEAD_DIM, TOGETHER))
    tl.store(grad_ptr, grad.to(grad_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["positions"])
def _qkv_norm_backward_kernel(
    grad_qkv_ptr,  # [batch * positions, (HEADS + 2 KV_HEADS) HEAD_DIM], q's and k's written
    q_ptr,  # [batch, HEADS, positions, HEAD_DIM]
    k_ptr,  # [batch, KV_HEADS, positions, HEAD_DIM]
    v_ptr,  # as k; None: v is not normed
    q_weight_ptr,  # [HEAD_DIM], contiguous; [HEADS HEAD_DIM] where Q_TOGETHER
    k_weight_ptr,  # likewise
    positions,
    q_eps,
    k_eps,
    v_eps,
    grad_row_stride,
    q_batch_stride,
    q_head_stride,
    q_position_stride,
    k_batch_stride,
    k_head_stride,
    k_position_stride,
    v_batch_stride,
    v_head_stride,
    v_position_stride,
    Q_TOGETHER: tl.constexpr,
    K_TOGETHER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch = token // positions
    position = token % positions
    row = grad_qkv_ptr + token * grad_row_stride
    _norm_heads_backward(
        row, q_ptr + batch * q_batch_stride + position * q_position_stride, q_weight_ptr,
        q_head_stride, q_eps, Q_TOGETHER, ZERO_CENTERED, HEADS, HEAD_DIM, BLOCK_HEADS, BLOCK_DIM,
    )  # fmt: skip
    _norm_heads_backward(
        row + HEADS * HEAD_DIM, k_ptr + batch * k_batch_stride + position * k_position_stride,
        k_weight_ptr, k_head_stride, k_eps,
        K_TOGETHER, ZERO_CENTERED, KV_HEADS, HEAD_DIM, BLOCK_KV_HEADS, BLOCK_DIM,
    )  # fmt: skip
    if v_ptr is not None:
        _norm_heads_backward(
            row + (HEADS + KV_HEADS) * HEAD_DIM,
            v_ptr + batch * v_batch_stride + position * v_position_stride, None, v_head_stride,
            v_eps, False, False, KV_HEADS, HEAD_DIM, BLOCK_KV_HEADS, BLOCK_DIM,
        )  # fmt: skip


def norm_rope_together(
    q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms, cos: Tensor | None, sin: Tensor | None,
    qkv: Tensor, interleaved: bool = False,
) -> None:  # fmt: skip
    """Write q and k, normed and rotated by their positions' angles, and v, as it is or normed, side
    by side into qkv.

    Equivalent PyTorch, for `rope_together` of qkv_rope.py and `rms_norm` of rms_norm.py::

        q = rms_norm(q, norms.q_weight, norms.q_eps, norms.zero_centered)
        k = rms_norm(k, norms.k_weight, norms.k_eps, norms.zero_centered)
        v = v if norms.v_eps is None else F.rms_norm(v, (head_dim,), eps=norms.v_eps)
        rope_together(q, k, v, cos, sin, qkv, interleaved)

    q is normed over its last dimension, as here, where q_weight is [head_dim], and over all heads
    of a token where it is [heads head_dim]; likewise k. Weights are bf16, fp16 or fp32; all else is
    as for `rope_together`.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or no kernel can run on them.
    """
    name, kernel = "norm_rope_together", _qkv_norm_rope_kernel
    (_, heads, positions, head_dim), kv_heads = q.shape, k.shape[1]
    batch = batch_of(name, qkv, cos, sin, heads, kv_heads, positions)
    q_weight, k_weight = weights_of(name, norms, heads, kv_heads, head_dim, qkv)
    if batch * positions == 0:
        return  # an empty grid cannot be launched
    q, k, v = (_features_together(t) for t in (q, k, v))
    cos, sin, cos_batch_stride = angles_of(cos, sin)
    rotated, block_dim = rotated_features(cos, head_dim), next_power_of_2(head_dim)
    launch(
        kernel, (batch * positions,),
        q, k, v, q_weight, k_weight, cos, sin, qkv,
        positions, norms.q_eps, norms.k_eps, norms.v_eps,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        cos_batch_stride, qkv.stride(0),
        q_weight.numel() > head_dim, k_weight.numel() > head_dim, norms.zero_centered,
        heads, kv_heads, rotated // 2, head_dim, interleaved,
        next_power_of_2(heads), next_power_of_2(kv_heads), next_power_of_2(rotated // 2), block_dim,
        block_of_rest(rotated, head_dim), num_warps=_warps_of(heads, block_dim // 2),
    )  # fmt: skip


def head_norms_backward(
    q: Tensor, k: Tensor, v: Tensor | None, norms: HeadNorms, grad_qkv: Tensor
) -> None:
    """Overwrite the gradient of normed q, k and v in grad_qkv with the gradient of raw ones.

    Equivalent PyTorch, for the gradients that `split_heads` of qkv_rope.py finds in grad_qkv::

        for x, weight, eps, grad in (q, q_weight, q_eps, grad_q), (k, k_weight, k_eps, grad_k):
            normed = rms_norm(x, weight, eps, norms.zero_centered)
            grad.copy_(torch.autograd.grad(normed, x, grad)[0])

    q, k, v and norms are those that `norm_rope_together` was given. grad_qkv is [batch * positions,
    (heads + 2 kv_heads) head_dim] and the caller's own memory. Where v has no norm, it may be None,
    and its gradient is left alone.

    Raises ValueError as `norm_rope_together`.
    """
    name, kernel = "head_norms_backward", _qkv_norm_backward_kernel
    (batch, heads, positions, head_dim), kv_heads = q.shape, k.shape[1]
    if norms.v_eps is None:
        v = None
    q_weight, k_weight = weights_of(name, norms, heads, kv_heads, head_dim, grad_qkv)
    if batch * positions == 0:
        return
    q, k = _features_together(q), _features_together(k)
    v = None if v is None else _features_together(v)
    v_strides = (0, 0, 0) if v is None else v.stride()[:3]
    block_dim = next_power_of_2(head_dim)
    launch(
        kernel, (batch * positions,),
        grad_qkv, q, k, v, q_weight, k_weight, positions, norms.q_eps, norms.k_eps, norms.v_eps,
        grad_qkv.stride(0), *q.stride()[:3], *k.stride()[:3], *v_strides,
        q_weight.numel() > head_dim, k_weight.numel() > head_dim, norms.zero_centered,
        heads, kv_heads, head_dim, next_power_of_2(heads), next_power_of_2(kv_heads), block_dim,
        num_warps=_warps_of(heads, block_dim // 2),
    )  # fmt: skip


def _warps_of(heads: int, block_half: int) -> int:
    return min(previous_power_of_2(max(heads * block_half // 256, 1)), 16)  # as `rope_forward` has
