"""The gradients of a layer's adapters that are sums over tokens."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fused_mlp.dropout import Masks

from ..kernels.sums_over_tokens import sums_over_tokens
from ..kernels.swiglu_products_backward import Product
from .buffer import Bordered


class AdapterSums:
    """Gradients of adapters, each added where a backward has what it is made of, computed at once.

    What is added is kept until then. Every gradient has a storage of its own.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[Tensor, list[Product]]] = []

    def add(
        self,
        bordered: Bordered,
        kinds: Sequence[tuple[int, torch.dtype]],
        needed: Sequence[bool],
        x: Tensor | None,
        grad: Tensor | None,
        z: Tensor | None,
        p: Tensor | None,
        masks: Masks | None = None,
    ) -> list[Tensor | None]:
        """New tensors for the gradients of A, B, A, B ..., None where not needed.

        Written by `compute`, as ``p.t() @ x`` and ``s * (grad.t() @ z)``, of each projection its
        part; x and p may be None if no A needs one, grad and z if no B does. masks: of x, for each
        projection. Of an x that is codes p is multiplied by the scales of its rows.
        """
        gradients: list[Tensor | None] = [None] * len(kinds)
        of_x: list[Product] = []
        blocks = accumulate(bordered.blocks, initial=0)
        outputs = accumulate(bordered.out_features, initial=0)
        for i, (block, first, out) in enumerate(
            zip(blocks, outputs, bordered.out_features, strict=False)
        ):
            rank, dtype = kinds[2 * i]
            if needed[2 * i]:
                assert x is not None and p is not None
                gradients[2 * i] = A = x.new_empty(rank, x.shape[1], dtype=dtype)
                mask = None if masks is None else masks[i]
                of_x.append(Product(p[:, block : block + rank], A.t(), mask=mask))
            rank, dtype = kinds[2 * i + 1]
            if needed[2 * i + 1]:
                assert grad is not None and z is not None
                gradients[2 * i + 1] = B = grad.new_empty(out, rank, dtype=dtype)
                product = Product(z[:, block : block + rank], B, bordered.scalings[i])
                self._sums.append((grad[:, first : first + out], [product]))
        if of_x:
            assert x is not None
            self._sums.append((x, of_x))
        return gradients

    def compute(self) -> None:
        """Write all gradients that were added, and let go of what they are made of."""
        sums_over_tokens(self._sums)
        self._sums = []
