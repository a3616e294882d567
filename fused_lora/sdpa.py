"""torch's scaled_dot_product_attention as two functions, forward and backward by hand.

An autograd function that contains attention needs its backward as a call, and what that call takes
as tensors, which it can save like others: a graph kept from forward would hold them where
checkpointing and offloading do not see them. PyTorch has such a pair of calls for each of its fused
kernels. Those of cuDNN and FlashAttention are used where scaled_dot_product_attention itself would
use them; everything else (a mask, head dimensions that it pads, the CPU) is attended to once more
in backward, under autograd: right everywhere, for one forward of attention more.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value
aten = torch.ops.aten


class Attention(NamedTuple):
    """What attention computes, besides its tensors."""

    scaling: float
    backend: int | None = None  # FLASH or CUDNN, once forward has run on one of them


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, list[Tensor | None], Attention]:
    """(attended, saved, attention): saved and attention are for `attention_backward`.

    Equivalent PyTorch: ``F.scaled_dot_product_attention(q, k, v, mask, scale=scaling,
    is_causal=mask is None, enable_gqa=True)``.

    q is [batch, heads, positions, head_dim], k and v [batch, kv_heads, positions, head_dim], of any
    strides; mask is None, for causal, or what scaled_dot_product_attention takes. attended is
    [batch, heads, positions, head_dim], on a GPU with the heads of a token side by side if q's are.
    """
    attention = Attention(scaling, _backend(q, k, v, mask, scaling))
    is_causal = q.shape[2] > 1
    if attention.backend == FLASH:
        attended, logsumexp, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scaling
        )
    elif attention.backend == CUDNN:
        attended, logsumexp, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scaling
        )
    else:
        return _attend(q, k, v, mask, scaling), [], attention
    return attended, [logsumexp, seed, offset], attention


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    attended: Tensor,
    saved: list[Tensor | None],
    attention: Attention,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in whatever layouts the backend gives."""
    scaling, backend = attention
    positions = q.shape[2]
    if backend is None:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            again = _attend(q, k, v, mask, scaling)
        grad_q, grad_k, grad_v = torch.autograd.grad(again, (q, k, v), grad)
        return grad_q, grad_k, grad_v
    logsumexp, seed, offset = saved
    is_causal = positions > 1
    if backend == FLASH:
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, attended, logsumexp, None, None, positions, positions, 0.0, is_causal,
            seed, offset, scale=scaling,
        )  # fmt: skip
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, attended, logsumexp, seed, offset, None, None, None, positions, positions,
        0.0, is_causal, scale=scaling,
    )  # fmt: skip


def _backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> int | None:
    """Whose kernels scaled_dot_product_attention would use, if they are called here."""
    # wider heads are not attended to backward on every card, narrower ones may be padded, and of
    # one position cuDNN has no backward
    if q.device.type != "cuda" or mask is not None or q.shape[3] % 8 or q.shape[3] > 128:
        return None
    if q.shape[2] == 1:
        return None
    choice = torch._fused_sdp_choice(
        q, k, v, None, 0.0, True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return choice if choice in (FLASH, CUDNN) else None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and mask is not None:
        # with a mask and grouped heads only the unfused kernel runs, which keeps all of q k'
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        is_grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None and q.shape[2] > 1, scale=scaling,
        enable_gqa=is_grouped,
    )  # fmt: skip
