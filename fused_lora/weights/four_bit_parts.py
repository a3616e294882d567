"""Weights in 4 bits for the functions of parts, which multiply plain ones.

Before a function's forward one launch writes its weights into memory that all modules of the model
with such weights take in turns (`layer/scratch.py`). Its backward has them written again if others
have used the memory since. A recomputed forward and the backward after it share one launch. The two
weights of experts take turns in one memory, so each is written right before its matmul.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fused_mlp.utils import compute_dtype

from ..foreign.ownership import HOOKED, owner_of
from ..layer.scratch import Scratch, ScratchBuffer, Scratches
from ..reading.four_bit import packed, places_of
from ..reading.projection import Projection
from .expert_weight import ExpertWeight


class Memories(Scratches):
    """The memory that the functions of a model take in turns, by the shapes of a function's weights
    and which of them lies in it, and the buffers of each function.

    Buffers hold the codes themselves. So a backward multiplies the weights of its forward, even if
    the model has others by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[tuple, tuple[tuple, list[ScratchBuffer]]] = {}

    def forget(self) -> None:
        """Have the next backward write its weights again, whatever is in memory now."""
        for scratch in self.values():
            scratch.holder = -1

    def buffers_of(self, reads: Sequence[Any]) -> list[ScratchBuffer]:
        """Return a buffer for each of these weights in 4 bits, which may have moved since."""
        key = tuple(id(read.base) for read in reads)
        places = tuple((_place_of(read.base), read.weight.dtype) for read in reads)
        if (made := self._made.get(key)) is None or made[0] != places:
            made = self._made[key] = places, self._make(reads)
        return made[1]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make(self, reads: Sequence[Any]) -> list[ScratchBuffer]:
        shapes, buffers = tuple(read.weight.shape for read in reads), []
        for index, read in enumerate(reads):
            like, is_expert = read.weight, isinstance(read.base, ExpertWeight)
            # each weight of experts is written right before its matmul: both share one memory
            key = shapes, 0 if is_expert else index, like.dtype, like.device
            if key not in self:
                largest = max(shape.numel() for shape in shapes)
                self[key] = Scratch(like.new_empty(largest if is_expert else like.shape))
            weight = read.base.packed if is_expert else packed(read.base)
            buffers.append(ScratchBuffer(self[key], [weight], None))
        return buffers


def _place_of(base: Any) -> tuple:
    return base.place if isinstance(base, ExpertWeight) else places_of(base)


def in_memory(module: nn.Module, reads: list[Any]) -> tuple[list[Any], list[ScratchBuffer]]:
    """Return the reads of a module's projections, or of its experts, with weights to multiply, and
    the buffers of those that are in 4 bits, which have to be written first."""
    in_4_bits = [read for read in reads if read.is_packed]
    if not in_4_bits:
        return reads, []
    owner = owner_of(module) or owner_of(module, HOOKED)
    assert owner is not None
    buffers = owner.memories.buffers_of(in_4_bits)
    matrices = iter(buffers)
    return [
        read._replace(weight=next(matrices).weight, is_packed=False) if read.is_packed else read
        for read in reads
    ], buffers


def written(module: nn.Module, reads: list[Any]) -> tuple[list[Any], Callable[[], None] | None]:
    """Write those weights of a module's projections that are in 4 bits. Return the reads with
    weights to multiply, and `write_again` for their function, None if all are plain."""
    reads, buffers = in_memory(module, reads)
    if not buffers:
        return reads, None
    _write(buffers)
    return reads, partial(write_again, buffers)


def _write(buffers: Sequence[ScratchBuffer], ends: Tensor | None = None) -> None:
    for buffer in buffers:
        buffer.key = None  # if what follows fails
    ScratchBuffer.encode(buffers, ends)
    for buffer in buffers:
        buffer.key = (ends,)  # they have no adapters


def write_again(buffers: Sequence[ScratchBuffer], ends: Tensor | None = None) -> None:
    """Write the weights, unless they still lie in memory. ends: as in `Dequantize4bit`, for weights
    of experts, which lie there if the memory has those of the same tokens."""
    if not all(_lies_in(buffer, ends) for buffer in buffers):
        _write(buffers, ends)


def _lies_in(buffer: ScratchBuffer, ends: Tensor | None) -> bool:
    key = buffer.key  # it keeps the last `ends`, so no other has that address
    return key is not None and (ends is None or key[0].data_ptr() == ends.data_ptr())


def memories_of(model: nn.Module) -> Memories:
    """Return the memory that the modules of a model share, or new if they share none."""
    owners = filter(None, map(owner_of, model.modules()))
    return next((owner.memories for owner in owners if owner.memories is not None), Memories())


def why_not_input(x: Tensor, reads: Sequence[Projection]) -> str:
    """Return the reason if projections in 4 bits cannot run fused on this input, or ""."""
    for read in reads:
        if read.is_packed:
            device = read.weight.device
            if device != x.device:  # there it may not be quantised yet
                return f"its weights are on {device}, its input on {x.device}: move the model"
            dtypes = [tensor.dtype for tensor in (read.weight, read.bias) if tensor is not None]
            if {*dtypes, x.dtype, compute_dtype(x)} != {x.dtype}:
                return (
                    f"its weights are {dtypes[0]}, input {x.dtype}, computation "
                    f"{compute_dtype(x)}: give all one dtype"
                )
    return ""
