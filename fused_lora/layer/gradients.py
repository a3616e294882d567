"""The backward of a layer outside its attention: from the gradient of its output to that of what o
reads, and from the gradient of q, k and v to that of its input.

A layer with a gated delta net shares both (`delta_layer.py`). The docstring of `decoder_layer.py`
has the equations.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.rows import as_rows, empty_rows
from .adapter_sums import AdapterSums, swiglu_gradients
from .buffer import Incoming, ProductInput
from .filling import Adapter
from .operands import Adapters, Dropouts, FrozenLayer, Others
from .residual import addend_gradient, needed_rows, norm_backward, spread_rows
from .saved import Added, SavedMLP


class OutputAdapters(NamedTuple):
    """The gradients of the adapters from o on."""

    o: Adapter
    gate: Adapter
    up: Adapter
    down: Adapter


class LayerBackward(NamedTuple):
    """The two halves of a layer's backward around its attention, and what they share.

    grads: the gradients of norms and biases, which they write. sums: computes those of adapters.
    """

    frozen: FrozenLayer
    dropouts: Dropouts
    grads: Others
    sums: AdapterSums

    def from_output(
        self, grad_output: Tensor, tokens: int, added: Added, mlp: SavedMLP, adapters: Adapters,
        need: Adapters,
    ) -> tuple[Tensor, Tensor, OutputAdapters]:  # fmt: skip
        """Return the gradients of what o reads, of the residual, [tokens, ...] each, and of the
        adapters from o on."""
        frozen, dropouts, grads, sums = self
        o, gate_up, down, rows = frozen.o, frozen.gate_up, frozen.down, frozen.rows
        total, like = added.total, o.A
        width = total.shape[1]
        # output = total + down(activation(gate) up)
        grad = frozen.borders.handover.take(grad_output, down.grad_columns)
        if grad is None or rows is not None:
            grad = empty_rows(like, total.shape[0], down.grad_columns)
            grad[:, :width].copy_(needed_rows(as_rows(grad_output), rows))
        grad_residual = grad[:, :width]
        if total.dtype != like.dtype:
            grad_residual = needed_rows(as_rows(grad_output), rows)
        if not frozen.adds_mlp_as_it_is:
            grad = addend_gradient(
                grad_residual, frozen.multiplier, mlp.normed, frozen.mlp_norm,
                grads.mlp_norm, like, down.grad_columns,
            )  # fmt: skip
        down.sum_biases(grad, (grads.down_bias,))
        grad_hidden, p_down = down.buffer.gradient(Incoming(grad), None, dropouts.down)
        in_swiglu = swiglu_gradients(
            mlp.gate_up, gate_up, p_down, mlp.m.z, adapters, need, dropouts.down
        )
        trains_biases = any(one is not None for one in grads.gate_up_biases)
        grad_gate_up = gate_up.buffer.swiglu_backward(
            grad_hidden, mlp.gate_up, in_swiglu.products, frozen.activation,
            is_read=dropouts.gate_up is None and not trains_biases,
        )  # fmt: skip
        del grad_hidden  # at 16,384 tokens a [T, intermediate] is 361 MB: let it go early
        if trains_biases:
            assert grad_gate_up.rows is not None
            gate_up.sum_biases(grad_gate_up.rows, grads.gate_up_biases)
        grad_normed, pm = gate_up.buffer.gradient(grad_gate_up, mlp.m.scales, dropouts.gate_up)
        del grad_gate_up
        (down_B,) = sums.add_B(down, (adapters.down,), (need.down,), grad, mlp.z_down)

        # gate and up of the norm of total
        gate_A, up_A = sums.add_A(
            gate_up, (adapters.gate, adapters.up), (need.gate, need.up), mlp.m.x, pm,
            dropouts.gate_up,
        )  # fmt: skip
        grad = empty_rows(like, total.shape[0], o.grad_columns)
        grad_total = grad[:, :width] if total.dtype == like.dtype else torch.empty_like(total)
        as_it_is = frozen.adds_attended_as_it_is
        incoming = o.buffer.norm_backward(
            grad_normed, grad_residual, total, frozen.post_norm, mlp.rstd, grad_total,
            grad, grads.post_norm, is_read=as_it_is and dropouts.o is None,
        )  # fmt: skip
        del grad_normed
        grad_residual = grad_total
        if not as_it_is:
            grad = addend_gradient(
                grad_residual, frozen.multiplier, added.normed, frozen.attended_norm,
                grads.attended_norm, like, o.grad_columns,
            )  # fmt: skip
            incoming = Incoming(grad)

        # total = x + o(attended)
        o.sum_biases(grad, (grads.o_bias,))
        grad_attended, pa = o.buffer.gradient(incoming, None, dropouts.o)
        (o_B,) = sums.add_B(o, (adapters.o,), (need.o,), grad, added.z)
        (o_A,) = sums.add_A(o, (adapters.o,), (need.o,), needed_rows(added.x, rows), pa, dropouts.o)
        del grad, incoming
        if rows is not None:
            sums.compute()  # of as many tokens, and not of all as those that follow
            grad_attended = spread_rows(grad_attended, rows, tokens)
            grad_residual = spread_rows(grad_residual, rows, tokens)
        return grad_attended, grad_residual, OutputAdapters(
            Adapter(o_A, o_B), Adapter(gate_A, in_swiglu.gate_B), Adapter(up_A, in_swiglu.up_B),
            Adapter(in_swiglu.down_A, down_B),
        )  # fmt: skip

    def to_input(
        self, grad_qkv: Tensor, grad_residual: Tensor, x: Tensor, n: ProductInput,
        rstd: Tensor | None, adapters: Sequence[Adapter], need: Sequence[Adapter], need_x: bool,
        mask: Tensor | None = None,
    ) -> tuple[Tensor | None, list[Adapter]]:  # fmt: skip
        """Return the gradient of x [T, hidden], None if nothing needs it, and those of adapters.

        grad_qkv: [T, out + width]. mask: [T, 1], which has multiplied x in front of the norm alone.
        """
        frozen, dropouts, grads, sums = self
        qkv, width = frozen.qkv, x.shape[1]
        qkv.sum_biases(grad_qkv, grads.qkv_biases)
        pn = grad_x = None
        if need_x or grads.input_norm is not None:
            grad_normed, pn = qkv.buffer.gradient(Incoming(grad_qkv), n.scales, dropouts.qkv)
            if mask is not None:
                grad_normed.mul_(mask)
            # as wide as the layer before takes it over, in whose backward it most likely goes
            wide = empty_rows(x, x.shape[0], frozen.down.grad_columns)
            grad_x = wide[:, :width]
            norm_backward(
                grad_normed, grad_residual, x, frozen.input_norm, rstd, grad_x, grads.input_norm
            )
            if x.dtype == qkv.A.dtype:
                frozen.borders.handover.offer(wide)
        elif any(one.A for one in need):
            pn = qkv.buffer.adapter_gradient(grad_qkv[:, : qkv.out], n.scales)
        all_B = sums.add_B(qkv, adapters, need, grad_qkv, n.z)
        all_A = sums.add_A(qkv, adapters, need, n.x, pn, dropouts.qkv)
        return grad_x, list(map(Adapter, all_A, all_B))
