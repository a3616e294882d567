"""A block with a mixer in place of attention: a function before the mixer, and a block after it.

The mixer, a recurrence or a convolution, stays a library's, and autograd runs through it. The two
take over its ends, which is the computation between mixer and projections (`mixer_ends.py`). With
the ends of a block as `block.py` has them, BeforeMixer is

    n               = norm(x)
    rows            = [n | zn] M'                   of all in-projections, one matmul
    inputs, gate    = ends.enter(rows)

and MixerBlock, with the mixer's result `found`,

    y               = ends.leave(found, gate)       into [y | zy]
    t               = x + [y | zy] M'

The backward of each is its forward in reverse. The residual x passes through BeforeMixer, whose
norm's backward then adds both of its gradients in one pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fused_mlp.utils import refuse_second_derivative, without_autocast

from ..kernels.rows import as_rows, empty_rows
from ..rerun import once_as_record, restore, store
from .adapter_sums import AdapterSums
from .block import (
    BlockBackward,
    Entered,
    Gradient,
    Left,
    add_output,
    adds_to_copy,
    enter,
    handed_over,
    rows_for_output,
)
from .buffer import Incoming
from .filling import Adapter
from .operands import (
    BlockFactors,
    Dropouts,
    Frame,
    Kinds,
    Trained,
    check_adapters,
    check_input,
    draw_dropouts,
    kinds_of,
)

NAME = "BeforeMixer"


class MixerEnds(Protocol):
    """The computation between a mixer and the projections on both sides: a NamedTuple of its frozen
    tensors, which goes through a record (`rerun.py`)."""

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
    entered: Entered
    projected: Tensor  # [T, out]
    ends: MixerEnds
    frame: Frame
    factors: BlockFactors
    adapters: tuple[Adapter, ...]
    dropouts: Dropouts
    kinds: Kinds | None


class Mixed(NamedTuple):
    """A mixer's result, projected and added to the residual."""

    left: Left
    total: Tensor  # [T, hidden], the sum
    kept: Tensor | None  # what `leave` returned


class SavedMixer(NamedTuple):
    """Results of a MixerBlock's forward that its backward needs."""

    left: Left
    kept: Tensor | None


class BeforeMixer(torch.autograd.Function):
    """``BeforeMixer.apply(hidden, mask, *trained, ends, frame)``: a block up to its mixer.

    Equivalent PyTorch, for the four in-projections of a gated delta net::

        n = norm(hidden * (mask != 0)[..., None])  # without a mask, of hidden
        return *ends.enter((in_proj_qkv(n), in_proj_z(n), in_proj_b(n), in_proj_a(n))), hidden

    Args:
        hidden: as for DecoderLayer.
        mask: [batch, positions], 0 for padding and anything else for tokens, or None.
        trained: of the in-projections, as for DecoderLayer, and None for out_proj's.
        frame: inputs: the in-projections. output: out_proj.

    Returns:
        New tensors, or views of one, in the buffers' dtype, a net's decay in fp32, and hidden
        itself for DecoderLayer. All else is as for DecoderLayer.
    """

    @staticmethod
    def forward(ctx, hidden, mask, *operands):
        *row, ends, frame = operands
        trained = Trained.from_flat(row, frame.projections)
        *adapters, _ = trained.adapters
        check_input(NAME, hidden, frame.inputs)
        check_adapters(NAME, adapters, frame.inputs)
        frame.filling.fill((frame.inputs,), adapters)
        factors = frame.factors(trained)
        if mask is not None:
            mask = mask.reshape(-1, 1) != 0
        x = _masked_rows(hidden, mask)
        dropouts = draw_dropouts(NAME, frame, len(x), of_output=False)
        projected, entered = enter(frame.scaled(factors), x, dropouts.inputs, None)
        store(ctx, SavedBefore(
            hidden, entered._replace(mask=mask), projected, ends, frame._replace(seed=None),
            factors, tuple(adapters), dropouts, kinds_of(trained),
        ))  # fmt: skip
        return *ends.enter(_parts(frame, projected, hidden)), hidden

    @staticmethod
    def backward(ctx, *gradients):
        refuse_second_derivative(NAME, "the unfused layer")
        *grads, grad_residual = gradients
        saved: SavedBefore = restore(ctx)
        need_hidden, _, *row, _, _ = ctx.needs_input_grad
        hidden, entered, none = saved.hidden, saved.entered, Adapter(None, None)
        frame = saved.frame.scaled(saved.factors)
        group = frame.inputs
        frame.filling.refill((group,), saved.adapters)
        needed, sums = Trained.from_flat(row, frame.projections), AdapterSums()
        with without_autocast(hidden):
            grad = empty_rows(group.A, len(saved.projected), group.grad_columns)
            parts, grad_parts = (_parts(frame, one, hidden) for one in (saved.projected, grad))
            saved.ends.enter_backward(grads, parts, grad_parts)
            x = _masked_rows(hidden, entered.mask)
            run = BlockBackward(
                frame, saved.dropouts, (*saved.adapters, none), needed, saved.kinds, sums
            )
            gradient, p = run.input_gradient(
                Incoming(grad), as_rows(grad_residual), x, entered, need_hidden
            )
            its_adapters = run.sum_inputs(entered, p, grad)
            sums.compute()
        grad_x = handed_over(frame.filling, gradient, hidden, hidden.dtype)
        return grad_x, None, *run.flat(*its_adapters, none), None, None


