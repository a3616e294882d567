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

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_mlp.dropout import draw_masks, masks_of, parts_of
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

from .kernels.head_norms import HeadNorms
from .kernels.qkv_attention import (
    Attention,
    AttentionSaved,
    attention_backward,
    attention_forward,
)
from .kernels.qkv_norm_rope import head_norms_backward, norm_rope_together
from .kernels.qkv_rope import _qkv_rope_kernel, rope_together, scale_q
from .lora_linear import (
    QKV_PREFIXES,
    FrozenLinear,
    FrozenQKV,
    check_layers,
    dtypes_of,
    project,
    with_biases,
)

# The slices of the adapters that hold A and B of q, k and v, those of o, and the biases.
OF_QKV, OF_O, OF_QKV_BIASES, OF_O_BIAS = slice(0, 6), slice(6, 8), slice(8, 11), slice(11, 12)


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
        adapters, frozen = split_frozen("LoRA_Attention", operands, FrozenAttention)
        _check(x, cos, sin, adapters, frozen)
        *layers, o = with_biases(
            "LoRA_Attention", (*QKV_PREFIXES, "o_"), (*frozen.qkv.layers, frozen.o), adapters[8:]
        )
        ctx.dtypes = dtypes_of(x, *adapters)
        ctx.shape_of_x, ctx.write_again = x.shape, frozen.write_again
        ctx.scalings = [layer.scaling for layer in (*layers, o)]

        x = x.to(compute_dtype(x))
        check_runnable("LoRA_Attention", _qkv_rope_kernel, x)
        batch, positions, _ = x.shape
        dropouts = [layer.dropout for layer in (*layers, o)]
        columns = [layer.weight.shape[1] for layer in (*layers, o)]
        masks = draw_masks(
            "LoRA_Attention", frozen.seed, dropouts, [batch * positions] * 4, columns
        )
        bits, ctx.scales = parts_of(masks)
        projected, z, A, B, weights = project(x, adapters[OF_QKV], layers, masks and masks[:3])
        size = frozen.head_dim
        q, k, v = (
            t.view(batch, positions, t.shape[2] // size, size).transpose(1, 2) for t in projected
        )
        qkv = x.new_empty(batch * positions, sum(t.shape[2] for t in projected))
        head_weights = (frozen.head_norms or (None, None))[:2]
        ctx.norm_options = (frozen.head_norms or ())[2:]
        raw: Sequence[Tensor | None] = (None, None, None)  # inputs of the head norms
        if frozen.head_norms is None:
            rope_together(q, k, v, cos, sin, qkv, frozen.interleaved)
        else:
            norms_v = frozen.head_norms.v_eps is not None
            raw = *projected[:2], projected[2] if norms_v else None
            norm_rope_together(q, k, v, frozen.head_norms, cos, sin, qkv, frozen.interleaved)
        scale_q(qkv, frozen.q_scale, projected[0].shape[2])
        attention = Attention(
            positions, q.shape[1], k.shape[1], frozen.scaling, frozen.interleaved, frozen.window
        )
        del projected, q, k, v  # qkv holds their values

        attended, attention_saved, ctx.attention = attention_forward(
            qkv, mask, attention, sinks=frozen.sinks
        )
        by_token = attended.view(batch, positions, attended.shape[1])
        (output,), z_o, o_A, o_B, o_weight = project(
            by_token, adapters[OF_O], [o], masks and masks[3:]
        )
        # Only dA needs x. Save x itself, not its rows: autograd cannot tell whose memory a view
        # made in here is.
        trains_A = any(ctx.needs_input_grad[4:-1][OF_QKV][::2])
        ctx.save_for_backward(
            x if trains_A else None, cos, sin, mask, frozen.q_scale, z, *raw, *head_weights, qkv,
            attended, z_o, A, *B, o_A, *o_B, *weights, *o_weight, *bits, *attention_saved,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("LoRA_Attention", "the unfused attention")
        (
            x, cos, sin, mask, q_scale, z, q, k, v, q_norm, k_norm, qkv, attended, z_o, A, *others,
        ) = ctx.saved_tensors  # fmt: skip
        B, (o_A, o_B), weights, others = others[:3], others[3:5], others[5:9], others[9:]
        if ctx.write_again is not None:
            ctx.write_again()
        count = len(ctx.scales or ())
        masks = masks_of(others[:count], ctx.scales)
        attention_saved = AttentionSaved(*others[count:])
        to_qkv = Group(weights[:3], A, B, ctx.scalings[:3], masks and masks[:3])
        to_o = Group(weights[3:], o_A, [o_B], ctx.scalings[3:], masks and masks[3:])
        need_x, _, _, _, *needs, _ = ctx.needs_input_grad
        dtype_of_x, *dtypes = ctx.dtypes
        needs_qkv, needs_o, needs_biases = needs[OF_QKV], needs[OF_O], needs[OF_QKV_BIASES]
        need_qkv = need_x or any(needs_qkv) or any(needs_biases)
        grads_biases: list[Tensor | None] = [None] * len(needs_biases)

        with without_autocast(z):
            grad = grad_output.reshape(-1, grad_output.shape[-1]).to(z.dtype)
            grad_attended, grad_z = input_gradient(to_o, [grad], need_qkv, needs_o[:1])
            grads_o = adapter_gradients(to_o, attended, z_o, [grad], grad_z, needs_o, dtypes[OF_O])
            grad_o_bias = bias_gradients([grad], needs[OF_O_BIAS], dtypes[OF_O_BIAS])
            if grad_attended is None:
                return *[None] * 10, *grads_o, *grads_biases, *grad_o_bias, None
            grad_qkv = torch.empty_like(qkv)
            attention_backward(
                grad_attended, qkv, cos, sin, mask, attended, attention_saved, ctx.attention,
                grad_qkv,
            )  # fmt: skip
            scale_q(grad_qkv, q_scale, weights[0].shape[0])
            if q is not None:
                of = ctx.attention
                q, k = (
                    t.unflatten(2, (count, -1)).transpose(1, 2)
                    for t, count in ((q, of.heads), (k, of.kv_heads))
                )
                if v is not None:
                    v = v.unflatten(2, (of.kv_heads, -1)).transpose(1, 2)
                norms = HeadNorms(q_norm, k_norm, *ctx.norm_options)
                head_norms_backward(q, k, v, norms, grad_qkv)
            del grad_attended
            grads = grad_qkv.split_with_sizes([weight.shape[0] for weight in to_qkv.weights], 1)
            grad_x, grad_z = input_gradient(to_qkv, grads, need_x, needs_qkv[::2])
            rows = None if x is None else x.reshape(-1, x.shape[-1])
            grads_qkv = adapter_gradients(to_qkv, rows, z, grads, grad_z, needs_qkv, dtypes[OF_QKV])
            grads_biases = bias_gradients(grads, needs_biases, dtypes[OF_QKV_BIASES])
        if grad_x is not None:
            grad_x = grad_x.view(ctx.shape_of_x).to(dtype_of_x)
        return grad_x, None, None, None, *grads_qkv, *grads_o, *grads_biases, *grad_o_bias, None


def _check(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    adapters: list[Tensor],
    frozen: FrozenAttention,
) -> None:
    """Raise ValueError where shapes or dtypes do not fit together, naming the tensor."""
    name = "LoRA_Attention"
    if len(adapters) not in (8, 12):
        raise ValueError(
            f"{name}: {len(adapters)} adapter tensors given, should be 8: A and B of q, k, v and "
            "o; or 12, with the biases of these"
        )
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
    check_layers(name, QKV_PREFIXES, x, adapters[OF_QKV], layers)
    q, k, v = (layer.weight.shape[0] for layer in layers)
    if k != v or any(out % frozen.head_dim for out in (q, k)):
        raise ValueError(
            f"{name}: q, k and v have {q}, {k} and {v} features, should be heads of "
            f"{frozen.head_dim}, as many for k as for v"
        )
    check_layers(name, ("o_",), x, adapters[OF_O], [frozen.o], in_features=q)
