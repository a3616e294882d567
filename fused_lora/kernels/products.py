"""Gradients that are sums over tokens, for the kernels that write them, and their checks."""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from torch import Tensor

from fused_mlp.dropout import Mask
from fused_mlp.launching import DTYPES, cdiv

from .dropped_products import check_mask
from .fp8_rows import E4M3
from .rows import check_alike, check_rows
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
    """The products of `swiglu_backward_products`, None for one that is not needed."""

    hidden: Product | None
    gate: Product | None
    up: Product | None


def split_products(products: Sequence[Product]) -> tuple[list[Product], list[int]]:
    """Return the products, split into as many as it takes for at most MAX_BLOCK_RANK ranks each."""
    parts, ranks = [], []
    for factor, gradient, scaling, mask in products:
        factors, gradients = (t.split(MAX_BLOCK_RANK, dim=1) for t in (factor, gradient))
        for some, its_gradient in zip(factors, gradients, strict=True):
            parts.append(Product(some, its_gradient, scaling, mask))
            ranks.append(some.shape[1])
    return parts, ranks


def check_product(
    name: str, kernel, product: Product, like: Tensor, columns: int, which: str = ""
) -> None:
    """Raise ValueError unless a factor and its gradient fit an x of these columns and as many rows
    as like has."""
    factor, gradient = product[:2]
    # numel: 1 where there is no such dimension, which is what is refused then
    rows, rank = like.shape[:1].numel(), factor.shape[-1:].numel()
    check_rows(name, kernel, (rows, rank), **{f"factor{which}": factor})
    check_alike(name, f"factor{which}", factor, like)
    if gradient.shape != (columns, rank):
        given, wanted = list(gradient.shape), [columns, rank]
        raise ValueError(f"{name}: gradient{which} is {given}, should be {wanted}")
    if gradient.device != like.device or gradient.dtype not in DTYPES:
        raise ValueError(
            f"{name}: gradient{which} is {gradient.dtype} on {gradient.device}, should be "
            f"bfloat16, float16 or float32 on {like.device}"
        )


def ranks_if_right(x: Tensor, products: Sequence[Product], first: Tensor) -> list[int] | None:
    """Return the products' ranks if they are right. `refuse_products` says what is wrong, but takes
    three times as long."""
    dtype, device = first.dtype, first.device
    is_coded = x.dtype == E4M3
    if x.ndim != 2 or (x.dtype != dtype and not is_coded) or x.device != device:
        return None
    rows, columns = x.shape
    if rows != first.shape[0] or (x.stride(1) != 1 and columns > 1):
        return None
    ranks = []
    for factor, gradient, _, mask in products:
        if factor.ndim != 2 or factor.dtype != dtype or factor.device != device:
            return None
        count, rank = factor.shape
        if (
            count != rows
            or (factor.stride(1) != 1 and rank > 1)
            or gradient.shape != (columns, rank)
            or gradient.dtype not in DTYPES
            or gradient.device != device
            or (mask is not None and (is_coded or mask.bits.shape != (cdiv(rows, 32), columns)))
        ):
            return None
        ranks.append(rank)
    return ranks


def refuse_products(
    name: str, kernel, i: int, x: Tensor, products: Sequence[Product], first: Tensor
) -> NoReturn:
    """Raise the ValueError that says what does not fit."""
    is_coded = x.dtype == E4M3
    x = x.to(first.dtype) if is_coded else x  # what follows looks at its shape
    rows, columns = first.shape[:1].numel(), x.shape[-1:].numel()
    check_rows(name, kernel, (rows, columns), **{f"x {i}": x})
    check_alike(name, f"x {i}", x, first)
    for j, product in enumerate(products):
        check_product(name, kernel, product, first, columns, f" {j} of x {i}")
        mask = product.mask
        if mask is not None and is_coded:
            raise ValueError(f"{name}: mask {j} of x {i}, which is codes, should be None")
        if mask is not None:
            check_mask(f"{name}: mask {j} of x {i}", mask, x)
    raise AssertionError("there is nothing to refuse")
