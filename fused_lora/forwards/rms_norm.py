"""The switch `rms_norm`: the forwards it sets on a norm, on a norm with a gate, and on a decoder
layer, whose second norm then adds the residual itself."""

from collections.abc import Iterator
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from fused_mlp.launching import DTYPES

from ..foreign.versions import as_mixers, as_named, by_name, name_of_cache
from ..functions.gated_norm import gated_rms_norm
from ..functions.rms_norm import add_rms_norm, rms_norm
from ..reading.aside import step_aside
from ..reading.known import inner_norm, known_form, layer_form, why_not_class
from ..reading.projection import CAST, why_call, why_not_plain
from ..reading.refusal import Refusal, attempt, refuse


def norms(model: nn.Module, kind: str = "RMSNorm") -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).__name__.endswith(kind):
            yield name, module


def why_not_norm(norm: Any) -> str | None:
    if (reason := why_not_class(norm, "RMSNorm")) is not None:
        return reason
    if getattr(norm, "weight", None) is None:
        return "it has no weight"
    reason = why_not_plain(norm, norm.weight)
    return None if reason is None else f"its weight {reason}"


def read_norm(norm: Any, dtype: torch.dtype | None = None) -> None:
    """Raise a Refusal if this norm cannot run fused. dtype: the input's, in a call."""
    if why_not_class(norm, "RMSNorm") is None and getattr(norm, "weight", None) is None:
        return  # it only norms
    refuse(why_not_norm(norm))
    if dtype not in (None, norm.weight.dtype):  # the class promotes to the wider dtype
        raise Refusal(
            f"its input is {dtype} and its weight {norm.weight.dtype}: cast one to the other"
        )


def active_norm(norm: Any) -> Any:
    """Return the norm that a call of this one runs: with modules_to_save, the adapter's copy."""
    if type(norm) is not ModulesToSaveWrapper or why_call(norm) is not None:
        return norm
    active = [] if norm.disable_adapters else norm.active_adapters
    saved = norm.modules_to_save
    return saved[active[0]] if active and active[0] in saved else norm.original_module


def why_not_within(norm: Any) -> str | None:
    """Return the reason if this norm cannot be part of a larger function."""
    return why_not_norm(norm) or why_call(norm, own_forward=False)


def why_not_frozen(norm: Any) -> str | None:
    """Return the reason if this norm cannot be part of a function that does not train it."""
    if (reason := why_not_within(norm)) is not None:
        return reason
    if norm.weight.requires_grad:
        return "its weight is trained: freeze it, requires_grad_(False)"
    return None


def norm_forward(norm: Any, parts: frozenset[str], x: Tensor) -> Tensor:
    _, reason = attempt(read_norm, norm, x.dtype)
    if reason:
        return step_aside(norm, reason, x)
    form = known_form(norm, "RMSNorm")
    weight = getattr(norm, "weight", None)
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    return rms_norm(x, weight, getattr(norm, form.eps), form.zero_centered)


# --- with a gate ----------------------------------------------------------------------------------


def read_gated_norm(norm: Any, dtype: torch.dtype | None = None) -> None:
    """Raise a Refusal if this gated norm cannot run fused. dtype: the input's, in a call."""
    refuse(why_not_class(norm, "RMSNormGated"))
    if norm.activation != "silu":
        raise Refusal(f"its activation is {norm.activation}, not silu")
    if (reason := why_not_plain(norm, norm.weight)) is not None:
        raise Refusal(f"its weight {reason}")
    if dtype not in (None, *DTYPES):
        raise Refusal(f"its input is {dtype}: {CAST}")


def gated_norm_forward(
    norm: Any, parts: frozenset[str], hidden_states: Tensor, gate: Tensor
) -> Tensor:
    _, reason = attempt(read_gated_norm, norm, hidden_states.dtype)
    if reason:
        return step_aside(norm, reason, hidden_states, gate)
    eps = getattr(norm, known_form(norm, "RMSNormGated").eps)
    return gated_rms_norm(hidden_states, gate, norm.weight, eps)


# --- with the residual ----------------------------------------------------------------------------


