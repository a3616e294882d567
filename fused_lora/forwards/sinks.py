"""Attention with sinks, gpt-oss's: each head's softmax has one more score, whose value is 0.

transformers has no sdpa for it. It runs eagerly, with a mask of positions x positions in every
layer, or on flex_attention, or on kernels from the hub. Our own kernels take the sinks, the sliding
window and the bounds of documents, and no mask.
"""

from typing import Any

from torch import Tensor

from fused_mlp.utils import compute_dtype

from ..foreign.originals import why_replaced
from ..kernels.causal_attention import fits_heads
from ..kernels.documents import is_documents
from ..reading.known import known_form
from .attend import dropout_of, has_sinks, window_beside


def sinks_and_window_of(attention: Any, mask: Any) -> tuple[Tensor | None, int | None]:
    """Return the sinks [heads] and the sliding window that our kernels have to take, None for
    none."""
    sinks = _sinks_of(attention) if has_sinks(attention) else None
    return sinks, window_beside(attention, mask)


def _sinks_of(attention: Any) -> Tensor:
    return getattr(attention, known_form(attention, "Attention").sinks)


def why_not_eager(attention: Any) -> str | None:
    """Return the reason if an attention with sinks runs anything but transformers' eager one."""
    implementation = attention.config._attn_implementation
    if implementation != "eager":
        return f"its attention is {implementation}: call model.set_attn_implementation('eager')"
    called = "eager_attention_forward", "repeat_kv"
    if (reason := why_replaced(type(attention).__module__, *called)) is not None:
        return reason
    if (dropout := dropout_of(attention)) and attention.training:
        return f"attention_dropout is {dropout}: load the model with attention_dropout=0.0"
    if _sinks_of(attention).requires_grad:
        return "its sinks are trained: freeze them, requires_grad_(False)"
    return None


def why_not_sinks(attention: Any, hidden: Tensor, mask: Any) -> str | None:
    """Return the reason if our kernels cannot attend in this call because of sinks."""
    if not has_sinks(attention):
        return None
    if (reason := why_not_eager(attention)) is not None:
        return reason
    dtype = compute_dtype(hidden)
    if not fits_heads(dtype, attention.head_dim):
        return f"with sinks no kernel takes heads of {attention.head_dim} in {dtype}: use bfloat16"
    if not (isinstance(mask, Tensor) and is_documents(mask)):
        return "its mask is a matrix: with sinks full rows run fused, padded ones with a fused loss"
    return None
