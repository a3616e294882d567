"""The switchboard: puts fused parts into a PEFT model, module by module, and takes them out again.

A fused module keeps its class, its submodules and its parameters; only `forward` is set on the
instance, so state_dict, saving, loading and merging are untouched. The fused forward asks at each
call whether it may stand in for the module's own, and steps aside while it may not (`site.py`).
"""

import warnings
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field, fields
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from .adopt.borders import unborder
from .adopt.documents import DECODER, decoder_forward, decoders
from .adopt.foreign import checkpointing
from .adopt.foreign.checkpointing import layers_of
from .adopt.fp8_checkpoint import drop_idle_hook
from .adopt.fp8_weight import keep_from_ddp
from .adopt.layer import BorderedForward, borders_of, give_borders, why_not_fp8, why_not_layer
from .adopt.projection import BASE_IS_TRAINED, has_adapters
from .adopt.site import (
    HOOKED,
    FusedForward,
    Site,
    fused_parts_of,
    keep_reported,
    share_told,
    why_not_here,
    why_not_own_forward,
)
from .adopt.switches import SWITCHES
from .step.checkpoint import POLICIES, Checkpoint

# What nn.DataParallel calls on every module of a model.
REPLICATE = "_replicate_for_data_parallel"
# The parts that a module was set to run, which its forward no longer tells once it is replaced.
PARTS_SET = "_fused_parts"
# The parts that a model was to run before it had adapters, and what is said of it.
ASKED_EARLY = "_fused_asked_early"
NO_ADAPTERS = "the model has no adapters: call peft.get_peft_model first, then fuse"
TOO_EARLY = "fuse was called before the model had adapters: call it again"


@dataclass(frozen=True)
class Fusion:
    """Switches for the parts of a model to run fused. All off is stock PEFT.

    mlp: gate, up, SwiGLU or GeGLU and down with their adapters as one function (`fused_mlp`).
    attention: q, k and v with their adapters as one autograd function, o as another.
    rope: the rotary embedding of q and k in one kernel; with attention, all of it is one function.
    rms_norm: every RMSNorm as one kernel; a layer's second with the residual's addition before it.
    cross_entropy: the loss without logits, in training with labels (to compute with `output.logits`
        is an error). Calls with label_smoothing, z_loss or the like run transformers' own.
    layer: all of a decoder layer as one autograd function on bordered weights (`decoder_layer.py`):
        what mlp, attention, rope and rms_norm fuse in it runs when it itself may not. It moves the
        model's base weights into buffers that have room for the adapters, and again whenever they
        lie elsewhere.
    fp8: whole layers with their base weights, and what these multiply, in FP8 (`fp8.py`): less
        exact, another precision than the model's. Adapters stay as exact as they are. The original
        weights lie on the host until `unfuse`; what is merged or loaded changes them. Those of a
        checkpoint in FP8 stay where they are (`fp8_checkpoint.py`).
    fp8_lm_head: the fused loss with the products of its lm_head in FP8 (`fp8_head.py`).
    checkpoint: "full", "offload", "selective" or no ("none") gradient checkpointing of the layers
        (see `checkpoint.py`) in the place of the model's own; "" leaves that as it is. Where the
        model's is switched on or off later, as a trainer does, that policy is, not the options.
    checkpoint_gib: for "selective", what the layers that are kept whole may hold together.
    """

    mlp: bool = False
    attention: bool = False
    rope: bool = False
    rms_norm: bool = False
    cross_entropy: bool = False
    layer: bool = False
    fp8: bool = False
    fp8_lm_head: bool = False
    checkpoint: str = ""
    checkpoint_gib: float | None = None
    bordered: InitVar[bool] = False  # what there was once

    def __post_init__(self, bordered: bool) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if part.type is bool and not isinstance(value, bool):
                raise ValueError(f"Fusion wants {part.name}=True or False, got {value!r}")
        if not isinstance(self.checkpoint, str):
            raise ValueError(
                f"Fusion wants checkpoint as one of {', '.join(POLICIES)}, got {self.checkpoint!r}"
            )
        if bordered:
            raise ValueError("Fusion: bordered=True is no longer there: ask for layer=True instead")
        if self.fp8 and not self.layer:
            raise ValueError("Fusion: fp8=True is of whole layers: ask for layer=True, too")
        if self.fp8_lm_head and not self.cross_entropy:
            raise ValueError(
                "Fusion: fp8_lm_head=True is of the fused loss: ask for cross_entropy=True, too"
            )


