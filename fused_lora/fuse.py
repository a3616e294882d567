"""The switchboard: puts fused parts into a PEFT model, module by module, and takes them out again.

A fused module keeps its class, its submodules and its parameters; only `forward` is set on the
instance, so state_dict, saving, loading and merging are untouched. The fused forward asks at each
call whether it may stand in for PEFT's own, and steps aside while it may not: disabled, merged or
switched adapters behave as they do without it. This file alone knows PEFT's and transformers'
classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from fused_mlp import FrozenMLP, LoRA_MLP

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

# The classes whose forward is down_proj(act_fn(gate_proj(x)) * up_proj(x)) and nothing else.
SWIGLU_MLPS = {
    f"transformers.models.{family}.modeling_{family}.{name}"
    for family, name in (
        ("llama", "LlamaMLP"),
        ("mistral", "MistralMLP"),
        ("qwen2", "Qwen2MLP"),
        ("qwen3", "Qwen3MLP"),
    )
}


@dataclass(frozen=True)
class Fusion:
    """Which parts of a model to run fused. All off is stock PEFT.

    mlp: gate, up, SwiGLU and down with their adapters as one autograd function (`fused_mlp`).
    """

    mlp: bool = False


@dataclass(frozen=True)
class FusionReport:
    """What runs fused, and what was left on PEFT's own path.

    fused: part -> names of the modules that run it, as in `model.named_modules()`.
    left: module name -> why it stays on PEFT's own path.
    """

    fused: dict[str, list[str]]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{part}: {len(names)} modules fused" for part, names in self.fused.items()]
        lines += [f"left to PEFT: {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines) or "nothing is fused"


def fuse(model: nn.Module, fusion: Fusion) -> FusionReport:
    """Run the parts that `fusion` names fused, in `model`, from now on.

    Args:
        model: a PEFT model (or any module that holds PEFT's LoRA layers), on any device.
        fusion: the parts. Parts fused earlier stay fused.

    Returns:
        The report: every module that now runs fused, and for every other candidate the reason.

    Raises:
        ValueError: `fusion` asks for nothing, or a part that it asks for fuses no module.
    """
    wanted = [part.name for part in fields(fusion) if getattr(fusion, part.name)]
    if not wanted:
        parts = ", ".join(part.name for part in fields(fusion))
        raise ValueError(f"fuse: {fusion} asks for nothing; set at least one of {parts} to True")
    for part in wanted:
        candidates = list(_candidates(model, part))
        reasons = {name: PARTS[part].why_not(module) for name, module in candidates}
        if all(reasons.values()):
            reason = next(iter(reasons.values()), PARTS[part].none_found)
            raise ValueError(f"fuse: {part}=True fuses no module of this model: {reason}")
        for name, module in candidates:
            if reasons[name] is None:
                module.forward = partial(PARTS[part].forward, module)
    return report(model)


def unfuse(model: nn.Module) -> list[str]:
    """Give every fused module of `model` its own forward back; returns their names."""
    names = []
    for name, module in model.named_modules():
        if _fused_part(module) is not None:
            del module.forward
            names.append(name)
    return names


def report(model: nn.Module) -> FusionReport:
    """What of `model` would run fused if it were called now (disabled adapters count as left)."""
    fused: dict[str, list[str]] = {}
    left: dict[str, str] = {}
    active = {part for module in model.modules() if (part := _fused_part(module)) is not None}
    for part in sorted(active):
        fused[part] = []
        for name, module in _candidates(model, part):
            reason = PARTS[part].why_not(module)
            if reason is None and _fused_part(module) is None:
                reason = "not asked for: it became able to run fused after fuse() was called"
            if reason is None:
                fused[part].append(name)
            else:
                left[name] = reason
    return FusionReport(fused, left)


def _candidates(model: nn.Module, part: str):
    return ((name, m) for name, m in model.named_modules() if PARTS[part].is_candidate(m))


def _fused_part(module: nn.Module) -> str | None:
    """The part that `module` runs fused, told by the forward on its instance."""
    forward = vars(module).get("forward")
    for name, part in PARTS.items():
        if isinstance(forward, partial) and forward.func is part.forward:
            return name
    return None


# --- MLP ------------------------------------------------------------------------------------------


def _is_mlp(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)


def _read_mlp(mlp: nn.Module) -> tuple | str:
    """What LoRA_MLP takes after x to stand in for this MLP as it is now, or why it may not."""
    forward = vars(mlp).get("forward")
    if forward is not None and _fused_part(mlp) is None:
        return "its forward has been replaced by something else"
    cls = type(mlp)
    if f"{cls.__module__}.{cls.__qualname__}" not in SWIGLU_MLPS:
        return f"{cls.__name__} is not an MLP class that is known to compute SwiGLU"
    activation: Any = mlp.act_fn
    if not _is_silu(activation):
        return f"its activation is {type(activation).__name__}, not SiLU"
    reason = _why_call(activation)
    if reason is not None:
        return f"act_fn: {reason}"
    projections = []
    for name in PROJECTIONS:
        projection = _read_projection(getattr(mlp, name))
        if isinstance(projection, str):
            return f"{name}: {projection}"
        projections.append(projection)
    gate, up, down = projections
    frozen = FrozenMLP(gate.weight, up.weight, down.weight, gate.scaling, up.scaling, down.scaling)
    return gate.A, gate.B, up.A, up.B, down.A, down.B, frozen


def _is_silu(activation) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


class _Projection(NamedTuple):
    """x W' + scaling (x A') B'"""

    weight: Tensor
    A: Tensor
    B: Tensor
    scaling: float


