"""The switchboard: puts fused parts into a PEFT model, module by module, and takes them out.

A fused module keeps its class, its submodules and its parameters. We only set `forward` on the
instance, so state_dict, saving, loading and merging are untouched. At each call the fused forward
checks whether it may replace the module's own, and steps aside if not (`reading/site.py`).
"""

from dataclasses import dataclass, fields

import torch
from torch import nn

from .adopt.report import (
    ASKED,
    NO_ADAPTERS,
    PARTS_SET,
    FusionReport,
    asked_for,
    check_is_module,
    explained,
    report,
)
from .adopt.setting import running_in, set_forwards
from .adopt.switches import BORDERS, SWITCHES, switches_for
from .foreign import checkpointing
from .foreign.checkpointing import layers_of
from .foreign.ownership import remove_taker, take_back
from .foreign.parallel import REGISTER, REPLICATE, between_forwards, refuse_data_parallel, reshard
from .forwards.layer_reading import layer_weights
from .reading.site import Part
from .step.checkpoint import POLICIES, Checkpoint
from .telling import warn
from .weights.borders import Border
from .weights.own_memory import unborder


@dataclass(frozen=True)
class Fusion:
    """Switches for the parts of a model to run fused. With all off it is stock PEFT.

    mlp: gate, up, SwiGLU or GeGLU and down with their adapters as one function (`fused_mlp`). The
        experts of a mixture with their routing weights, adapted or not, as another
        (`lora_experts.py`).
    attention: q, k and v with their adapters as one autograd function, o as another. Of a gated
        delta net: its in-projections as one, out_proj as another, around the library's recurrence.
    rope: the rotary embedding of q and k in one kernel. With `attention`, all of attention becomes
        one function.
    rms_norm: every RMSNorm as one kernel, also one with a gate, a layer's second together with the
        residual addition.
    cross_entropy: the loss without logits, in training with labels. Computing with `output.logits`
        is then an error. Calls with label_smoothing, z_loss or the like run transformers' loss.
    layer: a whole decoder layer as one autograd function on bordered weights (`layer/`). Where its
        MLP cannot run in it, attention still does. When that cannot either, the parts fused by mlp,
        attention, rope and rms_norm run. It moves the base weights that it runs on into buffers
        that have room for the adapters, and moves them again if they leave.
    fp8: whole layers with their base weights, and the inputs of these, in FP8 (`layer/fp8/`). This
        is less exact than the model's precision; adapters stay as exact as they are. The original
        weights lie on the host until `unfuse`, where merging and loading change them. Weights of an
        FP8 checkpoint stay in place (`weights/fp8_checkpoint.py`).
    fp8_lm_head: the fused loss with the matmuls of its lm_head in FP8 (`fp8_head.py`).
    checkpoint: "full", "offload", "selective" or no ("none") gradient checkpointing of the layers
        (see `checkpoint.py`) instead of the model's own; "" leaves the model's alone. When a
        trainer turns checkpointing on or off later, it turns this policy on or off and its options
        are ignored.
    checkpoint_gib: for "selective", the memory that the layers kept whole may hold together.
    host_gib: for "offload", the host memory that this process may pin; None: half of what is
        available at the first step, shared among the ranks of a host. Layer inputs come first.
        Attention's output waits there too if there is room for that of all layers, which saves
        time. Inputs that find no room stay on the GPU, with a warning.
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
    host_gib: float | None = None

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if part.type is bool and not isinstance(value, bool):
                raise ValueError(f"Fusion needs {part.name}=True or False, got {value!r}")
        if not isinstance(self.checkpoint, str):
            raise ValueError(
                f"Fusion needs checkpoint as one of {', '.join(POLICIES)}, got {self.checkpoint!r}"
            )
        if self.fp8 and not self.layer:
            raise ValueError("Fusion: fp8=True needs whole layers: ask for layer=True as well")
        if self.fp8_lm_head and not self.cross_entropy:
            raise ValueError(
                "Fusion: fp8_lm_head=True needs the fused loss: ask for cross_entropy=True as well"
            )


@between_forwards()
def fuse(model: nn.Module, fusion: Fusion | None = None, *, strict: bool = True) -> FusionReport:
    """Fuse the parts of `model` that `fusion` names, from now on.

    Args:
        model: a PEFT model (or any module that holds PEFT's LoRA layers), on any device. On the CPU
            it runs unfused, and says so, until it is moved to a GPU.
        fusion: the parts. Parts fused earlier stay fused. None chooses them for this model:
            whole layers if there is memory to move their weights, else their parts, with norms and
            loss. Checkpointing then stays as it is, and nothing is an error (strict=False).
        strict: make a part that fuses no module an error. Otherwise the report says why.

    Returns:
        The report: every module that now runs fused, and the reason for every other candidate. A
        module that steps aside later warns once per reason, unless you asked for it: adapters
        merged, unloaded, or several active.

    Raises:
        ValueError: `fusion` asks for nothing; with strict, a part fuses no module, as happens
            before get_peft_model; or an argument is not a model or a Fusion.
        RuntimeError: later, when nn.DataParallel copies the model. Use DistributedDataParallel.
    """
    check_is_module("fuse", model)
    reshard(model)
    if fusion is None:
        fusion, strict = _best(model), False
    if not isinstance(fusion, Fusion):
        raise ValueError(
            f"fuse needs its parts as a Fusion, got {type(fusion).__name__}: pass "
            "fused_lora.Fusion(mlp=True), for example"
        )
    policy = None
    if fusion.checkpoint or (fusion.checkpoint_gib, fusion.host_gib) != (None, None):
        policy = Checkpoint(fusion.checkpoint, fusion.checkpoint_gib, fusion.host_gib)
    asked = [part for part in (*SWITCHES, *BORDERS) if getattr(fusion, part)]
    if policy is None and not asked:
        parts = ", ".join(part.name for part in fields(fusion))
        raise ValueError(f"fuse: this Fusion asks for nothing; set at least one of {parts}")
    layers = [layer for _, layer in layers_of(model)]
    if policy is not None and not layers:
        raise ValueError(
            "fuse: checkpoint finds no layer in this model: it has none of transformers' "
            "GradientCheckpointingLayer"
        )
    wanted, kind, early = _to_run(model, asked, strict)
    set_forwards(model, wanted, kind)
    if policy is not None:
        last_runs_once = "cross_entropy" in running_in(model)
        checkpointing.install(policy, layers, last_runs_once)
        checkpointing.hold(model)
    if wanted or policy is not None:
        setattr(model, REPLICATE, refuse_data_parallel)
    earlier = asked_for(model) - (BORDERS.keys() if "layer" in asked else set())
    for module in model.modules():
        vars(module).pop(ASKED, None)
    setattr(model, ASKED, earlier | {*asked})
    if early:
        warn(f"fuse: {', '.join(early)} left out: {NO_ADAPTERS}")
    return report(model)


def _to_run(
    model: nn.Module, asked: list[str], strict: bool
) -> tuple[set[str], type[Border] | None, list[str]]:
    """Return the parts that the model has modules for, the kind of borders for its whole layers if
    one is asked for, and the parts left out only because there are no adapters yet."""
    switch = next((one for one in BORDERS if one in asked), "")
    kind = BORDERS.get(switch)
    reasons = {
        part: _why_not(model, its) for part, its in switches_for(kind).items() if part in asked
    }
    for part, reason in reasons.items():
        if reason and strict:
            to_do = "" if reason == NO_ADAPTERS else f"; leave {part} out"
            raise ValueError(f"fuse: {part}=True fuses no module: {reason}{to_do}")
    early = sorted(part for part, reason in reasons.items() if reason == NO_ADAPTERS)
    wanted = {part for part, reason in reasons.items() if reason is None}
    if kind is None or "layer" not in wanted:
        return wanted, None, early
    why_not = (
        kind.why_not(layer_weights(layer))
        for name, layer, site in switches_for(kind)["layer"].candidates(model)
        if site.why_not(model, name) is None  # else it runs in parts
    )
    reason = next(filter(None, why_not), None)
    if reason and strict:
        raise ValueError(f"fuse: {switch}=True fuses no layer: {reason}")
    return wanted, None if reason else kind, early


def _why_not(model: nn.Module, part: Part) -> str | None:
    """Return the reason if no module of a model may run a part."""
    candidates = part.candidates(model)
    reasons = [explained(model, site.why_not(model, name)) for name, _, site in candidates]
    return (reasons or [part.none_found])[0] if all(reasons) else None


def _best(model: nn.Module) -> Fusion:
    """Return all parts, with whole layers if the GPU has room for one layer's weights twice: moving
    them into buffers takes that."""
    room = all(_has_room(layer) for _, layer in list(layers_of(model))[:1])
    return Fusion(
        mlp=True, attention=True, rope=True, rms_norm=True, cross_entropy=True, layer=room
    )


def _has_room(layer: nn.Module) -> bool:
    weights = list(layer.parameters())
    if not weights or not weights[0].is_cuda:
        return True
    free_bytes, _ = torch.cuda.mem_get_info(weights[0].device)
    # 4 bits are multiplied in 16
    return free_bytes > 2 * sum(
        weight.nbytes * (4 if type(weight).__name__ == "Params4bit" else 1) for weight in weights
    )


def unfuse(model: nn.Module) -> list[str]:
    """Give every fused module of `model` its own forward back, and move bordered weights out of
    their buffers. Returns the names of the modules."""
    check_is_module("unfuse", model)
    names = []
    for name, module in model.named_modules():
        for attribute in (REGISTER, REPLICATE, PARTS_SET, ASKED):
            vars(module).pop(attribute, None)
        remove_taker(module)
        had_forward, had_policy = take_back(module), checkpointing.remove(module)
        if had_forward or had_policy:
            names.append(name)
    checkpointing.let_go(model)
    unborder(model)
    return names
