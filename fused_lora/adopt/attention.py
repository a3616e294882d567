"""The switches `attention` and `rope`: the forwards that they set on an attention and on its o."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels.qkv_norm_rope import HeadNorms
from ..lora_attention import FrozenAttention, LoRA_Attention
from ..lora_linear import FrozenLinear, FrozenQKV, LoRA_QKV, LoRA_W
from ..rope import rope
from .originals import is_builtin, why_replaced
from .projection import Projection, read_projection
from .rms_norm import why_not_frozen
from .site import (
    class_forward,
    fused_parts_of,
    having,
    say_once,
    why_not_class,
    why_not_own_forward,
    why_unloaded,
)


def read_qkv(attention: nn.Module) -> tuple | str:
    """Return the operands of LoRA_QKV after x, read from q, k and v as they are now, or the reason
    why they may not run fused."""
    if (reason := why_not_class(attention, "Attention")) is not None:
        return reason
    projections = []
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = read_projection(getattr(attention, name))
        if isinstance(projection, str):
            return f"{name}: {projection}"
        projections.append(projection)
    if (reason := why_unloaded(attention, projections)) is not None:
        return reason
    adapters = (tensor for one in projections for tensor in (one.A, one.B))
    weights, biases, scalings = zip(
        *((one.weight, one.bias, one.scaling) for one in projections), strict=True
    )
    return *adapters, FrozenQKV(*weights, *biases, *scalings)


def head_norms_of(attention: Any) -> HeadNorms | None:
    """Return the norms of the heads of q and k as they are now, or None if there are none."""
    if "q_norm" not in attention._modules:
        return None
    q, k = attention.q_norm, attention.k_norm
    return HeadNorms(q.weight, k.weight, q.variance_epsilon, k.variance_epsilon)


def why_not_head_norms(attention: Any) -> str | None:
    """Return the reason if the norms of the heads of q and k may not be part of a function."""
    for name in ("q_norm", "k_norm") if "q_norm" in attention._modules else ():
        if (reason := why_not_frozen(attention._modules[name])) is not None:
            return f"{name}: {reason}"
    return None


def output_projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, attention in having("q_proj", "o_proj")(model):
        o = attention.get_submodule("o_proj")
        if type(o) is not nn.Linear:  # without an adapter it is best by itself
            yield f"{name}.o_proj", o


def read_output(projection: nn.Module) -> Projection | str:
    reason = why_not_own_forward(projection)
    return reason or read_projection(projection, own_forward=False)


def output_forward(projection: nn.Module, parts: frozenset[str], x: Tensor, *rest, **options):
    read = read_output(projection)
    if rest or options:
        read = "it was given more than its input"
    if isinstance(read, str):
        say_once(projection, read)
        return class_forward(projection, x, *rest, **options)
    return LoRA_W.apply(x, read.A, read.B, FrozenLinear(read.weight, read.bias, read.scaling))


def self_attention_forward(
    attention: Any,
    parts: frozenset[str],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values=None,
    **options,
):
    """The four families' own forward, with its q, k and v and its rotary embedding fused or not; or
    all of it as one function, where it is asked for both and may."""
    if (reason := why_not_class(attention, "Attention")) is not None:
        say_once(attention, reason)
        return class_forward(
            attention, hidden_states, position_embeddings=position_embeddings,
            attention_mask=attention_mask, past_key_values=past_key_values, **options,
        )  # fmt: skip
    operands: tuple | str = "not asked for"
    if "attention" in parts and isinstance(operands := read_qkv(attention), str):
        say_once(attention, operands)
    if not isinstance(operands, str) and "rope" in parts:
        o = _read_rest(attention, attention_mask, past_key_values, options)
        if not isinstance(o, str):
            *adapters, frozen_qkv = operands
            frozen = FrozenAttention(
                frozen_qkv, FrozenLinear(o.weight, o.bias, o.scaling),
                attention.head_dim, attention.scaling, head_norms_of(attention),
            )  # fmt: skip
            output = LoRA_Attention.apply(
                hidden_states, *position_embeddings, attention_mask, *adapters, o.A, o.B, frozen
            )
            return output, None
    if isinstance(operands, str):
        q, k, v = (
            getattr(attention, name)(hidden_states) for name in ("q_proj", "k_proj", "v_proj")
        )
    else:
        q, k, v = LoRA_QKV.apply(hidden_states, *operands)
    by_head = (*hidden_states.shape[:-1], -1, attention.head_dim)
    return attend(
        attention, parts, q.view(by_head), k.view(by_head), v.view(by_head),
        position_embeddings, attention_mask, past_key_values, **options,
    )  # fmt: skip


def _read_rest(attention: Any, mask, past_key_values, options: dict) -> Projection | str:
    """Return o of an attention whose q, k and v are fused, as it is now, or the reason why the
    attention may not run as one function."""
    if torch.compiler.is_compiling():
        return "torch.compile has its own"
    reason = (
        why_not_sdpa(attention)
        or why_not_head_norms(attention)
        or why_not_inputs(mask, past_key_values, options)
    )
    if reason is not None:
        return reason
    o = attention.o_proj
    runs_here = "attention" in fused_parts_of(o) or type(o) is nn.Linear
    return read_output(o) if runs_here else "its o runs by itself"


def why_not_sdpa(attention: Any) -> str | None:
    """Return the reason if this attention does with q, k and v anything else than causal
    scaled_dot_product_attention."""
    implementation = attention.config._attn_implementation
    if implementation != "sdpa":
        return f"its attention is {implementation}, not sdpa"
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:
        return "its attention is registered as sdpa, but is not transformers' own"
    if (reason := why_replaced(sdpa_attention.__name__, "sdpa_attention_forward")) is not None:
        return reason
    if not is_builtin(F.scaled_dot_product_attention):
        return "F.scaled_dot_product_attention is not torch's own: undo that patch to run it fused"
    if attention.attention_dropout and attention.training:
        return f"attention_dropout is {attention.attention_dropout}"
    if not attention.is_causal:
        return "it is not causal"
    return None


def why_not_inputs(mask, past_key_values, options: dict) -> str | None:
    """Return the reason if an attention, or its layer, is called with more than tensors to attend
    to."""
    if past_key_values is not None:
        return "it was given past_key_values; in training, set model.config.use_cache = False"
    if mask is not None and (not isinstance(mask, Tensor) or mask.requires_grad):
        return "its attention_mask is not a tensor, or requires a gradient"
    if options.get("is_causal") is False:
        return "it was given is_causal=False"
    for name in ("position_bias", "output_attentions"):
        if options.get(name) not in (None, False):
            return f"it was given {name}"
    return None


def attend(
    attention: Any,
    parts: frozenset[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values,
    **options,
):
    """Do what the four families do with the projections, [batch, positions, heads, head_dim]."""
    by_token = q.shape[:2]
    if "q_norm" in attention._modules:  # Qwen3
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    cos, sin = position_embeddings
    if "rope" in parts:
        q, k = rope(q, k, cos, sin)
    else:
        q, k = (x * cos.unsqueeze(1) + _rotate_half(x) * sin.unsqueeze(1) for x in (q, k))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, attention.layer_idx)
    config = attention.config
    if not _is_llama(attention):
        default = getattr(config, "sliding_window", None)
        options["sliding_window"] = getattr(attention, "sliding_window", default)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(
        config._attn_implementation, _eager_attention_of(attention)
    )
    attended, weights = function(
        attention,
        q,
        k,
        v,
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        **options,
    )
    attended = attended.reshape(*by_token, -1).contiguous()
    return attention.o_proj(attended), weights


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _is_llama(attention: nn.Module) -> bool:
    return type(attention).__name__ == "LlamaAttention"


def _eager_attention_of(attention: nn.Module) -> Callable:
    """The eager attention of the class's own module."""
    return sys.modules[type(attention).__module__].eager_attention_forward
