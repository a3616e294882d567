"""Causal attention on [q | k | v] of a few hundred positions: its forward.

For a token i, the keys j <= i of its sequence and one head, with the scale a, and q and k already
rotated by RoPE:

    L         = log sum exp(a q k')
    P         = exp(a q k' - L)
    attended  = P v

in one pass over the keys, which scales down the sum so far when a larger score comes. A head's sink
(gpt-oss) is one more score in L, whose value is 0: the pass begins with it. With a window, a query
sees at most that many keys, itself the last.

Scores and sums are fp32. P is rounded to the tensors' dtype for its matmul, as in any fused
attention, and attended is rounded once, at the store. Deterministic. We timed the first version of
this kernel on an H200, in µs a layer of Qwen2.5-3B with 32 sequences (16 heads of 128, 2 of k and
v). cuDNN is timed as PyTorch calls it:

    positions      64     128     256     512
    cuDNN        18.2    18.4    39.0    95.9
    here         10.5    21.1    46.4     130

(`causal_attention_backward.py` has the backward.) Attention in tiles: Dao et al., arXiv 2205.14135.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, is_interpreted, launch

from .tiling import dots_in_fp32

# Up to these many positions our forward, and our backward, is faster than PyTorch's.
FORWARD_POSITIONS = 64
MAX_POSITIONS = 512  # what was measured

# Half heads that work as tiles: powers of two, and at least 16 for tl.dot. Wider ones than
# HALF_EVERYWHERE are for documents, where PyTorch needs a mask of positions x positions.
HALVES = (16, 32, 64, 128)
HALF_EVERYWHERE = 64

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Below every score, and a number: a window may hide a tile's first keys from some of its queries.
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


class Attention(NamedTuple):
    """The numbers that attention needs besides its tensors."""

    positions: int
    heads: int
    kv_heads: int
    scaling: float
    interleaved: bool = False  # RoPE pairs neighbours
    window: int | None = None  # keys that a query sees, itself the last; None: all up to itself


class Launch(NamedTuple):
    """Queries and keys of a tile, and Triton's warps and stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class Launches(NamedTuple):
    """A kernel's launches.

    The fastest of those tried: usual and wide on an H200, documents on an H100. The tensor cores
    take 64 rows at a time. With 128 the sums would not fit into registers. For heads of 256 other
    tiles make the backward 2 to 6% faster, but not within the 99 kB of shared memory that smaller
    cards have.
    """

    usual: Launch
    documents: Launch
    wide: Launch  # documents with heads of 256

    def choose(self, head_dim: int, documents: Tensor | None) -> Launch:
        if documents is None:
            return self.usual
        return self.documents if head_dim // 2 <= HALF_EVERYWHERE else self.wide


FORWARD = Launches(
    usual=Launch(queries=64, keys=32, warps=4, stages=2),
    documents=Launch(queries=64, keys=64, warps=4, stages=3),
    wide=Launch(queries=64, keys=32, warps=4, stages=2),
)


@triton.jit
def dot(a, b, total, IN_FP32: tl.constexpr):
    if IN_FP32:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def is_seen(query, key, WINDOW: tl.constexpr):
    """True where a query sees a key. WINDOW: how many it sees at most; 0: all up to itself."""
    seen = key <= query
    if WINDOW > 0:
        seen = seen & (query - key < WINDOW)
    return seen


@triton.jit
def first_seen(first_key, query, WINDOW: tl.constexpr):
    """The first key that a query sees, of those from first_key on."""
    if WINDOW > 0:
        first_key = tl.maximum(first_key, query - (WINDOW - 1))
    return first_key


