"""Products with a bordered weight (`bordered.py`), for `decoder_layer.py`.

With M = [[W, s B], [A, 0]], z = x A' and p = dy s B, K grows where what goes into the product is
the narrow side, else N does:

    y  = [x | z] M[:out]'      or  [y | z]  = x M[:, :in]',  then y  += z (s B)'
    dx = [dy | p] M[:, :in]    or  [dx | p] = dy M[:out],    then dx += p A
    dA = p' x,  dB = s dy' z
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .rows import empty_rows


class Bordered(NamedTuple):
    """One buffer and how it is laid out: what the products below need and do not train."""

    matrix: Tensor  # [out + width, in + width]
    bias: Tensor | None  # [out + width], zero after out
    in_features: int
    out_features: tuple[int, ...]  # of each projection; out is their sum
    blocks: tuple[int, ...]  # columns of the border for each; width is their sum, rounded up
    scalings: tuple[float, ...]

    @property
    def out(self) -> int:
        return sum(self.out_features)

    @property
    def width(self) -> int:
        return self.matrix.shape[1] - self.in_features


def grow_k_forward(x_ext: Tensor, bordered: Bordered) -> Tensor:
    """y [T, out] from x_ext [T, in + width], whose first columns are x; x A' is written into the
    others. Equivalent: ``x_ext[:, in:] = x @ A.t(); x_ext @ M[:out].t() + bias``."""
    matrix, bias, inputs, out = *bordered[:3], bordered.out
    torch.mm(x_ext[:, :inputs], matrix[out:, :inputs].t(), out=x_ext[:, inputs:])
    return _product(x_ext, matrix[:out], None if bias is None else bias[:out])


def extended_product(x: Tensor, bordered: Bordered) -> Tensor:
    """[y | x A'] [T, out + width] from x [T, in]: ``x @ M[:, :in].t() + bias``."""
    matrix, bias, inputs = bordered[:3]
    y_ext = empty_rows(x, x.shape[0], matrix.shape[0])
    return _product(x, matrix[:, :inputs], bias, out=y_ext)


def grow_k_backward(grad_ext: Tensor, bordered: Bordered) -> Tensor:
    """dx [T, in] from grad_ext [T, out + width], whose first columns are dy; p = dy sB is written
    into the others. Equivalent: ``grad_ext[:, out:] = dy @ sB; grad_ext @ M[:, :in]``."""
    matrix, inputs, out = bordered.matrix, bordered.in_features, bordered.out
    torch.mm(grad_ext[:, :out], matrix[:out, inputs:], out=grad_ext[:, out:])
    return grad_ext @ matrix[:, :inputs]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def kinds_of(adapters: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
    """Rank and dtype of A, B, A, B ...: what their gradients are to be."""
    return [(adapters[i - i % 2].shape[0], t.dtype) for i, t in enumerate(adapters)]


def check_adapters(name: str, adapters: Sequence[Tensor], bordered: Bordered) -> None:
    """Raise ValueError unless there is an A and a B of each projection that fit the border."""
    inputs, wanted = bordered.in_features, len(bordered.out_features)
    if len(adapters) != 2 * wanted:
        raise ValueError(
            f"{name}: {len(adapters)} adapter tensors given, should be {2 * wanted}: A and "
            f"B of each of {wanted} projections"
        )
    for i, (A, B) in enumerate(zip(adapters[::2], adapters[1::2], strict=True)):
        out, block, r = bordered.out_features[i], bordered.blocks[i], A.shape[0]
        if A.shape != (r, inputs) or B.shape != (out, r) or r > block:
            raise ValueError(
                f"{name}: A {i} is {list(A.shape)} and B {i} {list(B.shape)}, should be "
                f"[r, {inputs}] and [{out}, r] of one r up to {block}"
            )
