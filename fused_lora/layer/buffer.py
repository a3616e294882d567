"""Bordered weights: what a layer asks of a frozen weight and its adapters.

W [out, in], and A [width, in] and s B [out, width] of all its projections, make one matrix

    M = [[W, s B],      and with z = x A', p = dy s B      y  = [x | z] M[:out]'
         [A,  0 ]]                                         dx = [dy | p] M[:, :in]

A decoder layer has four: q, k and v; o; gate and up; down. It asks

    q, k, v; gate, up   project_norm       y of a norm of x
    o                   add_projected      a residual plus y
    down                add_swiglu         a residual plus y of SwiGLU
    o                   norm_backward      its dy, which comes out of a norm's backward
    gate, up            swiglu_backward    its dy, which comes out of SwiGLU's backward
    all                 gradient           dx and p of dy

No code outside a buffer's file knows which kind it is. `Buffer` multiplies in the weight's dtype. A
kind that multiplies in FP8 overrides these methods. A kind that only stores its weights differently
overrides just `encode`, and writes W into `matrix` there (`scratch.py`). `Filling` calls it before
a forward, and before a backward if `key` has changed.

With dropout, separate kernels compute every projection's z and p A from masked tensors.

DoRA multiplies each of y's features by a factor (`kernels/magnitudes.py`). A buffer gives y without
it, and whoever reads y multiplies. So does whoever writes dy.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_mlp.dropout import Mask, Masks
from fused_mlp.utils import without_autocast

from ..kernels.dropped_products import dropped_gradient, dropped_products
from ..kernels.extend_rows import extend_rows
from ..kernels.magnitudes import ColumnScale, Factors, Rescaled, magnitude_factors, sum_magnitudes
from ..kernels.products import SwiGLUProducts
from ..kernels.rows import empty_rows
from ..kernels.swiglu_products_backward import swiglu_backward_products
from ..kernels.swiglu_products_forward import swiglu_forward_product
from ..rerun import once
from .dropped_base import add_dropped_gradient, dropped_base
from .gathering import WeightSource
from .residual import Norm, apply_norm, norm_backward


class Dropout(NamedTuple):
    """The masks of one buffer's projections, and how many columns of the border each has."""

    masks: Masks
    blocks: tuple[int, ...]

    def at(self, rows: slice) -> "Dropout":
        """Return the masks of these rows. The first row begins a word of bits."""
        return Dropout([mask and mask.at(rows) for mask in self.masks], self.blocks)


class Activation(NamedTuple):
    """The activation of an MLP's gate, and the scale of its gate and up, if there is one."""

    name: str = "silu"
    scale: ColumnScale | None = None


class ProductInput(NamedTuple):
    """The rows that a product has read, [x | z], as backward needs them."""

    x: Tensor  # [T, in]
    z: Tensor  # [T, width], x A'
    scales: Tensor | None = None  # [T, 1], of the rows of an x in codes


class Incoming(NamedTuple):
    """The gradient dy of what a product gave."""

    rows: Tensor | None  # [T, out + width]: dy, and room for p; None: only `coded` exists
    coded: Any = None  # dy in the form that the buffer multiplies, where the pass before made it
    # by projection, where dropout drops in front of the frozen weight too (`dropped_base.py`)
    dropped: Sequence[Tensor] = ()


