"""Weights in 4 bits for the functions of parts, which multiply plain ones.

Before a function's forward one launch writes its weights into memory that all modules of the model
with such weights take in turns (`layer/scratch.py`). Its backward has them written again if others
have used the memory since. A recomputed forward and the backward after it share one launch.
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


class Memories(Scratches):
    """The memory that the functions of a model take in turns, by the shapes of a function's weights
    and which of them lies in it, and the buffers of each function.

    Buffers hold bitsandbytes' tensors. So a backward multiplies the weights of its forward, even if
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
        key = tuple(id(read.base.weight) for read in reads)
        places = tuple((places_of(read.base), read.weight.dtype) for read in reads)
        if (made := self._made.get(key)) is None or made[0] != places:
            made = self._made[key] = places, self._make(reads)
        return made[1]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make(self, reads: Sequence[Any]) -> list[ScratchBuffer]:
        shapes, buffers = tuple(read.weight.shape for read in reads), []
        for index, read in enumerate(reads):
            like = read.weight
            key = shapes, index, like.dtype, like.device
            if key not in self:
                self[key] = Scratch(like.new_empty(like.shape))
            buffers.append(ScratchBuffer(self[key], [packed(read.base)], None))
        return buffers


def written(module: nn.Module, reads: list[Any]) -> tuple[list[Any], Callable[[], None] | None]:
    """Write those weights of a module's projections, or of its experts, that are in 4 bits. Return
    the reads with weights to multiply, and `write_again` for their function, None if all are
    plain."""
    in_4_bits = [read for read in reads if read.is_packed]
    if not in_4_bits:
        return reads, None
    owner = owner_of(module) or owner_of(module, HOOKED)
    assert owner is not None
    buffers = owner.memories.buffers_of(in_4_bits)
    _write(buffers)
    matrices = iter(buffers)
    return [
        read._replace(weight=next(matrices).weight, is_packed=False) if read.is_packed else read
        for read in reads
    ], partial(_write_again, buffers)


def _write(buffers: Sequence[ScratchBuffer]) -> None:
    for buffer in buffers:
        buffer.key = None  # if what follows fails
    ScratchBuffer.encode(buffers)
    for buffer in buffers:
        buffer.key = ()  # they have no adapters


def _write_again(buffers: Sequence[ScratchBuffer]) -> None:
    """Call `_write`, unless the weights still lie in memory."""
    if any(buffer.key is None for buffer in buffers):
        _write(buffers)


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
