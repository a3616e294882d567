"""LoRA_Attention: attention with its four projections as one autograd function, backward by hand.

Forward, for x [T, in], RoPE's angles, and the frozen W, bias b, adapters A, B and scale s of each
projection, in the order of execution:

    z       = x [Aq; Ak; Av]'                      [T, r of all]
    q, k, v = x W' + b + s z B'                    each its own
    qkv     = [RoPE(q) | RoPE(k) | v]              in one pass, with the norms of heads before
                                                   RoPE if there are any (Qwen3)
    a       = attention(qkv)                       `qkv_attention.py`
    output  = a Wo' + bo + so (a Ao') Bo'

Backward, for the incoming g:

    da      = so g Bo Ao + g Wo                    and dAo, dBo
    dqkv    = attention's backward, rotated back   in one pass up to 512 positions; another goes
                                                   through the norms of heads
    dx      = dz [Aq; Ak; Av] + dq Wq + dk Wk + dv Wv, and all dA, dB

with the equations of `fused_mlp/utils.py` for both groups of projections. It does the work of
LoRA_QKV, RoPE, scaled_dot_product_attention and LoRA_W with as many matmuls. It saves the host work
between them: three functions and eight views that autograd follows. With our attention backward,
RoPE's backward needs no extra pass over q and k either.

Saved [T, ...] tensors: x (if an A of q, k or v is trained), z, qkv, a, a Ao' and what attention
saves. Norms of heads add raw q and k, and v where it has one: 10.2 kB a token in Qwen3-8B. Dropout
adds one bit for each element of a, and one for each element of x for each of q, k and v.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_mlp.dropout import draw_masks
from fused_mlp.launching import check_runnable
from fused_mlp.utils import (
    Group,
    adapter_gradients,
    bias_gradients,
    compute_dtype,
    input_gradient,
    refuse_second_derivative,
    split_frozen,
    without_autocast,
)

from ..kernels.causal_attention import Attention
from ..kernels.head_norms import HeadNorms, head_norms_backward
from ..kernels.qkv_attention import AttentionSaved, attention_backward, attention_forward
from ..kernels.qkv_rope import _qkv_rope_kernel, norm_rope_together, rope_together, scale_q
from ..rerun import join, split
from .lora_linear import (
    QKV_PREFIXES,
    FrozenLinear,
    FrozenQKV,
    check_layers,
    dtypes_of,
    project,
    with_biases,
)
from .rope import check_angles, check_head_norms


class FrozenAttention(NamedTuple):
    """The operands of LoRA_Attention that it does not train. Its seed serves all four masks, of q,
    k, v and o, and its write_again (see FrozenMLP) all weights; those in qkv and o are ignored."""

    qkv: FrozenQKV
    o: FrozenLinear
    head_dim: int
    scaling: float  # applied to the scores
    head_norms: HeadNorms | None = None  # of q, k and v; None: rotate q and k unnormed
    seed: Tensor | None = None  # [1] int64
    write_again: Callable[[], None] | None = None
    interleaved: bool = False  # RoPE pairs neighbours of a head, not its halves
    q_scale: Tensor | None = None  # [batch or 1, positions], multiplies q after RoPE; None: 1
    sinks: Tensor | None = None  # [heads], one more score in each softmax, whose value is 0
    window: int | None = None  # keys that a query sees, itself the last; None: all up to itself


class TrainedAttention(NamedTuple):
    """A value for each tensor that LoRA_Attention trains. Biases are all given, or none is."""

    qkv: Sequence[Any]  # A and B of q, k and v
    o: Sequence[Any]  # A and B
    qkv_biases: Sequence[Any] = ()
    o_bias: Sequence[Any] = ()

    @classmethod
    def from_flat(cls, values: Sequence[Any]) -> "TrainedAttention":
        """Name the values of ``*adapters``."""
        if len(values) not in (8, 12):
            raise ValueError(
                f"LoRA_Attention: {len(values)} adapter tensors given, should be 8: A and B of q, "
                "k, v and o; or 12, with the biases of these"
            )
        return cls(values[:6], values[6:8], values[8:11], values[11:])

    def flat(self) -> Iterator[Any]:
        """Return the values as `from_flat` takes them."""
        return chain.from_iterable(self)


class SavedAttention(NamedTuple):
    """Results of LoRA_Attention's forward that its backward needs."""

    x: Tensor | None  # None if no A of q, k and v is trained
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    z: Tensor
    raw: tuple[Tensor, Tensor, Tensor | None] | None  # q, k, v before norms, None without
    qkv: Tensor
    attended: Tensor
    attention: AttentionSaved
    z_o: Tensor
    to_qkv: Group
    to_o: Group
    head_norms: HeadNorms | None
    q_scale: Tensor | None


