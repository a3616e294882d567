"""The two ends of a decoder layer's blocks, which all of them share, forward and backward.

A decoder layer is two blocks, each of which adds to the residual x (`decoder_layer.py` runs them):

    attention    x + attention of the norm of x      `attention_block.py`; or another mixer,
                                                     `mixer_block.py`
    MLP          x + MLP of the norm of x            `mlp_block.py`

A block reads its norm with projections that share it (q, k and v; gate and up), computes, and ends
with one projection (o; down). Its ends lead from the residual to what its first projections give,
and from what the last one reads to the residual. Forward, for the residual x [T, hidden] and M the
bordered buffers (`buffer.py`):

    n     = norm(x)                    into the first columns of [n | zn], and x into a copy
    zn    = n A'                       into its others
    p     = [n | zn] M' + bias         of all projections that share n, side by side
    ...                                attention, SwiGLU or a mixer makes a of p
    za    = a A'                       into [a | za]
    t     = x + [a | za] M'            into the copy of x, and rounded once; what is added may be
                                       multiplied or normed

Backward, for the incoming g:

    pa    = g sB                       into the other columns of [g | pa]
    da    = [g | pa] M
    ...                                the gradient dp of p, from that of a
    pn    = dp sB                      into [dp | pn]
    dn    = [dp | pn] M
    dx    = norm backward of dn, plus g
    dA    = pn' n, pa' a               and, in the same launch,
    dB    = s dp' zn, s g' za

Where what is added is normed, the last projection gives u, which is saved. One more pass makes
t = x + norm(u), and g becomes the gradient of u for the last projection. Where it has a magnitude
(DoRA), a pass makes t = x + c u + bias, likewise. u comes out of the matmul in fp32 where its
buffer can, and is saved in the adapters' dtype for the gradient of the magnitude.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.magnitudes import scale_columns, scale_columns_backward
from ..kernels.row_norm import add_normed
from ..kernels.rows import empty_rows
from ..rerun import keeps_elsewhere
from .adapter_sums import AdapterSums
from .buffer import Dropout, Incoming, ProductInput, WeightGroup
from .filling import Adapter, Filling
from .operands import Dropouts, Frame, Kind, Kinds, Trained
from .residual import Norm, Normed, addend_gradient, norm_backward


class Entered(NamedTuple):
    """The beginning of a block."""

    n: ProductInput  # the norm of the residual, which the projections read
    rstd: Tensor | None  # of the norm
    mask: Tensor | None = None  # [T, 1], which has multiplied x in front of the norm alone
    unscaled: Tensor | None = None  # what the projections gave, where a pass has scaled that


class Added(NamedTuple):
    """Results of the last projection, on its way into the residual."""

    z: Tensor  # of what it reads
    normed: Normed | None  # where it is normed
    unscaled: Tensor | None  # where it is scaled: before that


class Left(NamedTuple):
    """The end of a block."""

    x: Tensor  # [T, in], what the last projection reads
    added: Added


def enter(
    frame: Frame, x: Tensor, dropout: Dropout | None, copy: Tensor | None, scales: bool = True
) -> tuple[Tensor, Entered]:
    """Return what the projections give of the norm of x, and what backward needs of that. x also
    goes into copy, if that is given. scales: here, and not in a kernel that reads them."""
    group = frame.inputs
    scales = scales and group.scale is not None
    given, n, rstd = group.buffer.project_norm(
        x, frame.norm, group.base_bias, dropout, copy, in_fp32=scales
    )
    if not scales:
        return given, Entered(n, rstd)
    y = torch.empty_like(given, dtype=group.A.dtype)
    unscaled = _scale(group, given, group.dropped_base(n.x, dropout), y)
    return y, Entered(n, rstd, unscaled=unscaled)


def rows_for_output(
    frame: Frame, like: Tensor, tokens: int, dropout: Dropout | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for [a | za], which the last matmul reads, and its first columns if a may be
    computed there; None for what is not needed."""
    if not frame.output.buffer.accumulates(dropout):
        return None, None
    extended = empty_rows(like, tokens, frame.output.x_columns)
    return extended, None if keeps_elsewhere() else extended[:, : frame.output.in_features]