def normed_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield layers with attention or another mixer. Unknown classes are included."""
    for name, module in model.named_modules():
        form, has = layer_form(module), module._modules.keys()
        if form.mlp in has and has & {"self_attn", form.mixer} and inner_norm(module) is not None:
            yield name, module


def read_normed_layer(layer: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the second norm of a layer, which can add the residual itself. dtype: the input's, if
    there is a call."""
    refuse(why_not_class(layer, "NormedLayer") or why_mixed(layer) or _why_wrapped(layer))
    norm = active_norm(getattr(layer, known_form(layer, "NormedLayer").before_mlp))
    refuse(why_not_within(norm))
    if dtype not in (None, norm.weight.dtype):
        raise Refusal(f"its input is {dtype} and its norm's weight {norm.weight.dtype}")
    return norm


def _why_wrapped(layer: Any) -> str | None:
    """Return the reason if something around a layer's mixer hides the inputs that it takes."""
    name = layer_form(layer).mixer
    mixer = layer._modules.get(name)
    if mixer is None or name_of_cache(mixer) is not None:
        return None
    return f"{name}: it is wrapped in {type(mixer).__name__}"


def why_mixed(layer: Any) -> str | None:
    """Return the reason if a layer whose class we know adds a mixture of experts to its MLP."""
    name = layer_form(layer).mixture
    return "it adds a mixture of experts to its MLP" if name and getattr(layer, name) else None


def normed_layer_forward(
    layer: Any, parts: frozenset[str], hidden_states: Tensor, *inputs, **options
):
    """Run the class's forward, with the residual addition fused into the norm after it."""
    options = by_name(layer, inputs) | options
    norm, reason = attempt(read_normed_layer, layer, hidden_states.dtype)
    if reason:
        return step_aside(layer, reason, hidden_states, **options)
    per_layer_input = options.pop("per_layer_input", None)
    form = known_form(layer, "NormedLayer")
    before = getattr(layer, form.before_attention)
    attended = _mixed(layer, before(hidden_states), options)
    attended = _added(layer, attended, form.after_attention)
    if attended.dtype != hidden_states.dtype:  # fp32 weights under autocast: the sum is fp32
        residual = hidden_states + attended
        normalised = norm(residual)
    else:
        norm_form = known_form(norm, "RMSNorm")
        eps = getattr(norm, norm_form.eps)
        normalised, residual = add_rms_norm(
            hidden_states, attended, norm.weight, eps, norm_form.zero_centered
        )
    return _after_norm(layer, residual, normalised, per_layer_input)


def after_attention(layer: Any, residual: Tensor, per_layer_input: Tensor | None) -> Tensor:
    """Run a layer from its second residual on, as its class does."""
    name = layer_form(layer).before_mlp
    normalised = getattr(layer, name)(residual) if name else residual
    return _after_norm(layer, residual, normalised, per_layer_input)


def _after_norm(
    layer: Any, residual: Tensor, normalised: Tensor, per_layer_input: Tensor | None
) -> Tensor:
    form = layer_form(layer)
    output = getattr(layer, form.mlp)(normalised)
    if isinstance(output, tuple):  # a mixture's routing comes second
        output = output[0]
    return finished(layer, residual + _added(layer, output, form.after_mlp), per_layer_input)


def _added(layer: Any, output: Tensor, name: str) -> Tensor:
    """Return what a layer adds to its residual. name: of the norm or dropout before that."""
    form = layer_form(layer)
    output = getattr(layer, name)(output) if name else output
    return output * getattr(layer, form.multiplier) if form.multiplier else output


def finished(layer: Any, total: Tensor, per_layer_input: Tensor | None) -> Tensor:
    """Return a layer's output from the total after its MLP, which it is but in Gemma 4."""
    form = layer_form(layer)
    if form.own_input and getattr(layer, form.own_input):
        gate = layer.act_fn(layer.per_layer_input_gate(total))
        addend = layer.per_layer_projection(gate * per_layer_input)
        total = total + layer.post_per_layer_input_norm(addend)
    return (total * getattr(layer, form.scale)).to(total.dtype) if form.scale else total


def _mixed(layer: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
    """Return what a layer's attention gives, or its mixer."""
    mixer = layer._modules.get(layer_form(layer).mixer)
    if mixer is None:
        return layer.self_attn(hidden_states=x, **as_named(options))[0]
    return mixer(hidden_states=x, **as_mixers(mixer, options))
