"""The switch `rms_norm`: the forwards that it sets on a norm, and on a decoder layer, whose
residual is added within its second norm."""

from collections.abc import Iterator
from typing import Any

from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from ..rms_norm import add_rms_norm, rms_norm
from .projection import why_call, why_not_plain
from .site import as_named, class_forward, known_form, say_once, why_not_class


def norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            yield name, module


def why_not_norm(norm: Any) -> str | None:
    if (reason := why_not_class(norm, "RMSNorm")) is not None:
        return reason
    if getattr(norm, "weight", None) is None:
        return "it has no weight"
    reason = why_not_plain(norm.weight)
    return None if reason is None else f"its weight {reason}"


def active_norm(norm: Any) -> Any:
    """Return the norm that a call of this one runs: of one in modules_to_save the adapter's."""
    if type(norm) is not ModulesToSaveWrapper or why_call(norm) is not None:
        return norm
    active = [] if norm.disable_adapters else norm.active_adapters
    saved = norm.modules_to_save
    return saved[active[0]] if active and active[0] in saved else norm.original_module


def why_not_within(norm: Any) -> str | None:
    """Return the reason if this norm may not be part of a function."""
    return why_not_norm(norm) or why_call(norm, own_forward=False)


def why_not_frozen(norm: Any) -> str | None:
    """Return the reason if this norm may not be part of a function that does not train it."""
    if (reason := why_not_within(norm)) is not None:
        return reason
    if norm.weight.requires_grad:
        return "its weight is trained: freeze it, requires_grad_(False)"
    return None


def norm_forward(norm: Any, parts: frozenset[str], x: Tensor) -> Tensor:
    reason = why_not_norm(norm)
    if reason is None and x.dtype != norm.weight.dtype:  # the class promotes to the wider dtype
        reason = f"its input is {x.dtype} and its weight {norm.weight.dtype}: cast one to the other"
    if reason is not None:
        say_once(norm, reason)
        return class_forward(norm, x)
    form = known_form(norm, "RMSNorm")
    return rms_norm(x, norm.weight, getattr(norm, form.eps), form.zero_centered)


def why_not_normed_layer(layer: Any) -> str | None:
    if (reason := why_not_class(layer, "NormedLayer")) is not None:
        return reason
    return why_not_within(active_norm(getattr(layer, known_form(layer, "NormedLayer").before_mlp)))


def normed_layer_forward(layer: Any, parts: frozenset[str], hidden_states: Tensor, **options):
    """The class's own forward; the residual's addition goes into the norm after it."""
    reason, form = why_not_normed_layer(layer), known_form(layer, "NormedLayer")
    if reason is None:
        norm = active_norm(getattr(layer, form.before_mlp))
        if hidden_states.dtype != norm.weight.dtype:
            reason = f"its input is {hidden_states.dtype} and its norm's weight {norm.weight.dtype}"
    if reason is not None:
        say_once(layer, reason)
        return class_forward(layer, hidden_states, **options)
    multiplier = getattr(layer, form.multiplier) if form.multiplier else None

    def added(output: Tensor, name: str) -> Tensor:
        output = getattr(layer, name)(output) if name else output
        return output if multiplier is None else output * multiplier

    options = as_named(options)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
    attended = added(attended, form.after_attention)
    if attended.dtype != hidden_states.dtype:  # of fp32 weights under autocast: the sum is fp32
        residual = hidden_states + attended
        return residual + added(layer.mlp(norm(residual)), form.after_mlp)
    form_of_norm = known_form(norm, "RMSNorm")
    normalised, residual = add_rms_norm(
        hidden_states, attended, norm.weight, getattr(norm, form_of_norm.eps),
        form_of_norm.zero_centered,
    )  # fmt: skip
    return residual + added(layer.mlp(normalised), form.after_mlp)