@dataclass(frozen=True)
class FusionReport:
    """A report of what runs fused and what was left on its own path.

    fused: part -> names of the modules that run it, as in `model.named_modules()`.
    left: module name -> why it stays on PEFT's or transformers' own path. Of an MLP or an attention
        that is fused a projection may be left: the others then run fused each by itself.
    counts: part -> what of it runs fused, of how many: "2 of 8 projections".

    As a string it has a line for each part and for each reason.
    """

    fused: dict[str, list[str]]
    left: dict[str, str]
    counts: dict[str, str] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        fused = {part: names for part, names in self.fused.items() if names}
        lines = [
            f"{part}: {self.counts.get(part, f'{len(names)} modules')} fused"
            for part, names in fused.items()
        ]
        modules: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            modules.setdefault(reason, []).append(name)
        for reason, (first, *others) in modules.items():
            and_others = f" and {len(others)} others like it" if others else ""
            lines.append(f"left to PEFT: {first}{and_others}: {reason}")
        return "\n".join(lines if fused else ["nothing is fused", *lines])


def fuse(model: nn.Module, fusion: Fusion | None = None, *, strict: bool = True) -> FusionReport:
    """Run the parts that `fusion` names fused, in `model`, from now on.

    Args:
        model: a PEFT model (or any module that holds PEFT's LoRA layers), on any device. On the CPU
            it runs as it did, and says so, until it is moved to a GPU.
        fusion: the parts. Parts fused earlier stay fused. None: whatever is right for this model,
            whole layers where there is memory to move their weights, else their parts, with norms
            and loss; checkpointing stays as it is, and nothing is an error (strict=False).
        strict: a part that fuses no module is an error. If not, the report says why.

    Returns:
        The report: every module that now runs fused, and for every other candidate the reason. A
        module that steps aside later warns, once for each reason, unless the reason is a wish:
        adapters disabled, merged or switched.

    Raises:
        ValueError: `fusion` asks for nothing, or (where strict) for a part that fuses no module, as
            it does before get_peft_model; or an argument is no model or no Fusion.
        RuntimeError: later, when nn.DataParallel copies the model; DistributedDataParallel may.
    """
    _check_model("fuse", model)
    if fusion is None:
        fusion, strict = _best(model), False
    if not isinstance(fusion, Fusion):
        raise ValueError(
            f"fuse wants its parts as a Fusion, got {type(fusion).__name__}: give "
            "fused_lora.Fusion(mlp=True) or the like"
        )
    wanted = [part for part in SWITCHES if getattr(fusion, part)]
    policy = None
    if fusion.checkpoint or fusion.checkpoint_gib is not None:
        policy = Checkpoint(fusion.checkpoint, fusion.checkpoint_gib)
    if not wanted and policy is None:
        parts = ", ".join(part.name for part in fields(fusion))
        raise ValueError(f"fuse: {fusion} asks for nothing; set at least one of {parts}")
    layers = [layer for _, layer in layers_of(model)]
    if policy is not None and not layers:
        raise ValueError(
            "fuse: checkpoint concerns no module of this model: it has no layers of transformers' "
            "GradientCheckpointingLayer"
        )
    refused: dict[str, str] = {}  # by part, or module
    early: set[str] = set()
    for part in list(wanted):
        reasons = {
            name: _explained(model, _why_not(part, site, module, fusion.fp8))
            for name, module, site in _candidates(model, part)
        }
        if not all(reasons.values()):
            continue
        reason = next(iter(reasons.values()), SWITCHES[part].none_found)
        if strict:
            to_do = "" if reason == NO_ADAPTERS else f"; leave {part} out"
            raise ValueError(f"fuse: {part}=True fuses no module of this model: {reason}{to_do}")
        if reason == NO_ADAPTERS:
            early.add(part)
        wanted.remove(part)
        refused |= {f"{name} as {part}": why for name, why in reasons.items() if why}
        if not reasons:
            refused[part] = SWITCHES[part].none_found
    fp8 = fusion.fp8 and "layer" in wanted
    if fp8:
        reasons = {name: why_not_fp8(layer) for name, layer, _ in _candidates(model, "layer")}
        if reason := next(filter(None, reasons.values()), None):
            if strict:
                raise ValueError(f"fuse: fp8=True fuses no layer of this model: {reason}")
            refused |= {f"{name} in FP8": why for name, why in reasons.items() if why}
            fp8 = False
    running = {part for module in model.modules() for part in fused_parts_of(module)}.union(wanted)
    # all that run fused, so that where a module runs several parts the last one's forward is set
    for part in SWITCHES:
        for _, module, site in list(_candidates(model, part, listed_only=False)):
            runs = fused_parts_of(module)
            if part in runs or (part in wanted and _why_not(part, site, module, fp8) is None):
                runs |= {part}
                owner = FusedForward(site.forward, module, runs)
                if "layer" in runs:
                    owner = BorderedForward(site.forward, module, runs, borders_of(module), fp8)
                module.forward = owner.forward
                setattr(module, PARTS_SET, runs)
    for _, decoder in decoders(model):
        if running & {"attention", "layer"} and why_not_own_forward(decoder) is None:
            decoder.forward = FusedForward(decoder_forward, decoder, DECODER).forward
    for part in running & SWITCHES.keys():
        for _, module, site in _candidates(model, part):
            if left := site.left(module):
                keep_reported(module, left)
    drop_idle_hook(model)
    give_borders([(n, m) for n, m in model.named_modules() if "layer" in fused_parts_of(m)])
    share_told(model)
    keep_from_ddp(model)
    if policy is not None:
        checkpointing.install(policy, layers, last_runs_once="cross_entropy" in running)
        checkpointing.hold(model)
    if wanted or policy is not None:
        setattr(model, REPLICATE, _refuse_data_parallel)
    for module in model.modules():
        vars(module).pop(ASKED_EARLY, None)
    found = report(model)
    if early:
        setattr(model, ASKED_EARLY, frozenset(early))
        warnings.warn(f"fuse: {', '.join(sorted(early))} left out: {NO_ADAPTERS}", stacklevel=2)
    return FusionReport(found.fused, found.left | refused, found.counts)


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function} wants a model, a torch.nn.Module, got {type(model).__name__}")


