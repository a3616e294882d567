"""The switch `layer` for a layer with a mixer in place of attention: a function before the mixer,
and one from there on."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..foreign.ownership import fused_parts_of, why_not_own_forward
from ..layer.mixer_block import BeforeMixer, MixerBlock, MixerEnds
from ..layer.mixer_ends import ShortConvEnds
from ..layer.operands import Frame, Trained
from ..reading.aside import say_left
from ..reading.known import known_form, layer_form, why_not_class
from ..reading.projection import why_call
from ..reading.refusal import refuse_documents
from . import delta_net, short_conv


class Mixer(NamedTuple):
    """A kind of mixer, as a part of a layer."""

    noun: str  # in the report
    untrained: tuple[str, ...]  # the names of its tensors that the functions do not train
    why_not: Callable[[Any], str | None]  # the reason if it cannot run between them
    ends: Callable[[Any, Tensor | None], MixerEnds]  # as they are now, for rows of these documents
    run: Callable[..., Tensor]  # on its inputs, with a call's options
    forward: Callable[..., Tensor]  # in a layer that does not run whole; keeps documents apart
    why_mixing: Callable[[Any], str | None]  # the reason if that forward cannot
    why_slow: Callable[[Any], str] = lambda mixer: ""  # the reason if its library is not fast


MIXERS = {
    "GatedDeltaNet": Mixer(
        noun="a gated delta net",
        untrained=delta_net.UNTRAINED,
        why_not=delta_net.why_not_net,
        ends=delta_net.net_ends,
        run=delta_net.run_rule,
        forward=delta_net.delta_net_forward,
        why_mixing=delta_net.why_net_mixes,
        why_slow=delta_net.why_slow_rule,
    ),
    "ShortConv": Mixer(
        noun="a short convolution",
        untrained=(),
        why_not=short_conv.why_not_short_conv,
        ends=lambda conv, seq_idx: ShortConvEnds(),
        run=short_conv.run_short_conv,
        forward=short_conv.short_conv_forward,
        why_mixing=short_conv.why_conv_mixes,
    ),
}


def mixers(model: nn.Module) -> Iterator[tuple[nn.Module, Mixer]]:
    """Yield the mixers of a model whose classes we know, and their kinds."""
    for module in model.modules():
        if (kind := _kind_of(module)) is not None:
            yield module, kind


def _kind_of(module: nn.Module) -> Mixer | None:
    return next((MIXERS[kind] for kind in MIXERS if known_form(module, kind) is not None), None)


def keeps_apart(layer: nn.Module) -> bool:
    """Return True if a layer without attention keeps the documents of its rows apart."""
    return all(_why_mixing(child) is None for child in layer.children())


def check_apart(layer: nn.Module) -> None:
    """Raise ValueError if a layer without attention would mix the documents of its rows."""
    for child in layer.children():
        refuse_documents(child, _why_mixing(child))


def _why_mixing(module: nn.Module) -> str | None:
    """Return the reason if part of a layer mixes documents."""
    if (kind := _kind_of(module)) is None:
        mixes = any(isinstance(one, nn.Conv1d) for one in module.modules())
        return "it runs as transformers has it" if mixes else None
    if not fused_parts_of(module):
        return why_not_own_forward(module) or "it ran unfused when fuse was called"
    return kind.why_mixing(module)


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


def why_slow(layer: Any) -> dict[str, str]:
    """Return the reason why a layer's mixer is not a fast library's, by its name in the layer."""
    form = layer_form(layer)
    reason = has_mixer(layer) and MIXERS[form.mixer_kind].why_slow(mixer_of(layer))
    return {f"{form.mixer}.recurrence": reason} if reason else {}


def run_mixer(
    layer: Any, hidden: Tensor, mask: Tensor | None, trained: Trained, frame: Frame,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, MixerBlock]:  # fmt: skip
    """Run a block up to and with its mixer. Return the residual, the mixer's result, the gate and
    the block that takes them."""
    mixer, kind = mixer_of(layer), MIXERS[layer_form(layer).mixer_kind]
    say_left(layer, why_slow(layer))
    ends = kind.ends(mixer, options.get("seq_idx"))
    *inputs, gate, residual = BeforeMixer.apply(hidden, mask, *trained.flat(), ends, frame)
    found = kind.run(mixer, *inputs, **options).to(gate.dtype)
    return residual, found, gate, MixerBlock(frame._replace(has_entered=True), ends)
