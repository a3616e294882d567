"""Finds or makes the buffers of a layer, and moves a model's weights into them.

`layer/buffer.py` draws one: a frozen weight W with its adapters around it, row-major, in W's dtype.
Its rows start on whole L2 cache lines (`rows.empty_rows`). LoRA then needs no extra pass over a
large tensor.

Projections that share an input share a buffer (q, k, v; gate, up): W and A are stacked, B is block
diagonal. PEFT's `base_layer.weight` and `.bias` become views of it and work as before. The adapters
stay PEFT's parameters. The border is scratch memory: every forward of a layer copies its current
adapters into it, all in one launch, so nobody has to report that they changed.

Only the weights in a buffer keep it alive, and a graph that needs it for backward. If a weight has
left (moved, cast, assigned, unpickled, copied with its model), the next forward moves it into a new
buffer. The old one is freed once all weights have left it.

The matmuls are in `layer/buffer.py`. LoRA: Hu et al., arXiv 2106.09685. The bordered form is ours.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_mlp.launching import is_capturing

from ..foreign.ownership import owner_of
from ..kernels.rows import empty_rows
from ..layer.buffer import Buffer, GroupLayout, WeightGroup
from ..layer.filling import Filling
from ..layer.scratch import Scratches
from ..reading.projection import Projection, why_not_base
from .own_memory import let_save

# 8 bf16 values are 16 bytes, the alignment cuBLAS needs for every row. Without any adapter the
# border is this wide, and zero.
WIDTH_MULTIPLE = 8
GROUPS = 4  # q, k and v; o; gate and up; down. An attention alone has the first two


class Layout(NamedTuple):
    """The layout of a buffer: each part's outputs and room for its rank, and the border's width."""

    outs: tuple[int, ...]
    blocks: tuple[int, ...]
    width: int

    @property
    def rows(self) -> int:
        return sum(self.outs) + self.width

    def has_room(self, parts: Sequence[Projection]) -> bool:
        return all(len(part.A) <= block for part, block in zip(parts, self.blocks, strict=True))


class Wanted(NamedTuple):
    """The projections that a buffer is to hold, and what it is made with."""

    reads: Sequence[Projection]
    parts: Sequence[Projection]  # the projections, or what they split into
    ranks: Sequence[int]  # of the parts' adapters
    dtype: torch.dtype  # the model's, which the weights may not show
    scratches: Scratches  # the model's, for weights that are stored in another form
    ahead: Scratches  # every second layer's, for weights that come ahead
    group: int  # which of a layer's buffers it is


class Border:
    """The buffer of projections that share an input, for as long as their weights lie in it.

    `DefaultBorder` is what a layer has unless its user asks for another (`switches.BORDERS`).
    """

    precision = ""  # the report adds it to such layers
    may_wait = False  # fully_shard, which takes no weights in a buffer, may come after `fuse`

    @staticmethod
    def why_not(weights: Iterator[Tensor]) -> str | None:
        """Return the reason if these weights of a layer, the last one a norm's, cannot lie in such
        buffers."""
        return None

    # returns the reason if such a buffer cannot take a base layer's weight
    why_not_base = staticmethod(why_not_base)
    # prepares a linear layer whose weight will lie in such a buffer
    take_in = staticmethod(let_save)

    def __init__(self) -> None:
        self._made: tuple[tuple, Layout] | None = None  # for weights in these places
        self._buffer: weakref.ref[Buffer] | None = None
        self._kept: Buffer | None = None  # the buffer, where no weight keeps it alive
        self._bases: list[weakref.ref] = []  # the layers whose weights lie in it
        self._first_biased: int | None = None  # the first whose bias does

    def __reduce__(self):
        # no weight of a copied or unpickled model lies in a buffer
        return type(self), ()

    def buffer(self) -> Buffer | None:
        """Return the buffer, None if there is none yet."""
        return None if self._buffer is None else self._buffer()

    def find_or_make(self, wanted: Wanted) -> tuple[WeightGroup, bool]:
        """Return the buffer, with room for adapters of these ranks, and whether it had to be
        made."""
        reads, parts = wanted.reads, wanted.parts
        weights, biases = [read.weight for read in reads], [*map(held_bias, reads)]
        first_biased = next((i for i, bias in enumerate(biases) if bias is not None), None)
        bias = None if first_biased is None else biases[first_biased]
        places, layout = self._made or ((), None)
        buffer = None
        if layout is not None and places == self.places_of(reads) and layout.has_room(parts):
            buffer = self.find(weights, bias, layout)
        is_new = buffer is None
        if buffer is None or layout is None:
            self._made = self._buffer = self._kept = None  # free its memory for the next
            layout = layout_of(reads[0].weight, parts, wanted.ranks)
            buffer = self.make(wanted, layout)
            self._made = self.places_of(reads), layout  # biases may have moved
        self._buffer = weakref.ref(buffer)
        self._bases = [weakref.ref(read.base) for read in reads]
        self._first_biased = first_biased
        inputs, scalings = weights[0].shape[1], tuple(part.scaling for part in parts)
        return WeightGroup(
            buffer, GroupLayout(inputs, layout.outs, layout.blocks, scalings)
        ), is_new

    def again(self, layout: GroupLayout) -> WeightGroup | None:
        """Return the group of this layout, where `reading/unchanged.py` has found all tensors in
        their places. None: `find_or_make` has to."""
        if self._made is None or self._made[1].blocks != layout.blocks:
            return None
        bases: Any = [base() for base in self._bases]
        bias = None if self._first_biased is None else bases[self._first_biased].bias
        buffer = self.find([base.weight for base in bases], bias, self._made[1])
        if buffer is None:
            return None
        self._buffer = weakref.ref(buffer)  # its key says whose adapters lie in the memory
        return WeightGroup(buffer, layout)

    def places_of(self, reads: Sequence[Projection]) -> tuple:
        """Return the places of the weights and biases. They differ once one has moved, even to an
        earlier address."""
        return tuple(
            (w.data_ptr(), w.stride(), w.dtype, w.device, None if bias is None else bias.data_ptr())
            for w, bias in ((read.weight, held_bias(read)) for read in reads)
        )

    def find(self, weights: Sequence[Tensor], bias: Tensor | None, layout: Layout) -> Buffer | None:
        """Return the buffer that the weights, and biases if there is a first, are views of."""
        if (buffer := self.buffer()) is not None:
            return buffer
        # .data has a separate version counter: filling borders does not invalidate a saved weight
        weight = weights[0].data
        inputs = weight.shape[1]
        matrix = weight.as_strided((layout.rows, inputs + layout.width), (weight.stride(0), 1), 0)
        if bias is not None:
            bias = bias.data.as_strided((layout.rows,), (1,), 0)
        return Buffer(matrix, bias, sum(layout.outs), inputs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def make(self, wanted: Wanted, layout: Layout) -> Buffer:
        """Allocate one [out + width, in + width] tensor, and a second one for untrained biases, if
        there are any. Parameters stay the same objects and become views of these."""
        reads, first = wanted.reads, wanted.reads[0].weight
        in_features = first.shape[1]
        matrix = empty_rows(first, layout.rows, in_features + layout.width).zero_()
        for read, rows in zip(reads, split_rows(matrix, reads), strict=True):
            _move(read.weight, rows[:, :in_features])
        move_biases(reads, layout)
        buffer = self.find([read.weight for read in reads], first_held_bias(reads), layout)
        assert buffer is not None
        return buffer


def held_bias(read: Projection) -> Tensor | None:
    """Return a projection's bias if the buffer holds it. A trained bias stays where it is, because
    its optimizer may hold that memory, and is passed to each forward."""
    return None if read.bias is None or read.bias.requires_grad else read.bias


def first_held_bias(reads: Sequence[Projection]) -> Tensor | None:
    return next((held for held in map(held_bias, reads) if held is not None), None)


def layout_of(weight: Tensor, parts: Sequence[Projection], ranks: Sequence[int]) -> Layout:
    if is_capturing(weight):
        raise RuntimeError(
            "a fused layer's weights have moved since its last eager forward: run one step "
            "eagerly, then capture the CUDA graph"
        )
    outs = tuple(part.weight.shape[0] for part in parts)
    blocks = tuple(max(rank, part.A.shape[0]) for rank, part in zip(ranks, parts, strict=True))
    width = -(-max(sum(blocks), 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    return Layout(outs, blocks, width)


def move_biases(
    reads: Sequence[Projection], layout: Layout, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Move the biases that a buffer holds into one tensor, each at its projection's rows. dtype:
    that they are cast to."""
    first = first_held_bias(reads)
    if first is None:
        return None
    bias = first.new_zeros(layout.rows, dtype=dtype)
    for read, rows in zip(reads, split_rows(bias, reads), strict=True):
        if (held := held_bias(read)) is not None:
            _move(held, rows)
    return bias


