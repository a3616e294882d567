"""Base layers in 4 bits: bitsandbytes' Linear4bit, and the PEFT layer around it.

bitsandbytes keeps its tensors. We read where they lie, and never move, copy or change them, so
saving, loading, merging and `unfuse` need nothing from us.
"""

import sys
from functools import lru_cache
from math import prod
from typing import Any, TypeGuard

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from ..foreign.parallel import is_dtensor, is_in_fsdp, why_sharded
from ..kernels.packed_4bit import Nested, Packed4bit
from ..layer.buffer import PlacedWeight
from .known import inner_norm
from .site import KERNELS_WANT_A_GPU

CLASSES = ("Linear4bit", "LinearNF4", "LinearFP4")


def is_4bit(base: Any) -> bool:
    """Return True for bitsandbytes' linear layer in 4 bits."""
    cls = type(base)
    if cls is nn.Linear:  # soonest for most, as it is asked in every forward
        return False
    return cls.__name__ in CLASSES and cls.__module__.startswith("bitsandbytes.")


def is_4bit_lora(projection: Any) -> TypeGuard[LoraLinear]:
    """Return True for the class that PEFT wraps around such a layer."""
    module = sys.modules.get("peft.tuners.lora.bnb")  # importing it takes bitsandbytes
    return module is not None and type(projection) is getattr(module, "Linear4bit", None)


def why_not_4bit(base: Any) -> str | None:
    """Return the reason if such a layer's weight is not its class's packed weight. FSDP2 shows it
    as a plain parameter."""
    weight = base._parameters.get("weight")
    if is_dtensor(weight):
        if (reason := why_sharded(base)) is not None:
            return f"its 4-bit weight {reason}"
    elif type(weight).__name__ != "Params4bit" and not is_in_fsdp(base):
        return f"its 4-bit weight has become a {type(weight).__name__}: load the model anew"
    elif is_in_fsdp(base) and weight.dtype != base.quant_storage:
        raise ValueError(  # bitsandbytes would compute with them
            f"FSDP has cast packed 4-bit weights from {base.quant_storage} to {weight.dtype}: load "
            f"the model with bnb_4bit_quant_storage={weight.dtype}"
        )
    state = state_of(base)
    if state is None:
        # on a GPU machine a weight on the CPU is quantised when it moves
        is_late = weight.device.type == "cpu" and KERNELS_WANT_A_GPU
        return None if is_late else "its weight is not quantised yet: move the model to a GPU first"
    if tuple(state.shape) != (base.out_features, base.in_features):
        return f"its 4-bit weight is {list(state.shape)}, not [out, in]: quantise it again"
    if getattr(state, "packing_format_for_cpu", False):
        return "bitsandbytes has packed its weight for the CPU: move the model to a GPU"
    return None


def state_of(base: Any) -> Any:
    """Return bitsandbytes' QuantState of a layer's weight, None before it is quantised."""
    state = getattr(base.weight, "quant_state", None)
    return base.quant_state if state is None else state  # FSDP loses the first


def stand_in_for(base: Any) -> Tensor:
    """Return a tensor with the shape, device and dtype that the weight has in a product, and no
    memory."""
    state = state_of(base)
    dtype = base.compute_dtype
    if dtype is None:  # then it is that of the inputs
        dtype = base.weight.dtype if state is None else state.dtype
    return _without_memory(base.out_features, base.in_features, dtype, base.weight.device)


@lru_cache(maxsize=256)
def _without_memory(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=device).expand(outputs, inputs)


def why_not_alike(base: Any, dtype: torch.dtype) -> str:
    """Return the reason if the products of such a layer are not in the dtype of the norms."""
    computed = stand_in_for(base).dtype
    return f"bnb_4bit_compute_dtype is {computed}, its norms are {dtype}: make them alike"


def why_not_norms(model: nn.Module, name: str) -> str | None:
    """Return the reason if a module has weights in 4 bits that are not multiplied in the dtype of
    its layer's norms."""
    modules = model.get_submodule(name).modules()
    bases = [module for module in modules if is_4bit(module) and why_not_4bit(module) is None]
    while bases and name:
        name = name.rpartition(".")[0]
        if (norm := inner_norm(model.get_submodule(name))) is not None:
            dtype = norm.weight.dtype
            unlike = (base for base in bases if stand_in_for(base).dtype != dtype)
            return next((why_not_alike(one, dtype) for one in unlike), None)
    return None


def packed(base: Any) -> Packed4bit:
    """Return the packed weight of a layer, as views of bitsandbytes' tensors."""
    return packed_from(base.weight.data, state_of(base))


def packed_from(codes: Tensor, state: Any) -> Packed4bit:
    """Return what bitsandbytes' quantize_4bit returns for a weight [..., in]."""
    nested = None
    if state.nested:
        inner = state.state2
        nested = Nested(inner.code, inner.absmax, state.offset, inner.blocksize)
    return Packed4bit(
        codes,
        (prod(state.shape[:-1]), state.shape[-1]),
        state.code,
        state.absmax,
        state.blocksize,
        nested,
    )


def places_of(base: Any) -> tuple:
    """Return what changes when a layer's packed weight has moved or was quantised again."""
    state = state_of(base)
    inner = state.state2.absmax.data_ptr() if state.nested else None
    is_placed = isinstance(base.weight, PlacedWeight)
    place = base.weight.place if is_placed else base.weight.data_ptr()
    return place, state.absmax.data_ptr(), state.blocksize, inner
