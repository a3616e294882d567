"""The half of `causal_attention_backward.py` that computes grad_k and grad_v.

A program has a tile of keys. It walks through the queries that see them, in all heads that share
them.
"""

import triton
import triton.language as tl

from .causal_attention import LOG2_E, dot, is_seen


@triton.jit
def load_halves(row, column, mask, HALF: tl.constexpr):
    """Both halves [tokens, HALF] of one head, the first of whose features is at this column."""
    tile = row + column + tl.arange(0, HALF)[None, :]
    return tl.load(tile, mask=mask, other=0.0), tl.load(tile + HALF, mask=mask, other=0.0)


@triton.jit
def store_rotated_back(
    row, column, grad_1, grad_2, cos_ptr, sin_ptr, angle, mask, HALF: tl.constexpr
):
    """Write a head's gradient, given in halves, rotated back by the angles of its tokens, or
    without cos_ptr as it is."""
    feature = tl.arange(0, HALF)[None, :]
    tile = row + column + feature
    dtype = tile.dtype.element_ty
    if cos_ptr is None:
        tl.store(tile, grad_1.to(dtype), mask=mask)
        tl.store(tile + HALF, grad_2.to(dtype), mask=mask)
    else:
        cos_row, sin_row = cos_ptr + angle + feature, sin_ptr + angle + feature
        cos_1 = tl.load(cos_row, mask=mask, other=0.0).to(tl.float32)
        cos_2 = tl.load(cos_row + HALF, mask=mask, other=0.0).to(tl.float32)
        sin_1 = tl.load(sin_row, mask=mask, other=0.0).to(tl.float32)
        sin_2 = tl.load(sin_row + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(tile, (grad_1 * cos_1 + grad_2 * sin_2).to(dtype), mask=mask)
        tl.store(tile + HALF, (grad_2 * cos_2 - grad_1 * sin_1).to(dtype), mask=mask)


@triton.jit
def _end_of_seeing(end, next_key, WINDOW: tl.constexpr):
    """The end of the queries, of those up to `end`, that see a key before next_key."""
    if WINDOW > 0:
        end = tl.minimum(end, next_key + (WINDOW - 1))
    return end


@triton.jit
def _attend_keys_backward(
    k_1, k_2, v, key, sequence, grad_rows, logsumexp_rows, dots_rows, kv_head, first_query, end,
    positions, qkv_row_stride, grad_row_stride, score_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a tile of keys, in halves and not scaled, and of its values. The
    queries run from first_query up to `end`, in all heads that share these keys."""
    HEAD_DIM: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HEADS // KV_HEADS
    feature = tl.arange(0, HEAD_DIM)[None, :]
    grad_k_1 = tl.zeros([BLOCK, HALF], tl.float32)
    grad_k_2 = tl.zeros([BLOCK, HALF], tl.float32)
    grad_v = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    zeros = tl.zeros([BLOCK, QUERIES], tl.float32)
    blocks = tl.cdiv(end - first_query, QUERIES)
    # a single loop over the heads and their queries keeps the next loads in flight
    for i in range(0, GROUP * blocks):
        head = kv_head * GROUP + i // blocks
        query = first_query + i % blocks * QUERIES + tl.arange(0, QUERIES)
        is_query = query < end
        mask = is_query[:, None]
        q_1, q_2 = load_halves(
            sequence + query.to(tl.int64)[:, None] * qkv_row_stride, head * HEAD_DIM, mask, HALF
        )
        grad_tile = grad_rows + query.to(tl.int64)[:, None] * grad_row_stride + head * HEAD_DIM
        grad = tl.load(grad_tile + feature, mask=mask, other=0.0)
        places = head.to(tl.int64) * positions + query
        logsumexp = tl.load(logsumexp_rows + places, mask=is_query, other=0.0)
        dots = tl.load(dots_rows + places, mask=is_query, other=0.0)
        scores = dot(k_2, tl.trans(q_2), dot(k_1, tl.trans(q_1), zeros, IN_FP32), IN_FP32)
        p = tl.exp2(scores * score_scale - (logsumexp * LOG2_E)[None, :])
        # behind the last query grad is 0, and so is everything that p is multiplied by
        p = tl.where(is_seen(query[None, :], key[:, None], WINDOW), p, 0.0)
        grad_v = dot(p.to(grad.dtype), grad, grad_v, IN_FP32)
        grad_p = dot(v, tl.trans(grad), zeros, IN_FP32)
        grad_scores = (p * (grad_p - dots[None, :])).to(grad.dtype)
        grad_k_1 = dot(grad_scores, q_1, grad_k_1, IN_FP32)
        grad_k_2 = dot(grad_scores, q_2, grad_k_2, IN_FP32)
    return grad_k_1, grad_k_2, grad_v


@triton.jit(do_not_specialize=["positions"])
def _attention_keys_backward_kernel(
    grad_ptr,  # as in _attention_queries_backward_kernel, all of them
    qkv_ptr,
    documents_ptr,
    logsumexp_ptr,
    dots_ptr,
    cos_ptr,
    sin_ptr,
    cos_batch_stride,
    grad_qkv_ptr,  # its other columns written
    positions,
    grad_row_stride,
    qkv_row_stride,
    grad_qkv_row_stride,
    scaling,
    score_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    kv_head = tl.program_id(0) % KV_HEADS
    batch = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    start = tl.program_id(1) * BLOCK  # the first ones have the most queries
    key = start + tl.arange(0, BLOCK)
    is_key = (key < positions)[:, None]
    sequence = qkv_ptr + batch * positions * qkv_row_stride
    grad_rows = grad_ptr + batch * positions * grad_row_stride
    logsumexp_rows = logsumexp_ptr + batch * HEADS * positions
    dots_rows = dots_ptr + batch * HEADS * positions
    key_row = sequence + key.to(tl.int64)[:, None] * qkv_row_stride
    k_column = (HEADS + kv_head) * HEAD_DIM
    v_column = (HEADS + KV_HEADS + kv_head) * HEAD_DIM
    feature = tl.arange(0, HEAD_DIM)[None, :]
    row = grad_qkv_ptr + (batch * positions + key)[:, None] * grad_qkv_row_stride
    angle = batch * cos_batch_stride + key[:, None] * HEAD_DIM
    if documents_ptr is None:
        k_1, k_2 = load_halves(key_row, k_column, is_key, HALF)
        v = tl.load(key_row + v_column + feature, mask=is_key, other=0.0)
        grad_k_1, grad_k_2, grad_v = _attend_keys_backward(
            k_1, k_2, v, key, sequence, grad_rows, logsumexp_rows, dots_rows, kv_head, start,
            _end_of_seeing(positions, start + BLOCK, WINDOW), positions, qkv_row_stride,
            grad_row_stride, score_scale, HEADS, KV_HEADS, HALF, BLOCK, QUERIES, WINDOW, IN_FP32,
        )  # fmt: skip
        store_rotated_back(
            row, k_column, grad_k_1 * scaling, grad_k_2 * scaling, cos_ptr, sin_ptr, angle, is_key,
            HALF,
        )  # fmt: skip
        tl.store(row + v_column + feature, grad_v.to(grad_qkv_ptr.dtype.element_ty), mask=is_key)
    else:
        documents = documents_ptr + batch * 2 * positions
        first = start
        last = tl.minimum(start + BLOCK, positions)
        while first < last:
            end = tl.load(documents + positions + first)
            next = tl.minimum(end, last)
            is_key = ((key >= first) & (key < next))[:, None]
            k_1, k_2 = load_halves(key_row, k_column, is_key, HALF)
            v = tl.load(key_row + v_column + feature, mask=is_key, other=0.0)
            grad_k_1, grad_k_2, grad_v = _attend_keys_backward(
                k_1, k_2, v, key, sequence, grad_rows, logsumexp_rows, dots_rows, kv_head, first,
                _end_of_seeing(end, next, WINDOW), positions, qkv_row_stride, grad_row_stride,
                score_scale, HEADS, KV_HEADS, HALF, BLOCK, QUERIES, WINDOW, IN_FP32,
            )  # fmt: skip
            store_rotated_back(
                row, k_column, grad_k_1 * scaling, grad_k_2 * scaling, cos_ptr, sin_ptr, angle,
                is_key, HALF,
            )  # fmt: skip
            grad_v = grad_v.to(grad_qkv_ptr.dtype.element_ty)
            tl.store(row + v_column + feature, grad_v, mask=is_key)
            first = next
