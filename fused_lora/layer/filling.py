"""Copies a decoder layer's adapters into the borders of its buffers (`buffer.py`)."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fused_mlp.launching import is_capturing

from ..kernels.many_copies import ManyCopies, Matrices
from ..kernels.rows import Handover
from .buffer import Bordered


class Filling:
    """Copies one layer's adapters into its borders, and knows which are there.

    handover: one for all layers of a model.
    """

    def __init__(self) -> None:
        self.handover = Handover()
        self._copies = ManyCopies()

    def fill(self, groups: Sequence[Bordered], adapters: Sequence[Tensor]) -> None:
        """Copy the adapters, A and B of each projection, into the borders of their groups.

        Equivalent PyTorch, for each: ``A_view.copy_(A); B_view.copy_(scaling * B)``, and zeros in
        what a larger rank may have left.
        """
        self._fill(groups, adapters, _holding(groups, adapters))

    def refill(self, groups: Sequence[Bordered], adapters: Sequence[Tensor]) -> None:
        """`fill`, unless the borders still hold what a forward with these adapters put there: for
        backward, before which a forward with others may have come."""
        holds = _holding(groups, adapters)
        # what a graph's replay copies nobody notices
        may_differ = self._copies.is_captured and not is_capturing(groups[0].A)
        if may_differ or any(one.buffer.holds != holds for one in groups):
            self._fill(groups, adapters, holds)
            for one in groups:  # these may be tensors of backward's own, whose memory goes round
                one.buffer.holds = None

    @torch.no_grad()
    def _fill(self, groups: Sequence[Bordered], adapters: Sequence[Tensor], holds: tuple) -> None:
        for one in groups:
            one.buffer.holds = None  # if what follows fails
        key, _ = holds
        self._copies.copy(key, lambda: _matrices(groups, adapters))
        buffers = [one.buffer for one in groups]
        type(buffers[0]).encode(buffers)
        for buffer in buffers:
            buffer.holds = holds


def _holding(groups: Sequence[Bordered], adapters: Sequence[Tensor]) -> tuple[Hashable, tuple]:
    """(key, versions) of filled borders: the same key for the same tensors in the same places, and
    the same versions as long as nothing that PyTorch counts has changed them."""
    key = (
        tuple((g.A.data_ptr(), g.A.dtype, g.blocks, g.scalings) for g in groups),
        tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in adapters),
    )
    return key, tuple(0 if t.is_inference() else t._version for t in adapters)


def _matrices(groups: Sequence[Bordered], adapters: Sequence[Tensor]) -> Matrices:
    """The views that each adapter is copied into, and those beside it that get zeros."""
    targets: list[Tensor] = []
    sources: list[Tensor | None] = []
    scalings: list[float] = []
    left = iter(adapters)
    for group in groups:
        row, column = 0, 0
        for out, block, scaling in zip(
            group.out_features, group.blocks, group.scalings, strict=True
        ):
            A, B = next(left).detach(), next(left).detach()
            rank = len(A)
            in_A = group.A[column:]
            in_B = group.sB[row : row + out, column:]
            targets += [in_A[:rank], in_B[:, :rank]]
            sources += [A, B]
            scalings += [1.0, scaling]  # before the cast: one rounding, not two
            if rank < block:
                targets += [in_A[rank:block], in_B[:, rank:block]]
                sources += [None, None]
                scalings += [1.0, 1.0]
            row, column = row + out, column + block
    return targets, sources, scalings
