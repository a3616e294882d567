"""Copies a decoder layer's adapters into the borders of its buffers (`buffer.py`)."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from fused_mlp.launching import is_capturing

from ..kernels.many_copies import ManyCopies, Matrices
from ..kernels.rows import Handover
from .buffer import WeightGroup
from .gathering import Gathering


class Adapter(NamedTuple):
    """A value for each tensor of an adapter: itself, a flag, or its gradient."""

    A: Any  # of the tensor [r, in]
    B: Any  # of the tensor [out, r]


def adapters_of(values: Sequence[Any]) -> tuple[Adapter, ...]:
    """Name these values: A and B of each adapter."""
    return tuple(map(Adapter, values[::2], values[1::2]))


class Key(NamedTuple):
    """The adapters in a group's border."""

    places: tuple  # equal for the same tensors in the same memory
    versions: tuple[int, ...]  # equal as long as nothing that PyTorch counts has changed them


class Filling:
    """Copies one layer's adapters into its borders, and knows which are there.

    handover, gathering: one for all layers of a model. index: the layer's place in a forward, among
    those whose weights are gathered.
    """

    def __init__(self) -> None:
        self.handover = Handover()
        self.index = 0
        self.gathering = Gathering()
        self._copies = ManyCopies()

    def fill(self, groups: Sequence[WeightGroup], adapters: Sequence[Adapter]) -> None:
        """Copy the adapters, A and B of each projection, into the borders of their groups.

        Equivalent PyTorch, for each: ``A_view.copy_(A); B_view.copy_(scaling * B)``, and zeros in
        what a larger rank may have left.
        """
        self._bring(groups)
        self._fill(groups, adapters, _keys_of(groups, adapters))

    def refill(self, groups: Sequence[WeightGroup], adapters: Sequence[Adapter]) -> None:
        """Call `fill`, unless the borders still hold these adapters.

        It is for backward, because a forward with other adapters may have run before it.
        """
        keys = _keys_of(groups, adapters)
        # the replay of a graph copies adapters without running this code
        may_differ = self._copies.is_captured and not is_capturing(groups[0].A)
        self._bring(groups)
        if may_differ or keys != [group.buffer.key for group in groups]:
            self._fill(groups, adapters, keys)
            for one in groups:  # backward's may be temporary copies, whose addresses others get
                one.buffer.key = None

    def _bring(self, groups: Sequence[WeightGroup]) -> None:
        gathered = [group.buffer for group in groups if group.buffer.sources]
        if gathered:
            self.gathering.bring(self.index, gathered)

    def _fill(
        self, groups: Sequence[WeightGroup], adapters: Sequence[Adapter], keys: Sequence[Key]
    ) -> None:
        buffers = [group.buffer for group in groups]
        for buffer in buffers:
            buffer.key = None  # if what follows fails
        places = tuple([key.places for key in keys])
        self._copies.copy(places, lambda: _matrices(groups, adapters))
        for kind in {type(buffer): None for buffer in buffers}:
            kind.encode([buffer for buffer in buffers if type(buffer) is kind])
        for buffer, key in zip(buffers, keys, strict=True):
            buffer.key = key


def _keys_of(groups: Sequence[WeightGroup], adapters: Sequence[Adapter]) -> list[Key]:
    tensors = [*chain.from_iterable(adapters)]
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
    versions = [0 if t.is_inference() else t._version for t in tensors]
    keys, first = [], 0
    for group in groups:
        last = first + 2 * len(group.blocks)
        keys.append(Key((group.place, *places[first:last]), tuple(versions[first:last])))
        first = last
    return keys


def _matrices(groups: Sequence[WeightGroup], adapters: Sequence[Adapter]) -> Matrices:
    """The views that each adapter is copied into, and those beside it that get zeros."""
    targets: list[Tensor] = []
    sources: list[Tensor | None] = []
    scalings: list[float] = []
    left = iter(adapters)
    for group in groups:
        column = 0
        parts = group.sB.split_with_sizes(group.out_features)
        for part, block, scaling in zip(parts, group.blocks, group.scalings, strict=True):
            A, B = next(left)
            rank = A.shape[0]
            in_A, in_B = group.A[column:], part[:, column:]
            targets += [in_A[:rank], in_B[:, :rank]]
            sources += [A.detach(), B.detach()]
            scalings += [1.0, scaling]  # before the cast: one rounding, not two
            if rank < block:
                targets += [in_A[rank:block], in_B[:, rank:block]]
                sources += [None, None]
                scalings += [1.0, 1.0]
            column += block
    return targets, sources, scalings
