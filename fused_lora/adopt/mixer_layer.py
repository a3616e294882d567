"""The switch `layer` for a layer with a mixer in place of attention, which runs as two functions
around it."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from ..layer.mixer_ends import ShortConvEnds
from ..layer.mixer_layer import AfterMixer, BeforeMixer, MixerEnds
from ..layer.operands import FrozenLayer
from ..rerun import saving_last
from . import delta_net, short_conv
from .aside import say_left
from .known import layer_form, why_not_class
from .projection import why_call


class Mixer(NamedTuple):
    """A kind of mixer, as a part of a layer.

    noun: its name in the report. untrained: the names of its tensors that the functions do not
    train. why_not: returns the reason if it cannot run between them. ends: returns its ends as they
    are now. run: runs it on its inputs, with a call's options. why_not_options: returns the reason
    if these keep the layer from running fused. why_slow: returns the reason if its library is not a
    fast one.
    """

    noun: str
    untrained: tuple[str, ...]
    why_not: Callable[[Any], str | None]
    ends: Callable[[Any], MixerEnds]
    run: Callable[..., Tensor]
    why_not_options: Callable[[dict], str | None] = lambda options: None
    why_slow: Callable[[Any], str] = lambda mixer: ""


MIXERS = {
    "GatedDeltaNet": Mixer(
        noun="a gated delta net",
        untrained=delta_net.UNTRAINED,
        why_not=delta_net.why_not_net,
        ends=delta_net.net_ends,
        run=delta_net.run_net,
        why_not_options=delta_net.why_not_documents,
        why_slow=delta_net.why_slow_rule,
    ),
    "ShortConv": Mixer(
        noun="a short convolution",
        untrained=(),
        why_not=short_conv.why_not_short_conv,
        ends=lambda conv: ShortConvEnds(),
        run=short_conv.run_short_conv,
    ),
}


def has_mixer(layer: Any) -> bool:
    """Return True for a layer with a mixer in place of attention."""
    return layer_form(layer).mixer in layer._modules


def mixer_of(layer: Any) -> Any:
    return layer._modules[layer_form(layer).mixer]


def noun_of(layer: Any) -> str:
    return MIXERS[layer_form(layer).mixer_kind].noun


def why_not_mixer(layer: Any) -> str | None:
    """Return the reason if a layer's mixer cannot be between its two functions."""
    form, mixer = layer_form(layer), mixer_of(layer)
    if reason := why_not_class(mixer, form.mixer_kind) or why_call(mixer, own_forward=False):
        return f"{form.mixer}: {reason}"
    kind = MIXERS[form.mixer_kind]
    if reason := kind.why_not(mixer):
        return f"{form.mixer}.{reason}"
    norms = f"{form.before_attention}.weight", f"{form.before_mlp}.weight"
    for name in (*norms, *(f"{form.mixer}.{one}" for one in kind.untrained)):
        tensor = attrgetter(name)(layer)
        if tensor is not None and tensor.requires_grad:
            return f"{name} is trained: freeze it, requires_grad_(False)"
    return None


def why_not_mixer_inputs(layer: Any, mask: Tensor | None, options: dict) -> str | None:
    """Return the reason if these arguments of a call keep the layer from running fused."""
    if mask is not None and mask.ndim != 2:
        return f"its attention_mask is {list(mask.shape)}, should be [batch, positions]"
    return MIXERS[layer_form(layer).mixer_kind].why_not_options(options)


def why_slow(layer: Any) -> dict[str, str]:
    """Return the reason why a layer's mixer is not a fast library's, by its name in the layer."""
    form = layer_form(layer)
    reason = has_mixer(layer) and MIXERS[form.mixer_kind].why_slow(mixer_of(layer))
    return {f"{form.mixer}.recurrence": reason} if reason else {}


def run_mixer_layer(
    layer: Any, hidden: Tensor, mask: Tensor | None, trained: list, frozen: FrozenLayer,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Run the two functions, and the mixer between them."""
    mixer, kind = mixer_of(layer), MIXERS[layer_form(layer).mixer_kind]
    say_left(layer, why_slow(layer))
    ends = kind.ends(mixer)
    before = 2 * len(frozen.qkv.out_features)  # A and B of each in-projection
    *inputs, gate, residual = BeforeMixer.apply(hidden, mask, *trained[:before], ends, frozen)
    found = kind.run(mixer, *inputs, **options).to(gate.dtype)

    def run(output_needed: bool) -> Tensor:
        now = frozen._replace(output_needed=output_needed)
        return AfterMixer.apply(found, gate, residual, *trained[before:], ends, now)

    return saving_last(run)
