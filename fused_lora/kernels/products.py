"""Gradients that are sums over tokens, for the kernels that write them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fused_mlp.dropout import Mask

from .tiling import MAX_BLOCK_RANK


class Product(NamedTuple):
    """Operands of ``gradient.copy_(scaling * x.t() @ factor)``, for x [rows, intermediate].

    The sum is in fp32 and rounded once. With a mask, only the elements of x that it keeps count,
    scaled.
    """

    factor: Tensor  # [rows, rank] in x's dtype; x may be codes
    gradient: Tensor  # [intermediate, rank], written; of any strides, bf16, fp16 or fp32
    scaling: float = 1.0
    mask: Mask | None = None  # where the product is of the input of an adapter

    @property
    def scale(self) -> float:
        """Number that the sums are multiplied by."""
        return self.scaling if self.mask is None else self.scaling * self.mask.scale


class SwiGLUProducts(NamedTuple):
    """The products of `swiglu_backward_products`, and the gradients of the magnitudes of gate and
    up, None for one that is not needed."""

    hidden: Product | None
    gate: Product | None
    up: Product | None
    magnitudes: Sequence[Tensor | None] = (None, None)  # [intermediate], written


def split_products(products: Sequence[Product]) -> tuple[list[Product], list[int]]:
    """Return the products, split into as many as it takes for at most MAX_BLOCK_RANK ranks each."""
    parts, ranks = [], []
    for factor, gradient, scaling, mask in products:
        factors, gradients = (t.split(MAX_BLOCK_RANK, dim=1) for t in (factor, gradient))
        for some, its_gradient in zip(factors, gradients, strict=True):
            parts.append(Product(some, its_gradient, scaling, mask))
            ranks.append(some.shape[1])
    return parts, ranks
