"""The report: which modules of a model run fused now, and why the others do not."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..foreign.checkpointing import layers_of, policy_of
from ..foreign.ownership import fused_parts_of
from ..foreign.parallel import between_forwards
from ..forwards.layer_reading import children_in_blocks, layer_weights
from ..forwards.rms_norm import normed_layers
from ..reading.projection import BASE_IS_TRAINED, has_adapters
from ..weights.borders import Border, borders_of
from ..weights.sourced_weight import SourcedWeight
from .switches import BORDERS, SWITCHES, switches_for

# The parts that a module was set to run. Its forward no longer tells once it is replaced.
PARTS_SET = "_fused_parts"
# The parts and borders that `fuse` was asked for. The model that it was given has them.
ASKED = "_fused_asked"
NO_ADAPTERS = "the model has no adapters: call peft.get_peft_model first, then fuse"
ABLE_NOW = "it became able to run fused after fuse() was called: call it again"


@dataclass(frozen=True)
class FusionReport:
    """A report of the modules that run fused and of those left unfused.

    fused: part -> names of the modules that run it, as in `model.named_modules()`.
    left: module name -> why it stays on PEFT's or transformers' path. A projection of a fused MLP
        or attention may be left: the others then run fused one by one.
    counts: part -> how many units run fused: "2 of 8 projections".
    host_memory: under checkpoint="offload", what waited there in the last forward; "" before it.
    base: after `host_base` or `shard_base`, how many layers' weights lie where; "" without.

    As a string it has a line for each part, for the base, for host memory and for each reason.
    """

    fused: dict[str, list[str]]
    left: dict[str, str]
    counts: dict[str, str] = field(default_factory=dict, compare=False)
    host_memory: str = field(default="", compare=False)
    base: str = field(default="", compare=False)

    def __str__(self) -> str:
        fused = {part: names for part, names in self.fused.items() if names}
        lines = [
            f"{part}: {self.counts.get(part, f'{len(names)} modules')} fused"
            for part, names in fused.items()
        ]
        if self.base:
            lines.append(f"base: {self.base}")
        if self.host_memory:
            lines.append(f"host memory: {self.host_memory}")
        modules: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            modules.setdefault(reason, []).append(name)
        for reason, (first, *others) in modules.items():
            like_it = "1 other" if len(others) == 1 else f"{len(others)} others"
            and_others = f" and {like_it} like it" if others else ""
            lines.append(f"left to PEFT: {first}{and_others}: {reason}")
        return "\n".join(lines if fused else ["nothing is fused", *lines])


def check_is_module(function: str, model: Any) -> None:
    """Raise ValueError for an argument that is no model."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function} needs a model, a torch.nn.Module, got {type(model).__name__}")


@between_forwards()
def report(model: nn.Module) -> FusionReport:
    """Report which modules of `model` would run fused if it were called now.

    A module counts as left if its adapters are merged, it is on the CPU, or somebody has replaced
    its forward since. So does one that reads FSDP's weights, which are sharded between forwards,
    and one that was not able to run fused when you called `fuse`, until you call it again. Modules
    inside a layer that runs fused as a whole are not listed. A layer that runs only its
    attention, or its mixer, as a block is in both lists, with the reason why its MLP does not.
    """
    check_is_module("report", model)
    found = FusionReport({}, {})
    asked = asked_for(model)
    in_blocks = tuple(
        f"{name}.{child}."
        for name, module, site in SWITCHES["layer"].candidates(model)
        if "layer" in fused_parts_of(module) and site.why_not_now(model, name) is None
        for child in children_in_blocks(module, site.left(site.read(module)))
    )
    for part in (part for part in SWITCHES if part in asked):
        _report_part(found, model, part, in_blocks)
    for switch in asked & BORDERS.keys():
        found.left.update(_why_not_in(model, BORDERS[switch]))
    layers = {name: policy_of(layer) for name, layer in layers_of(model)}
    if any(layers.values()):
        found.fused["checkpoint"] = [name for name, policy in layers.items() if policy]
    offloads = (policy.offload for policy in {*layers.values()} if policy is not None)
    host_memory = "; ".join(filter(None, map(str, offloads)))
    return replace(found, host_memory=host_memory, base=_where_base_lies(model))


def _where_base_lies(model: nn.Module) -> str:
    """Say how many layers' weights do not lie on this GPU, and where they do."""
    layers = [layer for _, layer in normed_layers(model)]
    away = {
        weight: layer
        for layer in layers
        for weight in layer.parameters()
        if isinstance(weight, SourcedWeight)
    }
    if not away:
        return ""
    (weight, *_), gib = away, sum(weight.nbytes for weight in away) / 2**30
    count = len({*away.values()})
    return f"{count} of {len(layers)} layers {weight.source.where}, {gib:.1f} GiB"


def asked_for(model: nn.Module) -> set[str]:
    """Return the parts and borders that `fuse` was asked for in all calls so far."""
    return {
        part
        for module in model.modules()
        for attribute in (PARTS_SET, ASKED)
        for part in vars(module).get(attribute, ())
    }


def _why_not_in(model: nn.Module, kind: type[Border]) -> dict[str, str]:
    """Return why layers do not run on borders of this kind, by their names."""
    reasons = {}
    for name, layer, site in switches_for(kind)["layer"].candidates(model):
        runs = "layer" in fused_parts_of(layer)
        reason = explained(model, site.why_not(model, name)) or kind.why_not(layer_weights(layer))
        reasons[f"{name}{kind.precision}" if runs else name] = reason
    return {name: reason for name, reason in reasons.items() if reason}


def _report_part(
    found: FusionReport, model: nn.Module, part: str, in_blocks: tuple[str, ...]
) -> None:
    """Report one part, skipping modules in the blocks of layers."""
    found.fused[part] = []
    running = total = in_part = 0
    candidates = list(SWITCHES[part].candidates(model))
    if not candidates:
        found.left[part] = SWITCHES[part].none_found
    for name, module, site in candidates:
        if f"{name}.".startswith(in_blocks):
            continue
        units = site.units(module)
        total += len(units)
        reason = explained(model, site.why_not_now(model, name))
        if reason is None and part not in fused_parts_of(module):
            reason = ABLE_NOW
        if reason is not None:
            if found.left.setdefault(name, reason) != reason:  # another part's
                found.left[f"{name} as {part}"] = reason
            continue
        found.fused[part].append(name)
        left = site.left(site.read(module))
        found.left.update({f"{name}.{unit}".rstrip("."): why for unit, why in left.items()})
        in_part += "" in left  # the layer itself: one block runs
        apart = left.keys() & set(units)
        for unit in units:  # one without an adapter only runs fused together with all others
            is_adapted = not apart or hasattr(module.get_submodule(unit), "lora_A")
            running += is_adapted and unit not in apart
    found.counts[part] = f"{running} of {total} {SWITCHES[part].units}"
    if in_part:
        found.counts[part] += f" and {in_part} in part"
    if part == "layer" and found.fused[part]:
        borders = borders_of(model.get_submodule(found.fused[part][0]))
        if borders is not None:
            found.counts[part] += borders.kind.precision


def explained(model: nn.Module, reason: str | None) -> str | None:
    """Return the reason why a module does not run fused. If its base weights are trained only
    because the model has no adapters, say that instead."""
    if reason is None or BASE_IS_TRAINED not in reason:
        return reason
    return reason if has_adapters(model) else NO_ADAPTERS