class LoRA_Attention(torch.autograd.Function):
    """``LoRA_Attention.apply(x, cos, sin, mask, *adapters, frozen)``: a whole attention module.

    Equivalent PyTorch, with LoRA_QKV and LoRA_W of `lora_linear.py`::

        q, k, v = LoRA_QKV.apply(x, *adapters[:6], frozen.qkv)
        q, k, v = (t.unflatten(-1, (-1, frozen.head_dim)).transpose(1, 2) for t in (q, k, v))
        q, k = rope(head_norms.q(q), head_norms.k(k), cos, sin)  # the norms, where there are any
        v = head_norms.v(v)  # likewise
        q = q * q_scale  # as every token has its own, if there is one
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=frozen.scaling, enable_gqa=True)
        output = LoRA_W.apply(attended.transpose(1, 2).flatten(2), *adapters[6:], frozen.o)

    A window hides older keys. A sink multiplies what a query of its head attends to by
    sigmoid(logsumexp of its scores - sink).

    Args:
        x: [batch, positions, in], bf16, fp16 or fp32, of any strides, batch 0 included.
        cos, sin: [batch or 1, positions, head_dim or less], as for rope. They get no gradient. If
            both are None, q and k are not rotated.
        mask: None for causal attention, or a mask as for scaled_dot_product_attention. It gets no
            gradient. With sinks or a window: None for up to 512 positions, or documents' bounds.
        adapters: A [r, in] and B [out, r] of q, k, v and o, 8 tensors of any r and any dtype, as
            for LoRA_W. If biases are trained, all four follow, [out] or None each.
        frozen: base weights and biases as for LoRA_QKV and LoRA_W, head_dim, and the scale.

    Returns:
        [batch, positions, out of o] in the compute dtype: autocast's if it is on, else x's. Each
        gradient has the dtype of its tensor, and is computed only if `requires_grad` asks for it.

    Saved for backward: the tensors listed in the file's docstring, cos, sin, mask, and the adapters
    and weights in the compute dtype. It writes to no input, incoming gradient or saved tensor, so x
    may have other consumers, and a second backward through a retained graph is right. Deterministic
    if attention's backward is. Not twice differentiable.

    Raises:
        ValueError: shapes or dtypes do not fit, or a base weight, a frozen bias, cos, sin or sinks
            require a gradient.
        RuntimeError: from backward, under create_graph=True.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, mask, *operands):
        tensors, frozen = split_frozen("LoRA_Attention", operands, FrozenAttention)
        trained = TrainedAttention.from_flat(tensors)
        _check(x, cos, sin, trained, frozen)
        layers = with_biases(
            "LoRA_Attention", (*QKV_PREFIXES, "o_"), (*frozen.qkv.layers, frozen.o),
            (*trained.qkv_biases, *trained.o_bias),
        )  # fmt: skip
        *qkv_layers, o = layers
        ctx.dtypes, ctx.dtype_of_x = dtypes_of(*tensors), x.dtype
        ctx.shape_of_x, ctx.write_again = x.shape, frozen.write_again

        x = x.to(compute_dtype(x))
        check_runnable("LoRA_Attention", _qkv_rope_kernel, x)
        batch, positions, _ = x.shape
        dropouts = [layer.dropout for layer in layers]
        columns = [layer.weight.shape[1] for layer in layers]
        masks = draw_masks(
            "LoRA_Attention", frozen.seed, dropouts, [batch * positions] * 4, columns
        )
        masks_of_qkv, mask_of_o = (None, None) if masks is None else (masks[:3], masks[3:])
        projected, z, to_qkv = project(x, trained.qkv, qkv_layers, masks_of_qkv)
        q, k, v = (_by_head(t, frozen.head_dim) for t in projected)
        heads, kv_heads = q.shape[1], k.shape[1]
        qkv = x.new_empty(batch * positions, sum(t.shape[2] for t in projected))
        raw = None
        if frozen.head_norms is None:
            rope_together(q, k, v, cos, sin, qkv, frozen.interleaved)
        else:
            raw_q, raw_k, raw_v = projected
            raw = raw_q, raw_k, None if frozen.head_norms.v_eps is None else raw_v
            norm_rope_together(q, k, v, frozen.head_norms, cos, sin, qkv, frozen.interleaved)
        scale_q(qkv, frozen.q_scale, projected[0].shape[2])
        attention = Attention(
            positions, heads, kv_heads, frozen.scaling, frozen.interleaved, frozen.window
        )
        del projected, q, k, v  # qkv holds their values

        attended, attention_saved = attention_forward(qkv, mask, attention, sinks=frozen.sinks)
        by_token = attended.view(batch, positions, attended.shape[1])
        (output,), z_o, to_o = project(by_token, trained.o, [o], mask_of_o)
        # Only dA needs x. Save x itself, not its rows: autograd cannot tell whose memory a view
        # made in here is.
        _, _, _, _, *needs, _ = ctx.needs_input_grad
        trains_A = any(TrainedAttention.from_flat(needs).qkv[::2])
        tensors, ctx.rest = split(SavedAttention(
            x if trains_A else None, cos, sin, mask, z, raw, qkv, attended, attention_saved, z_o,
            to_qkv, to_o, frozen.head_norms, frozen.q_scale,
        ))  # fmt: skip
        ctx.save_for_backward(*tensors)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("LoRA_Attention", "the unfused attention")
        saved: SavedAttention = join(ctx.rest, ctx.saved_tensors)
        if ctx.write_again is not None:
            ctx.write_again()
        to_qkv, to_o = saved.to_qkv, saved.to_o
        need_x, _, _, _, *flags, _ = ctx.needs_input_grad
        needs, dtypes = TrainedAttention.from_flat(flags), TrainedAttention.from_flat(ctx.dtypes)
        need_qkv = need_x or any(needs.qkv) or any(needs.qkv_biases)
        grad_x = None
        grads = TrainedAttention([None] * len(needs.qkv), (), [None] * len(needs.qkv_biases), ())

        with without_autocast(saved.z):
            grad = grad_output.reshape(-1, grad_output.shape[-1]).to(saved.z.dtype)
            grad_attended, grad_z = input_gradient(to_o, [grad], need_qkv, needs.o[:1])
            grads = grads._replace(
                o=adapter_gradients(
                    to_o, saved.attended, saved.z_o, [grad], grad_z, needs.o, dtypes.o
                ),
                o_bias=bias_gradients([grad], needs.o_bias, dtypes.o_bias),
            )
            if grad_attended is not None:
                grad_qkv = _attention_gradient(grad_attended, saved)
                del grad_attended
                parts = grad_qkv.split_with_sizes([len(weight) for weight in to_qkv.weights], 1)
                grad_x, grad_z = input_gradient(to_qkv, parts, need_x, needs.qkv[::2])
                rows = None if saved.x is None else saved.x.reshape(-1, saved.x.shape[-1])
                grads = grads._replace(
                    qkv=adapter_gradients(
                        to_qkv, rows, saved.z, parts, grad_z, needs.qkv, dtypes.qkv
                    ),
                    qkv_biases=bias_gradients(parts, needs.qkv_biases, dtypes.qkv_biases),
                )
        if grad_x is not None:
            grad_x = grad_x.view(ctx.shape_of_x).to(ctx.dtype_of_x)
        return grad_x, None, None, None, *grads.flat(), None


def _by_head(projected: Tensor, head_dim: int) -> Tensor:
    return projected.unflatten(2, (-1, head_dim)).transpose(1, 2)


def _attention_gradient(grad_attended: Tensor, saved: SavedAttention) -> Tensor:
    """Return the gradient [T, out of all] of what q, k and v are projected to."""
    grad_qkv = torch.empty_like(saved.qkv)
    attention_backward(
        grad_attended, saved.qkv, saved.cos, saved.sin, saved.mask, saved.attended,
        saved.attention, grad_qkv,
    )  # fmt: skip
    scale_q(grad_qkv, saved.q_scale, saved.attended.shape[1])
    if saved.head_norms is not None:
        assert saved.raw is not None
        head_dim = saved.attended.shape[1] // saved.attention.attention.heads
        q, k, v = saved.raw
        head_norms_backward(
            _by_head(q, head_dim), _by_head(k, head_dim),
            None if v is None else _by_head(v, head_dim), saved.head_norms, grad_qkv,
        )  # fmt: skip
    return grad_qkv


def _check(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    trained: TrainedAttention,
    frozen: FrozenAttention,
) -> None:
    """Raise ValueError where shapes or dtypes do not fit together, naming the tensor."""
    name = "LoRA_Attention"
    if x.ndim != 3:
        raise ValueError(f"{name}: x is {list(x.shape)}, should be [batch, positions, in]")
    if any(angle is not None and angle.requires_grad for angle in (cos, sin)):
        raise ValueError(
            f"{name}: cos or sin requires a gradient, which it would not get: detach them, or use "
            "the unfused attention"
        )
    if frozen.sinks is not None and frozen.sinks.requires_grad:
        raise ValueError(
            f"{name}: sinks require a gradient, which they would not get: freeze them, or use the "
            "unfused attention"
        )
    layers = frozen.qkv.layers
    check_layers(name, QKV_PREFIXES, x, trained.qkv, layers)
    q, k, v = (layer.weight.shape[0] for layer in layers)
    if k != v or any(out % frozen.head_dim for out in (q, k)):
        raise ValueError(
            f"{name}: q, k and v have {q}, {k} and {v} features, should be heads of "
            f"{frozen.head_dim}, as many for k as for v"
        )
    check_layers(name, ("o_",), x, trained.o, [frozen.o], in_features=q)
    if frozen.sinks is not None and frozen.sinks.shape != (q // frozen.head_dim,):
        raise ValueError(
            f"{name}: sinks is {list(frozen.sinks.shape)}, should be [{q // frozen.head_dim}]"
        )
    check_angles(name, cos, sin, (*x.shape[:2], frozen.head_dim), x.device)
    if frozen.head_norms is not None:
        heads = q // frozen.head_dim, k // frozen.head_dim
        check_head_norms(name, frozen.head_norms, *heads, frozen.head_dim, x.device)
