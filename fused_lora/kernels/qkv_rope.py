"""RoPE of q and k, with norms of their heads before it or without, in one kernel.

    rope_forward          q and k rotated where they lie in [q | k | v]
    rotate_back           q's and k's gradients, rotated back where they lie
    rope_backward         [grad_q | grad_k | grad_v], q and k rotated back, from three tensors
    norm_rope_together    [RoPE(norm(q)) | RoPE(norm(k)) | v], from three tensors
    rotate                q and k rotated, or rotated back, each into a separate tensor

[q | k | v] are rows that one matmul writes, and whose gradient one matmul reads. `head_norms.py`
has the norms and their backward.

A head's first 2 HALF features are pairs: (i, HALF + i), or with INTERLEAVED (2 i, 2 i + 1). The
other features, at the end, stay. With cos = (c1, c2) and sin = (s1, s2) split into halves, a pair
(x1, x2) becomes

    y1 = x1 c1 - x2 s1
    y2 = x2 c2 + x1 s2

(c1 = c2 and s1 = s2 in every embedding we know of, but nothing here needs it). The gradients for an
incoming g = (g1, g2) are

    grad_x1 = g1 c1 + g2 s2
    grad_x2 = g2 c2 - g1 s1

the same formula with -s2 for s1 and -s1 for s2. So one kernel does both, and BACKWARD flips the
angle's sign.

Traffic: q and k are read and written once, and v too where it is copied. A program does all heads
of a token, so it reads cos and sin once a token, not once a head. Eager PyTorch moves 10 tensors
forward: 1 for -x2, 2 for the concatenation, 2 for each product, 3 for the sum. Arithmetic is fp32
and rounds once, at the store. Eager rounds the norm twice, both products and the sum.
Deterministic.

The launchers trust their callers: `check_angles` and `check_head_norms` of functions/rope.py are
for autograd functions. cos and sin are [batch or 1, positions, head_dim], or fewer for the features
that are rotated. They are copied first if not contiguous.
"""

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import launch

from .head_norms import HeadNorms, load_weights, mean_of_heads, strided, warps_of_heads
from .row_norm import rstd_of_mean


@triton.jit
def _load_angles(cos_ptr, sin_ptr, BACKWARD: tl.constexpr, HALF: tl.constexpr):
    """cos_1, cos_2, sin_1 and sin_2 [HALF, or the next power of 2] of one position, in fp32."""
    features = tl.arange(0, triton.next_power_of_2(HALF))
    mask = features < HALF
    cos_1 = tl.load(cos_ptr + features, mask=mask).to(tl.float32)
    cos_2 = tl.load(cos_ptr + features + HALF, mask=mask).to(tl.float32)
    sin_1 = tl.load(sin_ptr + features, mask=mask).to(tl.float32)
    sin_2 = tl.load(sin_ptr + features + HALF, mask=mask).to(tl.float32)
    if BACKWARD:
        sin_1, sin_2 = -sin_2, -sin_1
    return cos_1, cos_2, sin_1, sin_2


