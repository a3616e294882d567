"""DecoderLayer: a whole Llama-like layer with its adapters as one autograd function, by hand.

For a layer's input x [T, hidden], with M the bordered buffers (`buffer.py`) of q, k and v,
of o, of gate and up, and of down, forward in the order of execution:

    sB, A   into M                                 of all seven adapters, in one launch
    n       = norm(x)                              into the first columns of [n | zn]
    zn      = n A'                                 into its others
    qkv     = [n | zn] M' + bias                   q, k and v side by side, in one matmul
    q, k    rotated where they lie (RoPE); with norms of their heads, as Qwen3 has, qkv stays as it
            is, and one pass writes [RoPE(norm(q)) | RoPE(norm(k)) | v] beside it
    a       = attention(q, k, v)           where q's projection gives a gate, times its sigmoid
    za      = a A'                                 into [a | za]; the pass also copies a there,
                                                   unless our own kernels have written it there
    t       = x + [a | za] M'                      into a copy of x, which the norm has written, and
                                                   rounded once; what is added may be multiplied
    m       = norm(t),  zm = m A'                  as n and zn; t once more, as the output's start
    gu      = [m | zm] M'                          gate and up side by side
    h, zh   = silu(gate) up, h A'                  as [h | zh], in one pass
    output  = t + [h | zh] M'                      and the bias, if there is one

Backward, for the incoming g, with M as it was (the adapters are copied again if another forward has
filled it since):

    ph      = g sB                                 into the other columns of [g | ph]
    dh      = [g | ph] M
    dgu     = SwiGLU backward                      into [dgu | pm], and from the same pass
    dA, dB  = ph' h, s dgu' zm                     of down, and of gate and up
    pm      = dgu sB
    dm      = [dgu | pm] M
    dt      = norm backward of dm, plus g          into [dt | pa]
    pa      = dt sB
    da      = [dt | pa] M
    dqkv    = attention backward, rotated back     into [dqkv | pn]; of q and k, where their heads
                                                   are normed, through these norms in place
    pn      = dqkv sB
    dn      = [dqkv | pn] M
    dx      = norm backward of dn, plus dt
    dA      = pn' n, pa' a, pm' m                  of q, k, v, of o, of gate and up, and, in the
    dB      = s dqkv' zn, s dt' za, s g' zh        same launch, of q, k, v, of o and of down

Where outputs are normed, o and down give u and d, which are saved: 16.4 kB a token of OLMo 2 7B,
and 24.6 for q, k and v once more. One pass each makes t = x + norm(u) and output = t + norm(d), and
o and down receive the gradients of u and d instead of dt and g. OLMo 2 norms outputs and not
inputs: n is x and m is t. Gemma 3 norms both. Granite multiplies what is added to a residual: a
pass each multiplies g and dt by the same number.

Norms may multiply by one more than their weight, and the gate's activation may be GELU by tanh
(Gemma): each is a flag of the same kernels (`kernels/row_norm.py`, `kernels/activation.py`).

Gradients of trained biases are sums over the rows of g, dgu, dt and dqkv, a pass each. Those of
trained norms' weights are summed by the norm's own backward.

So the adapters' only pass over [T, intermediate] tensors is the one over dgu, for pm. All matmuls
grow in K and have no more columns than without adapters. On an H200 at 16,384 tokens, pm and dm
take 2.27 ms. As [dm | pm], which is 64 columns wider, with pm A added to it afterwards, they take
2.35. Base, adapter and residual are added in fp32 and rounded once. Otherwise small adapters come
out several times too large or too small (`kernels/extend_rows.py`).

Per token of Qwen2.5-3B (hidden 2,048, intermediate 11,008, q and k and v 2,560; r = 32, bf16) it
saves 70.2 kB: [n|zn] 4.3, qkv 5.1, a 4.1, t 4.1, [m|zm] 4.2, gu 44.0, za, zh, log-sum-exp and both
rstd 0.2, and x 4.1, which is the output of the layer before. With norms of heads it saves q, k and
v once more, as attention gets them: at Qwen3-8B (hidden 4,096, intermediate 12,288, q and k and v
6,144) 12.3 of 115.3 kB. 2.0 of these are a second v, because attention reads all three from one
buffer. The rstd of the heads are recomputed.

Under checkpointing the forward runs twice, and keeps zh from the first time (`rerun.once`). That is
64 bytes a token, and saves the second SwiGLU. If there is somewhere to keep them, it keeps a, za
and t as well. These are 8.2 kB a token, and save recomputing attention, the matmul with o and the
sum.

With dropout (`buffer.py`, `fused_mlp/dropout.py`) zn, za, zm and zh come from masked inputs, and so
do the dA. dn, da, dm and dh start as the adapters' part, and the frozen matmul is added to it. One
mask for each projection is drawn at the start and saved: 2.9 kB a token. Under checkpointing we
keep only the seed, from which the second forward draws the same masks.
"""

