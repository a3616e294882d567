"""A layer's MLP between its bordered products (`buffer.py`), with the adapters' products
over [T, intermediate] tensors inside SwiGLU's, or GeGLU's, own passes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_mlp.dropout import Mask, Masks

from ..kernels.fp8_swiglu import guess_gradient_scales, repair_gradient_codes
from ..kernels.rows import empty_rows
from ..kernels.swiglu_products_backward import Product, swiglu_backward_products
from ..kernels.swiglu_products_forward import swiglu_forward_product
from .buffer import Bordered, grow_k_backward
from .fp8.buffer import Fp8Buffer
from .residual import adds_beside, sum_biases


def add_down(
    gate_up: Tensor,
    down: Bordered,
    total: Tensor | None,
    multiplier: float = 1.0,
    mask: Mask | None = None,
    activation: str = "silu",
    residual: Tensor | None = None,
) -> Tensor:
    """Add the down projection of silu(gate) up, which grows in K, to total, where the residual is;
    or a multiple of it. Without total it makes z alone. With a mask z is that of what it keeps.

    Equivalent PyTorch, for gate_up [T, 2 in] and total [T, out], contiguous, and this activation;
    returns z::

        total.copy_(residual)  # if it `adds_beside`
        gate, up = gate_up.chunk(2, dim=1)
        hidden = F.silu(gate) * up
        z = hidden @ A.t()
        total += multiplier * torch.cat((hidden, z), dim=1) @ M[:out].t()
        total += multiplier * bias[:out]  # if there is one: it rounds once more
    """
    inputs, out = down.in_features, down.out
    if isinstance(down.buffer, Fp8Buffer) and adds_beside(down, mask):
        residual = total if residual is None else residual
        z = down.buffer.add_swiglu(residual, total, gate_up, multiplier, activation)
    elif total is None:
        z = swiglu_forward_product(gate_up, down.A, None, None, mask, activation)
    else:
        hidden = empty_rows(gate_up, gate_up.shape[0], down.x_columns)
        z = swiglu_forward_product(
            gate_up, down.A, hidden[:, :inputs], hidden[:, inputs:], mask, activation
        )
        down.buffer.add_product(total, hidden, multiplier)
    if total is not None and down.bias is not None:
        total.add_(down.bias[:out], alpha=multiplier)
    return z


def through_swiglu(
    grad: Tensor,
    gate_up: Tensor,
    z: Tensor,
    down: Bordered,
    layout: Bordered,
    kinds: Sequence[tuple[int, torch.dtype]],
    needed: Sequence[bool],
    grad_biases: Sequence[Tensor | None] = (),
    mask: Mask | None = None,
    masks: Masks | None = None,
    activation: str = "silu",
    x_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The gradient of gate and up's input, and p, from grad [T, out + width of down], whose first
    columns are the gradient of down's output and whose others get its p; and new gradients of
    down's A, gate's B and up's B, None where not needed, as `swiglu_backward_products` has them.

    z: x A' of gate and up, whose buffer has this layout. kinds: rank and dtype of those adapters.
    grad_biases: of gate and up, written where one is trained. mask, masks: of down's input, and of
    gate's and up's. In FP8 the gradient of gate_up exists as codes alone, but with masks or biases.
    x_scales: of rows of x, where it is codes: p comes multiplied by them.
    """
    grad_hidden, p = grow_k_backward(grad, down, None if mask is None else [mask])
    gradients, (of_hidden, of_gate, of_up) = _of_adapters(
        gate_up, p, z, layout, kinds, needed, mask
    )
    buffer = layout.buffer
    if (
        masks is None
        and isinstance(buffer, Fp8Buffer)
        and not any(b is not None for b in grad_biases)
    ):
        codes, scales = buffer.room_for_codes(gate_up)
        coded = guess_gradient_scales(
            grad_hidden, gate_up, codes, scales, buffer.scales, activation
        )
        swiglu_backward_products(
            grad_hidden, gate_up, of_hidden, of_gate, of_up, None, activation, coded
        )
        repair_gradient_codes(grad_hidden, gate_up, coded, activation)
        del grad_hidden  # at 16,384 tokens a [T, intermediate] is 361 MB: let it go early
        return *buffer.gradient_of_codes(codes, scales, gate_up.dtype, x_scales), gradients
    grad_gate_up = empty_rows(gate_up, len(gate_up), layout.grad_columns)
    swiglu_backward_products(
        grad_hidden, gate_up, of_hidden, of_gate, of_up, grad_gate_up[:, : layout.out], activation
    )
    del grad_hidden
    sum_biases(grad_gate_up, layout, grad_biases)
    return *grow_k_backward(grad_gate_up, layout, masks, x_scales), gradients


def _of_adapters(
    gate_up: Tensor, p: Tensor, z: Tensor, layout: Bordered,
    kinds: Sequence[tuple[int, torch.dtype]], needed: Sequence[bool], mask: Mask | None,
) -> tuple[list[Tensor | None], list[Product | None]]:  # fmt: skip
    """The adapters' gradients and the products that write them. They are new and contiguous, as a
    .grad has to be."""
    intermediate = gate_up.shape[1] // 2
    starts = 0, 0, layout.blocks[0]
    gradients: list[Tensor | None] = []
    products: list[Product | None] = []
    for i, ((rank, dtype), wanted) in enumerate(zip(kinds, needed, strict=True)):
        if not wanted:
            gradients.append(None)
            products.append(None)
            continue
        shape = (intermediate, rank) if i else (rank, intermediate)
        gradient = gate_up.new_empty(shape, dtype=dtype)
        factor = (z if i else p)[:, starts[i] : starts[i] + rank]
        gradients.append(gradient)
        if i:
            products.append(Product(factor, gradient, layout.scalings[i - 1]))
        else:
            products.append(Product(factor, gradient.t(), mask=mask))
    return gradients, products
