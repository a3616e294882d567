"""Causal attention on [q | k | v], with RoPE in its passes, for sequences of a few hundred tokens.

For a token i, the keys j <= i of its sequence and one head, with the scale a and RoPE's turn R:

    q, k      = R q, R k                          written where they lay
    P         = exp(a q k' - L)                   L: the logsumexp of a token's a q k'
    attended  = P v

and backward, for the incoming g, with D the sum of g * attended over a head's features:

    grad_v    = P' g
    dS        = P * (g v' - D)
    grad_q    = R' a dS k
    grad_k    = R' a dS' q

grad_k and grad_v are sums over the heads that share k and v. All three are written side by side, as
a product of q, k and v takes its gradient.

Up to BLOCK tokens a program has all of a sequence and of the heads that share k and v: one kernel
each way, and P is computed twice in all. Beyond it forward is PyTorch's (`qkv_attention.py`), and
backward two kernels, which compute P and dS each for itself: one gives grad_q and D, the other
grad_k and grad_v. On an H200, in us a layer of Qwen2.5-3B with 32 sequences (16 heads of 128, 2 of
k and v), cuDNN's with RoPE before or after it:

{TABLE}

Beside its backward itself cuDNN has kernels for D, for sums over heads and for grad_q from fp32,
which take as long at 64 and 128 tokens. With more of them products are what counts, of which it has
five and this seven.

P and dS are rounded to the dtype of the tensors for their products, as in any fused attention; all
else is fp32 and rounds once, at the store. No atomics: deterministic, unlike cuDNN's backward.

Attention in tiles with a backward from L: Dao et al., arXiv 2205.14135 and 2307.08691. RoPE: Su et
al., arXiv 2104.09864.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import cdiv, on_device_of
from .qkv_rope import batch_of
from .rows import check_alike, check_rows
from .tiling import dots_in_fp32

# Tokens of a tile. The tensor cores take 64 rows at a time, and of 128 the sums would not fit into
# registers.
BLOCK = 64

# What was measured. By 1,024 tokens cuDNN's backward should be as fast.
MAX_POSITIONS = 512

# Halves of a head that are tiles: powers of two, of which tl.dot wants 16 at least.
HALVES = (16, 32, 64)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Launch(NamedTuple):
    """Keys of a tile, and Triton's warps and stages."""

    keys: int
    warps: int
    stages: int


# The fastest of those tried on an H200, from 64 to 512 tokens.
FORWARD = Launch(keys=BLOCK, warps=8, stages=2)
BACKWARD = Launch(keys=BLOCK, warps=8, stages=1)
BACKWARD_QUERIES = Launch(keys=32, warps=4, stages=2)
BACKWARD_KEYS = Launch(keys=BLOCK, warps=4, stages=2)


@triton.jit
def _dot(a, b, total, IN_FP32: tl.constexpr):
    if IN_FP32:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _load_halves(row, column, mask, HALF: tl.constexpr):
    """Both halves [tokens, HALF] of one head, the first of whose features is at this column."""
    tile = row + column + tl.arange(0, HALF)[None, :]
    return tl.load(tile, mask=mask, other=0.0), tl.load(tile + HALF, mask=mask, other=0.0)


@triton.jit
def _angles(cos_row, sin_row, mask, HALF: tl.constexpr):
    """cos and sin [tokens, HALF] of both halves."""
    cos_1, cos_2 = _load_halves(cos_row, 0, mask, HALF)
    sin_1, sin_2 = _load_halves(sin_row, 0, mask, HALF)
    return cos_1, cos_2, sin_1, sin_2


@triton.jit
def _store_halves(row, column, x_1, x_2, mask, HALF: tl.constexpr):
    tile = row + column + tl.arange(0, HALF)[None, :]
    tl.store(tile, x_1, mask=mask)
    tl.store(tile + HALF, x_2, mask=mask)


@triton.jit
def _turned(x_1, x_2, cos_1, cos_2, sin_1, sin_2):
    """A head's halves turned, as they are stored."""
    first, second = x_1.to(tl.float32), x_2.to(tl.float32)
    y_1 = first * cos_1.to(tl.float32) - second * sin_1.to(tl.float32)
    y_2 = second * cos_2.to(tl.float32) + first * sin_2.to(tl.float32)
    return y_1.to(x_1.dtype), y_2.to(x_1.dtype)