@triton.jit
def _write_heads(
    x_ptr,  # the first head of one token
    out_ptr,  # likewise, contiguous, written; None: x is, in place, and is contiguous
    weight_ptr,  # [HEAD_DIM] or [HEADS HEAD_DIM], contiguous; None: all are 1
    eps,  # None: no head is normed
    angles,  # of `_load_angles`; None: nothing is rotated
    head_stride,
    TOGETHER: tl.constexpr, ZERO_CENTERED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and write the heads of one token. HALF is 0 where there are no pairs."""
    BLOCK_HEADS: tl.constexpr = triton.next_power_of_2(HEADS)
    IN_PLACE: tl.constexpr = out_ptr is None
    REST: tl.constexpr = 0 if IN_PLACE and eps is None else HEAD_DIM - 2 * HALF
    # int64: heads may lie further apart than positions, as in a contiguous [batch, heads, seq, ...]
    heads = tl.arange(0, BLOCK_HEADS).to(tl.int64)[:, None]
    if IN_PLACE:
        x_ptr += heads * HEAD_DIM
        out_ptr = x_ptr
    else:
        x_ptr += heads * head_stride
        out_ptr += heads * HEAD_DIM
    if eps is not None:
        squares = tl.zeros([BLOCK_HEADS, 1], tl.float32)
    # 0.0 behind the end, which adds nothing to the sum of squares
    OTHER: tl.constexpr = None if eps is None else 0.0
    if HALF > 0:
        pairs = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        is_pair = (heads < HEADS) & (pairs < HALF)
        if INTERLEAVED:
            first = 2 * pairs
            second = first + 1
        else:
            first = pairs
            second = pairs + HALF
        x_1 = tl.load(x_ptr + first, mask=is_pair, other=OTHER).to(tl.float32)
        x_2 = tl.load(x_ptr + second, mask=is_pair, other=OTHER).to(tl.float32)
        if eps is not None:
            w_1 = load_weights(weight_ptr, heads, first, is_pair, HEAD_DIM, TOGETHER, ZERO_CENTERED)
            w_2 = load_weights(
                weight_ptr, heads, second, is_pair, HEAD_DIM, TOGETHER, ZERO_CENTERED
            )
            squares += tl.sum(x_1 * x_1 + x_2 * x_2, axis=1)[:, None]
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, triton.next_power_of_2(REST))[None, :]
        is_rest = (heads < HEADS) & (rest < HEAD_DIM)
        x_rest = tl.load(x_ptr + rest, mask=is_rest, other=OTHER)
        if eps is not None:
            x_rest = x_rest.to(tl.float32)
            squares += tl.sum(x_rest * x_rest, axis=1)[:, None]
    if eps is not None:
        rstd = rstd_of_mean(mean_of_heads(squares, HEADS, HEAD_DIM, TOGETHER), eps)
    dtype = out_ptr.dtype.element_ty
    if HALF > 0:
        if eps is not None:
            x_1 = x_1 * rstd * w_1
            x_2 = x_2 * rstd * w_2
        if angles is not None:
            cos_1, cos_2, sin_1, sin_2 = angles
            rotated_1 = x_1 * cos_1[None, :] - x_2 * sin_1[None, :]
            x_2 = x_2 * cos_2[None, :] + x_1 * sin_2[None, :]
            x_1 = rotated_1
        tl.store(out_ptr + first, x_1.to(dtype), mask=is_pair)
        tl.store(out_ptr + second, x_2.to(dtype), mask=is_pair)
    if REST > 0:
        if eps is not None:
            x_rest *= rstd
            if weight_ptr is not None:
                x_rest *= load_weights(
                    weight_ptr, heads, rest, is_rest, HEAD_DIM, TOGETHER, ZERO_CENTERED
                )
        tl.store(out_ptr + rest, x_rest.to(dtype), mask=is_rest)


@triton.jit(do_not_specialize=["positions"])
def _qkv_rope_kernel(
    q_ptr,  # [batch, HEADS, positions, HEAD_DIM]
    k_ptr,  # [batch, KV_HEADS, positions, HEAD_DIM]; None: nothing to do
    v_ptr,  # likewise
    q_weight_ptr,  # [HEAD_DIM], contiguous; [HEADS HEAD_DIM] where TOGETHER
    k_weight_ptr,  # likewise
    cos_ptr,  # [batch or 1, positions, 2 HALF], contiguous; None: nothing is rotated
    sin_ptr,  # as cos
    out_ptr,  # [batch * positions, HEADS HEAD_DIM or more], written; None: q is, in place
    k_out_ptr,  # [batch * positions, KV_HEADS HEAD_DIM], contiguous, written; None: beside q in out
    positions,
    q_eps,  # None: q is not normed, and has no weight
    k_eps,  # likewise
    v_eps,
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
    out_row_stride,
    BACKWARD: tl.constexpr,
    TOGETHER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch = token // positions
    position = token % positions
    angles = None
    if cos_ptr is not None:
        angle = batch * cos_batch_stride + position * (2 * HALF)
        angles = _load_angles(cos_ptr + angle, sin_ptr + angle, BACKWARD, HALF)
    row = None
    if out_ptr is not None:
        row = out_ptr + token * out_row_stride
    _write_heads(
        q_ptr + batch * q_batch_stride + position * q_position_stride,
        row, q_weight_ptr, q_eps, angles, q_head_stride,
        TOGETHER, ZERO_CENTERED, HEADS, HALF, HEAD_DIM, INTERLEAVED,
    )  # fmt: skip
    if k_ptr is not None:
        if k_out_ptr is None:
            k_row = row + HEADS * HEAD_DIM
        else:
            k_row = k_out_ptr + token * (KV_HEADS * HEAD_DIM)
        _write_heads(
            k_ptr + batch * k_batch_stride + position * k_position_stride,
            k_row, k_weight_ptr, k_eps, angles, k_head_stride,
            TOGETHER, ZERO_CENTERED, KV_HEADS, HALF, HEAD_DIM, INTERLEAVED,
        )  # fmt: skip
    if v_ptr is not None:
        _write_heads(
            v_ptr + batch * v_batch_stride + position * v_position_stride,
            row + (HEADS + KV_HEADS) * HEAD_DIM, None, v_eps, None, v_head_stride,
            False, False, KV_HEADS, 0, HEAD_DIM, False,
        )  # fmt: skip


def split_heads(qkv: Tensor, positions: int, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Return q, k and v of qkv [batch * positions, (heads + 2 kv_heads) head_dim], as views [batch,
    heads or kv_heads, positions, head_dim]."""
    rows, columns = qkv.shape
    parts = heads + 2 * kv_heads
    by_head = qkv.view(rows // max(positions, 1), positions, parts, columns // parts)
    return by_head.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)


def rope_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool = False
) -> None:
    """Rotate q and k, where they lie in qkv, by the angles of their positions.

    Equivalent PyTorch, for `rope` of functions/rope.py::

        q, k, v = split_heads(qkv, positions, heads, kv_heads)
        for x, rotated in zip((q, k), rope(q, k, cos, sin, interleaved)):
            x.copy_(rotated)

    qkv is [batch * positions, (heads + 2 kv_heads) head_dim], of the caller's own making.
    """
    _rotate_in_place(qkv, cos, sin, heads, kv_heads, interleaved, backward=False)


