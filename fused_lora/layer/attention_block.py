"""The attention of a decoder layer as a block.

The residual plus the attention of its norm. With the ends as `block.py` has them,

    qkv     = [n | zn] M' + bias           q, k and v side by side, in one matmul
    q, k    rotated where they lie (RoPE); with norms of their heads, as Qwen3 has, qkv stays as it
            is, and one pass writes [RoPE(norm(q)) | RoPE(norm(k)) | v] beside it
    a       = attention(q, k, v)           where q's projection gives a gate, times its sigmoid;
                                           into [a | za], where our own kernels compute it

and backward, for the gradient da of a,

    dqkv    = attention backward, rotated back     into [dqkv | pn]; of q and k, where their heads
                                                   are normed, through these norms in place

Per token of Qwen2.5-3B (hidden 2,048, q and k and v 2,560; r = 32, bf16) it saves 17.8 kB: its
input 4.1, [n|zn] 4.3, qkv 5.1, a 4.1, za, log-sum-exp and rstd 0.2. With norms of heads it saves q,
k and v once more, as attention gets them: at Qwen3-8B (hidden 4,096, q and k and v 6,144) 12.3 kB,
2.0 of these a second v, because attention reads all three from one buffer. The rstd of the heads
are recomputed. With magnitudes (DoRA) it saves q, k and v once more before a pass has scaled them,
and what o gives.

Under checkpointing, if there is somewhere to keep them, a recompute keeps a, za and the sum. These
are 8.2 kB a token, and save recomputing attention, the matmul with o and the sum. With a magnitude
of o it keeps a alone of these, and repeats the matmul, about 1% of a step. To keep what that gives
would be 4.1 kB more, and `docs/runs/h200/dora.txt` shows a step that waits for its copies.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..functions.rope import check_angles, check_head_norms
from ..kernels.causal_attention import Attention
from ..kernels.head_norms import HeadNorms, head_norms_backward
from ..kernels.output_gate import gate_backward, gate_forward, split_gated_heads
from ..kernels.qkv_attention import AttentionSaved, attention_backward, attention_forward
from ..kernels.qkv_rope import norm_rope_together, rope_forward, scale_q, split_heads
from ..kernels.rows import empty_rows
from ..rerun import has_kept, once_as_record
from .block import (
    BlockBackward,
    Entered,
    Gradient,
    Left,
    add_output,
    adds_to_copy,
    enter,
    rows_for_output,
)
from .buffer import Dropout, Incoming
from .operands import Dropouts, Frame


class Read(NamedTuple):
    """Attention, before its output projection."""

    a: Tensor  # [T, in of o]
    saved: AttentionSaved
    before_gate: Tensor | None  # what o reads before its gate, if it has one


class Attended(NamedTuple):
    """Attention, and its output projection added to the residual."""

    left: Left
    total: Tensor  # [T, hidden], the sum
    saved: AttentionSaved
    before_gate: Tensor | None = None  # what o reads before its gate, if it has one


class SavedAttention(NamedTuple):
    """Results of an AttentionBlock's forward that its backward needs."""

    entered: Entered
    raw: Tensor | None  # [q | k | v] before the norms of heads, if there are any; with gates
    qkv: Tensor
    left: Left
    attention: AttentionSaved
    before_gate: Tensor | None


