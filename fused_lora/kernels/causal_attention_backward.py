"""The backward of `causal_attention.py`, with RoPE's in it, from any forward's logsumexp L.

For the incoming g, with D the sum of g * attended over a head's features, and RoPE's rotation R:

    P         = exp(a q k' - L)
    grad_v    = P' g
    dS        = P * (g v' - D)
    grad_q    = R' a dS k
    grad_k    = R' a dS' q                  grad_k and grad_v: over all heads that share them

They are written side by side, as the backward of the q, k, v matmul takes them. One kernel computes
grad_q and D, another grad_k and grad_v (`causal_attention_keys_backward.py`). Each computes P and
dS for itself. A sink changes nothing here: it is in L, and attended is what it left.

The table is in µs per layer of Qwen2.5-3B with 32 sequences, on an H200. We compare with cuDNN's
backward, as PyTorch calls it, followed by RoPE's kernel. "first" is the first version of these
kernels. "now" was timed from 128 positions on:

    positions            64     128     256     512
    cuDNN and RoPE     70.6     117     224     484
    first              39.5    74.3     160     406
    now                        73.5     160     408

Besides the backward itself, cuDNN launches kernels for D, for sums over heads and to cast grad_q
from fp32. At 64 positions they take half of its time. With more positions the matmuls dominate:
cuDNN has five, we have seven.

P and dS are rounded to the tensors' dtype for their matmuls. All else is fp32 and rounds once, at
the store. There are no atomics: unlike cuDNN's backward, this one is deterministic.

Attention's backward in tiles: Dao et al., arXiv 2205.14135 and 2307.08691. RoPE: Su et al., arXiv
2104.09864.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, launch

from .causal_attention import (
    LOG2_E,
    Attention,
    Launch,
    Launches,
    dot,
    first_seen,
    is_seen,
)
from .causal_attention_keys_backward import (
    _attention_keys_backward_kernel,
    load_halves,
    store_rotated_back,
)
from .qkv_rope import angles_of
from .tiling import dots_in_fp32

BACKWARD_QUERIES = Launches(
    usual=Launch(queries=64, keys=32, warps=4, stages=2),
    documents=Launch(queries=64, keys=64, warps=4, stages=2),
    wide=Launch(queries=32, keys=32, warps=4, stages=2),
)
BACKWARD_KEYS = Launches(
    usual=Launch(queries=64, keys=64, warps=4, stages=2),
    documents=Launch(queries=64, keys=64, warps=4, stages=2),
    wide=Launch(queries=32, keys=32, warps=4, stages=2),
)


@triton.jit
def _attend_backward(
    q_1, q_2, grad, dots, logsumexp, query, sequence, kv_head, first_key, end, limit,
    qkv_row_stride, score_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries, in halves and not scaled, by keys as `_attend` has them"""
    HEAD_DIM: tl.constexpr = 2 * HALF
    grad_q_1 = tl.zeros([BLOCK, HALF], tl.float32)
    grad_q_2 = tl.zeros([BLOCK, HALF], tl.float32)
    zeros = tl.zeros([BLOCK, KEYS], tl.float32)
    for start in range(first_key, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = (key < limit)[:, None]
        key_row = sequence + key.to(tl.int64)[:, None] * qkv_row_stride
        k_1, k_2 = load_halves(key_row, (HEADS + kv_head) * HEAD_DIM, is_key, HALF)
        v_tile = key_row + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        v = tl.load(v_tile, mask=is_key, other=0.0)
        scores = dot(q_2, tl.trans(k_2), dot(q_1, tl.trans(k_1), zeros, IN_FP32), IN_FP32)
        p = tl.exp2(scores * score_scale - (logsumexp * LOG2_E)[:, None])
        p = tl.where(is_seen(query[:, None], key[None, :], WINDOW), p, 0.0)
        grad_p = dot(grad, tl.trans(v), zeros, IN_FP32)
        grad_scores = (p * (grad_p - dots[:, None])).to(grad.dtype)
        grad_q_1 = dot(grad_scores, k_1, grad_q_1, IN_FP32)
        grad_q_2 = dot(grad_scores, k_2, grad_q_2, IN_FP32)
    return grad_q_1, grad_q_2


@triton.jit(do_not_specialize=["positions"])
def _attention_queries_backward_kernel(
    grad_ptr,  # [batch * positions, HEADS 2 HALF]
    qkv_ptr,  # [batch * positions, (HEADS + 2 KV_HEADS) 2 HALF]
    documents_ptr,  # as in _attention_forward_kernel
    attended_ptr,  # as grad
    logsumexp_ptr,  # [batch, HEADS, positions] fp32
    dots_ptr,  # likewise, written: D
    cos_ptr,  # [batch or 1, positions, 2 HALF], contiguous; None: nothing was rotated
    sin_ptr,  # as cos
    cos_batch_stride,  # 0 where all sequences share their angles
    grad_qkv_ptr,  # as qkv, its first columns written
    positions,
    grad_row_stride,
    qkv_row_stride,
    attended_row_stride,
    grad_qkv_row_stride,
    scaling,
    score_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    batch_head = tl.program_id(0)
    head = batch_head % HEADS
    kv_head = head // (HEADS // KV_HEADS)
    batch = (batch_head // HEADS).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    query = block * BLOCK + tl.arange(0, BLOCK)
    is_query = query < positions
    mask = is_query[:, None]
    sequence = qkv_ptr + batch * positions * qkv_row_stride
    q_row = sequence + query.to(tl.int64)[:, None] * qkv_row_stride
    feature = head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    row = (batch * positions + query)[:, None]
    grad_tile = grad_ptr + row * grad_row_stride + feature
    grad = tl.load(grad_tile, mask=mask, other=0.0)
    attended = tl.load(attended_ptr + row * attended_row_stride + feature, mask=mask, other=0.0)
    dots = tl.sum(grad.to(tl.float32) * attended.to(tl.float32), axis=1)
    places = batch_head.to(tl.int64) * positions + query
    tl.store(dots_ptr + places, dots, mask=is_query)
    grad_qkv_row = grad_qkv_ptr + row * grad_qkv_row_stride
    angle = batch * cos_batch_stride + query[:, None] * HEAD_DIM
    end = tl.minimum((block + 1) * BLOCK, positions)
    if documents_ptr is None:
        q_1, q_2 = load_halves(q_row, head * HEAD_DIM, mask, HALF)
        logsumexp = tl.load(logsumexp_ptr + places, mask=is_query, other=0.0)
        first_key = first_seen(0, block * BLOCK, WINDOW)
        grad_q_1, grad_q_2 = _attend_backward(
            q_1, q_2, grad, dots, logsumexp, query, sequence, kv_head, first_key, end, positions,
            qkv_row_stride, score_scale, HEADS, KV_HEADS, HALF, BLOCK, KEYS, WINDOW, IN_FP32,
        )  # fmt: skip
        store_rotated_back(
            grad_qkv_row, head * HEAD_DIM, grad_q_1 * scaling, grad_q_2 * scaling,
            cos_ptr, sin_ptr, angle, mask, HALF,
        )  # fmt: skip
    else:
        documents = documents_ptr + batch * 2 * positions
        first = block * BLOCK
        while first < end:
            first_key = first_seen(tl.load(documents + first), first, WINDOW)
            next = tl.minimum(tl.load(documents + positions + first), end)
            is_query = (query >= first) & (query < next)
            mask = is_query[:, None]
            q_1, q_2 = load_halves(q_row, head * HEAD_DIM, mask, HALF)
            grad = tl.load(grad_tile, mask=mask, other=0.0)
            logsumexp = tl.load(logsumexp_ptr + places, mask=is_query, other=0.0)
            grad_q_1, grad_q_2 = _attend_backward(
                q_1, q_2, grad, dots, logsumexp, query, sequence, kv_head, first_key, next, next,
                qkv_row_stride, score_scale, HEADS, KV_HEADS, HALF, BLOCK, KEYS, WINDOW, IN_FP32,
            )  # fmt: skip
            store_rotated_back(
                grad_qkv_row, head * HEAD_DIM, grad_q_1 * scaling, grad_q_2 * scaling,
                cos_ptr, sin_ptr, angle, mask, HALF,
            )  # fmt: skip
            first = next


def causal_attention_backward(
    grad: Tensor,
    qkv: Tensor,
    angles: tuple[Tensor | None, Tensor | None],
    attended: Tensor,
    logsumexp: Tensor,
    attention: Attention,
    grad_qkv: Tensor,
    documents: Tensor | None = None,
) -> None:
    """Write the gradient of qkv, as it was before its angles rotated it, into grad_qkv.

    Equivalent PyTorch, for `rope_backward` of qkv_rope.py::

        gradients = torch.autograd.grad(attended, (q, k, v), grad)
        rope_backward(*gradients, *angles, grad_qkv)

    Args:
        grad, attended: [batch * positions, heads * head_dim].
        qkv: as the forward had it.
        angles: cos and sin, [batch or 1, positions, head_dim], as `rope_forward` takes them; None
            where nothing was rotated.
        logsumexp: [batch, heads, positions] in fp32 and contiguous, from any forward.
        grad_qkv: as qkv. Rows of all may lie any stride apart.
        attention, documents: as the forward had them.
    """
    kernel, batch = _attention_queries_backward_kernel, len(logsumexp)
    positions, heads, kv_heads, scaling, _, window = attention
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    if batch == 0:
        return
    dots = torch.empty_like(logsumexp)
    cos, sin, cos_batch_stride = angles_of(*angles)
    score_scale, in_fp32 = scaling * LOG2_E.value, dots_in_fp32(kernel, qkv)
    queries, keys, warps, stages = BACKWARD_QUERIES.choose(head_dim, documents)
    launch(
        kernel, (batch * heads, cdiv(positions, queries)),
        grad, qkv, documents, attended, logsumexp, dots, cos, sin, cos_batch_stride, grad_qkv,
        positions, grad.stride(0), qkv.stride(0), attended.stride(0), grad_qkv.stride(0),
        scaling, score_scale, heads, kv_heads, head_dim // 2, queries, keys,
        window or 0, in_fp32, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    queries, keys, warps, stages = BACKWARD_KEYS.choose(head_dim, documents)
    launch(
        _attention_keys_backward_kernel, (batch * kv_heads, cdiv(positions, keys)),
        grad, qkv, documents, logsumexp, dots, cos, sin, cos_batch_stride, grad_qkv, positions,
        grad.stride(0), qkv.stride(0), grad_qkv.stride(0),
        scaling, score_scale, heads, kv_heads, head_dim // 2, keys, queries,
        window or 0, in_fp32, num_warps=warps, num_stages=stages,
    )  # fmt: skip
