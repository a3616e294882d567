"""Attention between its projections, as the class computes it: norms, RoPE and the attention
function that the model has chosen."""

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fused_mlp.utils import compute_dtype

from ..foreign.originals import why_replaced
from ..foreign.versions import IS_NAMED_CACHE
from ..functions.rope import rope
from ..kernels.causal_attention import fits_heads
from ..kernels.document_bounds import is_documents, mask_of_documents
from ..kernels.head_norms import HeadNorms
from ..reading.aside import say_once
from ..reading.known import known_form, why_not_class
from ..reading.projection import CAST, why_call
from .rms_norm import why_not_frozen

NO_CACHE_IN_TRAINING = (
    "it was given past_key_values; in training, set model.config.use_cache = False"
)


def rotates(attention: nn.Module) -> bool:
    form = known_form(attention, "Attention")
    if form is None or not form.rotates:
        return True
    return attrgetter(form.rotates)(attention) in (True, "rope")


def dropout_of(attention: nn.Module) -> float:
    """Return the dropout of attention's scores, which some classes do not have."""
    return getattr(attention, "attention_dropout", 0.0)


def why_not_rotated(dtype: torch.dtype | None) -> str | None:
    # Refuse no other dtype: that of a quantised weight's storage says nothing.
    return f"its weights are {dtype}: {CAST}" if dtype is torch.float64 else None


def has_sinks(attention: nn.Module) -> bool:
    form = known_form(attention, "Attention")
    return form is not None and bool(form.sinks)


def window_of(attention: Any) -> int | None:
    """Return how many tokens each sees, itself the last, as transformers' mask for this attention
    has it. None: all up to itself."""
    path = dict(known_form(attention, "Attention").passes).get("sliding_window")
    if path is None:  # it may have one, as in Qwen2-MoE, that only the mask knows
        return getattr(attention, "sliding_window", None)
    return attrgetter(path)(attention)


def window_beside(attention: Any, mask: Any) -> int | None:
    """Return the window of an attention that its documents do not imply. None: any other mask has
    it, or their rows are shorter."""
    if not (isinstance(mask, Tensor) and is_documents(mask)):
        return None
    window = window_of(attention)
    return None if window is None or window >= mask.shape[3] else window


