"""Setting of forwards: each module's once, for all of the parts that it runs."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from .aside import keep_reported, share_told
from .documents import DECODER, decoder_forward, decoders
from .foreign.forwards import fused_parts_of, why_not_own_forward
from .fp8.checkpoint import drop_idle_hook
from .fp8.weight import keep_from_ddp
from .layer import BorderedForward, borders_of, give_borders, why_not_layer
from .report import PARTS_SET
from .site import FusedForward, Site
from .switches import SWITCHES


def running_in(model: nn.Module) -> set[str]:
    """Return the parts that modules of a model run fused."""
    return {part for module in model.modules() for part in fused_parts_of(module)}


def why_not_part(part: str, site: Site, module: nn.Module, fp8: bool) -> str | None:
    """Return the reason if a module may not run a part that is asked for, of layers in FP8."""
    return why_not_layer(module, fp8) if part == "layer" else site.why_not(module)


def set_forwards(model: nn.Module, wanted: set[str], fp8: bool) -> None:
    """Let the modules of a model that may run the wanted parts run them fused from now on, beside
    the parts that they ran before. fp8: its whole layers in FP8."""
    sites = list(_sites_by_module(model, wanted, fp8))
    for module, parts, site in sites:
        owner = FusedForward(site.forward, module, parts)
        if "layer" in parts:
            owner = BorderedForward(site.forward, module, parts, borders_of(module), fp8)
        module.forward = owner.forward
        setattr(module, PARTS_SET, parts)
    running = running_in(model)
    for _, decoder in decoders(model):
        if running & {"attention", "layer"} and why_not_own_forward(decoder) is None:
            decoder.forward = FusedForward(decoder_forward, decoder, DECODER).forward
    for part in running & SWITCHES.keys():
        for _, module, site in SWITCHES[part].candidates(model):
            if site.why_not(module) is None and (left := site.left(site.read(module))):
                keep_reported(module, left)
    drop_idle_hook(model)
    give_borders([(n, m) for n, m in model.named_modules() if "layer" in fused_parts_of(m)])
    share_told(model)
    keep_from_ddp(model)


def _sites_by_module(
    model: nn.Module, wanted: set[str], fp8: bool
) -> Iterator[tuple[Any, frozenset[str], Site]]:
    """Yield the modules that run parts fused, which those are, and the site whose forward to set.
    Of several it is one that gives way to none of the others: these have one forward."""
    found: dict[nn.Module, dict[str, Site]] = {}
    for part, kind in SWITCHES.items():
        for site in kind.sites:
            for _, module in site.candidates(model):
                is_wanted = part in wanted and why_not_part(part, site, module, fp8) is None
                if is_wanted or part in fused_parts_of(module):
                    found.setdefault(module, {})[part] = site
    for module, sites in found.items():
        (site, *_) = (site for site in sites.values() if site.gives_way_to not in sites)
        yield module, frozenset(sites), site
