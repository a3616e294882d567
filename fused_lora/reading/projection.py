"""Reading a linear layer, with a PEFT adapter or without: the operands it computes with now."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from fused_mlp.dropout import draw_seed
from fused_mlp.launching import DTYPES, is_capturing

from ..foreign.hooks import has_hooks
from ..foreign.originals import why_patched
from ..foreign.ownership import STAND_IN, fused_parts_of, has_own_forward, why_not_own_forward
from ..foreign.parallel import (
    APART,
    JOINED,
    is_dtensor,
    is_flattened,
    is_fsdp,
    is_fsdp_hook,
    why_sharded,
)
from ..kernels.fp8_rows import E4M3
from ..layer.buffer import PlacedWeight
from ..rerun import once
from ..step.settings import ADAPTERS, MERGED
from .codes import COMPRESSED, is_of_codes
from .four_bit import is_4bit, is_4bit_lora, stand_in_for, why_not_4bit
from .refusal import Refusal, refuse

# what decides which adapters run, and how
ADAPTERS[BaseTunerLayer] = ADAPTERS[AuxiliaryTrainingWrapper] = (
    "_active_adapter", "_disable_adapters",
)  # fmt: skip
ADAPTERS[LoraLayer] = ("scaling",)
MERGED[BaseTunerLayer] = ("merged_adapters",)

UNQUANTISED = "load the model in bf16 or in 4 bits"
BASE_IS_TRAINED = "its base weight is trained: freeze it, requires_grad_(False)"
ONLY_IN_LAYERS = "it uses DoRA: ask for layer=True, which runs it, but in no shared expert"
CAST = "cast the model to bfloat16, float16 or float32"


class Projection(NamedTuple):
    """x W' + bias + scaling (dropout(x) A' B' + lora_bias). Without an adapter A and B have
    rank 0."""

    weight: Tensor  # if it is packed, its shape, dtype and device alone
    bias: Tensor | None
    A: Tensor
    B: Tensor
    scaling: float
    # the current probability of dropping an element; None: share the mask of the projection before,
    # a part of the same layer
    dropout: float | None = 0.0
    lora_bias: Tensor | None = None  # PEFT's name for an adapter's bias
    base: nn.Module | None = None  # owner of weight and bias; None: this is a part
    # DoRA's: the norm of each row of W + scaling B A; None: that is what it is
    magnitude: Tensor | None = None
    # its weight is in 4 bits and has not been `written` (`weights/four_bit_parts.py`)
    is_packed: bool = False


def has_adapters(model: nn.Module) -> bool:
    """Return True for a model into which PEFT has put adapters of any kind."""
    return any(isinstance(module, BaseTunerLayer | PeftModel) for module in model.modules())


def why_not_base(base: nn.Module) -> str | None:
    """Return the reason if a base layer is no frozen linear layer, plain or in 4 bits."""
    if type(base) is not nn.Linear:
        return why_not_4bit(base) if is_4bit(base) else _not_linear(base)
    weight = _parameter(base, "weight")
    if (reason := why_not_plain(base, weight)) is not None:
        return f"its base weight {reason}"
    if weight.requires_grad:
        return f"its base weight: {JOINED}" if is_flattened(base) else BASE_IS_TRAINED
    return None


def why_not_alone(base: nn.Module) -> str | None:
    """Return the reason if a base layer cannot run fused outside a whole layer."""
    if is_4bit(base) and isinstance(base.weight, PlacedWeight):
        return "its weight in 4 bits is in host memory, where only whole layers fetch it"
    return why_not_base(base)


def read_projection(
    projection: nn.Module,
    own_forward: bool = True,
    why_not_base: Callable[[nn.Module], str | None] = why_not_alone,
    may_scale: bool = False,
) -> Projection:
    """Return the parts of a projection that computes what Projection says and nothing else. Raises
    a Refusal for any other.

    Called in every forward, up to seven times per layer. own_forward: whether the projection itself
    must still have its class's forward. why_not_base: checks how the base weight is stored.
    may_scale: whether it may have a magnitude.
    """
    if type(projection) is not LoraLinear and not is_4bit_lora(projection):
        refuse(_why_not_lora(projection) or why_not_base(projection))
        refuse(why_call(projection, own_forward))
        return _without_adapter(projection)
    if projection.merged:
        raise Refusal("adapters are merged into the weight: unmerge_adapter() takes them out")
    adapter = None if projection.disable_adapters else active_adapter(projection)
    # nn.Module finds a submodule only after failing to find an attribute, 3x slower
    parts = projection._modules
    lora_A: Any = parts["lora_A"]
    base: Any = parts["base_layer"]
    if adapter is None or adapter not in lora_A._modules:  # PEFT runs the base layer alone
        refuse(why_not_base(base) or why_call(base) or why_call(projection, own_forward))
        return _without_adapter(base)
    A: Any = lora_A._modules[adapter]
    B: Any = parts["lora_B"]._modules[adapter]  # type: ignore[union-attr]
    dropout: Any = parts["lora_dropout"]._modules[adapter]  # type: ignore[union-attr]
    dropped = _dropout_of(dropout)
    magnitude = None
    if projection.use_dora.get(adapter, False):
        scaler: Any = parts["lora_magnitude_vector"]._modules[adapter]  # type: ignore[union-attr]
        refuse(None if may_scale else ONLY_IN_LAYERS)
        refuse(why_call(scaler))
        if not projection.training:  # PEFT asks it, and not its dropout
            dropped = 0.0
        magnitude = _parameter(scaler, "weight")
    elif adapter in projection.lora_variant:
        variant = type(projection.lora_variant[adapter]).__name__
        raise Refusal(f"it uses a variant of LoRA ({variant}): only plain LoRA runs fused")
    refuse(why_not_base(base))
    for module in (projection, base, dropout, A, B):
        refuse(why_call(module, own_forward or module is not projection))
    scaling = projection.scaling[adapter]
    if isinstance(scaling, Tensor):
        raise Refusal(  # the host would wait for its value
            "its scaling is a tensor: hotswap_adapter works without "
            "prepare_model_for_compiled_hotswap"
        )
    lora_bias = _parameter(B, "bias")
    A, B = _parameter(A, "weight"), _parameter(B, "weight")
    weight, is_packed = _weight_of(base)
    bias, scaling = _parameter(base, "bias"), float(scaling)  # from NumPy, say
    return Projection(weight, bias, A, B, scaling, dropped, lora_bias, base, magnitude, is_packed)


def active_adapter(projection: Any) -> str:
    active = projection.active_adapters
    if len(active) != 1:
        named = ", ".join(active) or "none"
        raise Refusal(f"{len(active)} adapters are active: {named}: choose one with set_adapter")
    return active[0]


def _dropout_of(dropout: Any) -> float:
    """Return the current probability that this module drops an element. Raises a Refusal if no mask
    can replace it."""
    if type(dropout) is nn.Identity:
        return 0.0
    if type(dropout) is not nn.Dropout:
        raise Refusal(
            f"its lora_dropout is {type(dropout).__name__}, not torch.nn.Dropout, which LoraConfig "
            "makes"
        )
    if not dropout.training or dropout.p == 0.0:
        return 0.0
    if dropout.p == 1.0:
        raise Refusal("lora_dropout is 1.0, which leaves nothing of an adapter: choose less")
    if dropout.inplace:
        raise Refusal(
            "its lora_dropout is inplace, and so changes what others get: set its inplace to False"
        )
    return dropout.p


def seed_for(x: Tensor, *dropouts: float | None) -> Tensor | None:
    """Return a new seed for the masks of projections that run as one function, if any has dropout.
    A recomputed forward gets the seed of its first run."""
    if not any(dropouts):
        return None
    # A recompute draws as well, from the restored generator state: other dropout draws after ours
    # and must match. A graph restores no state, and has no other dropout.
    drawn = None if is_capturing(x) else draw_seed(x.device)
    (seed,) = once(lambda: (draw_seed(x.device) if drawn is None else drawn,), is_small=True)
    return seed


def split_projection(whole: Projection, sizes: Sequence[int]) -> list[Projection]:
    """Split one layer into the projections whose outputs, of these sizes, lie side by side in its
    own. They share its adapter's A, each with a gradient for it, and its mask."""
    weights, biases, B, lora_biases, magnitudes = (
        [None] * len(sizes) if one is None else one.split(list(sizes))
        for one in (whole.weight, whole.bias, whole.B, whole.lora_bias, whole.magnitude)
    )
    dropouts = [whole.dropout, *[None] * (len(sizes) - 1)]
    return [
        Projection(
            weight, bias, whole.A, one, whole.scaling, dropout, lora_bias, magnitude=magnitude
        )
        for weight, bias, one, dropout, lora_bias, magnitude in zip(
            weights, biases, B, dropouts, lora_biases, magnitudes, strict=True
        )
    ]


