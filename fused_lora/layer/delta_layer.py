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
from ..rerun import takes_away
from .adapter_sums import AdapterSums
from .buffer import ProductInput
from .filling import Adapter
from .forward import add_mlp, add_output
from .gradients import LayerBackward
from .operands import (
    Adapters,
    Dropouts,
    FrozenLayer,
    Others,
    check_adapters,
    check_layer_input,
    draw_dropouts,
)
from .saved import Added, SavedMLP, once_as_record, restore, store

NAMES = "BeforeRecurrence", "AfterRecurrence"
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
    rows: Tensor  # [T, out], q, k and v before the convolution, z, b and a
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
    adapters: Adapters
    dropouts: Dropouts


class BeforeRecurrence(torch.autograd.Function):
    """``BeforeRecurrence.apply(hidden, mask, *adapters, net, frozen)``: what a gated delta net
    computes in front of its recurrence, with the layer's norm.

    Equivalent PyTorch::

        n = input_norm(hidden * mask[..., None])  # without a mask, of hidden as it is
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
        check_layer_input(NAMES[0], hidden, group)
        check_adapters(NAMES[0], "in_proj", adapters, group)
        frozen.borders.fill((group,), adapters)
        if mask is not None:
            mask = mask.reshape(-1, 1).to(hidden.dtype)
        x = _unhidden_rows(hidden, mask)
        dropouts = draw_dropouts(frozen, len(x), frozen.groups[:1])
        rows, n, rstd = group.buffer.project_norm(
            x, frozen.input_norm, group.base_bias, dropouts.qkv, None
        )
        mixed, z, b, a = (one.unflatten(0, hidden.shape[:2]) for one in group.by_projection(rows))
        q, k, v = causal_conv_forward(mixed, net.conv_weight, net.conv_bias, net.sizes)
        decay = -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
        frozen = frozen.for_backward()
        store(ctx, SavedBefore(hidden, mask, n, rstd, rows, net, frozen, adapters, dropouts))
        return q, k, v, z, b.sigmoid(), decay, hidden

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v, grad_z, grad_beta, grad_decay, grad_residual):
        refuse_second_derivative(NAMES[0], "the unfused layer")
        saved: SavedBefore = restore(ctx)
        need_hidden, _, *needed, _, _ = ctx.needs_input_grad
        frozen, net, group = saved.frozen, saved.net, saved.frozen.qkv
        frozen.borders.refill((group,), saved.adapters)
        with without_autocast(saved.hidden):
            grad = empty_rows(group.A, len(saved.rows), group.grad_columns)
            mixed, _, b, a = group.by_projection(saved.rows)
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
        return total + down_proj(F.silu(gate_proj(post_norm(total))) * up_proj(post_norm(total)))

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
        o, pairs, x = frozen.o, _pairs(row), as_rows(hidden)
        parts = ("out_proj", o, pairs[:1]), ("gate_up", frozen.gate_up, pairs[1:3])
        for name, group, its in (*parts, ("down", frozen.down, pairs[3:])):
            check_adapters(NAMES[1], name, its, group)
        frozen.borders.fill(frozen.groups[1:], pairs)
        dropouts = draw_dropouts(frozen, len(x), frozen.groups[1:])

        def add() -> AddedAfterNorm:
            extended, copy = None, None
            y = found.new_empty(len(x), o.in_features)
            if frozen.rows is None and not o.buffer.adds_beside(dropouts.o):
                copy = torch.empty_like(x).copy_(x)
                extended = empty_rows(found, len(x), o.x_columns)
                if not takes_away():
                    y = extended[:, : o.in_features]
            by_head = y.view(-1, *found.shape[2:])
            _, rstd = gated_rms_norm_forward(
                found, z.view(found.shape), net.norm_weight, net.norm_eps, by_head
            )
            return AddedAfterNorm(add_output(x, y, extended, copy, frozen, dropouts.o), rstd)

        added, rstd = once_as_record(add)
        output, mlp = add_mlp(hidden, added.total, frozen, dropouts)
        adapters = Adapters(*[NO_ADAPTER] * 3, *pairs)
        frozen = frozen.for_backward()
        store(ctx, SavedAfter(found, z, rstd, added, mlp, net, frozen, adapters, dropouts))
        return output

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative(NAMES[1], "the unfused layer")
        saved: SavedAfter = restore(ctx)
        _, _, _, *needed, _, _ = ctx.needs_input_grad
        frozen, net, found = saved.frozen, saved.net, saved.found
        need = Adapters(*[NO_ADAPTER] * 3, *_pairs(needed))
        frozen.borders.refill(frozen.groups[1:], saved.adapters[3:])
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


class AddedAfterNorm(NamedTuple):
    """out_proj of the gated norm, added to the residual, and that norm's 1 / root mean square."""

    added: Added
    rstd: Tensor


NO_ADAPTER = Adapter(None, None)


def _unhidden_rows(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return what is normed, [T, hidden]: hidden, and 0 where mask is."""
    rows = as_rows(hidden)
    return rows if mask is None else rows * mask


def _pairs(row: list) -> tuple[Adapter, ...]:
    """Name the values of a row: A and B of each adapter."""
    return tuple(map(Adapter, row[::2], row[1::2]))