def rotate_back(
    grad_qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool = False
) -> None:
    """Rotate the gradients of q and k back where they lie in grad_qkv.

    Equivalent PyTorch: ``rope_backward(*split_heads(grad_qkv, ...), cos, sin, grad_qkv)``. All
    else is as for `rope_forward`.
    """
    _rotate_in_place(grad_qkv, cos, sin, heads, kv_heads, interleaved, backward=True)


def _rotate_in_place(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool,
    backward: bool,
) -> None:  # fmt: skip
    (rows, columns), positions = qkv.shape, cos.shape[1]
    batch, stride = rows // max(positions, 1), qkv.stride(0)
    head_dim = columns // (heads + 2 * kv_heads)
    # q's and k's heads lie side by side: a single tile holds both
    q_and_k = qkv.as_strided(
        (batch, heads + kv_heads, positions, head_dim), (positions * stride, head_dim, stride, 1)
    )
    _launch((q_and_k, None, None), (cos, sin), None, None, interleaved, backward)


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor | None, sin: Tensor | None,
    grad_qkv: Tensor, interleaved: bool = False,
) -> None:  # fmt: skip
    """Write the gradient of what `rope_forward` was given into grad_qkv.

    Equivalent PyTorch: ``torch.autograd.grad((q, k, v), qkv, (grad_q, grad_k, grad_v))[0]``, q and
    k being rotated. The gradients are as q, k and v for `norm_rope_together`. Without cos and sin
    nothing is rotated.
    """
    _launch((grad_q, grad_k, grad_v), (cos, sin), grad_qkv, None, interleaved, backward=True)


