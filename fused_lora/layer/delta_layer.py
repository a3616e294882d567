"""A whole decoder layer with a gated delta net, as two autograd functions around its recurrence.

The recurrence stays a library's, and autograd runs through it. With M the bordered buffers
(`buffer.py`) of the in-projections, of out_proj, of gate and up, and of down, BeforeRecurrence is

    n         = norm(x)                            as in `decoder_layer.py`
    rows      = [n | n A'] M'                      [q | k | v | z | b | a] side by side, one matmul
    q, k, v   = silu(conv([q | k | v]))            one pass (`causal_conv.py`)
    beta      = sigmoid(b)
    decay     = -exp(A_log) softplus(a + dt_bias)

and AfterRecurrence, of what the recurrence found,

    y         = norm(found) silu(z)                into [y | y A'], one pass (`gated_norm.py`)
    t         = x + [y | y A'] M'
    output    = t + MLP(norm(t))                   as in `decoder_layer.py`

The backward of each is its forward in reverse. Outside of these passes it is a decoder layer's
(`gradients.py`). The residual x passes through BeforeRecurrence, whose norm's backward then adds
both of its gradients in one pass.

Gated delta nets: Yang, Kautz & Hatamizadeh, arXiv 2412.06464.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_mlp.utils import refuse_second_derivative, without_autocast

from ..causal_conv import causal_conv_backward, causal_conv_forward
from ..gated_norm import gated_rms_norm_backward, gated_rms_norm_forward
from ..kernels.rows import as_rows, empty_rows
from .adapter_sums import AdapterSums
from .buffer import ProductInput
from .filling import Adapter
from .forward import add_mlp, add_output, rows_for_o
from .gradients import LayerBackward
from .operands import (
    Dropouts,
    FrozenLayer,
    Others,
    OutputAdapters,
    check_adapters,
    check_layer_input,
    draw_dropouts,
)
from .saved import Added, SavedMLP, once_as_record, restore, store

BEFORE, AFTER = "BeforeRecurrence", "AfterRecurrence"
NO_OTHERS = Others()  # trains: neither norms nor biases


class DeltaNet(NamedTuple):
    """The frozen tensors of a gated delta net beside its projections."""

    conv_weight: Tensor  # [channels, taps]
    conv_bias: Tensor | None  # [channels]
    A_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    norm_weight: Tensor  # [head_dim]
    norm_eps: float
    sizes: tuple[int, int, int]  # features of q, k and v


class SavedBefore(NamedTuple):
    """Results of BeforeRecurrence's forward that its backward needs."""

    hidden: Tensor
    mask: Tensor | None  # [T, 1]
    n: ProductInput
    rstd: Tensor | None
    projected: Tensor  # [T, out], q, k and v before the convolution, z, b and a
    net: DeltaNet
    frozen: FrozenLayer
    adapters: tuple[Adapter, ...]
    dropouts: Dropouts


class SavedAfter(NamedTuple):
    """Results of AfterRecurrence's forward that its backward needs."""

    found: Tensor
    z: Tensor
    rstd: Tensor  # of the gated norm
    added: Added
    mlp: SavedMLP
    net: DeltaNet
    frozen: FrozenLayer
    adapters: OutputAdapters
    dropouts: Dropouts


class BeforeRecurrence(torch.autograd.Function):
    """``BeforeRecurrence.apply(hidden, mask, *adapters, net, frozen)``: what a gated delta net
    computes in front of its recurrence, with the layer's norm.

    Equivalent PyTorch::

        n = norm_before_attention(hidden * mask[..., None])  # without a mask, of hidden as it is
        mixed, z, b, a = in_proj_qkv(n), in_proj_z(n), in_proj_b(n), in_proj_a(n)
        q, k, v = causal_conv(mixed, net.conv_weight, net.conv_bias, net.sizes)
        decay = -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
        return q, k, v, z, torch.sigmoid(b), decay, hidden

    Args:
        hidden: as for DecoderLayer.
        mask: [batch, positions], 0 for padding, or None.
        adapters: A and B of each in-projection, 8 tensors, as for DecoderLayer.
        frozen: as for DecoderLayer, with the in-projections as qkv and out_proj as o.

    Returns:
        New tensors [batch, positions, features] in the buffers' dtype, decay in fp32, and hidden
        itself for AfterRecurrence. All else is as for DecoderLayer.
    """

    @staticmethod
    def forward(ctx, hidden, mask, *operands):
        *row, net, frozen = operands
        adapters, group = _pairs(row), frozen.qkv
        check_layer_input(BEFORE, hidden, group)
        check_adapters(BEFORE, "in_proj", adapters, group)
        frozen.filling.fill((group,), adapters)
        if mask is not None:
            mask = mask.reshape(-1, 1).to(hidden.dtype)
        x = _unhidden_rows(hidden, mask)
        dropouts = draw_dropouts(frozen, len(x), frozen.groups[:1])
        projected, n, rstd = group.buffer.project_norm(
            x, frozen.norm_before_attention, group.base_bias, dropouts.qkv, None
        )
        parts = group.by_projection(projected)
        mixed, z, b, a = (one.unflatten(0, hidden.shape[:2]) for one in parts)
        q, k, v = causal_conv_forward(mixed, net.conv_weight, net.conv_bias, net.sizes)
        decay = -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
        frozen = frozen.for_backward()
        store(ctx, SavedBefore(
            hidden, mask, n, rstd, projected, net, frozen, adapters, dropouts,
        ))  # fmt: skip
        return q, k, v, z, b.sigmoid(), decay, hidden

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v, grad_z, grad_beta, grad_decay, grad_residual):
        refuse_second_derivative(BEFORE, "the unfused layer")
        saved: SavedBefore = restore(ctx)
        need_hidden, _, *needed, _, _ = ctx.needs_input_grad
        frozen, net, group = saved.frozen, saved.net, saved.frozen.qkv
        frozen.filling.refill((group,), saved.adapters)
        with without_autocast(saved.hidden):
            grad = empty_rows(group.A, len(saved.projected), group.grad_columns)
            mixed, _, b, a = group.by_projection(saved.projected)
            in_mixed, in_z, in_b, in_a = group.by_projection(grad)
            causal_conv_backward(
                (grad_q, grad_k, grad_v), mixed.unflatten(0, grad_q.shape[:2]), net.conv_weight,
                net.conv_bias, in_mixed, need_weights=False,
            )  # fmt: skip
            in_z.copy_(as_rows(grad_z))
            beta = b.float().sigmoid()
            in_b.copy_(as_rows(grad_beta) * beta * (1.0 - beta))
            slope = -net.A_log.float().exp() * (a.float() + net.dt_bias).sigmoid()
            in_a.copy_(as_rows(grad_decay) * slope)
            x = _unhidden_rows(saved.hidden, saved.mask)
            layer = LayerBackward(frozen, saved.dropouts, NO_OTHERS, AdapterSums())
            grad_x, adapters = layer.to_input(
                grad, as_rows(grad_residual), x, saved.n, saved.rstd, saved.adapters,
                _pairs(needed), need_hidden, saved.mask,
            )  # fmt: skip
            layer.sums.compute()
        if grad_x is not None:
            grad_x = grad_x.view(saved.hidden.shape)
        return grad_x, None, *(one for pair in adapters for one in pair), None, None


