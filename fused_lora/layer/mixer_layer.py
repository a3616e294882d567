"""A whole decoder layer with a mixer in place of attention, as two autograd functions around it.

The mixer, a recurrence or a convolution, stays a library's, and autograd runs through it. The two
functions take over its ends, which is the computation between mixer and projections
(`mixer_ends.py`). With M the bordered buffers (`buffer.py`) of the in-projections, of out_proj, of
gate and up, and of down, BeforeMixer is

    n               = norm(x)                       as in `decoder_layer.py`
    rows            = [n | n A'] M'                 of all in-projections, one matmul
    inputs, gate    = ends.enter(rows)

and AfterMixer, with the mixer's result `found`,

    y               = ends.leave(found, gate)       into [y | y A']
    t               = x + [y | y A'] M'
    output          = t + MLP(norm(t))              as in `decoder_layer.py`

The backward of each is its forward in reverse. Outside of the ends it is a decoder layer's
(`gradients.py`). The residual x passes through BeforeMixer, whose norm's backward then adds both of
its gradients in one pass.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fused_mlp.utils import refuse_second_derivative, without_autocast

from ..kernels.rows import as_rows, empty_rows
from ..rerun import once_as_record, restore, store
from .adapter_sums import AdapterSums
from .buffer import ProductInput
from .filling import Adapter, adapters_of
from .gradients import LayerBackward, LayerInput
from .halves import add_mlp, add_o, rows_for_o
from .operands import (
    AdaptersAfterAttention,
    Dropouts,
    FrozenLayer,
    Others,
    check_adapters,
    check_layer_input,
    draw_dropouts,
)
from .saved import Added, SavedMLP

BEFORE, AFTER = "BeforeMixer", "AfterMixer"
NO_OTHERS = Others()  # trains: neither norms nor biases


class MixerEnds(Protocol):
    """The computation between a mixer and the projections on both sides: a NamedTuple of its frozen
    tensors, which goes through a record (`saved.py`)."""

    def enter(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the mixer's inputs and then its gate, from the outputs of the in-projections. All
        are [batch, positions, features]."""
        ...

    def enter_backward(
        self, grads: Sequence[Tensor], parts: Sequence[Tensor], grad_parts: Sequence[Tensor]
    ) -> None:
        """Write the gradients of parts into grad_parts. grads: those of `enter`'s results."""
        ...

    def leave(self, found: Tensor, gate: Tensor, y: Tensor) -> Tensor | None:
        """Write the input of out_proj into y [T, features], from the mixer's result `found`. Return
        a tensor that backward reads as well, or None."""
        ...

    def leave_backward(
        self, grad_y: Tensor, found: Tensor, gate: Tensor, saved: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of found and gate. saved: returned by `leave`."""
        ...


class SavedBefore(NamedTuple):
    """Results of BeforeMixer's forward that its backward needs."""

    hidden: Tensor
    mask: Tensor | None  # [T, 1]
    n: ProductInput
    rstd: Tensor | None
    projected: Tensor  # [T, out]
    ends: MixerEnds
    frozen: FrozenLayer
    adapters: tuple[Adapter, ...]
    dropouts: Dropouts


class SavedAfter(NamedTuple):
    """Results of AfterMixer's forward that its backward needs."""

    found: Tensor
    gate: Tensor
    kept: Tensor | None
    added: Added
    mlp: SavedMLP
    ends: MixerEnds
    frozen: FrozenLayer
    adapters: AdaptersAfterAttention
    dropouts: Dropouts


class BeforeMixer(torch.autograd.Function):
    """``BeforeMixer.apply(hidden, mask, *adapters, ends, frozen)``: a layer up to its mixer.

    Equivalent PyTorch, for the four in-projections of a gated delta net::

        n = norm_before_attention(hidden * (mask != 0)[..., None])  # without a mask, of hidden
        return *ends.enter((in_proj_qkv(n), in_proj_z(n), in_proj_b(n), in_proj_a(n))), hidden

    Args:
        hidden: as for DecoderLayer.
        mask: [batch, positions], 0 for padding and anything else for tokens, or None.
        adapters: A and B of each in-projection, as for DecoderLayer.
        frozen: as for DecoderLayer, with the in-projections as qkv and out_proj as o.

    Returns:
        New tensors, or views of one, in the buffers' dtype, a net's decay in fp32, and hidden
        itself for AfterMixer. All else is as for DecoderLayer.
    """

    @staticmethod
    def forward(ctx, hidden, mask, *operands):
        *row, ends, frozen = operands
        adapters, group = adapters_of(row), frozen.qkv
        check_layer_input(BEFORE, hidden, group)
        check_adapters(BEFORE, "in_proj", adapters, group)
        frozen.filling.fill((group,), adapters)
        if mask is not None:
            mask = mask.reshape(-1, 1) != 0
        x = _masked_rows(hidden, mask)
        dropouts = draw_dropouts(frozen, len(x), frozen.groups[:1])
        projected, n, rstd = group.buffer.project_norm(
            x, frozen.norm_before_attention, group.base_bias, dropouts.qkv, None
        )
        entered = ends.enter(_parts(frozen, projected, hidden))
        frozen = frozen.for_backward()
        store(ctx, SavedBefore(
            hidden, mask, n, rstd, projected, ends, frozen, adapters, dropouts,
        ))  # fmt: skip
        return *entered, hidden

    @staticmethod
    def backward(ctx, *gradients):
        refuse_second_derivative(BEFORE, "the unfused layer")
        *grads, grad_residual = gradients
        saved: SavedBefore = restore(ctx)
        need_hidden, _, *needed, _, _ = ctx.needs_input_grad
        frozen, hidden, group = saved.frozen, saved.hidden, saved.frozen.qkv
        frozen.filling.refill((group,), saved.adapters)
        with without_autocast(hidden):
            grad = empty_rows(group.A, len(saved.projected), group.grad_columns)
            parts, grad_parts = (_parts(frozen, one, hidden) for one in (saved.projected, grad))
            saved.ends.enter_backward(grads, parts, grad_parts)
            entry = LayerInput(_masked_rows(hidden, saved.mask), saved.n, saved.rstd, saved.mask)
            layer = LayerBackward(frozen, saved.dropouts, NO_OTHERS, AdapterSums())
            grad_x, adapters = layer.to_input(
                grad, as_rows(grad_residual), entry, saved.adapters, adapters_of(needed),
                need_hidden,
            )  # fmt: skip
            layer.sums.compute()
        if grad_x is not None:
            grad_x = grad_x.view(hidden.shape)
        return grad_x, None, *chain.from_iterable(adapters), None, None


class AfterMixer(torch.autograd.Function):
    """``AfterMixer.apply(found, gate, hidden, *adapters, ends, frozen)``: a layer from its mixer
    on.

    Equivalent PyTorch::

        total = hidden + out_proj(y)  # y: from `ends.leave`
        m = norm_before_mlp(total)
        return total + down_proj(F.silu(gate_proj(m)) * up_proj(m))

    Args:
        found: the mixer's result, in the buffers' dtype.
        gate, hidden: BeforeMixer's.
        adapters: A and B of out_proj, gate, up and down, 8 tensors, as for DecoderLayer.
        frozen: as for BeforeMixer.

    Returns, saves and raises what DecoderLayer does. Saved as well: found and gate.
    """

    @staticmethod
    def forward(ctx, found, gate, hidden, *operands):
        *row, ends, frozen = operands
        o, adapters, x = frozen.o, AdaptersAfterAttention(*adapters_of(row)), as_rows(hidden)
        check_adapters(AFTER, "out_proj", (adapters.o,), o)
        check_adapters(AFTER, "gate_up", (adapters.gate, adapters.up), frozen.gate_up)
        check_adapters(AFTER, "down", (adapters.down,), frozen.down)
        frozen.filling.fill(frozen.groups[1:], adapters)
        dropouts = draw_dropouts(frozen, len(x), frozen.groups[1:])

        def add() -> tuple[Added, Tensor | None]:
            extended, y = rows_for_o(found, len(x), frozen, dropouts.o)
            copy = None if extended is None else torch.empty_like(x).copy_(x)
            if y is None:
                y = found.new_empty(len(x), o.in_features)
            kept = ends.leave(found, gate, y)
            return add_o(x, y, extended, copy, frozen, dropouts.o), kept

        added, kept = once_as_record(add)
        output, mlp = add_mlp(hidden, added.total, frozen, dropouts)
        frozen = frozen.for_backward()
        store(ctx, SavedAfter(found, gate, kept, added, mlp, ends, frozen, adapters, dropouts))
        return output

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative(AFTER, "the unfused layer")
        saved: SavedAfter = restore(ctx)
        _, _, _, *needed, _, _ = ctx.needs_input_grad
        frozen, found, gate = saved.frozen, saved.found, saved.gate
        need = AdaptersAfterAttention(*adapters_of(needed))
        frozen.filling.refill(frozen.groups[1:], saved.adapters)
        with without_autocast(found):
            layer = LayerBackward(frozen, saved.dropouts, NO_OTHERS, AdapterSums())
            grad_y, grad_residual, adapters = layer.to_o(
                grad_output, saved.added, saved.mlp, saved.adapters, need
            )
            layer.sums.compute()
            grad_found, grad_gate = saved.ends.leave_backward(grad_y, found, gate, saved.kept)
        grad_residual = grad_residual.unflatten(0, gate.shape[:2])
        return grad_found, grad_gate, grad_residual, *chain.from_iterable(adapters), None, None


def _parts(frozen: FrozenLayer, rows: Tensor, hidden: Tensor) -> list[Tensor]:
    """Return the columns of each in-projection, [batch, positions, features]."""
    return [one.unflatten(0, hidden.shape[:2]) for one in frozen.qkv.by_projection(rows)]


def _masked_rows(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return hidden as [T, hidden], and 0 where mask is."""
    rows = as_rows(hidden)
    return rows if mask is None else rows * mask