def _explained(model: nn.Module, reason: str | None) -> str | None:
    """A reason why a module does not run fused, or that its model has no adapters if this is why
    its base weights are trained."""
    if reason is None or BASE_IS_TRAINED not in reason:
        return reason
    return reason if has_adapters(model) else NO_ADAPTERS


def _best(model: nn.Module) -> Fusion:
    """All parts, and whole layers where the GPU has room for one layer's weights twice, which is
    what it takes to move them into buffers."""
    room = all(_has_room(layer) for _, layer in list(layers_of(model))[:1])
    return Fusion(
        mlp=True, attention=True, rope=True, rms_norm=True, cross_entropy=True, layer=room
    )


def _has_room(layer: nn.Module) -> bool:
    weights = list(layer.parameters())
    if not weights or not weights[0].is_cuda:
        return True
    free_bytes, _ = torch.cuda.mem_get_info(weights[0].device)
    return free_bytes > 2 * sum(weight.nbytes for weight in weights)


def unfuse(model: nn.Module) -> list[str]:
    """Give every fused module of `model` its own forward back, and bordered weights memory of
    their own; returns the names of the modules."""
    _check_model("unfuse", model)
    names = []
    for name, module in model.named_modules():
        for attribute in (REPLICATE, PARTS_SET, ASKED_EARLY):
            if attribute in vars(module):
                delattr(module, attribute)
        if fused_parts_of(module):
            del module.forward
            names.append(name)
        elif fused_parts_of(module, HOOKED):
            setattr(module, HOOKED, MethodType(type(module).forward, module))
            names.append(name)
        if checkpointing.remove(module):
            names.append(name)
    checkpointing.let_go(model)
    unborder(model)
    return list(dict.fromkeys(names))