import torch

from fused_mlp.utils import refuse_second_derivative, without_autocast

from ..kernels.rows import as_rows, empty_rows
from ..rerun import has_kept, once_as_record, restore, store
from .adapter_sums import AdapterSums
from .attention_gradient import attention_gradient
from .gradients import LayerBackward, LayerInput
from .halves import add_attention, add_mlp, norm_and_rotate
from .operands import (
    Adapters,
    Trained,
    check_operands,
    draw_dropouts,
    kinds_of,
    new_gradients,
)
from .saved import Saved


class DecoderLayer(torch.autograd.Function):
    """``DecoderLayer.apply(hidden, cos, sin, mask, *adapters, frozen)``: a decoder layer; with
    biases or norms that are trained ``DecoderLayer.apply(..., *adapters, *others, frozen)``.

    Equivalent PyTorch, where norms, q_proj and so on are the layer's own::

        # a norm that the layer lacks returns its input, as does rope without cos and sin
        n = norm_before_attention(hidden)
        q, k, v = (split_into_heads(proj(n)) for proj in (q_proj, k_proj, v_proj))
        q, k = rope(head_norms.q(q), head_norms.k(k), cos, sin)  # the norms, where there are any
        v = head_norms.v(v)  # likewise
        q = q * q_scale  # as every token has its own, if there is one
        # with has_gate each head of q_proj(n) is followed by its gate
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=attention_scaling, enable_gqa=True)
        attended = join_heads(attended) * torch.sigmoid(gate)  # the gate, if there is one
        total = hidden + norm_after_attention(multiplier * o_proj(attended))
        m = norm_before_mlp(total)
        activated = activation(gate_proj(m)) * up_proj(m)  # F.silu, or F.gelu by tanh
        output = total + norm_after_mlp(multiplier * down_proj(activated))

    with the projections' lora_dropout in training.

    Args:
        hidden: [batch, positions, hidden], bf16, fp16 or fp32, of any strides, batch 0 included. It
            may be fp32 while the buffers are in 16 bits, under autocast to their dtype: the
            residual and its gradient then stay fp32.
        cos, sin: [batch or 1, positions, head_dim or less], as rope's. They get no gradient. Both
            None: q and k are not rotated.
        mask: None, for causal attention, or what scaled_dot_product_attention takes, or documents'
            bounds, beside which frozen.window hides older tokens. It gets no gradient.
        adapters: A [r, in] and B [out, r] of q, k, v, o, gate, up and down, 14 tensors in bf16,
            fp16 or fp32. They are copied into the borders, in the buffers' dtype and scaled.
        others: the fields of Others, which replace frozen's: norms in hidden's dtype, biases in
            any. Biases are summed in fp32, and so are their gradients and those of norms.
        frozen: the buffers, and norms in hidden's dtype.

    Returns:
        [batch, positions, hidden], new, in hidden's dtype. Everything between matmuls is fp32 and
        rounds once. Each gradient has the dtype of its tensor, and exists only if that tensor
        requires one. The gradients of A and B are summed in fp32, and contiguous. hidden's
        gradient is not contiguous: its rows are padded.

    Saved for backward: hidden, cos, sin, mask, all norms, the adapters and what the file's
    docstring lists. The buffers are kept beside them: where another forward has filled the borders
    since, backward fills them again. No input, no incoming gradient and no saved tensor is written,
    so a second backward through a retained graph is right. Deterministic if attention's backward
    is, as `causal_attention_backward.py` is. Not twice differentiable.

    Raises:
        ValueError: shapes or dtypes do not fit, or there is dropout and no seed.
        RuntimeError: from backward, under create_graph=True, or if an adapter was changed in place
            since.
    """

    @staticmethod
    def forward(ctx, hidden, cos, sin, mask, *operands):
        *row, frozen = operands
        trained = Trained.from_flat(row)
        frozen = frozen.with_others(trained.others)
        check_operands(hidden, cos, sin, trained.adapters, frozen)
        x, positions = as_rows(hidden), hidden.shape[1]
        qkv_weights, o = frozen.qkv, frozen.o
        frozen.filling.fill(frozen.groups, trained.adapters)
        dropouts = draw_dropouts(frozen, x.shape[0])

        # the norm also writes the copy of x that o adds to; a recompute may have kept the sum
        adds_to_copy = frozen.norm_after_attention is None and o.buffer.accumulates(dropouts.o)
        copy = torch.empty_like(x) if adds_to_copy and not has_kept() else None
        qkv, n, input_rstd = qkv_weights.buffer.project_norm(
            x, frozen.norm_before_attention, qkv_weights.base_bias, dropouts.qkv, copy
        )
        raw, qkv = norm_and_rotate(qkv, cos, sin, positions, frozen)
        attended = once_as_record(
            lambda: add_attention(x, raw, qkv, mask, copy, positions, frozen, dropouts.o)
        )

        output, mlp = add_mlp(hidden, attended.added.total, frozen, dropouts)

        store(ctx, Saved(
            hidden=hidden, cos=cos, sin=sin, mask=mask, n=n, input_rstd=input_rstd, raw=raw,
            qkv=qkv, attended=attended, mlp=mlp, frozen=frozen.for_backward(),
            adapters=trained.adapters, dropouts=dropouts, kinds=kinds_of(trained.others),
        ))  # fmt: skip
        return output

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("DecoderLayer", "the unfused layer")
        saved: Saved = restore(ctx)
        need_hidden, _, _, _, *row, _ = ctx.needs_input_grad
        needed = Trained.from_flat(row)
        need = needed.adapters
        frozen, adapters = saved.frozen, saved.adapters
        frozen.filling.refill(frozen.groups, adapters)
        x = as_rows(saved.hidden)
        grads = new_gradients(x, saved.kinds, needed.others)

        with without_autocast(x):
            layer = LayerBackward(frozen, saved.dropouts, grads, AdapterSums())
            grad_attended, grad_residual, after_attention = layer.to_o(
                grad_output, saved.attended.added, saved.mlp, adapters.after_attention,
                need.after_attention,
            )  # fmt: skip
            grad_qkv = empty_rows(frozen.qkv.A, len(x), frozen.qkv.grad_columns)
            attention_gradient(grad_attended, saved, grad_qkv[:, : frozen.qkv.out])
            del grad_attended
            entry = LayerInput(x, saved.n, saved.input_rstd)
            grad_x, (q, k, v) = layer.to_input(
                grad_qkv, grad_residual, entry, adapters.qkv, need.qkv, need_hidden
            )
            layer.sums.compute()
        if grad_x is not None:
            grad_x = grad_x.view(saved.hidden.shape)
        adapter_grads = Adapters(q, k, v, *after_attention)
        gradients = Trained(adapter_grads, None if needed.others is None else grads)
        return grad_x, None, None, None, *gradients.flat(), None