class Buffer:
    """The memory of a bordered weight, while something needs it, and its products.

    matrix: [out + width, in + width]. bias: [out + width], zero after out, or None. key: of the
    adapters that are in the border now; None: unknown. sources: of weights that lie elsewhere, and
    the rows that they are brought into. group: which of a layer's buffers it is, if that matters.
    weight, A, sB: the parts of it. row_scales: [out], of a weight in codes, or None.
    """

    row_scales: Tensor | None = None
    sources: Sequence[tuple[WeightSource, Tensor]] = ()
    group = 0

    def __init__(self, matrix: Tensor, bias: Tensor | None, outputs: int, inputs: int):
        self.matrix, self.bias = matrix, bias
        self.key: tuple | None = None
        self.weight = matrix[:outputs, :inputs]
        self.A, self.sB = matrix[outputs:, :inputs], matrix[:outputs, inputs:]

    @staticmethod
    def encode(buffers: Sequence) -> None:
        """Prepare these buffers for matmuls, after their A and sB have been filled."""

    # --- forward ---

    def project_norm(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None, dropout: Dropout | None,
        copy: Tensor | None, in_fp32: bool = False,
    ) -> tuple[Tensor, ProductInput, Tensor | None]:  # fmt: skip
        """Return (n W' + bias + adapters, [n | z], rstd) of n, the norm of x, or x without one.

        Writes x into copy as well, if copy is given. n is in the buffer's dtype, and so is what the
        matmul gives, unless it is to be in_fp32, without a bias then, and can be.
        """
        inputs = x.shape[1]
        extended = empty_rows(self.A, x.shape[0], inputs + self.A.shape[0])
        normed, z = extended.split_with_sizes([inputs, self.A.shape[0]], 1)
        rstd = apply_norm(x, norm, normed, copy)
        if dropout is None:
            torch.mm(normed, self.A.t(), out=z)
        else:
            dropped_products(normed, self.A, dropout.blocks, dropout.masks, z)
        if in_fp32:
            y = x.new_empty(x.shape[0], len(self.sB), dtype=torch.float32)
            self.add_product(y, extended, 1.0, adds=False)
        else:
            y = self.product(extended, bias)
        return y, ProductInput(normed, z), rstd

    def accumulates(self, dropout: Dropout | None) -> bool:
        """Return True if the matmul adds to `total`, where the residual has to lie already. False:
        a pass after the matmul adds the residual."""
        return True

    def add_projected(
        self, x: Tensor, extended: Tensor | None, residual: Tensor | None, total: Tensor,
        bias: Tensor | None, multiplier: float, dropout: Dropout | None,
    ) -> Tensor:  # fmt: skip
        """Make total residual + multiplier (x W' + bias + adapters); return z, new.

        residual: not read if `accumulates`: total then holds it already. None: 0; total may then be
        in fp32. extended: rows for [x | z]; x may be their first columns. None: allocate them if
        needed. One matmul adds and rounds once. A bias rounds once more.
        """
        z = x.new_empty(x.shape[0], self.A.shape[0])
        if extended is None:
            extended = empty_rows(x, x.shape[0], x.shape[1] + self.A.shape[0])
        if dropout is None:
            extend_rows(x, self.A, extended, z)
        else:
            dropped_products(x, self.A, dropout.blocks, dropout.masks, z)
            first, rest = extended.split_with_sizes([x.shape[1], z.shape[1]], 1)
            if first.data_ptr() != x.data_ptr():
                first.copy_(x)
            rest.copy_(z)
        self.add_product(total, extended, multiplier, adds=residual is not None)
        if bias is not None:
            total.add_(bias, alpha=multiplier)
        return z

    def add_swiglu(
        self, gate_up: Tensor, residual: Tensor | None, total: Tensor | None,
        bias: Tensor | None, multiplier: float, activation: Activation, dropout: Dropout | None,
    ) -> Tensor:  # fmt: skip
        """Make total residual + multiplier (h W' + bias + adapters), as `add_projected` does, for
        h = silu(gate) up, or with GELU; return z, new. Without total compute z alone."""
        inputs, mask = self.A.shape[1], mask_of_one(dropout)
        if total is None:
            return swiglu_forward_product(gate_up, self.A, None, None, mask, *activation)
        extended = empty_rows(gate_up, gate_up.shape[0], inputs + self.A.shape[0])
        hidden, copy = extended.split_with_sizes([inputs, self.A.shape[0]], 1)
        z = swiglu_forward_product(gate_up, self.A, hidden, copy, mask, *activation)
        self.add_product(total, extended, multiplier, adds=residual is not None)
        if bias is not None:
            total.add_(bias, alpha=multiplier)
        return z

    # --- backward ---

    def norm_backward(
        self, grad_y: Tensor, grad_residual: Tensor, x: Tensor, norm: Norm | None,
        rstd: Tensor | None, grad_weight: Tensor | None, is_read: bool,
    ) -> tuple[Tensor, Incoming]:  # fmt: skip
        """Return the gradient of x, which was normed and goes on as the residual, in x's dtype and
        as `gradient` reads it. A trained weight's goes into grad_weight.

        is_read: `gradient` reads it next, as it is and without dropout.
        """
        grad_x, rows = self.rows_for_gradient(x)
        norm_backward(grad_y, grad_residual, x, norm, rstd, grad_x, grad_weight)
        if grad_x.dtype != rows.dtype:
            rows[:, : grad_x.shape[1]].copy_(grad_x)
        return grad_x, Incoming(rows)

    def rows_for_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return new memory for a gradient like x, and for [dy | p] of that. The first is the
        second's first columns, unless x has another dtype."""
        rows = empty_rows(self.A, len(x), sum(self.sB.shape))
        return rows[:, : x.shape[1]] if x.dtype == rows.dtype else torch.empty_like(x), rows

    def swiglu_backward(
        self, grad_hidden: Tensor, gate_up: Tensor, products: SwiGLUProducts,
        activation: Activation, is_read: bool,
    ) -> Incoming:  # fmt: skip
        """Return the gradient of gate_up, and write the products' gradients.

        is_read: `gradient` alone reads it, without dropout.
        """
        outputs, width = self.sB.shape
        rows = empty_rows(gate_up, gate_up.shape[0], outputs + width)
        swiglu_backward_products(
            grad_hidden,
            gate_up,
            products,
            rows[:, :outputs],
            activation.name,
            scale=activation.scale,
        )
        return Incoming(rows)

    def gradient(
        self, incoming: Incoming, scales: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor]:
        """Return (dx [T, in], p [T, width]). p may lie beside dy in incoming's rows.

        scales: those of `ProductInput`, by which p is multiplied for dA.
        """
        assert incoming.rows is not None
        dy, p = incoming.rows.split_with_sizes(self.sB.shape, 1)
        torch.mm(dy, self.sB, out=p)
        if dropout is None:
            return incoming.rows @ self.matrix[:, : self.A.shape[1]], p
        grad = dy.new_empty(dy.shape[0], self.A.shape[1])
        dropped_gradient(p, self.A, dropout.blocks, dropout.masks, grad)
        self.add_gradient(grad, dy)
        if incoming.dropped:
            weights = self.weights([one.shape[1] for one in incoming.dropped])
            add_dropped_gradient(incoming.dropped, weights, dropout.masks, grad)
        return grad, p

    def adapter_gradient(self, dy: Tensor, scales: Tensor | None) -> Tensor:
        """Return `gradient`'s p alone, new."""
        p = dy @ self.sB
        return p if scales is None else p.mul_(scales)

    # --- the weight's own products, where the adapters' are made beside it ---

    def product(self, extended: Tensor, bias: Tensor | None) -> Tensor:
        """Return [x | z] M[:out]' + bias."""
        weight = self.matrix[: self.sB.shape[0]].t()
        return extended @ weight if bias is None else torch.addmm(bias, extended, weight)

    def add_product(
        self, total: Tensor, extended: Tensor, multiplier: float, adds: bool = True
    ) -> None:
        """Add multiplier [x | z] M[:out]' to total, or write it there."""
        weight = self.matrix[: self.sB.shape[0]].t()
        if total.dtype == extended.dtype:  # beta = 0 ignores what total holds
            total.addmm_(extended, weight, alpha=multiplier, beta=float(adds))
        else:
            add_matmul_to_fp32(total, extended, weight, multiplier, adds)

    def add_gradient(self, grad: Tensor, dy: Tensor) -> None:
        """Add dy W to grad."""
        grad.addmm_(dy, self.weight)

    def weights(self, outs: Sequence[int]) -> Sequence[Tensor]:
        """Return the weights of projections with these outputs, in the dtype of the adapters."""
        weight, scales = self.weight, self.row_scales
        if scales is not None:
            weight = (weight.float() * scales[:, None]).to(self.A.dtype)
        return weight.split_with_sizes([*outs])