def trains_bias(read: Projection) -> bool:
    return read.lora_bias is not None or (read.bias is not None and read.bias.requires_grad)


def frozen_bias(read: Projection) -> Tensor | None:
    return None if trains_bias(read) else read.bias


def bias_of(read: Projection) -> Tensor | None:
    """Return the bias of a projection, including its adapter's."""
    if read.lora_bias is None:
        return read.bias
    scaled = read.lora_bias * read.scaling
    return scaled if read.bias is None else read.bias + scaled


def _why_not_lora(projection: Any) -> str | None:
    """Return the reason if a projection has an adapter that is not PEFT's plain LoRA."""
    if type(projection) is nn.Linear:
        return None
    if is_fsdp(type(projection)):
        return APART
    if isinstance(projection, ModulesToSaveWrapper):
        return "it is trained whole: name it in target_modules, not in modules_to_save"
    kind = type(projection)
    base = getattr(projection, "base_layer", projection)
    if base is projection:
        return None
    # PEFT has a separate class for a quantised base layer, say lora.bnb.Linear4bit
    if isinstance(projection, LoraLayer) and type(base) is not nn.Linear:
        return _not_linear(base)
    return f"its adapter is {kind.__module__}.{kind.__qualname__}: take LoraConfig's plain LoRA"


