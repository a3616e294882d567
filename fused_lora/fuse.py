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
from typing import NamedTuple

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


def _why_not_mlp(mlp: nn.Module) -> str | None:
    """Why LoRA_MLP may not stand in for this MLP as it is now; None when it may."""
    forward = vars(mlp).get("forward")
    if forward is not None and _fused_part(mlp) is None:
        return "its forward has been replaced by something else"
    cls = type(mlp)
    if f"{cls.__module__}.{cls.__qualname__}" not in SWIGLU_MLPS:
        return f"{cls.__name__} is not an MLP class that is known to compute SwiGLU"
    if not _is_silu(mlp.act_fn):
        return f"its activation is {type(mlp.act_fn).__name__}, not SiLU"
    for name in PROJECTIONS:
        reason = _why_not_projection(getattr(mlp, name))
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _is_silu(activation) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _why_not_projection(projection: nn.Module) -> str | None:
    """Why x W' + s (x A') B' is not all that this projection computes; None when it is."""
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
    if adapter not in projection.lora_A:
        return f"it has no adapter named {adapter}"
    dropout = projection.lora_dropout[adapter]
    if not isinstance(dropout, nn.Identity) and dropout.p > 0:
        return f"lora_dropout is {dropout.p}"
    if projection.use_dora.get(adapter, False):
        return "it uses DoRA"
    if adapter in projection.lora_variant:
        return f"it uses a variant of LoRA ({type(projection.lora_variant[adapter]).__name__})"
    if projection.lora_B[adapter].bias is not None:
        return "its adapter has a bias (lora_bias)"
    base = projection.base_layer
    if type(base) is not nn.Linear:
        return f"its base layer is {type(base).__name__}, not torch.nn.Linear"
    if type(base.weight) not in (nn.Parameter, Tensor) or not base.weight.is_floating_point():
        return f"its base weight is quantised or wrapped ({type(base.weight).__name__})"
    if base.bias is not None:
        return "its base layer has a bias"
    if base.weight.requires_grad:
        return "its base weight is trainable"
    for module in (projection, base, projection.lora_A[adapter], projection.lora_B[adapter]):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return "it has hooks, which a fused function would not call"
        if "forward" in vars(module):
            return "its forward has been replaced by something else"
    return None


def _fused_mlp_forward(mlp: nn.Module, x: Tensor) -> Tensor:
    """The forward that `fuse` sets on an MLP."""
    if _why_not_mlp(mlp) is not None:
        return type(mlp).forward(mlp, x)
    projections = [getattr(mlp, name) for name in PROJECTIONS]
    adapters, scalings = [], []
    for projection in projections:
        adapter = projection.active_adapters[0]
        adapters += [projection.lora_A[adapter].weight, projection.lora_B[adapter].weight]
        scalings.append(projection.scaling[adapter])
    weights = [projection.base_layer.weight for projection in projections]
    return LoRA_MLP.apply(x, *adapters, FrozenMLP(*weights, *scalings))


class _Part(NamedTuple):
    is_candidate: Callable[[nn.Module], bool]
    why_not: Callable[[nn.Module], str | None]
    forward: Callable[..., Tensor]
    none_found: str


PARTS = {
    "mlp": _Part(
        _is_mlp,
        _why_not_mlp,
        _fused_mlp_forward,
        "it has no MLP with gate_proj, up_proj and down_proj",
    ),
}