def add_matmul_to_fp32(
    total: Tensor, x: Tensor, weight: Tensor, multiplier: float, adds: bool = True
) -> None:
    """Add multiplier x weight, in 16 bits, to total in fp32, or write it there."""
    with without_autocast(total):
        if total.is_cuda:
            addmm, beta = torch.ops.aten.addmm.dtype_out, float(adds)
            addmm(total, x, weight, total.dtype, beta=beta, alpha=multiplier, out=total)
        else:  # whose matmuls have one dtype
            product = x.float() @ weight.float()
            (total if adds else total.zero_()).add_(product, alpha=multiplier)


def mask_of_one(dropout: Dropout | None) -> Mask | None:
    """Return the mask of a buffer with one projection."""
    return None if dropout is None else dropout.masks[0]


class PlacedWeight:
    """A weight without memory: a buffer holds it, in the buffer's format."""

    place: tuple[int, int]  # the buffer, and the row in it: what a CUDA graph reads

    def leave_buffer(self) -> None:
        """Become a plain parameter, as the same object."""
        raise NotImplementedError


class GroupLayout(NamedTuple):
    """The layout of a buffer with its projections."""

    in_features: int
    out_features: tuple[int, ...]  # of each projection
    blocks: tuple[int, ...]  # columns of the border for each
    scalings: tuple[float, ...]