def adds_to_copy(frame: Frame, dropout: Dropout | None) -> bool:
    """Return True if the last matmul adds to a copy of the residual, which the norm has written."""
    is_plain = frame.norm_after is None and frame.output.scale is None
    return frame.adds and is_plain and frame.output.buffer.accumulates(dropout)


def add_output(
    frame: Frame, x: Tensor, a: Tensor, extended: Tensor | None, total: Tensor,
    dropout: Dropout | None,
) -> Left:  # fmt: skip
    """Make total the residual x plus the last projection of a, or that alone. Where it
    `adds_to_copy`, total holds x already. extended: as `Buffer` has it."""
    output = frame.output

    def project(residual: Tensor | None, total: Tensor, multiplier: float) -> Tensor:
        return output.buffer.add_projected(
            a, extended, residual, total, output.base_bias, multiplier, dropout
        )

    return Left(a, add_projection(frame, x, total, project, output.dropped_base(a, dropout)))


def add_projection(
    frame: Frame,
    x: Tensor,
    total: Tensor,
    project: Callable[[Tensor | None, Tensor, float], Tensor],
    dropped: Tensor | None,
) -> Added:
    """Make total the residual x plus what the last projection gives. project(residual, total,
    multiplier) is a method of its buffer. dropped: its `dropped_base`."""
    norm, scale, multiplier = frame.norm_after, frame.output.scale, frame.multiplier
    if norm is None and scale is None:
        return Added(project(x if frame.adds else None, total, multiplier), None, None)
    projected, unscaled = total if norm is None else torch.zeros_like(x), None
    if scale is None:
        z = project(projected, projected, multiplier)
    else:
        given = total.new_empty(total.shape, dtype=torch.float32)
        z = project(None, given, 1.0)
        residual = x if frame.adds and norm is None else None
        unscaled = _scale(frame.output, given, dropped, projected, residual, multiplier)
    if norm is None:
        return Added(z, None, unscaled)
    rstd = add_normed(x, projected, norm.weight, norm.eps, total, norm.zero_centered)
    return Added(z, Normed(projected, rstd), unscaled)