@triton.jit
def _rope_attention_kernel(
    qkv_ptr,  # [batch * positions, (HEADS + 2 KV_HEADS) 2 HALF], q and k written
    cos_ptr,  # [batch or 1, positions, 2 HALF], contiguous
    sin_ptr,  # as cos
    attended_ptr,  # [batch * positions, HEADS 2 HALF], written
    logsumexp_ptr,  # [batch, HEADS, positions] fp32, written
    positions,  # at most BLOCK
    qkv_row_stride,
    cos_batch_stride,  # 0 where all sequences share their angles
    attended_row_stride,
    score_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    batch = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    token = tl.arange(0, BLOCK)
    mask = (token < positions)[:, None]
    row = batch * positions + token[:, None]
    angle = batch * cos_batch_stride + token[:, None] * HEAD_DIM
    cos_1, cos_2, sin_1, sin_2 = _angles(cos_ptr + angle, sin_ptr + angle, mask, HALF)
    qkv_row = qkv_ptr + row * qkv_row_stride
    k_1, k_2 = _load_halves(qkv_row, (HEADS + kv_head) * HEAD_DIM, mask, HALF)
    k_1, k_2 = _turned(k_1, k_2, cos_1, cos_2, sin_1, sin_2)
    _store_halves(qkv_row, (HEADS + kv_head) * HEAD_DIM, k_1, k_2, mask, HALF)
    feature = tl.arange(0, HEAD_DIM)[None, :]
    v_tile = qkv_row + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + feature
    v = tl.load(v_tile, mask=mask, other=0.0)
    zeros = tl.zeros([BLOCK, BLOCK], tl.float32)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        q_1, q_2 = _load_halves(qkv_row, head * HEAD_DIM, mask, HALF)
        q_1, q_2 = _turned(q_1, q_2, cos_1, cos_2, sin_1, sin_2)
        _store_halves(qkv_row, head * HEAD_DIM, q_1, q_2, mask, HALF)
        scores = _dot(q_2, tl.trans(k_2), _dot(q_1, tl.trans(k_1), zeros, IN_FP32), IN_FP32)
        scores = tl.where(token[None, :] <= token[:, None], scores * score_scale, float("-inf"))
        most = tl.max(scores, axis=1)
        p = tl.exp2(scores - most[:, None])
        total = tl.sum(p, axis=1)
        attended = _dot(p.to(v.dtype), v, tl.zeros([BLOCK, HEAD_DIM], tl.float32), IN_FP32)
        attended = (attended / total[:, None]).to(attended_ptr.dtype.element_ty)
        tile = attended_ptr + row * attended_row_stride + head * HEAD_DIM + feature
        tl.store(tile, attended, mask=mask)
        places = logsumexp_ptr + (batch * HEADS + head) * positions + token
        logsumexp = (most + tl.log2(total)) * LN_2
        tl.store(places, logsumexp, mask=token < positions)


@triton.jit
def _store_turned_back(row, column, grad_1, grad_2, cos_row, sin_row, mask, HALF: tl.constexpr):
    """Write a head's gradient, given in halves, turned back by the angles of its tokens."""
    feature = tl.arange(0, HALF)[None, :]
    cos_1 = tl.load(cos_row + feature, mask=mask, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos_row + HALF + feature, mask=mask, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin_row + feature, mask=mask, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_row + HALF + feature, mask=mask, other=0.0).to(tl.float32)
    tile = row + column + feature
    dtype = tile.dtype.element_ty
    tl.store(tile, (grad_1 * cos_1 + grad_2 * sin_2).to(dtype), mask=mask)
    tl.store(tile + HALF, (grad_2 * cos_2 - grad_1 * sin_1).to(dtype), mask=mask)


@triton.jit
def _attention_queries_backward_kernel(
    grad_ptr,  # [batch * positions, HEADS 2 HALF]
    qkv_ptr,  # [batch * positions, (HEADS + 2 KV_HEADS) 2 HALF]
    attended_ptr,  # as grad
    logsumexp_ptr,  # [batch, HEADS, positions] fp32
    dots_ptr,  # likewise, written: D
    cos_ptr,  # [batch or 1, positions, 2 HALF], contiguous
    sin_ptr,  # as cos
    grad_qkv_ptr,  # as qkv, its first columns written
    positions,
    grad_row_stride,
    qkv_row_stride,
    attended_row_stride,
    cos_batch_stride,  # 0 where all sequences share their angles
    grad_qkv_row_stride,
    scaling,
    score_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    batch_head = tl.program_id(0)
    head = batch_head % HEADS
    kv_head = head // (HEADS // KV_HEADS)
    batch = (batch_head // HEADS).to(tl.int64)
    first = batch * positions
    query = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK + tl.arange(0, BLOCK)
    is_query = query < positions
    mask = is_query[:, None]
    sequence = qkv_ptr + first * qkv_row_stride
    q_1, q_2 = _load_halves(
        sequence + query.to(tl.int64)[:, None] * qkv_row_stride, head * HEAD_DIM, mask, HALF
    )
    feature = head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    row = (first + query)[:, None]
    grad = tl.load(grad_ptr + row * grad_row_stride + feature, mask=mask, other=0.0)
    attended = tl.load(attended_ptr + row * attended_row_stride + feature, mask=mask, other=0.0)
    dots = tl.sum(grad.to(tl.float32) * attended.to(tl.float32), axis=1)
    places = batch_head.to(tl.int64) * positions + query
    tl.store(dots_ptr + places, dots, mask=is_query)
    logsumexp = tl.load(logsumexp_ptr + places, mask=is_query, other=0.0)
    grad_q_1 = tl.zeros([BLOCK, HALF], tl.float32)
    grad_q_2 = tl.zeros([BLOCK, HALF], tl.float32)
    zeros = tl.zeros([BLOCK, KEYS], tl.float32)
    end = tl.minimum((tl.num_programs(1) - tl.program_id(1)) * BLOCK, positions)
    for start in range(0, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = (key < positions)[:, None]
        key_row = sequence + key.to(tl.int64)[:, None] * qkv_row_stride
        k_1, k_2 = _load_halves(key_row, (HEADS + kv_head) * HEAD_DIM, is_key, HALF)
        v_tile = key_row + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        v = tl.load(v_tile, mask=is_key, other=0.0)
        scores = _dot(q_2, tl.trans(k_2), _dot(q_1, tl.trans(k_1), zeros, IN_FP32), IN_FP32)
        p = tl.exp2(scores * score_scale - (logsumexp * LOG2_E)[:, None])
        p = tl.where(key[None, :] <= query[:, None], p, 0.0)
        grad_p = _dot(grad, tl.trans(v), zeros, IN_FP32)
        grad_scores = (p * (grad_p - dots[:, None])).to(grad.dtype)
        grad_q_1 = _dot(grad_scores, k_1, grad_q_1, IN_FP32)
        grad_q_2 = _dot(grad_scores, k_2, grad_q_2, IN_FP32)
    angle = batch * cos_batch_stride + query[:, None] * HEAD_DIM
    _store_turned_back(
        grad_qkv_ptr + row * grad_qkv_row_stride, head * HEAD_DIM,
        grad_q_1 * scaling, grad_q_2 * scaling, cos_ptr + angle, sin_ptr + angle, mask, HALF,
    )  # fmt: skip


@triton.jit
def _attention_keys_backward_kernel(
    grad_ptr,  # as in _attention_queries_backward_kernel, all of them
    qkv_ptr,
    attended_ptr,
    logsumexp_ptr,
    dots_ptr,
    cos_ptr,
    sin_ptr,
    grad_qkv_ptr,  # its other columns written
    positions,
    grad_row_stride,
    qkv_row_stride,
    attended_row_stride,
    cos_batch_stride,
    grad_qkv_row_stride,
    scaling,
    score_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # all of a sequence is in it, and q's gradient is written, too
    IN_FP32: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    batch = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    first = batch * positions
    start = tl.program_id(1) * BLOCK  # the first ones have the most queries
    key = start + tl.arange(0, BLOCK)
    is_key = (key < positions)[:, None]
    sequence = qkv_ptr + first * qkv_row_stride
    key_row = sequence + key.to(tl.int64)[:, None] * qkv_row_stride
    k_1, k_2 = _load_halves(key_row, (HEADS + kv_head) * HEAD_DIM, is_key, HALF)
    feature = tl.arange(0, HEAD_DIM)[None, :]
    v = tl.load(key_row + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + feature, mask=is_key, other=0.0)
    grad_k_1 = tl.zeros([BLOCK, HALF], tl.float32)
    grad_k_2 = tl.zeros([BLOCK, HALF], tl.float32)
    grad_v = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    zeros = tl.zeros([BLOCK, BLOCK], tl.float32)
    first_block = start // BLOCK
    blocks = tl.cdiv(positions, BLOCK) - first_block
    # one loop over the heads and their queries, so that the loads of the next are on their way
    for i in range(0, GROUP * blocks):
        head = kv_head * GROUP + i // blocks
        query = (first_block + i % blocks) * BLOCK + tl.arange(0, BLOCK)
        is_query = query < positions
        mask = is_query[:, None]
        q_1, q_2 = _load_halves(
            sequence + query.to(tl.int64)[:, None] * qkv_row_stride, head * HEAD_DIM, mask, HALF
        )
        grad_tile = grad_ptr + (first + query)[:, None] * grad_row_stride + head * HEAD_DIM
        grad = tl.load(grad_tile + feature, mask=mask, other=0.0)
        places = (batch * HEADS + head) * positions + query
        logsumexp = tl.load(logsumexp_ptr + places, mask=is_query, other=0.0)
        if ONE_BLOCK:
            row = (first + query)[:, None] * attended_row_stride
            attended = tl.load(attended_ptr + row + head * HEAD_DIM + feature, mask=mask, other=0.0)
            dots = tl.sum(grad.to(tl.float32) * attended.to(tl.float32), axis=1)
        else:
            dots = tl.load(dots_ptr + places, mask=is_query, other=0.0)
        scores = _dot(k_2, tl.trans(q_2), _dot(k_1, tl.trans(q_1), zeros, IN_FP32), IN_FP32)
        p = tl.exp2(scores * score_scale - (logsumexp * LOG2_E)[None, :])
        # behind the last query grad is 0, and so is all that p is multiplied with
        p = tl.where(key[:, None] <= query[None, :], p, 0.0)
        grad_v = _dot(p.to(grad.dtype), grad, grad_v, IN_FP32)
        grad_p = _dot(v, tl.trans(grad), zeros, IN_FP32)
        grad_scores = (p * (grad_p - dots[None, :])).to(grad.dtype)
        grad_k_1 = _dot(grad_scores, q_1, grad_k_1, IN_FP32)
        grad_k_2 = _dot(grad_scores, q_2, grad_k_2, IN_FP32)
        if ONE_BLOCK:
            grad_scores = tl.trans(grad_scores)
            none = tl.zeros([BLOCK, HALF], tl.float32)
            grad_q_1 = _dot(grad_scores, k_1, none, IN_FP32) * scaling
            grad_q_2 = _dot(grad_scores, k_2, none, IN_FP32) * scaling
            angle = batch * cos_batch_stride + query[:, None] * HEAD_DIM
            _store_turned_back(
                grad_qkv_ptr + (first + query)[:, None] * grad_qkv_row_stride, head * HEAD_DIM,
                grad_q_1, grad_q_2, cos_ptr + angle, sin_ptr + angle, mask, HALF,
            )  # fmt: skip
    row = grad_qkv_ptr + (first + key)[:, None] * grad_qkv_row_stride
    angle = batch * cos_batch_stride + key[:, None] * HEAD_DIM
    _store_turned_back(
        row, (HEADS + kv_head) * HEAD_DIM, grad_k_1 * scaling, grad_k_2 * scaling,
        cos_ptr + angle, sin_ptr + angle, is_key, HALF,
    )  # fmt: skip
    tile = row + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + feature
    tl.store(tile, grad_v.to(grad_qkv_ptr.dtype.element_ty), mask=is_key)


def fits(qkv: Tensor, positions: int, heads: int, kv_heads: int) -> bool:
    """Whether these kernels are for such [q | k | v]: of so many positions, of heads whose halves
    are tiles, and on a GPU not of fp32, of which tiles do not fit into a multiprocessor."""
    half = qkv.shape[1] // (heads + 2 * kv_heads) // 2
    is_interpreted = not isinstance(_rope_attention_kernel, triton.JITFunction)
    return (
        0 < positions <= MAX_POSITIONS
        and half in HALVES
        and heads % kv_heads == 0
        and (qkv.dtype != torch.float32 or is_interpreted)
    )


def rope_attention_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """(attended, logsumexp) of up to BLOCK positions, and q and k turned where they lie in qkv.

    Equivalent PyTorch, the logsumexp being in fp32::

        rope_forward(qkv, cos, sin, heads, kv_heads)
        q, k, v = split_heads(qkv, positions, heads, kv_heads)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2).flatten(2)
        logsumexp = causal(scaling * q @ k.mT).logsumexp(-1)

    Args:
        qkv: [batch * positions, (heads + 2 kv_heads) head_dim], of the caller's own making, for
            which `fits`. Rows may lie any stride apart.
        cos, sin: [batch or 1, positions, head_dim], as `rope_forward` takes them.

    Returns:
        attended [batch * positions, heads * head_dim] and logsumexp [batch, heads, positions], new.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or no kernel can run on them.
    """
    name, kernel = "rope_attention_forward", _rope_attention_kernel
    check_rows(name, kernel, qkv.shape, qkv=qkv)
    batch = batch_of(name, qkv, cos, sin, heads, kv_heads)
    positions, head_dim = cos.shape[1:]
    _check_fits(name, qkv, positions, heads, kv_heads, BLOCK)
    attended = qkv.new_empty(qkv.shape[0], heads * head_dim)
    logsumexp = qkv.new_empty(batch, heads, positions, dtype=torch.float32)
    cos, sin = cos.contiguous(), sin.contiguous()
    _, warps, stages = FORWARD
    if batch:  # an empty grid cannot be launched
        with on_device_of(qkv):
            kernel[(batch * kv_heads,)](
                qkv, cos, sin, attended, logsumexp, positions,
                qkv.stride(0), 0 if cos.shape[0] == 1 else cos.stride(0), attended.stride(0),
                scaling * LOG2_E.value,
                heads, kv_heads, head_dim // 2, BLOCK, dots_in_fp32(kernel, qkv),
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
    return attended, logsumexp


def rope_attention_backward(
    grad: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    attended: Tensor,
    logsumexp: Tensor,
    kv_heads: int,
    scaling: float,
    grad_qkv: Tensor,
) -> None:
    """Write the gradient of what `rope_attention_forward` was given into grad_qkv, of up to
    MAX_POSITIONS positions.

    Equivalent PyTorch: ``grad_qkv.copy_(torch.autograd.grad(attended, qkv, grad)[0])``.

    Args:
        grad, attended: [batch * positions, heads * head_dim].
        qkv: as the forward left it, q and k turned.
        logsumexp: [batch, heads, positions] in fp32 and contiguous, from any forward.
        grad_qkv: as qkv. Rows of all may lie any stride apart.

    Raises:
        ValueError: as `rope_attention_forward`.
    """
    name, kernel = "rope_attention_backward", _attention_keys_backward_kernel
    _, heads, positions = logsumexp.shape
    check_rows(name, kernel, qkv.shape, qkv=qkv, grad_qkv=grad_qkv)
    batch = batch_of(name, qkv, cos, sin, heads, kv_heads)
    head_dim = cos.shape[2]
    _check_fits(name, qkv, positions, heads, kv_heads, MAX_POSITIONS)
    shape = qkv.shape[0], heads * head_dim
    check_rows(name, kernel, shape, grad=grad, attended=attended)
    check_alike(name, "grad", grad, qkv)
    given = logsumexp.shape, logsumexp.dtype, logsumexp.is_contiguous()
    if given != ((batch, heads, cos.shape[1]), torch.float32, True):
        raise ValueError(
            f"{name}: logsumexp is {list(logsumexp.shape)} in {logsumexp.dtype}, should be "
            f"{[batch, heads, cos.shape[1]]} in torch.float32 and contiguous"
        )
    if batch == 0:
        return
    cos, sin = cos.contiguous(), sin.contiguous()
    is_one_block = positions <= BLOCK
    dots = None if is_one_block else torch.empty_like(logsumexp)
    operands = grad, qkv, attended, logsumexp, dots, cos, sin, grad_qkv
    sizes = (
        positions, grad.stride(0), qkv.stride(0), attended.stride(0),
        0 if cos.shape[0] == 1 else cos.stride(0), grad_qkv.stride(0),
        scaling, scaling * LOG2_E.value,
        heads, kv_heads, head_dim // 2, BLOCK,
    )  # fmt: skip
    in_fp32, blocks = dots_in_fp32(kernel, qkv), cdiv(positions, BLOCK)
    with on_device_of(qkv):
        if not is_one_block:
            keys, warps, stages = BACKWARD_QUERIES
            _attention_queries_backward_kernel[(batch * heads, blocks)](
                *operands, *sizes, keys, in_fp32, num_warps=warps, num_stages=stages
            )
        _, warps, stages = BACKWARD if is_one_block else BACKWARD_KEYS
        kernel[(batch * kv_heads, blocks)](
            *operands, *sizes, is_one_block, in_fp32, num_warps=warps, num_stages=stages
        )


def _check_fits(
    name: str, qkv: Tensor, positions: int, heads: int, kv_heads: int, most: int
) -> None:
    if not fits(qkv, positions, heads, kv_heads) or positions > most:
        raise ValueError(
            f"{name}: [q | k | v] is {list(qkv.shape)} in {qkv.dtype}, of {positions} positions, "
            f"{heads} heads and {kv_heads} of k and v; it is for up to {most} positions, for heads "
            f"of {', '.join(str(2 * half) for half in HALVES)} features, a multiple of those of k "
            "and v, and on a GPU for bfloat16 and float16"
        )