class MixerBlock(NamedTuple):
    """A block from its mixer on.

    Equivalent PyTorch::

        total = x + out_proj(y)  # y: from `ends.leave`
    """

    frame: Frame  # BeforeMixer's, which has_entered

    # --- of one call alone ---

    ends: Any = None  # MixerEnds
    found: Any = None  # the mixer's result, in the buffers' dtype; gets a gradient
    gate: Any = None  # BeforeMixer's; gets a gradient

    @property
    def output_needed(self) -> bool:
        return True

    def check(self, name: str, hidden: Tensor) -> None:
        """Check nothing: BeforeMixer has."""

    def forward(
        self, x: Tensor, output: Tensor | None, dropouts: Dropouts
    ) -> tuple[Tensor, SavedMixer]:
        """Return total, in output if that is given, and what backward needs."""

        def add() -> Mixed:
            frame, found, dropout = self.frame, self.found, dropouts.output
            total = torch.empty_like(x) if output is None else output
            extended, y = rows_for_output(frame, found, len(x), dropout)
            if adds_to_copy(frame, dropout):
                total.copy_(x)
            if y is None:
                y = found.new_empty(len(x), frame.output.in_features)
            kept = self.ends.leave(found, self.gate, y)
            return Mixed(add_output(frame, x, y, extended, total, dropout), total, kept)

        mixed = once_as_record(add)
        return mixed.total, SavedMixer(mixed.left, mixed.kept)

    def backward(
        self, run: BlockBackward, x: Tensor | None, saved: SavedMixer, gradient: Gradient,
        need_x: bool, before: BlockBackward | None,
    ) -> tuple[Gradient, tuple]:  # fmt: skip
        """Return the gradients of x and of what the block trains."""
        dropout = run.dropouts.output
        incoming = run.output_gradient(gradient, saved.left.added)
        grad_y, p = self.frame.output.buffer.gradient(incoming, None, dropout)
        out_proj = run.sum_output(incoming, saved.left, p, dropout)
        run.mixer_grads = self.ends.leave_backward(grad_y, self.found, self.gate, saved.kept)
        return Gradient(gradient.total, None), run.flat(out_proj)


def _parts(frame: Frame, rows: Tensor, hidden: Tensor) -> list[Tensor]:
    """Return the columns of each in-projection, [batch, positions, features]."""
    return [one.unflatten(0, hidden.shape[:2]) for one in frame.inputs.by_projection(rows)]


def _masked_rows(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return hidden as [T, hidden], and 0 where mask is."""
    rows = as_rows(hidden)
    return rows if mask is None else rows * mask