class WeightGroup:
    """One buffer and how it is laid out: what its products need and do not train.

    out: the sum of out_features. starts: where blocks begin. x_columns: of [x | z]. grad_columns:
    of [dy | p]. place: equal for the same border, laid out alike. own_bias: replaces the buffer's,
    where one is trained. base_bias: the bias without what is beside it for z, None with a scale.
    scale: of what its projections give, for whoever reads that, with the bias; None: no scale.
    """

    scale: ColumnScale | None = None

    def __init__(self, buffer: Buffer, layout: GroupLayout, own_bias: Tensor | None = None):
        self.buffer, self.A, self.sB, self.layout = buffer, buffer.A, buffer.sB, layout
        self.in_features, self.out_features, self.blocks, self.scalings = layout
        self.out = sum(self.out_features)
        self.starts = tuple(accumulate(self.blocks[:-1], initial=0))
        self.own_bias = own_bias
        self.place = self.A.data_ptr(), self.A.dtype, self.blocks, self.scalings
        width = self.A.shape[0]
        self.x_columns, self.grad_columns = self.in_features + width, self.out + width
        self.bias = buffer.bias if own_bias is None else own_bias
        self.base_bias = None if self.bias is None else self.bias[: self.out]

    def with_own_bias(self, own_bias: Tensor | None) -> "WeightGroup":
        return WeightGroup(self.buffer, self.layout, own_bias)

    def scaled(self, factors: Factors | None) -> "WeightGroup":
        """Return the group with the scale of these factors."""
        if factors is None:
            return self
        group = WeightGroup(self.buffer, self.layout, self.own_bias)
        group.scale, group.base_bias = ColumnScale(*factors, self.base_bias), None
        return group

    def factors(self, magnitudes: Sequence[Tensor | None]) -> Factors | None:
        """Return what these magnitudes [out], None for a projection without, become with what the
        buffer holds. A recompute takes the first run's."""
        if all(magnitude is None for magnitude in magnitudes):
            return None
        return Factors(*once(lambda: self._factors(magnitudes), is_small=True))

    def _factors(self, magnitudes: Sequence[Tensor | None]) -> Factors:
        has_all = all(magnitude is not None for magnitude in magnitudes)
        new = torch.empty if has_all else torch.ones
        factor = new(self.out, dtype=torch.float32, device=self.A.device)
        inverse_norm = torch.empty_like(factor)
        ends = accumulate(self.out_features)
        projections = [
            Rescaled(magnitude, end - out, out, first, block)
            for magnitude, end, out, first, block in zip(
                magnitudes, ends, self.out_features, self.starts, self.blocks, strict=True
            )
            if magnitude is not None
        ]
        magnitude_factors(
            self.buffer.weight, self.A, self.sB, self.buffer.row_scales, projections, factor,
            inverse_norm,
        )  # fmt: skip
        return Factors(factor, inverse_norm)

    def dropped_base(self, x: Tensor, dropout: Dropout | None) -> Tensor | None:
        """Return what dropout in front of the frozen weights adds to what they give of x, in fp32;
        None where it drops nothing there."""
        if self.scale is None or dropout is None:
            return None
        return dropped_base(x, self.buffer.weights(self.out_features), dropout.masks)

    def dropped_gradients(
        self, grad: Tensor, dropout: Dropout | None, multiplier: float = 1.0
    ) -> Sequence[Tensor]:
        """Return the gradient of `dropped_base` by projection, given that of what is scaled, times
        the multiplier, in the first columns of grad."""
        if self.scale is None or dropout is None:
            return ()
        factors = (multiplier * (self.scale.factor - 1.0)).split_with_sizes([*self.out_features])
        grads = self.by_projection(grad)
        # one by one: each is in fp32 first
        return [(one * f).to(self.A.dtype) for one, f in zip(grads, factors, strict=True)]

    def sum_magnitudes(self, sums: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients of the projections' magnitudes from the sums of `magnitudes.py`."""
        assert self.scale is not None
        sum_magnitudes(sums, self.scale, self.out_features, gradients)

    def by_projection(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of each projection in its outputs, or in their gradient."""
        return rows[:, : self.out].split_with_sizes(self.out_features, 1)

    def by_adapter(self, border: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return the columns of each adapter in z, or in p: the first of its block."""
        rest = border.shape[1] - sum(self.blocks)
        parts = border.split_with_sizes((*self.blocks, rest), 1)[:-1]
        if self.blocks == (*ranks,):
            return list(parts)
        return [part[:, :rank] for part, rank in zip(parts, ranks, strict=True)]

    def sum_biases(self, rows: Tensor, grad_biases: Sequence[Tensor | None]) -> None:
        """Write the gradients of trained biases: each sums its projection's gradient, in the first
        columns of rows, over tokens."""
        if all(grad_bias is None for grad_bias in grad_biases):
            return
        for grad, grad_bias in zip(self.by_projection(rows), grad_biases, strict=True):
            if grad_bias is not None:
                # bf16 sums in fp32, and is rounded to the dtype that is asked for
                dtype = torch.promote_types(grad.dtype, grad_bias.dtype)
                grad_bias.copy_(grad.sum(0, dtype=dtype))
