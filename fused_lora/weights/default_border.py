"""The buffers of a layer whose user asks for no other kind. Plain weights lie in them. Those in 4
bits, spread over ranks or in host memory are written into memory that all layers share.

FSDP2 gathers a layer's weights before its forward and before its backward, and frees them after
each. They come back in the same parameters, which it has made itself, so a buffer can keep these
and copy them in each pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from ..foreign.parallel import is_gathered_in
from ..kernels.packed_4bit import Packed4bit
from ..kernels.rows import empty_rows
from ..layer.buffer import Buffer
from ..layer.gathering import WeightSource
from ..layer.scratch import Scratch, ScratchBuffer
from ..reading.four_bit import packed, places_of
from ..reading.projection import Projection
from .borders import Border, Layout, Wanted, held_bias, move_biases
from .sourced_weight import SourcedWeight


class DefaultBorder(Border):
    """A Border that also takes weights in 4 bits, beside others or alone, those that FSDP2 gathers
    and those of `shard_base` and `host_base`. All are written into a scratch in each pass. Without
    any, it is a Border."""

    may_wait = True

    def places_of(self, reads: Sequence[Projection]) -> tuple:
        if _are_gathered(reads):
            return places_of_gathered(reads)
        if _is_written(reads):
            return tuple(map(_place_of, reads))
        return super().places_of(reads)

    @torch.inference_mode(False)
    @torch.no_grad()
    def make(self, wanted: Wanted, layout: Layout) -> Buffer:
        reads, group = wanted.reads, wanted.group
        is_gathered = _are_gathered(reads)
        if not is_gathered and not _is_written(reads):
            return super().make(wanted, layout)
        like, inputs = reads[0].weight, reads[0].weight.shape[1]
        comes_ahead = any(isinstance(read.weight, SourcedWeight) for read in reads)
        scratches = wanted.ahead if comes_ahead else wanted.scratches
        key = group, layout, inputs, like.dtype, like.device  # o and down may be alike
        if key not in scratches:
            scratches[key] = Scratch(empty_rows(like, layout.rows, inputs + layout.width).zero_())
        codes: list[tuple[WeightSource, Tensor]] = []
        weights = [_stored(read, wanted, codes) for read in reads]
        biases: list[Tensor | None] = []
        if is_gathered:
            biases = [held_bias(read) for read in reads]
            bias = None if all(one is None for one in biases) else like.new_zeros(layout.rows)
        else:
            bias = move_biases(reads, layout, like.dtype)
        self._kept = ScratchBuffer(scratches[key], weights, bias, biases, group, codes)
        return self._kept


def _stored(
    read: Projection, wanted: Wanted, codes: list[tuple[WeightSource, Tensor]]
) -> Packed4bit | Tensor | WeightSource:
    """Return a weight as it is stored. Codes that lie elsewhere get memory here, and join `codes`
    with it."""
    if not read.is_packed:
        return read.weight.source if isinstance(read.weight, SourcedWeight) else read.weight
    weight = packed(read.base)
    if not isinstance(weight.codes, SourcedWeight):
        return weight
    source = weight.codes.source
    key = "codes", wanted.group, len(codes), source.shape, source.dtype, source.device
    if key not in wanted.ahead:
        memory = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        wanted.ahead[key] = Scratch(memory)
    codes.append((source, wanted.ahead[key].memory))
    return weight._replace(codes=wanted.ahead[key].memory)


def _are_gathered(reads: Sequence[Projection]) -> bool:
    return any(is_gathered_in(read.base) for read in reads)


def _is_written(reads: Sequence[Projection]) -> bool:
    return any(read.is_packed or isinstance(read.weight, SourcedWeight) for read in reads)


def places_of_gathered(reads: Sequence[Projection]) -> tuple:
    """Return whose the weights and biases are: FSDP2 gathers them to another address each time."""
    weights = (read.base.weight if read.is_packed else read.weight for read in reads)  # type: ignore[union-attr]
    parameters = [*weights, *map(held_bias, reads)]
    # an id could be that of another one, after the first is gone
    ids = tuple(
        parameter if parameter is None else (WeakIdRef(parameter), parameter.dtype)
        for parameter in parameters
    )
    return tuple(read.weight.dtype for read in reads), ids


def _place_of(read: Projection) -> tuple:
    bias = held_bias(read)
    if isinstance(read.weight, SourcedWeight):
        place: tuple = read.weight.place
    else:
        place = places_of(read.base) if read.is_packed else (read.weight.data_ptr(),)
    # 4 bits stay where they are if compute_dtype changes
    return *place, read.weight.dtype, None if bias is None else bias.data_ptr()