def _read_projection(projection: nn.Module) -> _Projection | str:
    """The parts of a projection that computes x W' + s (x A') B' and nothing else, or why not.

    Called at every forward, three times an MLP: each module is looked up once, since the lookups of
    nn.Module are what this takes its time for.
    """
    if type(projection) is not LoraLinear:
        kind = type(projection)
        return f"no LoRA adapter of PEFT's plain kind ({kind.__module__}.{kind.__qualname__})"
    if projection.disable_adapters:
        return "adapters are disabled"
    if projection.merged:
        return "adapters are merged into the weight"
    active = projection.active_adapters
    if len(active) != 1:
        return f"{len(active)} adapters are active: {', '.join(active) or 'none'}"
    adapter = active[0]
    lora_A = projection.lora_A
    if adapter not in lora_A:
        return f"it has no adapter named {adapter}"
    dropout: Any = projection.lora_dropout[adapter]
    if not isinstance(dropout, nn.Identity) and dropout.p > 0:
        return f"lora_dropout is {dropout.p}"
    if projection.use_dora.get(adapter, False):
        return "it uses DoRA"
    if adapter in projection.lora_variant:
        return f"it uses a variant of LoRA ({type(projection.lora_variant[adapter]).__name__})"
    A, B, base = lora_A[adapter], projection.lora_B[adapter], projection.base_layer
    if B.bias is not None:
        return "its adapter has a bias (lora_bias)"
    if type(base) is not nn.Linear:
        return f"its base layer is {type(base).__name__}, not torch.nn.Linear"
    if base.bias is not None:
        return "its base layer has a bias"
    weight = base.weight
    if type(weight) not in (nn.Parameter, Tensor) or not weight.is_floating_point():
        return f"its base weight is quantised or wrapped ({type(weight).__name__})"
    if weight.requires_grad:
        return "its base weight is trainable"
    for module in (projection, base, dropout, A, B):
        reason = _why_call(module)
        if reason is not None:
            return reason
    return _Projection(weight, A.weight, B.weight, projection.scaling[adapter])


def _why_call(module: nn.Module) -> str | None:
    """Why what `module` computes may not be computed without calling it."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return "it has hooks, which a fused function would not call"
    if "forward" in vars(module):
        return "its forward has been replaced by something else"
    return None


def _fused_mlp_forward(mlp: nn.Module, x: Tensor) -> Tensor:
    """The forward that `fuse` sets on an MLP."""
    operands = _read_mlp(mlp)
    if isinstance(operands, str):
        return type(mlp).forward(mlp, x)
    return LoRA_MLP.apply(x, *operands)


class _Part(NamedTuple):
    """How one part is found, read and run.

    is_candidate: whether the part may concern a module.
    read: the operands of its fused function, or the reason for leaving the module to PEFT.
    forward: what is set on the module. none_found: why a model may have no candidate.
    """

    is_candidate: Callable[[nn.Module], bool]
    read: Callable[[nn.Module], tuple | str]
    forward: Callable[..., Tensor]
    none_found: str

    def why_not(self, module: nn.Module) -> str | None:
        operands = self.read(module)
        return operands if isinstance(operands, str) else None


PARTS = {
    "mlp": _Part(
        _is_mlp,
        _read_mlp,
        _fused_mlp_forward,
        "it has no MLP with gate_proj, up_proj and down_proj",
    ),
}
