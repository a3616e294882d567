"""Setting forwards: one per module, for all the parts that it runs."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..causal_lm.documents import DOCUMENTS, decoder_forward, decoders
from ..foreign.ownership import (
    HeadTaker,
    fused_parts_of,
    has_own_forward,
    owner_of,
    remove_taker,
    why_not_own_forward,
)
from ..foreign.parallel import let_shard
from ..forwards import attention
from ..forwards.layer import give_borders
from ..forwards.mixer_layer import mixers
from ..reading.aside import reasons_of
from ..reading.site import FusedForward, Site
from ..weights.borders import Border, LayerBorders, borders_of
from ..weights.default_border import DefaultBorder
from ..weights.four_bit_parts import memories_of
from ..weights.fp8_checkpoint import drop_idle_hook
from ..weights.fp8_weight import keep_codes_from_ddp
from ..weights.own_memory import leave_buffers
from .report import PARTS_SET
from .switches import SWITCHES, switches_for

IN_LAYERS = {"mlp", "attention", "rope", "rms_norm", "layer"}


def running_in(model: nn.Module) -> set[str]:
    """Return the parts that modules of a model run fused."""
    return {part for module in model.modules() for part in fused_parts_of(module)}


def set_forwards(model: nn.Module, wanted: set[str], kind: type[Border] | None) -> None:
    """Make the modules of a model run the wanted parts fused where they can, beside the parts that
    they already ran. kind: of borders for whole layers; None: keep theirs."""
    sites, memories = list(_sites_by_module(model, wanted, kind)), memories_of(model)
    for module, parts, site in sites:
        fused, borders = FusedForward(site.forward, module, parts), borders_of(module)
        if "layer" in parts and (borders is None or kind not in (None, borders.kind)):
            borders = LayerBorders(kind or DefaultBorder)
        fused.borders = borders
        module.forward = fused.forward
        setattr(module, PARTS_SET, parts)
    running = running_in(model)
    mixing = list(mixers(model)) if running else []
    for mixer, its in mixing:
        if has_own_forward(mixer):
            mixer.forward = FusedForward(its.forward, mixer, DOCUMENTS).forward
    for _, decoder in decoders(model):
        if (running & IN_LAYERS or mixing) and why_not_own_forward(decoder) is None:
            decoder.forward = FusedForward(decoder_forward, decoder, DOCUMENTS).forward
    for part in running & SWITCHES.keys():
        for name, module, site in SWITCHES[part].candidates(model):
            owner = owner_of(module)
            if owner is not None and site.why_not(model, name) is None:  # not to be said again
                owner.reported.update(reasons_of(site.left(site.read(module))))
    whole = [(n, m) for n, m in model.named_modules() if "layer" in fused_parts_of(m)]
    give_borders(whole)
    as_one = [(n, m) for n, m in model.named_modules() if attention.runs_as_one(m)]
    alone = []
    for name, module in as_one:
        if any(_is_within(name, layer) for layer, _ in whole):
            owner_of(module).borders = None  # type: ignore[union-attr]
        else:
            alone.append((name, module))
    attention.give_borders_alone([module for _, module in alone])
    outer = [name for name, _ in (*whole, *alone)]
    for name, module in model.named_modules():
        if any(_is_within(one, name) or _is_within(name, one) for one in outer):
            let_shard(module, leave_buffers)
    owners = [*filter(None, map(owner_of, model.modules()))]
    for owner in owners:
        owner.told, owner.memories = owners[0].told, memories
    remove_taker(model)
    if names := [n for n, one in model.named_modules() if "cross_entropy" in fused_parts_of(one)]:
        model.register_forward_pre_hook(HeadTaker(names))
    drop_idle_hook(model)
    keep_codes_from_ddp(model)


def _is_within(name: str, outer: str) -> bool:
    """Return True for the name of a module within another, or of that itself."""
    return not outer or f"{name}.".startswith(f"{outer}.")


def _sites_by_module(
    model: nn.Module, wanted: set[str], asked: type[Border] | None
) -> Iterator[tuple[Any, frozenset[str], Site]]:
    """Yield each module that runs parts fused, its parts, and the site whose forward to set. Among
    several sites it is one that gives way to none of the others, which share one forward."""
    found: dict[nn.Module, dict[str, Site]] = {}
    for part, its in switches_for(asked).items():
        for site in its.sites:
            for name, module in site.candidates(model):
                is_wanted = part in wanted and site.why_not(model, name) is None
                if is_wanted or part in fused_parts_of(module):
                    found.setdefault(module, {})[part] = site
    for module, sites in found.items():
        (site, *_) = (site for site in sites.values() if site.gives_way_to not in sites)
        yield module, frozenset(sites), site
