"""The norms of q's, k's and v's heads: their operands, their arithmetic, and their backward.

x is one head's raw elements, and all heads of q (or of k) share the weight w. OLMo 2 instead norms
all heads of a token together, with a weight for every feature. w is the weight, or 1 + weight
(Gemma 3). v's norm has no weight (Gemma 4):

    y      = x r w,    r = 1 / sqrt(mean(x^2) + eps)
    grad_x = r (g w - n mean(g w n)),    n = x r

as in `row_norm.py`. The forward is a part of RoPE's pass (`qkv_rope.py`). Attention's backward
rotates its gradient back as it writes it, which gives g. `head_norms_backward` recomputes r from
raw x, so nothing else is saved. It reads g and x of what is normed and writes grad_x over g.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import launch, next_power_of_2, previous_power_of_2

from .row_norm import rstd_of_mean


class HeadNorms(NamedTuple):
    """The norms of q and k, of every head or of all heads together, and of v's heads."""

    q_weight: Tensor  # [head_dim], or [heads head_dim]
    k_weight: Tensor  # [head_dim], or [kv_heads head_dim]
    q_eps: float
    k_eps: float
    zero_centered: bool = False  # they multiply by one more than their weight
    v_eps: float | None = None  # of v's norm, which has no weight; None: v stays as it is

    def are_together(self, head_dim: int) -> bool:
        """Return True if all heads of a token are normed together."""
        return max(self.q_weight.numel(), self.k_weight.numel()) > head_dim


@triton.jit
def mean_of_heads(sums, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOGETHER: tl.constexpr):
    """The mean of each head by its sum [heads, 1], 0 behind the end, or of all heads: [.., 1]."""
    if TOGETHER:
        mean = tl.div_rn(tl.sum(sums, axis=0)[:, None], 1.0 * HEADS * HEAD_DIM)
    else:
        mean = tl.div_rn(sums, 1.0 * HEAD_DIM)
    return mean


@triton.jit
def load_weights(
    weight_ptr, heads, features, mask, HEAD_DIM: tl.constexpr, TOGETHER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """The weights [heads or 1, features] of heads of HEAD_DIM."""
    if TOGETHER:
        weight = tl.load(weight_ptr + heads * HEAD_DIM + features, mask=mask, other=0.0)
    else:
        weight = tl.load(weight_ptr + features, mask=features < HEAD_DIM, other=0.0)
    weight = weight.to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    return weight


@triton.jit
def _norm_heads_backward(
    grad_ptr,  # the first head of one token, contiguous, read and written
    x_ptr,  # likewise, of any stride
    weight_ptr,  # [HEAD_DIM] or [HEADS HEAD_DIM], contiguous; None: all are 1
    head_stride,
    eps,
    TOGETHER: tl.constexpr, ZERO_CENTERED: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, triton.next_power_of_2(HEADS)).to(tl.int64)[:, None]
    features = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
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
    q_weight_ptr,  # [HEAD_DIM], contiguous; [HEADS HEAD_DIM] where TOGETHER
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
    TOGETHER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch = token // positions
    position = token % positions
    row = grad_qkv_ptr + token * grad_row_stride
    _norm_heads_backward(
        row, q_ptr + batch * q_batch_stride + position * q_position_stride, q_weight_ptr,
        q_head_stride, q_eps, TOGETHER, ZERO_CENTERED, HEADS, HEAD_DIM,
    )  # fmt: skip
    _norm_heads_backward(
        row + HEADS * HEAD_DIM, k_ptr + batch * k_batch_stride + position * k_position_stride,
        k_weight_ptr, k_head_stride, k_eps, TOGETHER, ZERO_CENTERED, KV_HEADS, HEAD_DIM,
    )  # fmt: skip
    if v_ptr is not None:
        _norm_heads_backward(
            row + (HEADS + KV_HEADS) * HEAD_DIM,
            v_ptr + batch * v_batch_stride + position * v_position_stride, None, v_head_stride,
            v_eps, False, False, KV_HEADS, HEAD_DIM,
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
    """
    batch, heads, positions, head_dim = q.shape
    q_weight, k_weight, q_eps, k_eps, zero_centered, v_eps = norms
    if batch * positions == 0:
        return  # an empty grid cannot be launched
    q_heads, q_strides = strided(q)
    k_heads, k_strides = strided(k)
    v_heads, v_strides = strided(None if v_eps is None else v)
    launch(
        _qkv_norm_backward_kernel, (batch * positions,),
        grad_qkv, q_heads, k_heads, v_heads, q_weight.contiguous(), k_weight.contiguous(),
        positions, q_eps, k_eps, v_eps, grad_qkv.stride(0), *q_strides, *k_strides, *v_strides,
        norms.are_together(head_dim), zero_centered, heads, k.shape[1], head_dim,
        num_warps=warps_of_heads(heads, head_dim),
    )  # fmt: skip


def strided(x: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return x [batch, heads, positions, head_dim], copied if a head's elements are not side by
    side, and the strides of its other dimensions."""
    if x is None:
        return None, (0, 0, 0)
    if x.stride(3) != 1:
        x = x.contiguous()
    return x, x.stride()[:3]


def warps_of_heads(heads: int, head_dim: int) -> int:
    """Return num_warps for this many of a token's heads. A thread then loads 8 bf16 values of each
    half, which are 16 bytes, and up to twice as many of a tile that its heads do not fill."""
    return min(previous_power_of_2(max(heads * next_power_of_2(head_dim) // 512, 1)), 16)
