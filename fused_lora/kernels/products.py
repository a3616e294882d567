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
    """``gradient.copy_(scaling * x.t() @ factor)``, for x [rows, intermediate], in fp32 and rounded
    once; with a mask, of what it keeps of x, scaled."""

    factor: Tensor  # [rows, rank] in x's dtype; x may be codes
    gradient: Tensor  # [intermediate, rank], written; of any strides, bf16, fp16 or fp32
    scaling: float = 1.0
    mask: Mask | None = None  # where the product is of the input of an adapter

    @property
    def scale(self) -> float:
        """The factor of the sums."""
        return self.scaling if self.mask is None else self.scaling * self.mask.scale


class SwiGLUProducts(NamedTuple):
    """The products of `swiglu_backward_products`, None for one that is not needed."""

    hidden: Product | None
    gate: Product | None
    up: Product | None


def split_products(products: Sequence[Product]) -> tuple[list[Product], list[int]]:
    """The products, each as many as it takes to have at most MAX_BLOCK_RANK ranks in one."""
    parts, ranks = [], []
    for factor, gradient, scaling, mask in products:
        of_factor, of_gradient = (t.split(MAX_BLOCK_RANK, dim=1) for t in (factor, gradient))
        for some, its_gradient in zip(of_factor, of_gradient, strict=True):
            parts.append(Product(some, its_gradient, scaling, mask))
            ranks.append(some.shape[1])
    return parts, ranks


def check_product(name: str, kernel, product: Product, gate_up: Tensor) -> None:
    """Raise ValueError unless a factor and its gradient fit [gate | up]."""
    rows, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    factor, gradient = product[:2]
    rank = factor.shape[-1]
    check_rows(name, kernel, (rows, rank), factor=factor)
    check_alike(name, "factor", factor, gate_up)
    _check_gradient(name, "gradient", gradient, (intermediate, rank), gate_up)


def _check_gradient(
    name: str, key: str, gradient: Tensor, shape: tuple[int, int], like: Tensor
) -> None:
    if gradient.shape != shape:
        raise ValueError(f"{name}: {key} is {list(gradient.shape)}, should be {list(shape)}")
    if gradient.device != like.device or gradient.dtype not in DTYPES:
        raise ValueError(
            f"{name}: {key} is {gradient.dtype} on {gradient.device}, should be bfloat16, "
            f"float16 or float32 on {like.device}"
        )


def ranks_if_right(x: Tensor, products: Sequence[Product], first: Tensor) -> list[int] | None:
    """Return the products' ranks if they are right. `refuse_products` says what is not, in three
    times as long."""
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
    # numel: 1 where there is no such dimension, which is what is refused then
    rows, columns = first.shape[:1].numel(), x.shape[-1:].numel()
    check_rows(name, kernel, (rows, columns), **{f"x {i}": x})
    check_alike(name, f"x {i}", x, first)
    for j, (factor, gradient, _, mask) in enumerate(products):
        key, rank = f"factor {j} of x {i}", factor.shape[-1:].numel()
        check_rows(name, kernel, (rows, rank), **{key: factor})
        check_alike(name, key, factor, first)
        if mask is not None and is_coded:
            raise ValueError(f"{name}: mask {j} of x {i}, which is codes, should be None")
        if mask is not None:
            check_mask(f"{name}: mask {j} of x {i}", mask, x)
        _check_gradient(name, f"gradient {j} of x {i}", gradient, (columns, rank), first)
    raise AssertionError("there is nothing to refuse")
