"""The backward of a layer outside its attention: from the gradient of its output to that of what o
reads, and from the gradient of q, k and v to that of its input.

A layer with another mixer shares both (`mixer_layer.py`). The docstring of `decoder_layer.py`
has the equations.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..kernels.rows import as_rows, empty_rows
from .adapter_sums import AdapterSums, new_swiglu_gradients
from .buffer import Incoming, ProductInput
from .filling import Adapter
from .operands import AdaptersAfterAttention, Dropouts, FrozenLayer, Others
from .residual import addend_gradient, norm_backward
from .saved import Added, SavedMLP


class LayerInput(NamedTuple):
    """The input of a layer, and its norm."""

    x: Tensor  # [T, hidden]
    n: ProductInput  # its norm, which q, k and v read
    rstd: Tensor | None  # of the norm
    mask: Tensor | None = None  # [T, 1], which has multiplied x in front of the norm alone


class LayerBackward(NamedTuple):
    """The two halves of a layer's backward around its attention, and what they share.

    grads: the gradients of norms and biases, which they write. sums: computes those of adapters.
    """

    frozen: FrozenLayer
    dropouts: Dropouts
    grads: Others
    sums: AdapterSums

    def to_o(
        self, grad_output: Tensor, added: Added, mlp: SavedMLP, adapters: AdaptersAfterAttention,
        need: AdaptersAfterAttention,
    ) -> tuple[Tensor, Tensor, AdaptersAfterAttention]:  # fmt: skip
        """Return the gradients of what o reads, of the residual, [T, ...] each, and of the
        adapters from o on. Names are those of `decoder_layer.py`."""
        frozen, dropouts, grads, sums = self
        o, gate_up, down = frozen.o, frozen.gate_up, frozen.down
        total, like = added.total, o.A
        # output = total + down(activation(gate) up)
        g = frozen.filling.handover.take(grad_output, down.grad_columns)
        if g is None:
            g = empty_rows(like, len(total), down.grad_columns)
            g[:, : total.shape[1]].copy_(as_rows(grad_output))
        grad_sum = g[:, : total.shape[1]]  # of the residual addition, in the residual's dtype
        if total.dtype != like.dtype:
            grad_sum = as_rows(grad_output)
        grad_down = g
        if not frozen.mlp_adds_directly:
            grad_down = addend_gradient(
                grad_sum, frozen.multiplier, mlp.normed, frozen.norm_after_mlp,
                grads.norm_after_mlp, like, down.grad_columns,
            )  # fmt: skip
        down.sum_biases(grad_down, (grads.down_bias,))
        dh, ph = down.buffer.gradient(Incoming(grad_down), None, dropouts.down)
        with_swiglu = new_swiglu_gradients(
            mlp.gate_up, gate_up, ph, mlp.m.z, adapters, need, dropouts.down
        )
        trains_biases = any(bias is not None for bias in grads.gate_up_biases)
        dgu = gate_up.buffer.swiglu_backward(  # and what is in with_swiglu
            dh, mlp.gate_up, with_swiglu.products, frozen.activation,
            is_read=dropouts.gate_up is None and not trains_biases,
        )  # fmt: skip
        del dh  # at 16,384 tokens a [T, intermediate] is 361 MB: let it go early
        if trains_biases:
            assert dgu.rows is not None
            gate_up.sum_biases(dgu.rows, grads.gate_up_biases)
        dm, pm = gate_up.buffer.gradient(dgu, mlp.m.scales, dropouts.gate_up)
        del dgu
        (down_B,) = sums.add_B(down, (adapters.down,), (need.down,), grad_down, mlp.z_down)
        del grad_down

        # gate and up of the norm of total
        gate_A, up_A = sums.add_A(
            gate_up, (adapters.gate, adapters.up), (need.gate, need.up), mlp.m.x, pm,
            dropouts.gate_up,
        )  # fmt: skip
        adds_directly = frozen.attention_adds_directly
        dt, incoming = o.buffer.norm_backward(
            dm, grad_sum, total, frozen.norm_before_mlp, mlp.rstd, grads.norm_before_mlp,
            is_read=adds_directly and dropouts.o is None,
        )  # fmt: skip
        del dm, g, grad_sum
        if not adds_directly:
            incoming = Incoming(addend_gradient(
                dt, frozen.multiplier, added.normed, frozen.norm_after_attention,
                grads.norm_after_attention, like, o.grad_columns,
            ))  # fmt: skip
        grad_o = incoming.rows
        assert grad_o is not None

        # total = x + o(attended)
        o.sum_biases(grad_o, (grads.o_bias,))
        da, pa = o.buffer.gradient(incoming, None, dropouts.o)
        (o_B,) = sums.add_B(o, (adapters.o,), (need.o,), grad_o, added.z)
        (o_A,) = sums.add_A(o, (adapters.o,), (need.o,), added.x, pa, dropouts.o)
        del grad_o, incoming
        return da, dt, AdaptersAfterAttention(
            Adapter(o_A, o_B), Adapter(gate_A, with_swiglu.gate_B),
            Adapter(up_A, with_swiglu.up_B), Adapter(with_swiglu.down_A, down_B),
        )  # fmt: skip

    def to_input(
        self, grad_qkv: Tensor, grad_residual: Tensor, entry: LayerInput,
        adapters: Sequence[Adapter], need: Sequence[Adapter], need_x: bool,
    ) -> tuple[Tensor | None, list[Adapter]]:  # fmt: skip
        """Return the gradient of x [T, hidden], None if nothing needs it, and those of adapters.

        grad_qkv: [T, out + width].
        """
        frozen, dropouts, grads, sums = self
        qkv, (x, n, rstd, mask) = frozen.qkv, entry
        qkv.sum_biases(grad_qkv, grads.qkv_biases)
        pn = grad_x = None
        if need_x or grads.norm_before_attention is not None:
            grad_normed, pn = qkv.buffer.gradient(Incoming(grad_qkv), n.scales, dropouts.qkv)
            if mask is not None:
                grad_normed.mul_(mask)
            # as wide as the backward of the layer before needs it, which then copies nothing
            wide = empty_rows(x, x.shape[0], frozen.down.grad_columns)
            grad_x = wide[:, : x.shape[1]]
            norm_backward(
                grad_normed, grad_residual, x, frozen.norm_before_attention, rstd, grad_x,
                grads.norm_before_attention,
            )  # fmt: skip
            if x.dtype == qkv.A.dtype:
                frozen.filling.handover.offer(wide)
        elif any(one.A for one in need):
            pn = qkv.buffer.adapter_gradient(grad_qkv[:, : qkv.out], n.scales)
        all_B = sums.add_B(qkv, adapters, need, grad_qkv, n.z)
        all_A = sums.add_A(qkv, adapters, need, n.x, pn, dropouts.qkv)
        return grad_x, list(map(Adapter, all_A, all_B))