def _refuse_data_parallel() -> NoReturn:
    """Its replicas would share the original's forwards, and with them its parameters."""
    raise RuntimeError(
        "nn.DataParallel copies the model for every GPU, which a fused one does not survive: start "
        "one process a GPU with torchrun, let it see one GPU (CUDA_VISIBLE_DEVICES), or unfuse it"
    )


def report(model: nn.Module) -> FusionReport:
    """Report what of `model` would run fused if it were called now: disabled adapters count as
    left, and so does what is on the CPU, or whose forward somebody has replaced since.
    What is within a layer that runs fused as a whole is part of that and not listed by itself.
    Between two forwards FSDP's weights are sharded, and what reads them counts as left, too.
    What was asked for before the model had adapters counts as left until `fuse` is called again.
    """
    _check_model("report", model)
    fused: dict[str, list[str]] = {}
    left: dict[str, str] = {}
    counts: dict[str, str] = {}
    active, early = (
        {part for module in model.modules() for part in vars(module).get(attribute, ())}
        for attribute in (PARTS_SET, ASKED_EARLY)
    )
    whole = tuple(
        f"{name}."
        for name, module, site in _candidates(model, "layer")
        if "layer" in fused_parts_of(module) and _why_not_now(site, module) is None
    )
    for part in (part for part in SWITCHES if part in active | early):
        fused[part] = []
        run = found = 0
        for name, module, site in _candidates(model, part):
            if name.startswith(whole):
                continue
            found += len(site.units(module))
            reason = _explained(model, _why_not_now(site, module))
            if reason is None and part not in fused_parts_of(module):
                reason = "not asked for: it became able to run fused after fuse() was called"
                reason = TOO_EARLY if part in early else reason
            if reason is None:
                fused[part].append(name)
                reasons = site.left(module)
                left |= {f"{name}.{unit}": why for unit, why in reasons.items()}
                run += sum(_runs(module, unit, reasons) for unit in site.units(module))
            else:
                left[name] = reason
        counts[part] = f"{run} of {found} {SWITCHES[part].units}"
        if part == "layer" and fused[part] and _is_fp8(model.get_submodule(fused[part][0])):
            counts[part] += " in FP8"
    layers = {name: checkpointing.policy_of(layer) for name, layer in layers_of(model)}
    if any(layers.values()):
        fused["checkpoint"] = [name for name, policy in layers.items() if policy]
    return FusionReport(fused, left, counts)


def _is_fp8(layer: nn.Module) -> bool:
    borders = borders_of(layer)
    return borders is not None and borders.fp8


def _runs(module: nn.Module, unit: str, left: dict[str, str]) -> bool:
    """Return True if a unit of a module runs fused, of which these do not: one without an adapter
    only together with all others."""
    return not left or (unit not in left and hasattr(module.get_submodule(unit), "lora_A"))


def _why_not(part: str, site: Site, module: nn.Module, fp8: bool) -> str | None:
    """Return the reason if a module may not run a part that is asked for, of layers in FP8."""
    return why_not_layer(module, fp8) if part == "layer" else site.why_not(module)


def _why_not_now(site: Site, module: nn.Module) -> str | None:
    return site.why_not(module) or why_not_here(module)


def _candidates(
    model: nn.Module, part: str, listed_only: bool = True
) -> Iterator[tuple[str, Any, Site]]:
    for site in SWITCHES[part].sites:
        if site.is_listed or not listed_only:
            for name, module in site.candidates(model):
                yield name, module, site