class AttentionBlock(NamedTuple):
    """An attention between a norm and the residual.

    Equivalent PyTorch, where norms and projections are the layer's own::

        # a norm that the layer lacks returns its input, as does rope without cos and sin
        n = norm(x)
        q, k, v = (split_into_heads(proj(n)) for proj in (q_proj, k_proj, v_proj))
        q, k = rope(head_norms.q(q), head_norms.k(k), cos, sin)  # the norms, where there are any
        v = head_norms.v(v)  # likewise
        q = q * q_scale  # as every token has its own, if there is one
        # with has_gate each head of q_proj(n) is followed by its gate
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
        attended = join_heads(attended) * torch.sigmoid(gate)  # the gate, if there is one
        total = x + norm_after(multiplier * o_proj(attended))
    """

    frame: Frame  # inputs: q, k and v. output: o
    heads: int
    kv_heads: int
    scaling: float  # of the scores
    head_norms: HeadNorms | None = None  # of q, k and v; None: q and k are rotated as they are
    has_gate: bool = False  # q's projection gives a gate beside each head (`output_gate.py`)
    interleaved: bool = False  # RoPE pairs neighbours of a head, not its halves
    sinks: Tensor | None = None  # [heads], one more score in each softmax, whose value is 0

    # --- of one call alone; none gets a gradient ---

    positions: int = 0
    # [batch or 1, positions, head_dim or less], as rope's. None: q and k are not rotated
    cos: Tensor | None = None
    sin: Tensor | None = None
    # None, for causal attention, or what scaled_dot_product_attention takes, or documents' bounds,
    # beside which window hides older tokens
    mask: Tensor | None = None
    # [batch or 1, positions] in fp32, multiplies q after RoPE; None: 1
    q_scale: Tensor | None = None
    window: int | None = None  # tokens of its document that each sees, itself the last; None: all

    @property
    def output_needed(self) -> bool:
        return True

    def check(self, name: str, hidden: Tensor) -> None:
        if any(angle is not None and angle.requires_grad for angle in (self.cos, self.sin)):
            raise ValueError(
                f"{name}: cos or sin requires a gradient, which it would not get: detach them, or "
                "use the unfused layer"
            )
        if self.sinks is not None and self.sinks.shape != (self.heads,):
            raise ValueError(f"{name}: sinks is {list(self.sinks.shape)}, should be [{self.heads}]")
        if self.sinks is not None and self.sinks.requires_grad:
            raise ValueError(
                f"{name}: sinks require a gradient, which they would not get: freeze them, or use "
                "the unfused layer"
            )
        head_dim = self.frame.output.in_features // self.heads
        check_angles(name, self.cos, self.sin, (*hidden.shape[:2], head_dim), hidden.device)
        if self.head_norms is not None:
            check_head_norms(
                name, self.head_norms, self.heads, self.kv_heads, head_dim, hidden.device
            )

    def forward(
        self, x: Tensor, output: Tensor | None, dropouts: Dropouts
    ) -> tuple[Tensor, SavedAttention]:
        """Return total, in output if that is given, and what backward needs."""
        frame = self.frame
        is_last = output is not None  # a function's own output is not kept
        keeps_sum = not is_last and frame.output.scale is None
        is_kept = has_kept() and keeps_sum
        if not is_last and not is_kept:
            output = torch.empty_like(x)
        # the norm also writes the copy of x that o adds to; a recompute may have kept the sum
        copy = None if is_kept or not adds_to_copy(frame, dropouts.output) else output
        qkv, entered = enter(frame, x, dropouts.inputs, copy)
        raw, qkv = self._norm_and_rotate(qkv)

        def attend() -> Attended:
            return self._attend(x, raw, qkv, output, dropouts.output)

        attended = once_as_record(attend) if keeps_sum else attend()
        return attended.total, SavedAttention(
            entered, raw, qkv, attended.left, attended.saved, attended.before_gate
        )

    def _norm_and_rotate(self, qkv: Tensor) -> tuple[Tensor | None, Tensor]:
        """Norm the heads of q, k and v, if they have norms, and rotate q and k. Return (raw, qkv).
        With norms qkv is new and raw is the given one. Without, qkv is rotated in place."""
        features = self.frame.output.in_features  # q_proj may give gates as well
        heads, kv_heads, cos, sin = self.heads, self.kv_heads, self.cos, self.sin
        if self.head_norms is None:
            if cos is not None:
                assert sin is not None
                rope_forward(qkv, cos, sin, heads, kv_heads, self.interleaved)
            scale_q(qkv, self.q_scale, features)
            return None, qkv
        split = split_gated_heads if self.has_gate else split_heads
        q, k, v = split(qkv, self.positions, heads, kv_heads)
        rotated = qkv.new_empty(len(qkv), (heads + 2 * kv_heads) * q.shape[3])
        norm_rope_together(q, k, v, self.head_norms, cos, sin, rotated, self.interleaved)
        scale_q(rotated, self.q_scale, features)
        return qkv, rotated

    def _attend(
        self, x: Tensor, raw: Tensor | None, qkv: Tensor, total: Tensor | None,
        dropout: Dropout | None,
    ) -> Attended:  # fmt: skip
        """Attend, multiply by the gate in raw, if there is one, project by o and add to the
        residual x in total."""
        assert total is not None
        extended, out = rows_for_output(self.frame, qkv, len(x), dropout)
        attention = Attention(
            self.positions, self.heads, self.kv_heads, self.scaling, self.interleaved, self.window
        )

        def read() -> Read:
            if not self.has_gate:
                return Read(*attention_forward(qkv, self.mask, attention, out, self.sinks), None)
            assert raw is not None
            before_gate, saved = attention_forward(qkv, self.mask, attention)
            heads = before_gate.shape[1] // self.heads
            return Read(gate_forward(before_gate, raw, heads, out), saved, before_gate)

        a, saved, before_gate = read() if self.frame.output.scale is None else once_as_record(read)
        left = add_output(self.frame, x, a, extended, total, dropout)
        return Attended(left, total, saved, before_gate)

    def backward(
        self, run: BlockBackward, x: Tensor, saved: SavedAttention, gradient: Gradient,
        need_x: bool, before: BlockBackward | None,
    ) -> tuple[Gradient | None, tuple]:  # fmt: skip
        """Return the gradients of x, None if nothing needs it, and of what the block trains."""
        inputs, output, dropout = self.frame.inputs, self.frame.output, run.dropouts.output
        incoming = run.output_gradient(gradient, saved.left.added)
        da, pa = output.buffer.gradient(incoming, None, dropout)
        o = run.sum_output(incoming, saved.left, pa, dropout)
        del incoming
        grad_qkv = empty_rows(inputs.A, len(da), inputs.grad_columns)
        self._attention_gradient(da, saved, grad_qkv[:, : inputs.out])
        del da
        grad_x, pn = run.input_gradient(
            Incoming(grad_qkv), gradient.total, x, saved.entered, need_x, before
        )
        return grad_x, run.flat(*run.sum_inputs(saved.entered, pn, grad_qkv), o)

    def _attention_gradient(self, grad: Tensor, saved: SavedAttention, grad_qkv: Tensor) -> None:
        """Write the gradient of q, k and v (with a gate beside each head of q, if there are gates)
        into grad_qkv [T, out], given that of o's input."""
        heads, kv_heads, attended, target = self.heads, self.kv_heads, saved.left.x, grad_qkv
        split = split_gated_heads if self.has_gate else split_heads
        if self.has_gate:
            assert saved.raw is not None and saved.before_gate is not None
            attended = saved.before_gate
            grad = gate_backward(grad, attended, saved.raw, attended.shape[1] // heads, grad_qkv)
            target = torch.empty_like(saved.qkv)
        attention_backward(
            grad, saved.qkv, self.cos, self.sin, self.mask, attended, saved.attention, target
        )
        scale_q(target, self.q_scale, attended.shape[1])
        if saved.raw is not None:
            assert self.head_norms is not None
            q, k, v = split(saved.raw, self.positions, heads, kv_heads)
            head_norms_backward(q, k, v, self.head_norms, target)
        if self.has_gate:
            parts = split(grad_qkv, self.positions, heads, kv_heads)
            found = split_heads(target, self.positions, heads, kv_heads)
            for part, one in zip(parts, found, strict=True):
                part.copy_(one)