def norm_rope_together(
    q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms, cos: Tensor | None, sin: Tensor | None,
    qkv: Tensor, interleaved: bool = False,
) -> None:  # fmt: skip
    """Write q and k, normed and rotated by their positions' angles, and v, as it is or normed, side
    by side into qkv.

    Equivalent PyTorch, for `rms_norm` of functions/rms_norm.py::

        q = rms_norm(q, norms.q_weight, norms.q_eps, norms.zero_centered)
        k = rms_norm(k, norms.k_weight, norms.k_eps, norms.zero_centered)
        v = v if norms.v_eps is None else F.rms_norm(v, (head_dim,), eps=norms.v_eps)
        parts = split_heads(qkv, positions, heads, kv_heads)
        for part, x in zip(parts, (*rope(q, k, cos, sin, interleaved), v)):
            part.copy_(x)

    q is normed over its last dimension, as here, where q_weight is [head_dim], and over all heads
    of a token where it is [heads head_dim]; likewise k. Weights are bf16, fp16 or fp32.

    q is [batch, heads, positions, head_dim], k and v are [batch, kv_heads, positions, head_dim].
    They may lie in any order, but are copied first if a head's elements are not side by side.
    Without cos and sin nothing is rotated.
    """
    _launch((q, k, v), (cos, sin), qkv, norms, interleaved)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Return q and k, rotated, or with `backward` their gradients, rotated back: new tensors in
    memory [batch, positions, heads, head_dim]. k may have no heads."""
    q_out, k_out = _empty_by_token(q), _empty_by_token(k)
    given = q, k if k.shape[1] else None, None
    _launch(given, (cos, sin), q_out, None, interleaved, backward, k_out)
    return q_out, k_out


def _empty_by_token(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape [batch, heads, positions, head_dim] that has a token's
    heads side by side in memory."""
    _, heads, positions, head_dim = x.shape
    # not a transposed view: a view returned by an autograd function cannot be changed in place
    strides = (positions * heads * head_dim, head_dim, heads * head_dim, 1)
    return x.new_empty_strided(x.shape, strides)


def _launch(
    parts: tuple[Tensor, Tensor | None, Tensor | None],
    angles: tuple[Tensor | None, Tensor | None],
    out: Tensor | None,
    norms: HeadNorms | None,
    interleaved: bool,
    backward: bool = False,
    k_out: Tensor | None = None,
) -> None:
    batch, heads, positions, head_dim = parts[0].shape
    if batch * positions == 0:
        return  # an empty grid cannot be launched
    (q, q_strides), (k, k_strides), (v, v_strides) = map(strided, parts)
    cos, sin, cos_batch_stride = angles_of(*angles)
    q_weight = k_weight = q_eps = k_eps = v_eps = None
    together = zero_centered = False
    if norms is not None:
        q_weight, k_weight, q_eps, k_eps, zero_centered, v_eps = norms
        q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
        together = norms.are_together(head_dim)
    launch(
        _qkv_rope_kernel, (batch * positions,),
        q, k, v, q_weight, k_weight, cos, sin, out, k_out,
        positions, q_eps, k_eps, v_eps,
        *q_strides, *k_strides, *v_strides, cos_batch_stride,
        0 if out is None else out.stride(-2),  # of [q | k | v], or of q by token
        backward, together, zero_centered,
        heads, 0 if k is None else k.shape[1], (head_dim if cos is None else cos.shape[2]) // 2,
        head_dim, interleaved, num_warps=warps_of_heads(heads, head_dim),
    )  # fmt: skip


def angles_of(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Return cos and sin, contiguous, and the stride between those of two sequences."""
    if cos is None or sin is None:
        return None, None, 0
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0)


def scale_q(qkv: Tensor, q_scale: Tensor | None, q_columns: int) -> None:
    """Multiply q, or its gradient, by its scale [batch or 1, positions], if there is one."""
    if q_scale is not None:
        by_token = qkv[:, :q_columns].unflatten(0, (-1, q_scale.shape[1]))
        by_token.mul_(q_scale.unsqueeze(2))