class AfterRecurrence(torch.autograd.Function):
    """``AfterRecurrence.apply(found, z, hidden, *adapters, net, frozen)``: what a layer computes
    behind the recurrence of its gated delta net.

    Equivalent PyTorch::

        y = gated_rms_norm(found, z.view(found.shape), net.norm_weight, net.norm_eps)
        total = hidden + out_proj(y.flatten(2))
        m = norm_before_mlp(total)
        return total + down_proj(F.silu(gate_proj(m)) * up_proj(m))

    Args:
        found: [batch, positions, heads, head_dim], in the buffers' dtype.
        z, hidden: BeforeRecurrence's.
        adapters: A and B of out_proj, gate, up and down, 8 tensors, as for DecoderLayer.
        frozen: as for BeforeRecurrence.

    Returns, saves and raises what DecoderLayer does. Saved as well: found and z.
    """

    @staticmethod
    def forward(ctx, found, z, hidden, *operands):
        *row, net, frozen = operands
        o, adapters, x = frozen.o, OutputAdapters(*_pairs(row)), as_rows(hidden)
        check_adapters(AFTER, "out_proj", (adapters.o,), o)
        check_adapters(AFTER, "gate_up", (adapters.gate, adapters.up), frozen.gate_up)
        check_adapters(AFTER, "down", (adapters.down,), frozen.down)
        frozen.filling.fill(frozen.groups[1:], adapters)
        dropouts = draw_dropouts(frozen, len(x), frozen.groups[1:])

        def add() -> tuple[Added, Tensor]:
            extended, y = rows_for_o(found, len(x), frozen, dropouts.o)
            copy = None if extended is None else torch.empty_like(x).copy_(x)
            if y is None:
                y = found.new_empty(len(x), o.in_features)
            by_head = y.view(-1, *found.shape[2:])
            _, rstd = gated_rms_norm_forward(
                found, z.view(found.shape), net.norm_weight, net.norm_eps, by_head
            )
            return add_output(x, y, extended, copy, frozen, dropouts.o), rstd

        added, rstd = once_as_record(add)
        output, mlp = add_mlp(hidden, added.total, frozen, dropouts)
        frozen = frozen.for_backward()
        store(ctx, SavedAfter(found, z, rstd, added, mlp, net, frozen, adapters, dropouts))
        return output

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative(AFTER, "the unfused layer")
        saved: SavedAfter = restore(ctx)
        _, _, _, *needed, _, _ = ctx.needs_input_grad
        frozen, net, found = saved.frozen, saved.net, saved.found
        need = OutputAdapters(*_pairs(needed))
        frozen.filling.refill(frozen.groups[1:], saved.adapters)
        batch, positions = found.shape[:2]
        with without_autocast(found):
            layer = LayerBackward(frozen, saved.dropouts, NO_OTHERS, AdapterSums())
            grad_y, grad_residual, adapters = layer.from_output(
                grad_output, batch * positions, saved.added, saved.mlp, saved.adapters, need
            )
            layer.sums.compute()
            grad_found, grad_z, _ = gated_rms_norm_backward(
                grad_y.view(found.shape), found, saved.z.view(found.shape), net.norm_weight,
                saved.rstd, need_weight=False,
            )  # fmt: skip
        grad_residual = grad_residual.unflatten(0, found.shape[:2])
        gradients = (one for pair in adapters for one in pair)
        return grad_found, grad_z.view(saved.z.shape), grad_residual, *gradients, None, None


def _unhidden_rows(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return what is normed, [T, hidden]: hidden, and 0 where mask is."""
    rows = as_rows(hidden)
    return rows if mask is None else rows * mask


def _pairs(values: list) -> tuple[Adapter, ...]:
    """Name these values: A and B of each adapter."""
    return tuple(map(Adapter, values[::2], values[1::2]))
