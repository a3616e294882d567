"""RoPE on [q | k | v], rows that one matmul writes and whose gradient one matmul reads.

    rope_forward     q and k rotated where they lie
    rope_together    [q | k | v], q and k rotated, from three tensors
    rope_backward    [grad_q | grad_k | grad_v], q and k rotated back, from three tensors
    rotate_back      q's and k's gradients, rotated back where they lie

(`rope.py` has the mathematics, and rotates the heads. Narrower angles rotate a part of each head.)
The kernel that rotates three tensors also puts them side by side, from whatever layout matmuls or
attention's backward left them in.

Traffic: q and k are read and written once, and with three tensors v as well. Arithmetic is fp32 and
rounds once, at the store. Deterministic. `rope_forward` writes over what it reads. It is for a
buffer that the caller made and that nobody else has seen.
"""

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import DTYPES, launch, next_power_of_2, previous_power_of_2

from .rotation import load_angles, rotate_heads


@triton.jit(do_not_specialize=["positions"])
def _qkv_rope_kernel(
    q_ptr,  # [batch, HEADS, positions, HEAD_DIM]
    k_ptr,  # [batch, KV_HEADS, positions, HEAD_DIM], or None, with v: q's heads alone are rotated
    v_ptr,  # as k
    cos_ptr,  # [batch or 1, positions, 2 HALF], contiguous; None: nothing is rotated
    sin_ptr,  # as cos
    qkv_ptr,  # [batch * positions, (HEADS + 2 KV_HEADS) HEAD_DIM], written: what is rotated, and v
    positions,
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
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch = token // positions
    position = token % positions
    cos_1, cos_2, sin_1, sin_2 = load_angles(
        cos_ptr, sin_ptr, cos_batch_stride, batch, position, BACKWARD, HALF, BLOCK_HALF
    )
    row = qkv_ptr + token * qkv_row_stride
    rotate_heads(
        q_ptr + batch * q_batch_stride + position * q_position_stride,
        row,
        q_head_stride, cos_1, cos_2, sin_1, sin_2, HEADS, HALF, HEAD_DIM, INTERLEAVED, BLOCK_HEADS,
        BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    if k_ptr is not None:
        rotate_heads(
            k_ptr + batch * k_batch_stride + position * k_position_stride,
            row + HEADS * HEAD_DIM,
            k_head_stride, cos_1, cos_2, sin_1, sin_2, KV_HEADS, HALF, HEAD_DIM, INTERLEAVED,
            BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
        head = tl.arange(0, BLOCK_KV_HEADS).to(tl.int64)[:, None]
        feature = tl.arange(0, BLOCK_DIM)[None, :]
        mask = (head < KV_HEADS) & (feature < HEAD_DIM)
        v = v_ptr + batch * v_batch_stride + position * v_position_stride
        v_row = row + (HEADS + KV_HEADS) * HEAD_DIM
        value = tl.load(v + head * v_head_stride + feature, mask=mask)
        tl.store(v_row + head * HEAD_DIM + feature, value, mask=mask)


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

    Equivalent PyTorch, for `rope` of rope.py::

        q, k, v = split_heads(qkv, positions, heads, kv_heads)
        for x, rotated in zip((q, k), rope(q, k, cos, sin, interleaved)):
            x.copy_(rotated)

    Args:
        qkv: [batch * positions, (heads + 2 kv_heads) head_dim], of the caller's own making.
        cos, sin: [batch or 1, positions, head_dim, or fewer for the features that are rotated],
            bf16, fp16 or fp32. They are copied first if not contiguous. Any number of sequences may
            share one cos and sin.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or no kernel can run on them.
    """
    _rotate_in_place("rope_forward", qkv, cos, sin, heads, kv_heads, interleaved, backward=False)


def rotate_back(
    grad_qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool = False
) -> None:
    """Rotate the gradients of q and k back where they lie in grad_qkv.

    Equivalent PyTorch: ``rope_backward(*split_heads(grad_qkv, ...), cos, sin, grad_qkv)``. All
    else is as for `rope_forward`.

    Raises:
        ValueError: as `rope_forward`.
    """
    _rotate_in_place("rotate_back", grad_qkv, cos, sin, heads, kv_heads, interleaved, backward=True)


def _rotate_in_place(
    name: str, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool,
    backward: bool,
) -> None:  # fmt: skip
    batch = batch_of(name, qkv, cos, sin, heads, kv_heads)
    # q's and k's heads lie side by side, so a single tile can hold both
    parts = heads + 2 * kv_heads
    by_head = qkv.view(batch, cos.shape[1], parts, qkv.shape[1] // parts)
    q = by_head.transpose(1, 2)[:, : heads + kv_heads]
    _rotate((q, None, None), cos, sin, qkv, interleaved, backward, in_place=True)


def rope_together(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, qkv: Tensor,
    interleaved: bool = False,
) -> None:  # fmt: skip
    """Write q and k, rotated by the angles of their positions, and v side by side into qkv.

    Equivalent PyTorch, for `rope` of rope.py::

        parts = split_heads(qkv, positions, heads, kv_heads)
        for part, x in zip(parts, (*rope(q, k, cos, sin, interleaved), v)):
            part.copy_(x)

    q is [batch, heads, positions, head_dim], k and v are [batch, kv_heads, positions, head_dim].
    They may lie in any order, but are copied first if a head's elements are not side by side.
    Without cos and sin nothing is rotated. All else is as for `rope_forward`.

    Raises:
        ValueError: as `rope_forward`.
    """
    _rotate_together("rope_together", (q, k, v), cos, sin, qkv, interleaved, backward=False)


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor | None, sin: Tensor | None,
    grad_qkv: Tensor, interleaved: bool = False,
) -> None:  # fmt: skip
    """Write the gradient of what `rope_forward` or `rope_together` was given into grad_qkv.

    Equivalent PyTorch: ``torch.autograd.grad((q, k, v), qkv, (grad_q, grad_k, grad_v))[0]``, q and
    k being rotated. The gradients are as q, k and v for `rope_together`.

    Raises:
        ValueError: as `rope_forward`.
    """
    gradients = grad_q, grad_k, grad_v
    _rotate_together("rope_backward", gradients, cos, sin, grad_qkv, interleaved, backward=True)


def _rotate_together(
    name: str,
    parts: tuple[Tensor, Tensor, Tensor],
    cos: Tensor | None,
    sin: Tensor | None,
    qkv: Tensor,
    interleaved: bool,
    backward: bool,
) -> None:
    heads, positions = parts[0].shape[1:3]
    batch_of(name, qkv, cos, sin, heads, parts[1].shape[1], positions)
    _rotate(parts, cos, sin, qkv, interleaved, backward)


def _rotate(
    parts: tuple[Tensor, Tensor | None, Tensor | None], cos: Tensor | None, sin: Tensor | None,
    qkv: Tensor, interleaved: bool, backward: bool, in_place: bool = False,
) -> None:  # fmt: skip
    """Write q, rotated, or with k and v all three, q and k rotated, side by side into qkv."""
    q, k, _ = parts
    batch, heads, positions, head_dim = q.shape
    kv_heads, rotated = 0 if k is None else k.shape[1], rotated_features(cos, head_dim)
    if batch * positions == 0:
        return  # an empty grid cannot be launched
    given = [None if t is None else _features_together(t) for t in parts]
    strides = [(0,) * 4 if t is None else t.stride() for t in given]
    cos, sin, cos_batch_stride = angles_of(cos, sin)
    block_heads, block_dim = next_power_of_2(heads), next_power_of_2(head_dim)
    launch(
        _qkv_rope_kernel, (batch * positions,),
        *given, cos, sin, qkv,
        positions,
        *strides[0][:3], *strides[1][:3], *strides[2][:3],
        cos_batch_stride,
        qkv.stride(0),
        backward,
        heads, kv_heads, rotated // 2, head_dim, interleaved,
        block_heads, next_power_of_2(max(kv_heads, 1)), next_power_of_2(rotated // 2), block_dim,
        0 if in_place else block_of_rest(rotated, head_dim),
        # 8 bf16 values of each half, one 16-byte load, per thread, and of a tile that its heads do
        # not fill up to twice as many
        num_warps=min(previous_power_of_2(max(heads * block_dim // 512, 1)), 16),
    )  # fmt: skip


def rotated_features(cos: Tensor | None, head_dim: int) -> int:
    """Return how many features of a head are rotated."""
    return head_dim if cos is None else cos.shape[2]


def block_of_rest(rotated: int, head_dim: int) -> int:
    """Return the tile for the features of a head that stay, 0 for none."""
    return next_power_of_2(head_dim - rotated) if rotated < head_dim else 0


def _features_together(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def scale_q(qkv: Tensor, q_scale: Tensor | None, q_columns: int) -> None:
    """Multiply q, or its gradient, by its scale [batch or 1, positions], if there is one."""
    if q_scale is not None:
        by_token = qkv[:, :q_columns].unflatten(0, (-1, q_scale.shape[1]))
        by_token.mul_(q_scale.unsqueeze(2))


def angles_of(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Return cos and sin, contiguous, and the stride between those of two sequences."""
    if cos is None or sin is None:
        return None, None, 0
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0)


def batch_of(
    name: str, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, kv_heads: int,
    positions: int = 0,
) -> int:  # fmt: skip
    """Count the sequences of qkv.

    Raises ValueError if qkv does not fit cos and sin, or this number of positions without them.
    """
    rows, columns = qkv.shape
    parts = heads + 2 * kv_heads
    if cos is None and sin is None:
        batch = rows // max(positions, 1)
        if columns % parts or batch * positions != rows:
            raise ValueError(
                f"{name}: [q | k | v] is {list(qkv.shape)}, should be [batch * {positions}, "
                f"{parts} * head_dim]"
            )
        return batch
    if cos is None or sin is None:
        raise ValueError(f"{name}: only one of cos and sin is given, should be both or neither")
    if cos.ndim != 3 or cos.shape[2] % 2 or cos.shape != sin.shape:
        raise ValueError(
            f"{name}: cos is {list(cos.shape)} and sin {list(sin.shape)}, should both be [batch or "
            "1, positions, head_dim], head_dim even"
        )
    sequences, positions, head_dim = cos.shape  # or less than head_dim, to rotate a part
    batch = rows // max(positions, 1)
    fits = columns % parts == 0 and head_dim <= columns // parts
    if batch * positions != rows or sequences not in (1, batch) or not fits:
        raise ValueError(
            f"{name}: [q | k | v] is {list(qkv.shape)}, should be [batch * {positions}, "
            f"{parts} * {head_dim}] as cos is {list(cos.shape)}"
        )
    for key, angle in (("cos", cos), ("sin", sin)):
        if angle.dtype not in DTYPES or angle.device != qkv.device:
            raise ValueError(
                f"{name}: {key} is {angle.dtype} on {angle.device}, should be bfloat16, float16 or "
                f"float32 on {qkv.device} as [q | k | v] is"
            )
    return batch