def _not_linear(base: nn.Module) -> str:
    if is_fsdp(type(base)):
        return f"its base layer: {APART}"
    to_do = f", not torch.nn.Linear: {UNQUANTISED}"
    if is_of_codes(base):
        to_do = ": ask for layer=True, fp8=True, or load the model in bf16"
    return f"its base layer is {type(base).__name__}{to_do}"


def _without_adapter(linear: nn.Module) -> Projection:
    weight, is_packed = _weight_of(linear)
    out_features, in_features = weight.shape
    dtype = weight.dtype if weight.dtype in DTYPES else torch.float32  # for codes
    # not weight.new_empty: an FP8 weight would copy its original from the host for that
    empty = partial(torch.empty, dtype=dtype, device=weight.device)
    A, B = empty(0, in_features), empty(out_features, 0)
    bias = _parameter(linear, "bias")
    return Projection(weight, bias, A, B, 0.0, base=linear, is_packed=is_packed)


def _weight_of(base: nn.Module) -> tuple[Tensor, bool]:
    """Return Projection's weight, and whether it is packed."""
    if is_4bit(base):
        return stand_in_for(base), True
    return _parameter(base, "weight"), False


def _parameter(module: nn.Module, name: str) -> Any:
    found = module._parameters.get(name, module)  # faster, as above
    return getattr(module, name) if found is module else found


def why_not_plain(module: nn.Module, weight: Any) -> str | None:
    """Return the reason if a module's weight is not a plain tensor in a dtype that our kernels
    support. One that FSDP2 shards is plain during a forward."""
    is_plain = isinstance(weight, PlacedWeight) or type(weight) in (nn.Parameter, Tensor)
    if is_dtensor(weight):
        if (reason := why_sharded(module)) is not None:
            return reason
        is_plain = True
    if not is_plain or not weight.is_floating_point():
        return f"is quantised or wrapped ({type(weight).__name__}): {UNQUANTISED}"
    if weight.dtype in DTYPES:
        return None
    if weight.dtype == E4M3:  # compressed-tensors keeps them until a model's first forward
        return f"is FP8 codes: {COMPRESSED}"
    return f"is {weight.dtype}: {CAST}"


def why_call(module: nn.Module, own_forward: bool = True, may_be_apart: bool = False) -> str | None:
    """Return the reason if we must call `module` to get its output.

    own_forward: whether it must still have its class's forward. may_be_apart: whether fully_shard
    may shard it by itself (`call_with`).
    """
    cls = type(module)
    if has_hooks(module, is_fsdp_hook if may_be_apart else None):
        if is_fsdp(cls) and not may_be_apart:
            return APART
        return "it has hooks, which a fused function would not call: remove them"
    if own_forward and not has_own_forward(module) and fused_parts_of(module) != STAND_IN:
        return why_not_own_forward(module) or "its forward has been replaced by something else"
    return why_patched(cls)