def split_rows(tensor: Tensor, reads: Sequence[Projection]) -> Sequence[Tensor]:
    """Return each projection's rows of a tensor of [out + width, ...]."""
    outs = [len(read.weight) for read in reads]
    return tensor[: sum(outs)].split(outs)


def _move(parameter: Tensor, memory: Tensor) -> None:
    parameter.data = memory.copy_(parameter)


class LayerBorders(Filling):
    """The borders of one decoder layer, or of an attention alone.

    replica_of: the name of an earlier layer with the same base weights (PEFT's layer_replication).
    They lie in that layer's buffers. scratches: shared by all layers of a model. ahead: by every
    second one whose weights are gathered.
    """

    def __init__(self, kind: type[Border], groups: int = GROUPS):
        super().__init__()
        self.kind = kind
        self.by_group = tuple(kind() for _ in range(groups))
        self.replica_of: str | None = None
        self.scratches, self.ahead = Scratches(), Scratches()

    def forget(self) -> None:
        """Have the next backward fill the borders again, whatever is in them now."""
        for border in self.by_group:
            if (buffer := border.buffer()) is not None:
                buffer.key = None

    def find_or_make(
        self,
        groups: Sequence[Sequence[Projection]],
        parts: Sequence[Sequence[Projection]],
        ranks: Sequence[Sequence[int]],
        dtype: torch.dtype,
    ) -> list[WeightGroup | None]:
        """Return the buffers of these projections, making those whose weights lie elsewhere; None
        for a group without any, whose block does not run.

        They are made one by one, so at most one group's weights exist twice. dtype: the model's,
        which the weights may not show.
        """
        every = zip(self.by_group, groups, parts, ranks, strict=True)
        found = [
            border.find_or_make(
                Wanted(reads, split, ranks_of_parts, dtype, self.scratches, self.ahead, group)
            )
            if reads
            else None
            for group, (border, reads, split, ranks_of_parts) in enumerate(every)
        ]
        made = [bordered for bordered, was_made in filter(None, found) if was_made]
        if made and made[0].A.device.type == "cuda":
            torch.cuda.empty_cache()  # the freed pieces are too small for the next buffers
        return [one and one[0] for one in found]

    def again(self, layouts: Sequence[GroupLayout | None]) -> list[WeightGroup | None] | None:
        """Call each border's `again`, but for groups without a layout, which have no buffer."""
        every = zip(self.by_group, layouts, strict=True)
        found = [layout and border.again(layout) for border, layout in every]
        return None if found.count(None) > layouts.count(None) else found


def borders_of(module: nn.Module) -> LayerBorders | None:
    """Return the borders that a module's forward runs on, if any."""
    owner = owner_of(module)
    return None if owner is None else owner.borders
