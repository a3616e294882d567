"""Weights in 4 bits for the functions of parts, which multiply plain ones.

Before a function's forward one launch writes its weights into memory that all modules of the model
with such weights take in turns. Its backward has them written again if others have used the memory
since. A recomputed forward and the backward after it share one launch.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn

from fused_mlp.launching import is_capturing
from fused_mlp.utils import compute_dtype

from ..foreign.ownership import HOOKED, owner_of
from ..kernels.dequantize_4bit import Dequantize4bit
from ..kernels.packed_4bit import Packed4bit
from ..layer.scratch import SERIALS, Scratch
from ..reading.four_bit import packed, places_of
from ..reading.projection import Projection


class Memory(Scratch):
    """A Scratch [values of all weights of a function].

    is_captured: the replay of a CUDA graph may write into it, which nobody notices.
    """

    is_captured = False


class Written:
    """The weights of one function in 4 bits, and the matrices [out, in] they are written into.

    It holds bitsandbytes' tensors. So a backward multiplies the weights of its forward, even if the
    model has others by then.
    """

    def __init__(self, scratch: Memory, weights: Sequence[Packed4bit]):
        self.serial, self._scratch, self._weights = next(SERIALS), scratch, weights
        pieces = scratch.memory.split([prod(weight.shape) for weight in weights])
        self.matrices = [piece.view(one.shape) for piece, one in zip(pieces, weights, strict=True)]
        self._dequantize = Dequantize4bit()

    def write(self) -> None:
        scratch = self._scratch
        scratch.holder = -1  # if what follows fails
        scratch.is_captured |= is_capturing(scratch.memory)
        key = tuple(weight.codes.data_ptr() for weight in self._weights)  # FSDP2 gathers to others
        self._dequantize.write(key, lambda: (self._weights, self.matrices))
        scratch.holder = self.serial

    def write_again(self) -> None:
        """Call `write`, unless the weights still lie in memory."""
        scratch = self._scratch
        may_differ = scratch.is_captured and not is_capturing(scratch.memory)
        if may_differ or scratch.holder != self.serial:
            self.write()


class Memories:
    """The memory that the functions of a model take in turns, and the weights of each function. A
    copy is empty, because a copied model has its own."""

    def __reduce__(self):
        return Memories, ()

    def __init__(self) -> None:
        self.by_shape: dict[tuple, Memory] = {}
        self._made: dict[tuple, tuple[tuple, Written]] = {}

    def forget(self) -> None:
        """Have the next backward write its weights again, whatever is in memory now."""
        for memory in self.by_shape.values():
            memory.holder = -1

    def written(self, reads: Sequence[Projection]) -> Written:
        """Return the weights of these projections in 4 bits, which may have moved since."""
        key = tuple(id(read.base) for read in reads)
        places = tuple((places_of(read.base), read.weight.dtype) for read in reads)
        if (made := self._made.get(key)) is None or made[0] != places:
            made = self._made[key] = places, self._make(reads)
        return made[1]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make(self, reads: Sequence[Projection]) -> Written:
        like = reads[0].weight
        shapes = tuple(read.weight.shape for read in reads)
        key = shapes, like.dtype, like.device
        if key not in self.by_shape:
            self.by_shape[key] = Memory(like.new_empty(sum(map(prod, shapes))))
        return Written(self.by_shape[key], [packed(read.base) for read in reads])


def written(
    module: nn.Module, reads: list[Projection]
) -> tuple[list[Projection], Callable[[], None] | None]:
    """Write those weights of a module's projections that are in 4 bits. Return the projections with
    weights to multiply, and `write_again` for their function, None if all are plain."""
    in_4_bits = [read for read in reads if read.is_packed]
    if not in_4_bits:
        return reads, None
    owner = owner_of(module) or owner_of(module, HOOKED)
    assert owner is not None
    found = owner.memories.written(in_4_bits)
    found.write()
    matrices = iter(found.matrices)
    return [
        read._replace(weight=next(matrices), is_packed=False) if read.is_packed else read
        for read in reads
    ], found.write_again


def memories_of(model: nn.Module) -> Memories:
    """Return the memory that the modules of a model share, or new if they share none."""
    owners = filter(None, map(owner_of, model.modules()))
    return next((owner.memories for owner in owners if owner.memories is not None), Memories())


def why_not_input(x: Tensor, reads: Sequence[Projection]) -> str:
    """Return the reason if projections in 4 bits cannot run fused on this input, or ""."""
    for read in reads:
        if read.is_packed:
            dtypes = [tensor.dtype for tensor in (read.weight, read.bias) if tensor is not None]
            if {*dtypes, x.dtype, compute_dtype(x)} != {x.dtype}:
                return (
                    f"its weights are {dtypes[0]}, input {x.dtype}, computation "
                    f"{compute_dtype(x)}: give all one dtype"
                )
    return ""