@triton.jit
def _attend(
    q, query, sequence, key_column, first_key, end, limit, qkv_row_stride, score_scale, sink,
    HEAD_DIM: tl.constexpr, OF_V: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """Return (attended, logsumexp) of a tile of queries. Its keys begin at first_key, go on a tile
    at a time up to `end`, and stop before `limit`. sink: in units of scores; None: none."""
    feature = tl.arange(0, HEAD_DIM)[None, :]
    most = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if sink is not None:
        most = tl.maximum(most, sink)
        total += 1.0
    attended = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    zeros = tl.zeros([BLOCK, KEYS], tl.float32)
    for start in range(first_key, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = (key < limit)[:, None]
        k_tile = sequence + key.to(tl.int64)[:, None] * qkv_row_stride + key_column + feature
        k = tl.load(k_tile, mask=is_key, other=0.0)
        v = tl.load(k_tile + OF_V, mask=is_key, other=0.0)
        scores = dot(q, tl.trans(k), zeros, IN_FP32) * score_scale
        scores = tl.where(is_seen(query[:, None], key[None, :], WINDOW), scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_most[:, None])
        shrink = tl.exp2(most - new_most)
        most = new_most
        total = total * shrink + tl.sum(p, axis=1)
        attended = dot(p.to(v.dtype), v, attended * shrink[:, None], IN_FP32)
    return attended / total[:, None], (most + tl.log2(total)) * LN_2


@triton.jit(do_not_specialize=["positions"])
def _attention_forward_kernel(
    qkv_ptr,  # [batch * positions, (HEADS + 2 KV_HEADS) HEAD_DIM]
    documents_ptr,  # [batch, 2, positions] int32, first and end of each token's; None: one a row
    sinks_ptr,  # [HEADS]; None: no sinks
    attended_ptr,  # [batch * positions, HEADS HEAD_DIM], written
    logsumexp_ptr,  # [batch, HEADS, positions] fp32, written
    positions,
    qkv_row_stride,
    attended_row_stride,
    score_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # those with the most keys start first
    query = block * BLOCK + tl.arange(0, BLOCK)
    is_query = query < positions
    sequence = qkv_ptr + batch * positions * qkv_row_stride
    feature = tl.arange(0, HEAD_DIM)[None, :]
    q_tile = sequence + query.to(tl.int64)[:, None] * qkv_row_stride + head * HEAD_DIM + feature
    row = (batch * positions + query)[:, None]
    tile = attended_ptr + row * attended_row_stride + head * HEAD_DIM + feature
    places = logsumexp_ptr + tl.program_id(0).to(tl.int64) * positions + query
    key_column = (HEADS + head // (HEADS // KV_HEADS)) * HEAD_DIM
    end = tl.minimum((block + 1) * BLOCK, positions)
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
    if documents_ptr is None:
        q = tl.load(q_tile, mask=is_query[:, None], other=0.0)
        first_key = first_seen(0, block * BLOCK, WINDOW)
        attended, logsumexp = _attend(
            q, query, sequence, key_column, first_key, end, positions, qkv_row_stride, score_scale,
            sink, HEAD_DIM, KV_HEADS * HEAD_DIM, BLOCK, KEYS, WINDOW, IN_FP32,
        )  # fmt: skip
        tl.store(tile, attended.to(attended_ptr.dtype.element_ty), mask=is_query[:, None])
        tl.store(places, logsumexp, mask=is_query)
    else:
        documents = documents_ptr + batch * 2 * positions
        first = block * BLOCK
        # one document of the tile at a time: we read nothing of another, which may hold NaN
        while first < end:
            first_key = tl.load(documents + first)
            first_key = first_seen(first_key, first, WINDOW)
            next = tl.minimum(tl.load(documents + positions + first), end)
            is_query = (query >= first) & (query < next)
            q = tl.load(q_tile, mask=is_query[:, None], other=0.0)
            # those of other documents take part as the first of this one, and are not stored
            attended, logsumexp = _attend(
                q, tl.maximum(query, first), sequence, key_column, first_key, next, next,
                qkv_row_stride, score_scale, sink,
                HEAD_DIM, KV_HEADS * HEAD_DIM, BLOCK, KEYS, WINDOW, IN_FP32,
            )  # fmt: skip
            tl.store(tile, attended.to(attended_ptr.dtype.element_ty), mask=is_query[:, None])
            tl.store(places, logsumexp, mask=is_query)
            first = next


def fits_kernels(qkv: Tensor, attention: Attention, documents: Tensor | None = None) -> bool:
    """Return True if these kernels can run on [q | k | v].

    Halves of heads must be tiles. Unless rows hold documents, positions and head_dim must be small
    enough. On a GPU fp32 is out: its tiles do not fit into a multiprocessor.
    """
    positions, heads, kv_heads, *_ = attention
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    is_small = positions <= MAX_POSITIONS and head_dim // 2 <= HALF_EVERYWHERE
    return (
        positions > 0
        and (is_small or documents is not None)
        and heads % kv_heads == 0
        and fits_heads(qkv.dtype, head_dim)
    )


def fits_heads(dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if these kernels can attend to documents with such heads."""
    is_known = dtype != torch.float32 or is_interpreted(_attention_forward_kernel)
    return head_dim // 2 in HALVES and is_known


def causal_attention_forward(
    qkv: Tensor,
    attention: Attention,
    documents: Tensor | None = None,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attended [batch * positions, heads * head_dim], which is out if given, and logsumexp
    [batch, heads, positions].

    Equivalent PyTorch, with the logsumexp in fp32::

        q, k, v = split_heads(qkv, positions, heads, kv_heads)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2).flatten(2)
        logsumexp = causal(scaling * q @ k.mT).logsumexp(-1)

    Then, with sinks [heads] in any dtype::

        attended *= sigmoid(logsumexp - sinks)
        logsumexp = logaddexp(logsumexp, sinks)

    qkv is [batch * positions, (heads + 2 kv_heads) head_dim], has q and k rotated, and passes
    `fits_kernels`. Rows may lie any stride apart. documents: from `documents_of`; the mask is then
    `mask_of_documents`. None: each row is one document.
    """
    kernel = _attention_forward_kernel
    positions, heads, kv_heads, scaling, _, window = attention
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    batch = qkv.shape[0] // positions
    attended = qkv.new_empty(qkv.shape[0], heads * head_dim) if out is None else out
    logsumexp = qkv.new_empty(batch, heads, positions, dtype=torch.float32)
    queries, keys, warps, stages = FORWARD.choose(head_dim, documents)
    if batch:  # an empty grid cannot be launched
        launch(
            kernel, (batch * heads, cdiv(positions, queries)),
            qkv, documents, None if sinks is None else sinks.contiguous(), attended, logsumexp,
            positions, qkv.stride(0), attended.stride(0), scaling * LOG2_E.value, heads, kv_heads,
            head_dim, queries, keys, window or 0, dots_in_fp32(kernel, qkv),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return attended, logsumexp
