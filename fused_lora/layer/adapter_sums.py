"""The gradients of a layer's adapters, which are sums over tokens.

Most are computed in one launch at the end of backward: `AdapterSums` collects them. The gradients
of down's A and of gate's and up's B read tensors [T, intermediate], so SwiGLU's backward computes
them in the same pass: `new_swiglu_gradients`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..kernels.products import Product, SwiGLUProducts
from ..kernels.sums_over_tokens import sums_over_tokens
from .buffer import Dropout, WeightGroup, mask_of_one
from .filling import Adapter


class AdapterSums:
    """Gradients of adapters, added as soon as a backward has their factors, computed at once.

    The factors are kept until then. No two gradients share storage.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[Tensor, list[Product]]] = []

    def add_A(
        self, group: WeightGroup, adapters: Sequence[Adapter], needed: Sequence[Adapter], x: Tensor,
        p: Tensor | None, dropout: Dropout | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Return new tensors for the gradients of each A, ``p.t() @ x``, None where not needed.

        x: what the projections read, or its codes; p then has been multiplied by their scales. p
        may be None if no A needs a gradient.
        """
        gradients: list[Tensor | None] = [None] * len(adapters)
        if p is None:
            return gradients
        products = []
        parts = zip(adapters, needed, group.by_block(p), strict=True)
        for i, (adapter, need, factor) in enumerate(parts):
            if need.A:
                rank = adapter.A.shape[0]
                gradients[i] = gradient = x.new_empty(rank, x.shape[1], dtype=adapter.A.dtype)
                mask = None if dropout is None else dropout.masks[i]
                products.append(Product(_columns(factor, rank), gradient.t(), mask=mask))
        if products:
            self._sums.append((x, products))
        return gradients

    def add_B(
        self, group: WeightGroup, adapters: Sequence[Adapter], needed: Sequence[Adapter],
        grad: Tensor, z: Tensor,
    ) -> list[Tensor | None]:  # fmt: skip
        """Return new tensors for the gradients of each B, ``s * (grad.t() @ z)``, None where not
        needed. grad: of the projections' outputs, in its first columns."""
        gradients: list[Tensor | None] = [None] * len(adapters)
        parts = zip(
            adapters, needed, group.by_projection(grad), group.by_block(z), group.scalings,
            strict=True,
        )  # fmt: skip
        for i, (adapter, need, part, factor, scaling) in enumerate(parts):
            if need.B:
                rank = adapter.A.shape[0]
                gradients[i] = gradient = grad.new_empty(part.shape[1], rank, dtype=adapter.B.dtype)
                self._sums.append((part, [Product(_columns(factor, rank), gradient, scaling)]))
        return gradients

    def compute(self) -> None:
        """Write all gradients that were added, and let go of their factors."""
        sums_over_tokens(self._sums)
        self._sums = []


def _columns(factor: Tensor, rank: int) -> Tensor:
    """Return the columns of its block that an adapter has."""
    return factor if factor.shape[1] == rank else factor[:, :rank]


class SwiGLUGradients(NamedTuple):
    """The gradients that SwiGLU's backward pass writes, None where not needed, and its products."""

    down_A: Tensor | None
    gate_B: Tensor | None
    up_B: Tensor | None
    products: SwiGLUProducts


def new_swiglu_gradients(
    gate_up: Tensor, group: WeightGroup, p: Tensor, z: Tensor, adapters: Sequence[Adapter],
    needed: Sequence[Adapter], dropout: Dropout | None,
) -> SwiGLUGradients:  # fmt: skip
    """Return new tensors for ``p.t() @ h``, ``s * (dgate.t() @ z)`` and ``s * (dup.t() @ z)``.

    adapters: of gate, up and down. group, z: of gate and up. p, dropout: of down. Gradients are
    contiguous, as a .grad has to be.
    """
    (*adapters, down), (*needed, down_needed) = adapters, needed
    intermediate = gate_up.shape[1] // 2
    down_A = down_product = None
    if down_needed.A:
        A = down.A
        rank = A.shape[0]
        down_A = gate_up.new_empty(rank, intermediate, dtype=A.dtype)
        down_product = Product(p[:, :rank], down_A.t(), mask=mask_of_one(dropout))
    products: list[Product | None] = []
    for adapter, need, first, scaling in zip(
        adapters, needed, group.starts, group.scalings, strict=True
    ):  # fmt: skip
        product = None
        if need.B:
            rank = adapter.A.shape[0]
            gradient = gate_up.new_empty(intermediate, rank, dtype=adapter.B.dtype)
            product = Product(z[:, first : first + rank], gradient, scaling)
        products.append(product)
    gate_product, up_product = products
    gate_B, up_B = (one and one.gradient for one in products)
    return SwiGLUGradients(
        down_A, gate_B, up_B, SwiGLUProducts(down_product, gate_product, up_product)
    )
