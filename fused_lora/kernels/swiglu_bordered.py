"""A layer's MLP between its bordered products (`bordered_linear.py`), with the adapters' products
over [T, intermediate] tensors inside SwiGLU's, or GeGLU's, own passes, for `decoder_layer.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_mlp.dropout import Mask

from ..bordered import Bordered
from .rows import empty_rows
from .swiglu_products_backward import Product, swiglu_backward_products
from .swiglu_products_forward import swiglu_forward_product


def add_down(
    gate_up: Tensor,
    down: Bordered,
    total: Tensor | None,
    multiplier: float = 1.0,
    mask: Mask | None = None,
    activation: str = "silu",
) -> Tensor:
    """Add the down projection of silu(gate) up, which grows in K, to total, where the residual is;
    or a multiple of it. Without total it makes z alone. With a mask z is that of what it keeps.

    Equivalent PyTorch, for gate_up [T, 2 in] and total [T, out], contiguous, and this activation;
    returns z::

        gate, up = gate_up.chunk(2, dim=1)
        hidden = F.silu(gate) * up
        z = hidden @ A.t()
        total += multiplier * torch.cat((hidden, z), dim=1) @ M[:out].t()
        total += multiplier * bias[:out]  # if there is one: it rounds once more
    """
    inputs, out = down.in_features, down.out
    if total is None:
        return swiglu_forward_product(gate_up, down.A, None, None, mask, activation)
    hidden = empty_rows(gate_up, gate_up.shape[0], down.x_columns)
    z = swiglu_forward_product(
        gate_up, down.A, hidden[:, :inputs], hidden[:, inputs:], mask, activation
    )
    down.buffer.add_product(total, hidden, multiplier)
    if down.bias is not None:
        total.add_(down.bias[:out], alpha=multiplier)
    return z


def swiglu_gradients(
    grad_hidden: Tensor,
    gate_up: Tensor,
    p: Tensor,
    z: Tensor,
    layout: Bordered,
    kinds: Sequence[tuple[int, torch.dtype]],
    needed: Sequence[bool],
    grad_gate_up: Tensor,
    mask: Mask | None = None,
    activation: str = "silu",
) -> list[Tensor | None]:
    """Write the gradient of gate_up; returns those of down's A, gate's B and up's B, None where not
    needed.

    As `swiglu_backward_products` has it, for p = dy sB of down and z = x A' of gate and up, whose
    buffer has this layout. kinds: rank and dtype of those three adapters. mask: of down's input.
    Their gradients are new and contiguous, as a .grad has to be.
    """
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
    of_hidden, of_gate, of_up = products
    swiglu_backward_products(
        grad_hidden, gate_up, of_hidden, of_gate, of_up, grad_gate_up, activation
    )
    return gradients
