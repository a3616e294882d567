"""Products with a bordered weight (`buffer.py`).

With M = [[W, s B], [A, 0]], z = x A' and p = dy s B:

    y  = [x | z] M[:out]'
    dx = [dy | p] M[:, :in]

and with dropout, for the mask mi of each projection, zi = (x mi) Ai' by a kernel, and

    dx = m1 (p1 A1) + m2 (p2 A2) + ... + dy W       what comes first by another
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_mlp.dropout import Masks

from ..kernels.dropped_products import dropped_gradient, dropped_products
from .fp8.buffer import Fp8Buffer

Codes = tuple[Tensor, Tensor]  # of rows in FP8, and their scales


class Buffer:
    """The memory of one border, while something needs it, and its products.

    matrix: [out + width, in + width]. bias: [out + width], zero after out, or None. holds: what
    says whose adapters are in the border now, None for nobody knows whose.
    """

    def __init__(self, matrix: Tensor, bias: Tensor | None, outputs: int, inputs: int):
        self.matrix, self.bias = matrix, bias
        self.holds: tuple | None = None
        self.weight = matrix[:outputs, :inputs]
        self.A, self.sB = matrix[outputs:, :inputs], matrix[:outputs, inputs:]

    @staticmethod
    def encode(buffers: Sequence) -> None:
        """Called when A and sB of all have been filled."""

    def product(self, x_ext: Tensor, bias: Tensor | None) -> Tensor:
        """[x | z] M[:out]' + bias"""
        return _product(x_ext, self.matrix[: len(self.sB)], bias)

    def add_product(self, total: Tensor, x_ext: Tensor, multiplier: float) -> None:
        """total += multiplier [x | z] M[:out]'"""
        total.addmm_(x_ext, self.matrix[: len(self.sB)].t(), alpha=multiplier)

    def gradient_and_p(
        self, grad_ext: Tensor, x_scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """([dy | p] M[:, :in], p) of [dy | room for p]. x, which is no codes, has no scales."""
        outputs, inputs = self.weight.shape
        dy, p = grad_ext[:, :outputs], grad_ext[:, outputs:]
        torch.mm(dy, self.sB, out=p)
        return grad_ext @ self.matrix[:, :inputs], p

    def add_gradient(self, grad: Tensor, dy: Tensor) -> None:
        """grad += dy W"""
        grad.addmm_(dy, self.weight)


class Extended(NamedTuple):
    """[x | z] as a product has read it: x [T, in], z = x A', and the scales of rows of codes."""

    x: Tensor
    z: Tensor
    scales: Tensor | None = None


class Bordered(NamedTuple):
    """One buffer and how it is laid out: what the products below need and do not train."""

    buffer: Buffer | Fp8Buffer
    in_features: int
    out_features: tuple[int, ...]  # of each projection; out is their sum
    blocks: tuple[int, ...]  # columns of the border for each; width is their sum, rounded up
    scalings: tuple[float, ...]
    own_bias: Tensor | None = None  # in the place of the buffer's, where one is trained

    @property
    def A(self) -> Tensor:
        return self.buffer.A

    @property
    def sB(self) -> Tensor:
        return self.buffer.sB

    @property
    def bias(self) -> Tensor | None:
        return self.buffer.bias if self.own_bias is None else self.own_bias

    @property
    def base_bias(self) -> Tensor | None:
        """Without what is beside it for z."""
        return None if self.bias is None else self.bias[: self.out]

    @property
    def out(self) -> int:
        return sum(self.out_features)

    @property
    def x_columns(self) -> int:
        """The columns of [x | z]."""
        return self.in_features + len(self.A)

    @property
    def grad_columns(self) -> int:
        """The columns of [dy | p]."""
        return self.out + len(self.A)


def grow_k_forward(x_ext: Tensor, bordered: Bordered, masks: Masks | None = None) -> Tensor:
    """y [T, out] from x_ext [T, in + width], whose first columns are x; x A' is written into the
    others. Equivalent: ``x_ext[:, in:] = x @ A.t(); x_ext @ M[:out].t() + bias``."""
    x, z = x_ext[:, : bordered.in_features], x_ext[:, bordered.in_features :]
    if masks is None:
        torch.mm(x, bordered.A.t(), out=z)
    else:
        dropped_products(x, bordered.A, bordered.blocks, masks, z)
    return bordered.buffer.product(x_ext, bordered.base_bias)


def grow_k_backward(
    grad_ext: Tensor, bordered: Bordered, masks: Masks | None = None,
    x_scales: Tensor | None = None, codes: Codes | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx [T, in], p [T, width]) from grad_ext [T, out + width], whose first columns are dy, and
    whose others p may be written into. Equivalent: ``p = dy @ sB; dy @ W + p @ A``. Of an x that
    was codes p is multiplied by their scales, for dA. codes: dy's, in FP8, where they are there."""
    if codes is not None and isinstance(bordered.buffer, Fp8Buffer):
        return bordered.buffer.gradient_of_codes(*codes, grad_ext.dtype, x_scales)
    if masks is None:
        return bordered.buffer.gradient_and_p(grad_ext, x_scales)
    dy, p = grad_ext[:, : bordered.out], grad_ext[:, bordered.out :]
    torch.mm(dy, bordered.sB, out=p)
    grad = grad_ext.new_empty(grad_ext.shape[0], bordered.in_features)
    dropped_gradient(p, bordered.A, bordered.blocks, masks, grad)
    bordered.buffer.add_gradient(grad, dy)
    return grad, p


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


def with_own_biases(name: str, bordered: Bordered, biases: Sequence[Tensor | None]) -> Bordered:
    """The buffer with a bias of each projection, or None, in the place of its own, if there are
    any."""
    if all(bias is None for bias in biases):
        return bordered
    own, row = bordered.A.new_zeros(bordered.grad_columns), 0
    for i, (bias, out) in enumerate(zip(biases, bordered.out_features, strict=True)):
        if bias is not None:
            if bias.shape != (out,):
                raise ValueError(f"{name}: bias {i} is {list(bias.shape)}, should be {[out]}")
            own[row : row + out].copy_(bias)
        row += out
    return bordered._replace(own_bias=own)