def _scale(
    group: WeightGroup, given: Tensor, dropped: Tensor | None, y: Tensor,
    residual: Tensor | None = None, multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    """Write into y what the projections give, scaled, or the residual plus that. Return it before
    that, in the adapters' dtype. given: without `dropped`. Both are written."""
    assert group.scale is not None
    if dropped is not None:
        given.add_(dropped)
        dropped.mul_(-multiplier)
        residual = dropped if residual is None else dropped.add_(residual)
    unscaled = torch.empty_like(given, dtype=group.A.dtype)
    scale_columns(given, group.scale, y, unscaled, residual, multiplier)
    return unscaled


class Gradient(NamedTuple):
    """The gradient of a residual."""

    total: Tensor  # [T, hidden], in the residual's dtype
    incoming: Incoming | None  # as the last projection of the block before reads it; None: as it is

    def at(self, rows: slice) -> "Gradient":
        incoming = self.incoming and self.incoming.rows
        return Gradient(self.total[rows], None if incoming is None else Incoming(incoming[rows]))


class BlockBackward:
    """The two ends of a block's backward, and what they share.

    bias_grads, magnitude_grads, norm_grad, norm_after_grad: gradients that the ends write, None
    where nothing is trained; those of the last projection are the `last_`. sums: computes those of
    all blocks' adapters at once.
    """

    def __init__(
        self, frame: Frame, dropouts: Dropouts, adapters: Sequence[Adapter], needed: Trained,
        kinds: Kinds | None, sums: AdapterSums,
    ):  # fmt: skip
        self.frame, self.dropouts, self.sums = frame, dropouts, sums
        self.trained = adapters, needed, kinds
        self.grad_x: Gradient | None = None  # memory for the gradient of x; None: new
        *self.adapters, self.last_adapter = adapters
        *self.need, self.need_last = needed.adapters
        self.mixer_grads: tuple[Tensor | None, ...] = (None, None)  # of a mixer's result and gate
        self.bias_grads: list[Tensor | None] = []
        self.magnitude_grads: list[Tensor | None] = []
        self.last_bias_grad = self.last_magnitude_grad = None
        self.norm_grad = self.norm_after_grad = None
        if kinds is not None:
            like = frame.output.A
            for_each = [
                [_new(like, *pair) for pair in zip(its_kinds, its_needed, strict=True)]
                for its_kinds, its_needed in (
                    (kinds.biases, needed.biases), (kinds.magnitudes, needed.magnitudes)
                )
            ]  # fmt: skip
            *self.bias_grads, self.last_bias_grad = for_each[0]
            *self.magnitude_grads, self.last_magnitude_grad = for_each[1]
            self.norm_grad = _new(like, kinds.norm, needed.norm)
            self.norm_after_grad = _new(like, kinds.norm_after, needed.norm_after)

    def output_gradient(self, gradient: Gradient, added: Added) -> Incoming:
        """Return the gradient of what the last projection gave."""
        frame, (total, incoming) = self.frame, gradient
        like, columns = frame.output.A, frame.output.grad_columns
        if not frame.adds_directly:
            grad, multiplier = total, frame.multiplier
            if added.unscaled is None or added.normed is not None:
                rows = addend_gradient(
                    total, multiplier, added.normed, frame.norm_after, self.norm_after_grad, like,
                    columns,
                )  # fmt: skip
                grad, multiplier = rows, 1.0
            else:
                rows = empty_rows(like, len(total), columns)
            dropped = frame.output.dropped_gradients(grad, self.dropouts.output, multiplier)
            last = (self.last_magnitude_grad,)
            self._unscale(frame.output, added.unscaled, grad, rows, last, multiplier)
            incoming = Incoming(rows, dropped=dropped)
        elif incoming is None:
            rows = empty_rows(like, len(total), columns)
            rows[:, : total.shape[1]].copy_(total)
            incoming = Incoming(rows)
        if self.last_bias_grad is not None:
            assert incoming.rows is not None
            frame.output.sum_biases(incoming.rows, (self.last_bias_grad,))
        return incoming

    def _unscale(
        self, group: WeightGroup, unscaled: Tensor | None, grad: Tensor, rows: Tensor,
        magnitude_grads: Sequence[Tensor | None], multiplier: float = 1.0,
    ) -> None:  # fmt: skip
        """Write the gradient of what the group's projections gave, `unscaled`, into the first
        columns of rows, given in those of grad that of what a pass has made of it. Both may be one.
        """
        if unscaled is not None and group.scale is not None:
            grad, grad_u = grad[:, : group.out], rows[:, : group.out]
            factor = group.scale.factor
            sums = scale_columns_backward(grad, unscaled, factor, grad_u, multiplier)
            group.sum_magnitudes(sums, magnitude_grads)

    def sum_output(
        self, incoming: Incoming, left: Left, p: Tensor, dropout: Dropout | None
    ) -> Adapter:
        """Return the gradients of the last projection's adapter."""
        group, adapter, need = self.frame.output, (self.last_adapter,), (self.need_last,)
        assert incoming.rows is not None
        (B,) = self.sums.add_B(group, adapter, need, incoming.rows, left.added.z)
        (A,) = self.sums.add_A(group, adapter, need, left.x, p, dropout)
        return Adapter(A, B)

    def input_gradient(
        self, incoming: Incoming, grad_residual: Tensor, x: Tensor, entered: Entered,
        need_x: bool, before: "BlockBackward | None" = None,
    ) -> tuple[Gradient | None, Tensor | None]:  # fmt: skip
        """Return the gradient of the residual x and p of the projections that share its norm, None
        for what nothing needs. grad_residual: of x beside the block. before: who takes it next."""
        frame, (n, rstd, mask, unscaled), norm_grad = self.frame, entered, self.norm_grad
        group = frame.inputs
        if any(grad is not None for grad in self.bias_grads):
            assert incoming.rows is not None
            group.sum_biases(incoming.rows, self.bias_grads)
        if (rows := incoming.rows) is not None:
            dropped = group.dropped_gradients(rows, self.dropouts.inputs)
            incoming = incoming._replace(dropped=dropped)
            self._unscale(group, unscaled, rows, rows, self.magnitude_grads)
        if not need_x and norm_grad is None:
            if not any(need.A for need in self.need):
                return None, None
            assert incoming.rows is not None
            return None, group.buffer.adapter_gradient(incoming.rows[:, : group.out], n.scales)
        grad_n, p = group.buffer.gradient(incoming, n.scales, self.dropouts.inputs)
        if mask is not None:
            grad_n.mul_(mask)
        if not frame.adds:
            return Gradient(grad_n, None), p
        if before is not None:
            return before.total_gradient(
                grad_n, grad_residual, x, frame.norm, rstd, norm_grad
            ), p  # fmt: skip
        grad_x = self.grad_x or self.new_gradient(x, None)
        norm_backward(grad_n, grad_residual, x, frame.norm, rstd, grad_x.total, norm_grad)
        return grad_x, p

    def total_gradient(
        self, grad_y: Tensor, grad_residual: Tensor, total: Tensor, norm: Norm | None,
        rstd: Tensor | None, norm_grad: Tensor | None,
    ) -> Gradient:  # fmt: skip
        """Return the gradient of this block's total, which is normed and goes on as the
        residual."""
        is_read = self.frame.adds_directly and self.dropouts.output is None
        return Gradient(*self.frame.output.buffer.norm_backward(
            grad_y, grad_residual, total, norm, rstd, norm_grad, is_read
        ))  # fmt: skip

    def new_gradient(self, x: Tensor, before: "BlockBackward | None") -> Gradient:
        """Return memory for the gradient of x, as wide as who takes it next needs it: the block
        before, or the layer before, which then copies nothing."""
        frame = self.frame
        columns = frame.columns_before if before is None else before.frame.output.grad_columns
        wide = empty_rows(x, len(x), max(columns, x.shape[1]))
        # under autocast the residual may be fp32, and who takes its gradient casts it
        incoming = Incoming(wide) if x.dtype == frame.output.A.dtype else None
        return Gradient(wide[:, : x.shape[1]], incoming)

    def sum_inputs(self, entered: Entered, p: Tensor | None, grad: Tensor) -> list[Adapter]:
        """Return the gradients of the adapters that share the norm. grad: of what they gave."""
        group = self.frame.inputs
        all_B = self.sums.add_B(group, self.adapters, self.need, grad, entered.n.z)
        return list(map(Adapter, self.sum_A(entered, p), all_B))

    def sum_A(self, entered: Entered, p: Tensor | None) -> list[Tensor | None]:
        return self.sums.add_A(
            self.frame.inputs, self.adapters, self.need, entered.n.x, p, self.dropouts.inputs
        )

    def flat(self, *adapters: Adapter) -> tuple:
        """Return the gradients of all that the block trains, as `Trained` has them."""
        if not self.frame.trains_others:
            return Trained(adapters).flat()
        return Trained(
            adapters, [*self.bias_grads, self.last_bias_grad],
            [*self.magnitude_grads, self.last_magnitude_grad], self.norm_grad, self.norm_after_grad,
        ).flat()  # fmt: skip


def handed_over(
    filling: Filling, gradient: Gradient | None, like: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return a gradient in this dtype, [batch, positions, features] with the first two of `like`,
    and leave its rows for the layer before."""
    if gradient is None:
        return None
    if gradient.incoming is not None and gradient.incoming.rows is not None:
        filling.handover.offer(gradient.incoming.rows)
    return gradient.total.view(*like.shape[:2], gradient.total.shape[1]).to(dtype)


def _new(like: Tensor, kind: Kind | None, need: bool | None) -> Tensor | None:
    return like.new_empty(kind.shape, dtype=kind.dtype) if kind is not None and need else None
