"""The two halves of a layer's forward between its norms: attention, and the MLP."""

import torch
from torch import Tensor

from ..kernels.causal_attention import Attention
from ..kernels.output_gate import gate_forward, split_gated_heads
from ..kernels.qkv_attention import attention_forward
from ..kernels.qkv_rope import norm_rope_together, rope_forward, scale_q, split_heads
from ..kernels.row_norm import add_normed
from ..kernels.rows import empty_rows
from ..rerun import keeps_elsewhere, once
from .buffer import Dropout
from .operands import Dropouts, FrozenLayer
from .residual import Norm, Normed
from .saved import Added, Attended, SavedMLP


def norm_and_rotate(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, positions: int, frozen: FrozenLayer
) -> tuple[Tensor | None, Tensor]:
    """Norm the heads of q, k and v, if they have norms, and rotate q and k. Return (raw, qkv). With
    norms qkv is new and raw is the given one. Without, qkv is rotated in place."""
    if frozen.head_norms is None:
        if cos is not None:
            assert sin is not None
            rope_forward(qkv, cos, sin, frozen.heads, frozen.kv_heads, frozen.interleaved)
        scale_q(qkv, frozen.q_scale, frozen.o.in_features)
        return None, qkv
    heads, kv_heads = frozen.heads, frozen.kv_heads
    if frozen.has_gate:
        q, k, v = split_gated_heads(qkv, positions, heads, kv_heads)
        rotated = qkv.new_empty(len(qkv), (heads + 2 * kv_heads) * q.shape[3])
    else:
        q, k, v = split_heads(qkv, positions, heads, kv_heads)
        rotated = torch.empty_like(qkv)
    norm_rope_together(q, k, v, frozen.head_norms, cos, sin, rotated, frozen.interleaved)
    scale_q(rotated, frozen.q_scale, frozen.o.in_features)  # q_proj may give gates as well
    return qkv, rotated


def add_attention(
    x: Tensor, raw: Tensor | None, qkv: Tensor, mask: Tensor | None, copy: Tensor | None,
    positions: int, frozen: FrozenLayer, dropout: Dropout | None,
) -> Attended:  # fmt: skip
    """Attend, multiply by the gate in raw, if there is one, project by o and add to the residual x,
    or into its copy."""
    extended, out = rows_for_o(qkv, len(x), frozen, dropout)
    attention = Attention(
        positions, frozen.heads, frozen.kv_heads, frozen.attention_scaling, frozen.interleaved,
        frozen.window,
    )  # fmt: skip
    before_gate = None
    if frozen.has_gate:
        assert raw is not None
        before_gate, saved = attention_forward(qkv, mask, attention)
        attended = gate_forward(before_gate, raw, before_gate.shape[1] // frozen.heads, out)
    else:
        attended, saved = attention_forward(qkv, mask, attention, out)
    added = add_o(x, attended, extended, copy, frozen, dropout)
    return Attended(added, saved, before_gate)


def rows_for_o(
    like: Tensor, tokens: int, frozen: FrozenLayer, dropout: Dropout | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for [x | z], which o's matmul reads, and its first columns if x may be computed
    there; None for what is not needed."""
    o = frozen.o
    if not o.buffer.accumulates(dropout):
        return None, None
    extended = empty_rows(like, tokens, o.x_columns)
    return extended, None if keeps_elsewhere() else extended[:, : o.in_features]


def add_o(
    x: Tensor, o_input: Tensor, extended: Tensor | None, copy: Tensor | None,
    frozen: FrozenLayer, dropout: Dropout | None,
) -> Added:  # fmt: skip
    """Project o_input by o and add to the residual x, or into its copy. extended: as `Buffer` has
    it."""
    o, total = frozen.o, torch.empty_like(x) if copy is None else copy

    def add(residual: Tensor, total: Tensor) -> Tensor:
        return o.buffer.add_projected(
            o_input, extended, residual, total, o.base_bias, frozen.multiplier, dropout
        )

    if frozen.norm_after_attention is None:
        z, normed = add(x, total), None
    else:
        projected = torch.zeros_like(x)
        z = add(projected, projected)
        normed = _add_normed(x, projected, frozen.norm_after_attention, total)
    return Added(o_input, total, z, normed)


def add_mlp(
    hidden: Tensor, total: Tensor, frozen: FrozenLayer, dropouts: Dropouts
) -> tuple[Tensor, SavedMLP]:
    """Return the layer's output, like its input hidden: total plus the MLP of its norm."""
    gate_up_weights, down = frozen.gate_up, frozen.down
    sums = None
    if frozen.output_needed:
        # not a view itself, or autograd would forbid to change it in place
        output = hidden.new_empty(hidden.shape)
        sums = output.view(total.shape)
    else:
        output = hidden.new_zeros(1).expand(hidden.shape)
    adds_to_sums = frozen.norm_after_mlp is None and down.buffer.accumulates(dropouts.down)
    gate_up, m, rstd = gate_up_weights.buffer.project_norm(
        total, frozen.norm_before_mlp, gate_up_weights.base_bias, dropouts.gate_up,
        sums if adds_to_sums else None,
    )  # fmt: skip
    z_down, normed = _add_activated(gate_up, total, sums, frozen, dropouts.down)
    return output, SavedMLP(m, rstd, gate_up, z_down, normed)


def _add_activated(
    gate_up: Tensor, total: Tensor, sums: Tensor | None, frozen: FrozenLayer,
    dropout: Dropout | None,
) -> tuple[Tensor, Normed | None]:  # fmt: skip
    """Write total plus down of the activated gate_up into sums, if they are given. Return z of
    down, and down's output where that is normed."""
    down = frozen.down

    def add(residual: Tensor, sums: Tensor | None) -> Tensor:
        return down.buffer.add_swiglu(
            gate_up, residual, sums, down.base_bias, frozen.multiplier, frozen.activation, dropout
        )

    if frozen.norm_after_mlp is not None:
        projected = torch.zeros_like(total)
        z = add(projected, projected)
        target = torch.empty_like(total) if sums is None else sums
        return z, _add_normed(total, projected, frozen.norm_after_mlp, target)
    if sums is None:
        (z,) = once(lambda: (add(total, None),), is_small=True)
    else:
        z = add(total, sums)
        (z,) = once(lambda: (z,), is_small=True)  # a recompute without sums needs no SwiGLU then
    return z, None


def _add_normed(residual: Tensor, projected: Tensor, norm: Norm, total: Tensor) -> Normed:
    rstd = add_normed(residual, projected, norm.weight, norm.eps, total, norm.zero_centered)
    return Normed(projected, rstd)
