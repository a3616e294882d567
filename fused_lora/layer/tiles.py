"""A block's backward in tiles of rows, where all in it but the sums over tokens is by row.

What a block computes between its ends then exists for one tile at a time. The gradients of what it
trains are computed for each tile in fp32, added up in the order of the rows, and rounded once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_mlp.dropout import ROWS_OF_A_WORD
from fused_mlp.launching import cdiv

from .adapter_sums import AdapterSums
from .block import BlockBackward, Gradient
from .filling import Adapter
from .operands import Kind, Kinds, Trained


def tiles_of(rows: int, tile_rows: int | None) -> list[slice]:
    """Return tiles of at least tile_rows, or one for all if that is None.

    All are of one size but for the last, which may be smaller: the first one's memory is enough for
    each. They begin where a word of dropout's bits does.
    """
    count = 1 if tile_rows is None else max(rows // tile_rows, 1)
    size = cdiv(cdiv(rows, count), ROWS_OF_A_WORD.value) * ROWS_OF_A_WORD.value
    return [slice(first, min(first + size, rows)) for first in range(0, rows, max(size, 1))]


class TiledBackward:
    """The backward of one block, tile by tile.

    run: of all rows. x: the residual. grad_x: its gradient, which the tiles write. before: who
    takes that next.
    """

    def __init__(
        self, run: BlockBackward, x: Tensor, gradient: Gradient, before: BlockBackward | None
    ):
        self._run, self._gradient = run, gradient
        self.grad_x = run.new_gradient(x, before)
        adapters, self._needed, kinds = run.trained
        self._kinds = Trained(tuple(adapters), *(kinds or ())).flat()
        self._adapters = [  # memory for their gradients is made like them
            Adapter(*(one.to("meta", torch.float32) for one in adapter)) for adapter in adapters
        ]
        self._in_fp32 = kinds and Kinds(
            [*map(_in_fp32, kinds.biases)], [*map(_in_fp32, kinds.magnitudes)],
            _in_fp32(kinds.norm), _in_fp32(kinds.norm_after),
        )  # fmt: skip
        self._sums: list[Tensor] = []
        self._are_there: list[bool] = []

    def at(self, rows: slice) -> tuple[BlockBackward, Gradient]:
        """Return the backward of these rows alone, and the gradient that it starts from."""
        run = self._run
        tile = BlockBackward(
            run.frame, run.dropouts.at(rows), self._adapters, self._needed, self._in_fp32,
            AdapterSums(),
        )  # fmt: skip
        tile.grad_x = self.grad_x.at(rows)
        return tile, self._gradient.at(rows)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a tile's gradients of what the block trains."""
        self._are_there = [one is not None for one in gradients]
        found = [one for one in gradients if one is not None]
        if self._sums and found:
            torch._foreach_add_(self._sums, found)
        else:
            self._sums = found

    def trained(self) -> tuple[Tensor | None, ...]:
        """Return the sums, in the dtypes of what is trained."""
        sums = iter(self._sums)
        return tuple(
            next(sums).to(kind.dtype) if is_there else None
            for kind, is_there in zip(self._kinds, self._are_there, strict=True)
        )


def _in_fp32(kind: Kind | None) -> Kind | None:
    return kind and kind._replace(dtype=torch.float32)