def mask_for_attention(attention: Any, mask: Any, dtype: torch.dtype) -> Any:
    """Return a mask that transformers' attention accepts. Documents are converted: with sinks to
    what the eager attention adds to its scores, in this dtype."""
    if not (isinstance(mask, Tensor) and is_documents(mask)):
        return mask
    seen = mask_of_documents(mask, window_beside(attention, mask))
    if not has_sinks(attention):
        return seen
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def full_angles(attention: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin for both halves of what is rotated, as our kernels take them."""
    if not known_form(attention, "Attention").shares_angles:
        return cos, sin
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def attend(
    attention: Any,
    parts: frozenset[str],
    qkv: Sequence[Tensor],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values,
    **options,
):
    """Attend as the class does. qkv are [batch, positions, out of q_proj] and so on; v, or k and v,
    may be missing where the form shares them."""
    form, shared = known_form(attention, "Attention"), options.pop("shared_kv_states", None)
    by_token = qkv[0].shape[:2]
    norms: Any = (getattr(attention, name, None) for name in form.norm_names)
    q_norm, k_norm = norms
    if form.norms == "features":
        qkv = q_norm(qkv[0]), k_norm(qkv[1]), qkv[2]
    q, *kv = (one.unflatten(2, (-1, attention.head_dim)) for one in qkv)
    gate = k = v = None
    if form.has_gate:  # each head's q, then its gate
        q, gate = q.unflatten(2, (-1, 2)).unbind(3)
    if form.norms == "heads":
        q = q_norm(q)
    q = q.transpose(1, 2)
    if kv:  # v may be k, as it was before its norm
        k, v = kv[0], kv[-1]
        k = k_norm(k) if form.norms == "heads" else k
        v = attention.v_norm(v) if "v_norm" in attention._modules else v
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if rotates(attention):
        q, k = _rotated(attention, parts, q, k, *position_embeddings)
    if k is None:
        k, v = (one.to(q.device) for one in shared[attention.layer_type])
        past_key_values = None  # it has them already
    if (scale := q_scale_of(attention, options)) is not None:
        q = q * scale[:, None, :, None].to(q.dtype)
    if past_key_values is not None:
        # a paged cache changes some of these options for the attention below
        given = {"kwargs": options} if IS_NAMED_CACHE else {}
        k, v = past_key_values.update(k, v, attention.layer_idx, **given)
    if form.shares_kv and attention.store_full_length_kv:
        shared[attention.layer_type] = k, v
    config = attention.config
    for option, path in form.passes:
        options[option] = attrgetter(path)(attention)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(
        config._attn_implementation, _module_function(attention, "eager_attention_forward")
    )
    dropout = dropout_of(attention) if attention.training else 0.0
    attended, weights = function(
        attention, q, k, v, attention_mask, dropout=dropout, scaling=attention.scaling, **options
    )
    attended = attended.reshape(*by_token, -1).contiguous()
    if gate is not None:
        attended = attended * torch.sigmoid(gate.flatten(2))
    return getattr(attention, form.output)(attended), weights


def _rotated(
    attention: Any, parts: frozenset[str], q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Rotate q, and k if it is there, fused if asked for and possible."""
    form = known_form(attention, "Attention")
    reason = why_not_rotated(q.dtype) if "rope" in parts else None
    if "rope" in parts and reason is None:
        cos, sin = full_angles(attention, cos, sin)
        rotated = rope(q, q[:, :0] if k is None else k, cos, sin, form.interleaved)
        return rotated if k is not None else (rotated[0], None)
    if reason is not None:
        say_once(attention, reason)
    rotate = _module_function(attention, "apply_rotary_pos_emb")
    if not form.shares_kv:
        return rotate(q, k, cos, sin)
    return rotate(q, cos, sin), None if k is None else rotate(k, cos, sin)


def q_scale_of(attention: Any, options: dict) -> Tensor | None:
    """Return what q is multiplied by after RoPE, [batch or 1, positions] in fp32, None for 1.

    options: of a call of the attention or its layer, position_ids among them.
    """
    if not known_form(attention, "Attention").scales_q:
        return None
    parameters = attention.config.rope_parameters
    scale = _module_function(attention, "get_llama_4_attn_scale")(
        options["position_ids"], parameters.get("llama_4_scaling_beta"),
        parameters.get("original_max_position_embeddings"),
    )  # fmt: skip
    return scale[:, 0, :, 0]


def _module_function(attention: nn.Module, name: str) -> Callable:
    """Return a function by name from the module of the attention's class."""
    return getattr(sys.modules[type(attention).__module__], name)


# --- in a larger function -------------------------------------------------------------------------


def head_norms_of(attention: Any) -> HeadNorms | None:
    """Return the norms of q, k and v as they are now, or None if there are none."""
    if not (norms := _head_norms(attention)):
        return None
    q, k = norms.values()
    form = known_form(q, "RMSNorm")
    q_eps, k_eps = (getattr(norm, form.eps) for norm in (q, k))
    v_norm = attention._modules.get("v_norm")
    v_eps = None if v_norm is None else getattr(v_norm, form.eps)
    return HeadNorms(q.weight, k.weight, q_eps, k_eps, form.zero_centered, v_eps)


def why_not_head_norms(attention: Any) -> str | None:
    """Return the reason if the norms of q, k and v cannot be part of a function."""
    norms = _head_norms(attention)
    if (v_norm := attention._modules.get("v_norm")) is not None:  # it has no weight
        reason = why_not_class(v_norm, "RMSNorm") or why_call(v_norm, own_forward=False)
        if reason is not None:
            return f"v_norm: {reason}"
    for name, norm in norms.items():
        if (reason := why_not_frozen(norm)) is not None:
            return f"{name}: {reason}"
    if len({known_form(norm, "RMSNorm") for norm in norms.values()}) > 1:
        return f"{' and '.join(norms)} are norms of different forms"
    return None


def _head_norms(attention: Any) -> dict[str, Any]:
    names = known_form(attention, "Attention").norm_names
    return {name: attention._modules[name] for name in names if name in attention._modules}


def why_not_sdpa(attention: Any) -> str | None:
    """Return the reason if this attention runs anything but causal scaled_dot_product_attention on
    q, k and v, or with sinks the eager one."""
    if has_sinks(attention):
        return why_not_eager(attention)
    implementation = attention.config._attn_implementation
    form = known_form(attention, "Attention")
    if form.shares_kv and (reason := _why_not_own_kv(attention)) is not None:
        return reason
    if implementation != "sdpa" and "softcap" in dict(form.passes):
        return f"its attention is {implementation}, which soft-caps its scores, unlike sdpa"
    if implementation != "sdpa":
        return f"its attention is {implementation}: call model.set_attn_implementation('sdpa')"
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:
        return "its attention is registered as sdpa, but is not transformers' own: undo that"
    if (reason := why_replaced(sdpa_attention.__name__, "sdpa_attention_forward")) is not None:
        return reason
    if not isinstance(F.scaled_dot_product_attention, BuiltinFunctionType):
        return "F.scaled_dot_product_attention is not torch's own: undo that patch to run it fused"
    if (dropout := dropout_of(attention)) and attention.training:
        return f"attention_dropout is {dropout}: load the model with attention_dropout=0.0"
    if not attention.is_causal:
        return "it is not causal"
    return None


def _why_not_own_kv(attention: Any) -> str | None:
    """Return the reason if an attention has no k and v that are its own alone."""
    if attention.is_kv_shared_layer:
        return "its k and v are an earlier layer's"
    if attention.store_full_length_kv and attention.config.num_kv_shared_layers:
        return "later layers take its k and v as well"
    return "its k is its v as well" if attention.v_proj is None else None


def why_not_inputs(mask, past_key_values, options: dict) -> str | None:
    """Return the reason if these arguments keep an attention, or its layer, from running fused."""
    if past_key_values is not None:
        return NO_CACHE_IN_TRAINING
    if mask is not None and (not isinstance(mask, Tensor) or mask.requires_grad):
        return "its attention_mask is not a tensor, or requires a gradient"
    if options.get("is_causal") is False:
        return "it was given is_causal=False"
    for name in ("position_bias", "output_attentions", "return_shared_kv_states"):
        if options.get(name) not in (None, False):
            return f"it was given {name}: leave that out"
    return None


# --- with sinks -----------------------------------------------------------------------------------
# Each head's softmax has one more score, whose value is 0, as in gpt-oss. transformers has no sdpa
# for it. It runs eagerly, with a mask of positions x positions in every layer, or on flex_attention
# or kernels from the hub. Our own kernels take the sinks, the sliding window and the bounds of
# documents, and no mask.


def sinks_and_window_of(attention: Any, mask: Any) -> tuple[Tensor | None, int | None]:
    """Return the sinks [heads] and the sliding window that our kernels have to take, None for
    none."""
    name = known_form(attention, "Attention").sinks
    return getattr(attention, name) if name else None, window_beside(attention, mask)


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
    if getattr(attention, known_form(attention, "Attention").sinks).requires_grad:
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
