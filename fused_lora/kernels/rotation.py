"""The angles of a token and the heads that they rotate, for every kernel of RoPE (`rope.py`).

HALF pairs of a head's HEAD_DIM features are rotated: HALF may be less than half of HEAD_DIM, and
the other features, at the end, stay. A pair is (i, HALF + i), or with INTERLEAVED (2 i, 2 i + 1).
"""

import triton
import triton.language as tl


@triton.jit
def pair_of(features, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The features of pairs by their numbers."""
    if INTERLEAVED:
        first = 2 * features
        second = first + 1
    else:
        first = features
        second = features + HALF
    return first, second


@triton.jit
def rotate_heads(
    x_ptr,  # the first head of one token
    rotated_ptr,  # likewise, contiguous, written
    head_stride,
    cos_1,  # [BLOCK_HALF], fp32
    cos_2,
    sin_1,
    sin_2,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # of the features that stay; 0: there are none to copy
):
    # int64: heads may lie further apart than positions, as in a contiguous [batch, heads, seq, ...]
    heads = tl.arange(0, BLOCK_HEADS).to(tl.int64)[:, None]
    features = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < HEADS) & (features < HALF)
    first, second = pair_of(features, HALF, INTERLEAVED)
    x_ptr += heads * head_stride
    x_1 = tl.load(x_ptr + first, mask=mask).to(tl.float32)
    x_2 = tl.load(x_ptr + second, mask=mask).to(tl.float32)
    rotated_1 = x_1 * cos_1[None, :] - x_2 * sin_1[None, :]
    rotated_2 = x_2 * cos_2[None, :] + x_1 * sin_2[None, :]
    rotated_ptr += heads * HEAD_DIM
    dtype = rotated_ptr.dtype.element_ty
    tl.store(rotated_ptr + first, rotated_1.to(dtype), mask=mask)
    tl.store(rotated_ptr + second, rotated_2.to(dtype), mask=mask)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        is_rest = (heads < HEADS) & (rest < HEAD_DIM)
        tl.store(rotated_ptr + rest, tl.load(x_ptr + rest, mask=is_rest), mask=is_rest)


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, batch_stride, batch, position,
    BACKWARD: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """cos_1, cos_2, sin_1 and sin_2 [BLOCK_HALF] of one position; BACKWARD rotates the other way.
    Without cos_ptr those of an angle of 0."""
    features = tl.arange(0, BLOCK_HALF)
    mask = features < HALF
    angle = batch * batch_stride + position * (2 * HALF) + features
    if cos_ptr is None:
        cos_1 = tl.full([BLOCK_HALF], 1.0, tl.float32)
        sin_1 = tl.zeros([BLOCK_HALF], tl.float32)
        cos_2, sin_2 = cos_1, sin_1
    else:
        cos_1 = tl.load(cos_ptr + angle, mask=mask).to(tl.float32)
        cos_2 = tl.load(cos_ptr + angle + HALF, mask=mask).to(tl.float32)
        sin_1 = tl.load(sin_ptr + angle, mask=mask).to(tl.float32)
        sin_2 = tl.load(sin_ptr + angle + HALF, mask=mask).to(tl.float32)
    if BACKWARD:
        sin_1, sin_2 = -sin_2, -sin_1
    return cos_1, cos_2, sin_1, sin_2


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
