"""The buffers of layers with weights in 4 bits: views of memory that all layers share."""

from collections.abc import Sequence

import torch

from ...kernels.rows import empty_rows
from ...layer.buffer import Bordered, Buffer
from ...layer.scratch import Scratch, ScratchBuffer, Scratches
from ..borders import Border, Layout, held_bias, layout_of, move_biases
from ..projection import Projection
from .reading import packed, places_of


class PackedBorder(Border):
    """A Border that also takes weights in 4 bits, beside others or alone. Where there are none, it
    is a Border."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: tuple[tuple, Layout, ScratchBuffer] | None = None

    def buffer(self) -> Buffer | None:
        return super().buffer() if self._kept is None else self._kept[2]

    def find_or_make(
        self,
        reads: Sequence[Projection],
        parts: Sequence[Projection],
        ranks: Sequence[int],
        dtype: torch.dtype,
        scratches: Scratches,
    ) -> tuple[Bordered, bool]:
        if not any(read.is_packed for read in reads):
            self._kept = None
            return super().find_or_make(reads, parts, ranks, dtype, scratches)
        places = tuple(map(_place_of, reads))
        if self._kept is not None:
            kept_places, layout, buffer = self._kept
            if kept_places == places and layout.has_room(parts):
                return layout.bordered(buffer, reads, parts), False
        self._kept = None
        layout = layout_of(reads[0].weight, parts, ranks)
        buffer = _make(reads, layout, scratches)
        self._kept = tuple(map(_place_of, reads)), layout, buffer  # the biases have moved
        return layout.bordered(buffer, reads, parts), False


def _place_of(read: Projection) -> tuple:
    bias = held_bias(read)
    place = places_of(read.base) if read.is_packed else (read.weight.data_ptr(),)
    return *place, None if bias is None else bias.data_ptr()


@torch.inference_mode(False)
@torch.no_grad()
def _make(reads: Sequence[Projection], layout: Layout, scratches: Scratches) -> ScratchBuffer:
    like, inputs = reads[0].weight, reads[0].weight.shape[1]
    key = layout, inputs, like.dtype, like.device
    if key not in scratches:
        scratches[key] = Scratch(empty_rows(like, layout.rows, inputs + layout.width).zero_())
    weights = [packed(read.base) if read.is_packed else read.weight.detach() for read in reads]
    return ScratchBuffer(scratches[key], weights, move_biases(reads, layout, like.dtype))
