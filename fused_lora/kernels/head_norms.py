"""The norms of q, k and v: their operands, and the arithmetic that forward and backward share."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import DTYPES


class HeadNorms(NamedTuple):
    """The norms of q and k, of every head or of all heads together, and of v's heads."""

    q_weight: Tensor  # [head_dim], or [heads head_dim]
    k_weight: Tensor  # [head_dim], or [kv_heads head_dim]
    q_eps: float
    k_eps: float
    zero_centered: bool = False  # they multiply by one more than their weight
    v_eps: float | None = None  # of v's norm, which has no weight; None: v stays as it is


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


def weights_of(
    name: str, norms: HeadNorms, heads: int, kv_heads: int, head_dim: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the norms' weights, contiguous. Raise ValueError where one does not fit."""
    for key, weight, count in (
        ("q_weight", norms.q_weight, heads), ("k_weight", norms.k_weight, kv_heads)
    ):  # fmt: skip
        if weight.shape not in ((head_dim,), (count * head_dim,)):
            raise ValueError(
                f"{name}: {key} is {list(weight.shape)}, should be [{head_dim}], or of all heads "
                f"[{count * head_dim}]"
            )
        if weight.dtype not in DTYPES or weight.device != like.device:
            raise ValueError(
                f"{name}: {key} is {weight.dtype} on {weight.device}, should be bfloat16, float16 "
                f"or float32 on {like.device}"
            )
    return norms.q_weight.contiguous(), norms.k_weight.contiguous()
