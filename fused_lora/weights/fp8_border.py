"""The buffers of layers in FP8, made from their weights or from a checkpoint's codes."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..foreign.parallel import is_dtensor
from ..kernels.fp8_rows import E4M3, codes_and_scales
from ..layer.buffer import Buffer
from ..layer.fp8.buffer import Fp8Buffer
from ..reading.codes import is_of_codes, scales_of, why_not_codes
from ..reading.four_bit import is_4bit
from ..reading.projection import Projection
from . import fp8_checkpoint as checkpoint
from .borders import Border, Layout, Wanted, held_bias, move_biases
from .fp8_weight import Fp8Weight, become_fp8, why_not_in_fp8
from .own_memory import let_save
from .sourced_weight import SourcedWeight


class Fp8Border(Border):
    """A Border in FP8. The weights keep their buffer alive (`fp8_weight.py`). A buffer with a
    checkpoint's codes (`fp8_checkpoint.py`) lasts until these move or change."""

    precision = " in FP8"

    @staticmethod
    def why_not(weights: Iterator[Tensor]) -> str | None:
        *coded, norm = weights
        if any(map(is_dtensor, coded)):
            return "fully_shard shards its weights: leave fp8 out, or its layers unsharded"
        for weight in coded:
            if isinstance(weight, SourcedWeight):
                source = weight.source
                return f"its weight is {source.where}: leave fp8 out, or {source.call}"
        if any(weight.dtype == E4M3 for weight in coded):  # they do not show the model's dtype
            coded.append(norm)
        return next(filter(None, map(why_not_in_fp8, coded)), None)

    @staticmethod
    def why_not_base(base: nn.Module) -> str | None:
        if is_4bit(base):
            return "its weight is in 4 bits: leave fp8 out"
        return why_not_codes(base) if is_of_codes(base) else Border.why_not_base(base)

    @staticmethod
    def take_in(base: nn.Linear) -> None:
        let_save(base)
        if is_of_codes(base):
            checkpoint.let_train(base)

    def places_of(self, reads: Sequence[Projection]) -> tuple:
        """Return the places of the biases, and of a checkpoint's codes and scales with their
        version counters."""
        biases = tuple(None if bias is None else bias.data_ptr() for bias in map(held_bias, reads))
        found = ((read.weight, scales_of(read.base)) for read in reads)
        coded = (t for weight, scales in found if scales for t in (weight, scales.values))
        versions = ((t.data_ptr(), t.device, 0 if t.is_inference() else t._version) for t in coded)
        return biases, *versions

    def find(self, weights: Sequence[Tensor], bias: Tensor | None, layout: Layout) -> Buffer | None:
        held = [getattr(one, "buffer", None) for one in weights if one.dtype != E4M3]
        buffer = (held or [self._kept])[0]
        return buffer if buffer is not None and _all_lie_in(buffer, weights) else None

    @torch.inference_mode(False)
    @torch.no_grad()
    def make(self, wanted: Wanted, layout: Layout) -> Buffer:
        reads, bases = wanted.reads, [read.base for read in wanted.reads]
        codes, scales, originals = [], [], []
        checkpoint_scales = [scales_of(base) for base in bases]
        for read, its_scales in zip(reads, checkpoint_scales, strict=True):
            weight, original = read.weight, None
            if its_scales is not None:
                coded_weight = checkpoint.rowwise_codes(weight, its_scales)
            elif isinstance(weight, Fp8Weight):  # made for a smaller rank, or moved
                coded_weight, original = codes_and_scales(weight.whole()), weight.original
            else:
                coded_weight = codes_and_scales(weight.detach())
                original = torch.empty(weight.shape, dtype=weight.dtype).copy_(weight)
            codes.append(coded_weight[0].view(torch.uint8))
            scales.append(coded_weight[1])
            originals.append(original)
        bias = move_biases(reads, layout)
        together = torch.cat(codes).view(E4M3), torch.cat(scales)
        buffer = Fp8Buffer(*together, bias, layout.width, wanted.dtype)
        row = 0
        for read, its_scales, original in zip(reads, checkpoint_scales, originals, strict=True):
            end = row + len(read.weight)
            if original is not None:
                become_fp8(read.weight, buffer, row, original)
            elif its_scales is not None and its_scales.block[0] == 1:
                # with gaps between rows, which the kernels for block scales do not take
                read.weight.data = buffer.weight[row:end]  # the same codes
            row = end
        self._kept = buffer if any(map(is_of_codes, bases)) else None
        return buffer


def _all_lie_in(buffer: Fp8Buffer, weights: Sequence[Tensor]) -> bool:
    """Return whether the weights, as they are now, are consecutive codes in this buffer. Codes from
    a checkpoint do not know where they lie, so they always count."""
    row = 0
    for weight in weights:
        if weight.dtype != E4M3 and not (
            isinstance(weight, Fp8Weight) and weight.lies_in(buffer, row, weight.shape)
        ):
            return False
        row += len(weight)
    return True
