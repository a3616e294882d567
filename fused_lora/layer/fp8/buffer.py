"""A frozen weight in FP8 with the border of its adapters, and its matmuls (`layer/buffer.py`).

W [out, in] is e4m3 codes with a scale s for each row, made once. An FP8 matmul needs the dimension
it sums over contiguous in both operands. We therefore keep two copies of the codes: W8 [out, in]
for the forward, and its transpose for the gradient of x. Together they take as many bytes as one
copy in bf16. In the transpose, W's scales lie along the sum: dy is multiplied by them before it is
coded itself.

    forward     [x | z]  to codes with a scale a row      y  = codes [W8 | border]' scales
    gradient    [dy s | p]  likewise                      dx = codes [W8' | border]' scales

z and p, the adapters' own matmuls, are computed from the same codes. They and the border are in two
halves (`kernels/fp8_rows.py`), as exact as in bf16. Where x is codes, p comes multiplied by their
scales, for dA. Because x, dy and W are coded, a matmul is 0.037 off; in bf16 it is 0.002.

The outputs of norms and SwiGLU are coded by the kernel that computes them (`kernels/row_norm.py`,
`fp8_swiglu.py`, `swiglu_products_backward.py`). So are the gradients of the inputs of SwiGLU and of
the norm after o. A separate pass codes everything else. With dropout, z comes from a masked x and
not from these codes: the forward takes z as given, and backward multiplies the adapters in bf16. Of
the tensors that `attention_block.py` and `mlp_block.py` list, n and m are saved as codes alone.
With their z they take 2.6 and 2.4 kB a token of Qwen2.5-3B instead of 4.3 and 4.2.

On the CPU, which has no FP8 matmuls, and for results in other dtypes than bf16, the codes are
multiplied in fp32.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.fp8_borders import Bordering, Halves, fp8_borders
from ...kernels.fp8_products import add_border, add_coded_border, product_of_codes
from ...kernels.fp8_rows import E4M3, fp8_rows, new_codes, padded_columns
from ...kernels.fp8_swiglu import (
    guess_gradient_scales,
    repair_gradient_codes,
    swiglu_codes,
)
from ...kernels.products import SwiGLUProducts
from ...kernels.row_norm import norm_backward_codes, norm_codes
from ...kernels.swiglu_products_backward import swiglu_backward_products
from ..buffer import Activation, Buffer, Dropout, Incoming, ProductInput
from ..residual import Norm

_serials = itertools.count()


class Codes(NamedTuple):
    """Rows in FP8."""

    values: Tensor  # [T, padded] in e4m3: the rows, and room for their border
    scales: Tensor  # [T, 1]
    dtype: torch.dtype  # that they stand for


class Fp8Buffer(Buffer):
    """A `Buffer` of codes. It multiplies by them unless there is dropout.

    weight: [out, in] codes. scales: [out] in fp32. bias: [out + width] or None, in the dtype of the
    products. width: the columns that the border has room for. made_of: by a weight's first row, of
    which change of its original the codes are (`weights/fp8_weight.py`). serial: no other's.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, width: int, dtype: torch.dtype
    ):
        outputs, inputs = codes.shape
        self.scales = self.row_scales = scales
        self.bias = bias
        self.key: tuple | None = None
        self.made_of: dict[int, int] = {}
        self.serial = next(_serials)
        self._codes = _zero_codes(codes.device, outputs, padded_columns(inputs, width))
        self._codes_t = _zero_codes(codes.device, inputs, padded_columns(outputs, width))
        self.weight = self._codes[:, :inputs]
        self.write(0, codes)
        self.A = torch.zeros(width, inputs, dtype=dtype, device=codes.device)
        self.sB = torch.zeros(outputs, width, dtype=dtype, device=codes.device)
        halves = [_zero_codes(codes.device, 2, width, count) for count in (inputs, outputs)]
        self._A_halves, self._B_halves = map(
            Halves, halves, torch.ones(2, width, device=codes.device)
        )
        self._factors, self._factors_t = torch.ones(2, width, device=codes.device)
        self._ones = torch.ones(inputs, device=codes.device)

    def write(self, row: int, codes: Tensor) -> None:
        """Overwrite the codes of some of the weight's rows, from `row` on."""
        outputs, inputs = codes.shape
        bits = codes.view(torch.uint8)
        self._codes.view(torch.uint8)[row : row + outputs, :inputs].copy_(bits)
        self._codes_t.view(torch.uint8)[:inputs, row : row + outputs].copy_(bits.t())

    @staticmethod
    def encode(buffers: Sequence) -> None:
        """Write the borders of all buffers, after their A and sB have been filled."""
        fp8_borders(
            [
                Bordering(
                    buffer.sB, buffer.A, buffer.scales, buffer._codes, buffer._codes_t,
                    buffer._factors, buffer._factors_t, buffer._B_halves, buffer._A_halves,
                )
                for buffer in buffers
            ]
        )  # fmt: skip

    # --- forward ---

    def project_norm(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None, dropout: Dropout | None,
        copy: Tensor | None, in_fp32: bool = False,
    ) -> tuple[Tensor, ProductInput, Tensor | None]:  # fmt: skip
        if dropout is not None:
            return super().project_norm(x, norm, bias, dropout, copy, in_fp32)
        padded = self._codes.shape[1]
        if norm is None:
            (codes, scales), rstd = fp8_rows(x, padded), None
        else:
            codes, scales, rstd = norm_codes(x, norm.weight, norm.eps, padded, norm.zero_centered)
        y, z = self._product_and_z(codes, scales, bias, x.dtype)
        if copy is not None:
            copy.copy_(x)
        return y, ProductInput(codes[:, : x.shape[1]], z, scales), rstd

    def accumulates(self, dropout: Dropout | None) -> bool:
        """An FP8 matmul cannot add to the residual. It rounds before that is added, but by then
        includes the adapter."""
        return dropout is not None

    def add_projected(
        self, x: Tensor, extended: Tensor | None, residual: Tensor | None, total: Tensor,
        bias: Tensor | None, multiplier: float, dropout: Dropout | None,
    ) -> Tensor:  # fmt: skip
        if dropout is not None or residual is None:
            return super().add_projected(x, extended, residual, total, bias, multiplier, dropout)
        codes, scales = fp8_rows(x, self._codes.shape[1])
        y, z = self._product_and_z(codes, scales, bias, x.dtype)
        torch.add(residual, y, alpha=multiplier, out=total)
        return z

    def add_swiglu(
        self, gate_up: Tensor, residual: Tensor | None, total: Tensor | None,
        bias: Tensor | None, multiplier: float, activation: Activation, dropout: Dropout | None,
    ) -> Tensor:  # fmt: skip
        if dropout is not None or activation.scale is not None or residual is None:
            return super().add_swiglu(
                gate_up, residual, total, bias, multiplier, activation, dropout
            )
        codes, scales = swiglu_codes(gate_up, self._codes.shape[1], activation.name)
        if total is None:
            return add_coded_border(codes, scales, self._A_halves, self._factors, gate_up.dtype)
        y, z = self._product_and_z(codes, scales, None, gate_up.dtype)
        torch.add(residual, y, alpha=multiplier, out=total)
        if bias is not None:
            total.add_(bias, alpha=multiplier)
        return z

    # --- backward ---

    def norm_backward(
        self, grad_y: Tensor, grad_residual: Tensor, x: Tensor, norm: Norm | None,
        rstd: Tensor | None, grad_weight: Tensor | None, is_read: bool,
    ) -> tuple[Tensor, Incoming]:  # fmt: skip
        if norm is None or rstd is None or grad_weight is not None or not is_read:
            return super().norm_backward(grad_y, grad_residual, x, norm, rstd, grad_weight, is_read)
        grad_x, rows = self.rows_for_gradient(x)
        codes = norm_backward_codes(
            grad_y, grad_residual, x, norm.weight, rstd, grad_x, self.scales,
            self._codes_t.shape[1], norm.zero_centered,
        )  # fmt: skip
        return grad_x, Incoming(rows, Codes(*codes, x.dtype))

    def swiglu_backward(
        self, grad_hidden: Tensor, gate_up: Tensor, products: SwiGLUProducts,
        activation: Activation, is_read: bool,
    ) -> Incoming:  # fmt: skip
        """Return the gradient as codes alone, where only `gradient` reads it."""
        if not is_read or activation.scale is not None:
            return super().swiglu_backward(grad_hidden, gate_up, products, activation, is_read)
        codes, scales = new_codes(gate_up, self._codes_t.shape[1])
        name = activation.name
        coded = guess_gradient_scales(grad_hidden, gate_up, codes, scales, self.scales, name)
        swiglu_backward_products(grad_hidden, gate_up, products, None, name, coded)
        repair_gradient_codes(grad_hidden, gate_up, coded, name)
        return Incoming(None, Codes(codes, scales, gate_up.dtype))

    def gradient(
        self, incoming: Incoming, scales: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor]:
        if dropout is not None:
            return super().gradient(incoming, scales, dropout)
        codes = incoming.coded
        if codes is None:
            assert incoming.rows is not None
            dy = incoming.rows[:, : len(self.sB)]
            codes = Codes(*fp8_rows(dy, self._codes_t.shape[1], self.scales), dy.dtype)
        return self.gradient_of_codes(codes, scales)

    def gradient_of_codes(self, dy: Codes, x_scales: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ([dy | p] M[:, :in], p x_scales) of dy's codes, and write their border.

        x_scales [T, 1]: the scales of x's codes, which dA sums times p'.
        """
        values, scales, dtype = dy
        p = add_coded_border(values, scales, self._B_halves, self._factors_t, dtype, x_scales)
        return product_of_codes(values, scales, self._codes_t, self._ones, None, dtype), p

    # --- products with codes ---

    def _product_and_z(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        z = add_coded_border(codes, scales, self._A_halves, self._factors, dtype)
        return self._product(codes, scales, bias, dtype), z

    def _product(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Multiply codes with their border, in fp32: fast sums lose small adapters."""
        return product_of_codes(
            codes, scales, self._codes, self.scales, bias, dtype, sums_in_fp32=True
        )

    def product(self, extended: Tensor, bias: Tensor | None) -> Tensor:
        x, z = extended.tensor_split([self.A.shape[1]], 1)
        codes, scales = fp8_rows(x, self._codes.shape[1])
        add_border(codes, x.shape[1], scales, z, self._factors)
        return self._product(codes, scales, bias, x.dtype)

    def add_product(
        self, total: Tensor, extended: Tensor, multiplier: float, adds: bool = True
    ) -> None:
        y = self.product(extended, None)
        if adds:
            total.add_(y, alpha=multiplier)
        else:
            torch.mul(y, multiplier, out=total)

    def add_gradient(self, grad: Tensor, dy: Tensor) -> None:
        codes, scales = fp8_rows(dy, self._codes_t.shape[1], self.scales)
        codes.view(torch.uint8)[:, dy.shape[1] :].zero_()  # the border
        grad.add_(product_of_codes(codes, scales, self._codes_t, self._ones, None, dy.dtype))


def _zero_codes(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)
