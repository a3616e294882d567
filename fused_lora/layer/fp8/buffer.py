"""A frozen weight in FP8 with the border of its adapters, and its products (`buffer.py`).

W [out, in] is e4m3 codes with a scale s for each row, made once. Products of FP8 want what they sum
over side by side in both operands, so that there are two copies of the codes, W8 [out, in] for the
forward and its transpose for the gradient of x, together as many bytes as one in bf16. In the
second W's scales lie in the sum: dy is multiplied by them before it becomes codes itself.

    forward     [x | z]  to codes with a scale a row      y  = codes [W8 | border]' scales
    gradient    [dy s | p]  likewise                      dx = codes [W8' | border]' scales

z and p, the adapters' own products, are made of the same codes. They and the border are in two
halves (`kernels/fp8_rows.py`), as exact as in bf16. Where x is codes p comes multiplied by their
scales, for dA. A product is 0.037 off for what x, dy and W lose as codes, in bf16 0.002.

What norms and SwiGLU give, and the gradients of what SwiGLU and the norm after o are given, are
codes from the kernel that computes them (`kernels/fp8_norm.py`, `fp8_swiglu.py`,
`swiglu_products_backward.py`), of all else a pass of its own makes them. With dropout, whose masks
make z of another x, the forward takes z as it is given, and backward multiplies adapters in bf16.

On the CPU, which has no such products, and for results in other dtypes than bf16, the codes are
multiplied in fp32.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.fp8_borders import Bordering, Halves, fp8_borders
from ...kernels.fp8_norm import norm_backward_codes, norm_codes
from ...kernels.fp8_products import add_border, add_coded_border, product_of_codes
from ...kernels.fp8_rows import E4M3, fp8_rows, new_codes, padded_columns
from ...kernels.fp8_swiglu import swiglu_codes

_serials = itertools.count()


class Fp8Buffer:
    """Codes of a weight and its border; attributes and products as `bordered.Buffer` has them.

    weight: [out, in] codes. scales: [out] in fp32. bias: [out + width] or None, in the dtype of the
    products. width: the columns that the border has room for. made_of: by a weight's first row, of
    which change of its original the codes are (`adopt/fp8/weight.py`). serial: no other's.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, width: int, dtype: torch.dtype
    ):
        outputs, inputs = codes.shape
        self.scales, self.bias = scales, bias
        self.holds: tuple | None = None
        self.made_of: dict[int, int] = {}
        self.serial = next(_serials)
        self._codes = _zero_codes(codes.device, outputs, padded_columns(inputs, width))
        self._codes_t = _zero_codes(codes.device, inputs, padded_columns(outputs, width))
        self.weight = self._codes[:, :inputs]
        self.write(0, codes)
        self.A = torch.zeros(width, inputs, dtype=dtype, device=codes.device)
        self.sB = torch.zeros(outputs, width, dtype=dtype, device=codes.device)
        of_both = [_zero_codes(codes.device, 2, width, count) for count in (inputs, outputs)]
        self._of_A, self._of_B = map(Halves, of_both, torch.ones(2, width, device=codes.device))
        self._factors, self._factors_t = torch.ones(2, width, device=codes.device)
        self._ones = torch.ones(inputs, device=codes.device)

    def write(self, row: int, codes: Tensor) -> None:
        """Put codes of some of the weight's rows in the place of what is there."""
        outputs, inputs = codes.shape
        bits = codes.view(torch.uint8)
        self._codes.view(torch.uint8)[row : row + outputs, :inputs].copy_(bits)
        self._codes_t.view(torch.uint8)[:inputs, row : row + outputs].copy_(bits.t())

    @staticmethod
    def encode(buffers: Sequence) -> None:
        """Called when A and sB of all have been filled."""
        fp8_borders(
            [
                Bordering(
                    one.sB, one.A, one.scales, one._codes, one._codes_t, one._factors,
                    one._factors_t, one._of_B, one._of_A,
                )
                for one in buffers
            ]
        )  # fmt: skip

    # --- with their adapters ---

    def product_and_z(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """([x | z] M[:out]' + bias, z), of codes of x."""
        return self._product_and_z(*fp8_rows(x, self._codes.shape[1]), bias, x.dtype)

    def product_of_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """([n | z] M[:out]' + bias, codes, z, scales, rstd) of n, the norm of x, or without a
        weight x."""
        padded = self._codes.shape[1]
        if weight is None:
            (codes, scales), rstd = fp8_rows(x, padded), None
        else:
            codes, scales, rstd = norm_codes(x, weight, eps, padded, zero_centered)
        y, z = self._product_and_z(codes, scales, bias, x.dtype)
        return y, codes[:, : x.shape[1]], z, scales, rstd

    def add_swiglu(
        self, residual: Tensor | None, total: Tensor | None, gate_up: Tensor, multiplier: float,
        activation: str,
    ) -> Tensor:  # fmt: skip
        """total = residual + multiplier [h | z] M[:out]' of h = silu(gate) up, or nothing without
        total; returns z."""
        codes, scales = swiglu_codes(gate_up, self._codes.shape[1], activation)
        if residual is None or total is None:
            return add_coded_border(codes, scales, self._of_A, self._factors, gate_up.dtype)
        y, z = self._product_and_z(codes, scales, None, gate_up.dtype)
        torch.add(residual, y, alpha=multiplier, out=total)
        return z

    def _product_and_z(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        z = add_coded_border(codes, scales, self._of_A, self._factors, dtype)
        return self._product(codes, scales, bias, dtype), z

    def _product(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Of codes with their border; in fp32, where fast sums lose small adapters."""
        return product_of_codes(
            codes, scales, self._codes, self.scales, bias, dtype, sums_in_fp32=True
        )

    def gradient_and_p(
        self, grad_ext: Tensor, x_scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """([dy | p] M[:, :in], p x_scales), of codes of dy, the first columns of what is given."""
        dy = grad_ext[:, : len(self.sB)]
        codes, scales = fp8_rows(dy, self._codes_t.shape[1], self.scales)
        return self.gradient_of_codes(codes, scales, dy.dtype, x_scales)

    def gradient_through_norm(
        self, grad_y: Tensor, grad_residual: Tensor, x: Tensor, weight: Tensor, rstd: Tensor,
        zero_centered: bool, dy: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Write a norm's gradient of x into dy; returns dy's codes, without their border."""
        return norm_backward_codes(
            grad_y, grad_residual, x, weight, rstd, dy, self.scales, self._codes_t.shape[1],
            zero_centered,
        )  # fmt: skip

    def room_for_codes(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """New codes and scales for a dy of as many rows as like has, without its border."""
        return new_codes(like, self._codes_t.shape[1])

    def gradient_of_codes(
        self, codes: Tensor, scales: Tensor, dtype: torch.dtype, x_scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """([dy | p] M[:, :in], p x_scales) in dtype, of dy's codes, after which their border is
        written. x_scales [T, 1]: of the codes that dA is a sum of, p' times them."""
        p = add_coded_border(codes, scales, self._of_B, self._factors_t, dtype, x_scales)
        return product_of_codes(codes, scales, self._codes_t, self._ones, None, dtype), p

    # --- where dropout's masks make z of another x, and p's product by a kernel of its own ---

    def product(self, x_ext: Tensor, bias: Tensor | None) -> Tensor:
        """[x | z] M[:out]' + bias"""
        x, z = x_ext.tensor_split([self.A.shape[1]], 1)
        codes, scales = fp8_rows(x, self._codes.shape[1])
        add_border(codes, x.shape[1], scales, z, self._factors)
        return self._product(codes, scales, bias, x.dtype)

    def add_product(self, total: Tensor, x_ext: Tensor, multiplier: float) -> None:
        """total += multiplier [x | z] M[:out]'"""
        total.add_(self.product(x_ext, None), alpha=multiplier)

    def add_gradient(self, grad: Tensor, dy: Tensor) -> None:
        """grad += dy W"""
        codes, scales = fp8_rows(dy, self._codes_t.shape[1], self.scales)
        rows = _without_border(codes, scales, dy.shape[1])
        grad.add_(product_of_codes(*rows, self._codes_t, self._ones, None, dy.dtype))


def _zero_codes(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)


def _without_border(codes: Tensor, scales: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    codes.view(torch.uint8)[:, columns:].zero_()
    return codes, scales
