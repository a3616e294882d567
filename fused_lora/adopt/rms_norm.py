"""The switch `rms_norm`: the forwards that it sets on a norm, and on a decoder layer, whose
residual is added within its second norm."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..rms_norm import add_rms_norm, rms_norm
from .projection import why_call, why_not_plain
from .site import class_forward, say_once, why_not_class


def norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            yield name, module


def why_not_norm(norm: Any) -> str | None:
    if (reason := why_not_class(norm, "RMSNorm")) is not None:
        return reason
    if type(norm.weight) is not nn.Parameter:
        return f"its weight {why_not_plain(norm.weight)}"
    return None


def why_not_frozen(norm: Any) -> str | None:
    """Return the reason if this norm may not be part of a function that does not train it."""
    if (reason := why_not_class(norm, "RMSNorm") or why_call(norm, own_forward=False)) is not None:
        return reason
    if type(norm.weight) is not nn.Parameter:
        return f"its weight is wrapped ({type(norm.weight).__name__})"
    if norm.weight.requires_grad:
        return "its weight is trainable"
    return None


def norm_forward(norm: Any, parts: frozenset[str], x: Tensor) -> Tensor:
    reason = why_not_norm(norm)
    if reason is None and x.dtype != norm.weight.dtype:  # the class promotes to the wider dtype
        reason = f"its input is {x.dtype} and its weight {norm.weight.dtype}: cast one to the other"
    if reason is not None:
        say_once(norm, reason)
        return class_forward(norm, x)
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def why_not_normed_layer(layer: Any) -> str | None:
    if (reason := why_not_class(layer, "DecoderLayer")) is not None:
        return reason
    norm = layer.post_attention_layernorm
    return why_not_norm(norm) or why_call(norm, own_forward=False)


def normed_layer_forward(layer: Any, parts: frozenset[str], hidden_states: Tensor, **options):
    """The four families' own forward; the residual's addition goes into the norm after it."""
    norm = layer.post_attention_layernorm
    reason = why_not_normed_layer(layer)
    if reason is None and hidden_states.dtype != norm.weight.dtype:
        reason = f"its input is {hidden_states.dtype} and its norm's weight {norm.weight.dtype}"
    if reason is not None:
        say_once(layer, reason)
        return class_forward(layer, hidden_states, **options)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
    if attended.dtype != hidden_states.dtype:  # of fp32 weights under autocast: the sum is fp32
        residual = hidden_states + attended
        return residual + layer.mlp(norm(residual))
    normalised, residual = add_rms_norm(hidden_states, attended, norm.weight, norm.variance_epsilon)
    return residual + layer.mlp(normalised)
