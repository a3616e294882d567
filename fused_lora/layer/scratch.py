"""Buffers that layers share: a layer writes its weights into them before it multiplies.

Weights in 4 bits cannot be multiplied as they are. Before a layer's forward, and again before its
backward, one launch writes all of them into matrices that the layers of a model take in turns
(`kernels/dequantize_4bit.py`). A recomputed forward and the backward after it share one launch.
For Qwen2.5-3B these matrices are 154 MB, and both passes over all layers write 11 GB.

Weights that FSDP2 shards over ranks are plain only while it has gathered them, each by itself. They
are copied into the same matrices. Those of `shard_base` and `host_base` are brought into them a
layer ahead (`gathering.py`). In 4 bits it is their codes that come ahead, into two sets of memory,
and all layers share one set of matrices.
"""

import itertools
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fused_mlp.launching import is_capturing

from ..kernels.dequantize_4bit import Dequantize4bit
from ..kernels.packed_4bit import Packed4bit
from .buffer import Buffer
from .gathering import WeightSource

SERIALS = itertools.count()  # of what takes turns


class Scratch:
    """Memory that layers, or functions of parts, take in turns.

    holder: the serial of the one whose weights lie in it. key: of the adapters in a layer's border.
    is_captured: the replay of a CUDA graph may write into it, which nobody notices.
    """

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.holder = -1
        self.key: tuple | None = None
        self.is_captured = False


class Scratches(dict[Hashable, Scratch]):
    """The memory of a model, by shape. A copy is empty, because a copied model makes its own."""

    def __reduce__(self):
        return type(self), ()


class ScratchBuffer(Buffer):
    """A `Buffer` whose weights are written into a `Scratch`.

    weights: those of its projections, [out_i, in] each: packed, or plain ones that are copied, or
        from a `WeightSource`, which `Gathering` brings.
    bias: [out + width] or None. biases: [out_i] or None each, copied into bias before each pass;
        empty: bias already holds them.
    group: which of a layer's buffers it is.
    codes: those of packed weights that lie elsewhere, and the memory that each is brought into.
    """

    def __init__(
        self,
        scratch: Scratch,
        weights: Sequence[Packed4bit | Tensor | WeightSource],
        bias: Tensor | None,
        biases: Sequence[Tensor | None] = (),
        group: int = 0,
        codes: Sequence[tuple[WeightSource, Tensor]] = (),
    ):
        self._scratch, self.group = scratch, group
        self.serial = next(SERIALS)
        outs = [one.shape[0] for one in weights]
        matrix, shape = scratch.memory, (sum(outs), weights[0].shape[1])
        if matrix.ndim == 1:  # matrices of other shapes lie in it as well
            matrix = matrix[: shape[0] * shape[1]].view(shape)
        super().__init__(matrix, bias, *shape)
        self._packed: list[tuple[Packed4bit, Tensor]] = []
        self._plain: list[tuple[Tensor, Tensor]] = []
        sources = [*codes]
        for weight, rows in zip(weights, self.weight.split(outs), strict=True):
            if isinstance(weight, Packed4bit):
                self._packed.append((weight, rows))
            elif isinstance(weight, WeightSource):
                stride = rows.stride(0)
                sources.append((weight, rows.as_strided((len(rows), stride), (stride, 1))))
            else:
                self._plain.append(_as_words(weight.detach(), rows))
        for source, rows in sources:
            source.space(rows.stride(0))
        self.sources = sources
        if bias is not None and biases:
            pairs = zip(biases, bias[: sum(outs)].split(outs), strict=True)
            self._plain += [(one, part) for one, part in pairs if one is not None]
        self._dequantize = Dequantize4bit()

    @property
    def key(self) -> tuple | None:
        """That of the adapters; None where another layer's weights may lie in the matrix."""
        scratch = self._scratch
        may_differ = scratch.is_captured and not is_capturing(scratch.memory)
        return None if may_differ or scratch.holder != self.serial else scratch.key

    @key.setter
    def key(self, key: tuple | None) -> None:
        self._scratch.holder, self._scratch.key = self.serial, key

    @staticmethod
    def encode(buffers: Sequence["ScratchBuffer"], ends: Tensor | None = None) -> None:
        """Write the weights of these buffers into their matrices, in one launch. ends: as in
        `Dequantize4bit`, for weights of experts."""
        codes = [packed.codes for one in buffers for packed, _ in one._packed]
        key = *(one.serial for one in buffers), *(code.data_ptr() for code in codes)
        buffers[0]._dequantize.write(key, lambda: _packed_in(buffers), ends)
        for buffer in buffers:
            buffer._scratch.is_captured |= is_capturing(buffer.matrix)
            for plain, to in buffer._plain:
                to.copy_(plain)


def _as_words(weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """View both as words of 8 bytes where they allow it. PyTorch copies into rows with gaps element
    by element, which takes longer the smaller these are."""
    elements = 8 // weight.element_size()
    sizes = (size for one in (weight, rows) for size in (one.stride(0), one.storage_offset()))
    is_alike = weight.dtype == rows.dtype and weight.stride(1) == 1
    if not is_alike or any(size % elements for size in (weight.shape[1], *sizes)):
        return weight, rows
    return weight.view(torch.int64), rows.view(torch.int64)


def _packed_in(buffers: Sequence[ScratchBuffer]) -> tuple[list[Packed4bit], list[Tensor]]:
    """Return the packed weights of these buffers, and the rows they are written into."""
    every = [pair for buffer in buffers for pair in buffer._packed]
    return [weight for weight, _ in every], [rows for _, rows in every]
