"""DecoderLayer: a whole Llama-like layer with its adapters as one autograd function, by hand.

For a layer's input x [T, hidden], with M the bordered buffers (`bordered.py`) of q, k and v,
of o, of gate and up, and of down, forward in the order of execution:

    sB, A   into M                                 of all seven adapters, in one launch
    n       = norm(x)                              into the first columns of [n | zn]
    zn      = n A'                                 into its others
    qkv     = [n | zn] M' + bias                   q, k and v side by side, in one product
    q, k    turned where they lie (RoPE); with norms of their heads, as Qwen3 has, qkv stays as it
            is, and one pass writes [RoPE(norm(q)) | RoPE(norm(k)) | v] beside it
    a       = attention(q, k, v)
    za      = a A'                                 into [a | za], in the pass that copies a there
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
    dqkv    = attention backward, turned back      into [dqkv | pn]; of q and k, where their heads
                                                   are normed, through these norms in place
    pn      = dqkv sB
    dn      = [dqkv | pn] M
    dx      = norm backward of dn, plus dt
    dA      = pn' n, pa' a, pm' m                  of q, k, v, of o, of gate and up, and, in the
    dB      = s dqkv' zn, s dt' za, s g' zh        same launch, of q, k, v, of o and of down

Where outputs are normed, what o and down give is u and d of their own, which are saved (16.4 kB a
token of OLMo 2 7B, and 24.6 for q, k and v once more), and in one pass each t = x + norm(u) and
output = t + norm(d). In the places of g and dt in what o, down and their adapters get then are the
gradients of d and u. OLMo 2 norms outputs and not inputs: n is x and m is t. Gemma 3 norms both.
Where what is added to a residual is multiplied by some number (Granite), these are so many times g
and dt, in a pass of their own each.

Norms may multiply by one more than their weight, and the gate's activation may be GELU by tanh
(Gemma): each is a flag of the same kernels (`kernels/activation.py`).

Where biases or norms' weights are trained, too, theirs are sums over tokens: of the rows of g, dgu,
dt and dqkv that these products read, a pass each, and of what a norm's backward has in hand.

So the adapters' only pass over [T, intermediate] tensors is that over dgu, for pm. All products
grow in K and have no more columns than without adapters: on an H200, at 16,384 tokens, pm and dm
take 2.27 ms, and 2.35 as [dm | pm], which is 64 columns wider, with pm A added to it afterwards.
And base, adapter and residual are added in fp32 and rounded once: otherwise small adapters come out
several times too large or too small (`kernels/residual.py`).

Per token of Qwen2.5-3B (hidden 2,048, intermediate 11,008, q and k and v 2,560; r = 32, bf16) it
saves 70.2 kB: [n|zn] 4.3, qkv 5.1, a 4.1, t 4.1, [m|zm] 4.2, gu 44.0, za, zh, log-sum-exp and both
rstd 0.2, and x 4.1, which is the output of the layer before. Norms of heads add q, k and v once
more, as attention has them: at Qwen3-8B (hidden 4,096, intermediate 12,288, q and k and v 6,144)
12.3 of 115.3 kB, 2.0 of which are a second v, for attention reads all three from one buffer. Their
rstd are computed again. In FP8 n and m are codes alone (`bordered.Extended`), 2.6 and 2.4 kB with
their z. Where checkpointing runs the layer
again, zh is kept (`rerun.once`): 64 bytes a token, and SwiGLU does not run again. Where it has
somewhere to keep them, neither are a, za and t computed a second time: 8.2 kB a token for
attention, the product with o and its addition.

With dropout (`bordered.py`, `fused_mlp/dropout.py`) zn, za, zm and zh are of masked inputs, and so
are dA; dn, da, dm and dh begin as what the adapters give, to which the frozen product is added. One
mask for each projection is drawn at the start and saved: 2.9 kB a token. Where the layer runs again
they are drawn again from the same seed, which is all that is kept of them.
"""

import torch
from torch import Tensor

from fused_mlp.dropout import masks_of, parts_of
from fused_mlp.utils import without_autocast

from .bordered import grow_k_backward, kinds_of
from .frozen_layer import (
    ADAPTERS,
    GROUPS,
    Others,
    by_group,
    check_layer_operands,
    draw_layer_masks,
    masks_by_group,
    new_gradients,
    with_others,
)
from .kernels.adapter_sums import AdapterSums
from .kernels.layer_residual import (
    add_projected,
    adds_beside,
    gradient_of_added,
    norm_backward,
    normed_product,
    spread_rows,
    sum_biases,
    wanted_rows,
)
from .kernels.qkv_attention import Attention, attention_backward, attention_forward
from .kernels.qkv_norm_rope import HeadNorms, head_norms_backward, norm_rope_together
from .kernels.qkv_rope import rope_forward, split_heads
from .kernels.residual import add_normed
from .kernels.rows import as_rows, empty_rows
from .kernels.swiglu_bordered import add_down, through_swiglu
from .rerun import has_kept, once, takes_away


class DecoderLayer(torch.autograd.Function):
    """``DecoderLayer.apply(hidden, cos, sin, mask, *adapters, frozen)``: a decoder layer; with
    biases or norms that are trained ``DecoderLayer.apply(..., *adapters, *others, frozen)``.

    Equivalent PyTorch, where norms, q_proj and so on are the layer's own::

        # a layer has as many of these norms as it has; of others, and without `rope`, the input
        n = input_norm(hidden)
        q, k, v = (split_into_heads(proj(n)) for proj in (q_proj, k_proj, v_proj))
        q, k = rope(head_norms.q(q), head_norms.k(k), cos, sin)  # the norms, where there are any
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=attention_scaling, enable_gqa=True)
        total = hidden + attended_norm(multiplier * o_proj(join_heads(attended)))
        m = post_norm(total)
        hidden = activation(gate_proj(m)) * up_proj(m)  # F.silu, or F.gelu by tanh
        output = total + mlp_norm(multiplier * down_proj(hidden))

    with the projections' lora_dropout in training.

    Args:
        hidden: [batch, positions, hidden], bf16, fp16 or fp32, of any strides, batch 0 included.
        cos, sin: [batch or 1, positions, head_dim], as rope's. They get no gradient. None, both:
            q and k are not turned.
        mask: None, for causal attention, or what scaled_dot_product_attention takes. Likewise.
        adapters: A [r, in] and B [out, r] of q, k, v, o, gate, up and down, 14 tensors in bf16,
            fp16 or fp32. They are copied into the borders, in the buffers' dtype and scaled.
        others: the fields of Others, in the place of frozen's: norms in hidden's dtype, biases in
            any. Biases are summed in fp32, and so are their gradients and those of norms.
        frozen: the buffers and norms, in hidden's dtype, and for which tokens the layer's output is
            wanted: of the others it computes norm, q, k, v and attention alone.

    Returns:
        [batch, positions, hidden], new, in hidden's dtype. Everything between products is fp32 and
        rounds once. Gradients come in the dtype of what they belong to, and only for what asks for
        one. Those of A and B are summed in fp32, and contiguous. The rows of hidden's are further
        apart than they are long.

    Saved for backward: hidden, cos, sin, mask, the rows that are wanted, all norms, the adapters
    and what the file's docstring lists, from t on of those rows alone. The buffers are kept beside
    them: where another forward has filled the borders since, backward fills them again. No input,
    no incoming gradient and no saved tensor is written, so a second backward through a retained
    graph is right.
    Deterministic where attention's backward is that of `causal_attention_backward.py`, else as that
    is. Not twice differentiable.

    Raises:
        ValueError: shapes or dtypes do not fit, or there is dropout and no seed.
        RuntimeError: from backward, under create_graph=True, or if an adapter was changed in place
            since.
    """

    @staticmethod
    def forward(ctx, hidden, cos, sin, mask, *operands):
        *trained, frozen = operands
        adapters, others = trained[:ADAPTERS], trained[ADAPTERS:]
        check_layer_operands(hidden, cos, sin, adapters, frozen)
        frozen = with_others(frozen, others)
        x = as_rows(hidden)
        frozen.borders.fill([getattr(frozen, name) for name in GROUPS], adapters)
        masks = draw_layer_masks(frozen, x)
        masks_qkv, masks_o, masks_gate_up, masks_down = masks_by_group(masks)

        centered = frozen.zero_centered
        beside_o = adds_beside(frozen.o, masks_o)
        # a copy of the residual for what is added to it, unless that is there from a first run
        adds_to_copy = frozen.attended_norm is None and frozen.rows is None and not beside_o
        copy = torch.empty_like(x) if adds_to_copy and not has_kept() else None
        qkv, normed, input_rstd = normed_product(
            x, frozen.input_norm, frozen.input_eps, centered, frozen.qkv, masks_qkv, copy
        )
        raw = None  # what the norms of heads were given
        if frozen.head_norms is None:
            if cos is not None:
                rope_forward(qkv, cos, sin, frozen.heads, frozen.kv_heads)
        else:
            raw, qkv = qkv, torch.empty_like(qkv)
            q, k, v = split_heads(raw, hidden.shape[1], frozen.heads, frozen.kv_heads)
            norm_rope_together(q, k, v, frozen.head_norms, cos, sin, qkv)
        of_heads = frozen.heads, frozen.kv_heads, frozen.attention_scaling

        def attend() -> tuple:
            attention = Attention(hidden.shape[1], *of_heads)
            extended = out = None  # of o's product, which reads [a | za]
            if frozen.rows is None and not beside_o:
                extended = empty_rows(x, len(x), frozen.o.x_columns)
                if not takes_away():
                    out = extended[:, : frozen.o.in_features]
            attended, saved, attention = attention_forward(qkv, mask, attention, out)
            residual, wanted = wanted_rows(x, frozen.rows), wanted_rows(attended, frozen.rows)
            total = copy
            if total is None:
                total = residual if frozen.rows is not None else torch.empty_like(x)
            projected = projected_rstd = None
            if frozen.attended_norm is None:
                z_o = add_projected(
                    wanted, extended, frozen.o, total, frozen.multiplier, masks_o,
                    residual if beside_o else None,
                )  # fmt: skip
            else:
                projected = torch.zeros_like(residual)
                z_o = add_projected(
                    wanted, extended, frozen.o, projected, frozen.multiplier, masks_o
                )
                projected_rstd = add_normed(
                    residual, projected, frozen.attended_norm, frozen.attended_eps, total, centered
                )
            return attended, total, z_o, projected, projected_rstd, attention, *saved

        # from total on, there are the rows that are wanted
        (
            attended, total, z_o, projected, projected_rstd, ctx.attention, *attention_saved,
        ) = once(attend)  # fmt: skip

        # not a view itself, or autograd would forbid to change it in place
        if not frozen.output_needed:
            output, sums = x.new_zeros(1).expand(hidden.shape), None
        elif frozen.rows is None:
            output = x.new_empty(hidden.shape)
            sums = output.view(x.shape)
        else:
            output, sums = x.new_zeros(hidden.shape), torch.empty_like(total)
        mask_down = None if masks_down is None else masks_down[0]
        beside = frozen.mlp_norm is None and adds_beside(frozen.down, mask_down)
        added_to = sums if frozen.mlp_norm is None and not beside else None
        gate_up, post_normed, post_rstd = normed_product(
            total, frozen.post_norm, frozen.post_eps, centered, frozen.gate_up, masks_gate_up,
            added_to,
        )  # fmt: skip

        def add(sums: Tensor | None) -> Tensor:
            return add_down(
                gate_up, frozen.down, sums, frozen.multiplier, mask_down, frozen.activation,
                total if beside else None,
            )  # fmt: skip

        given = given_rstd = None
        if frozen.mlp_norm is None:
            z_added = None

            def add_first() -> tuple[Tensor]:
                nonlocal z_added
                z_added = add(sums)
                return (z_added,)

            (z_down,) = once(add_first, is_small=True)
            if z_added is None and sums is not None:  # it runs again, and its output is wanted
                add(sums)
        else:
            given = torch.zeros_like(total)
            z_down = add(given)
            target = torch.empty_like(total) if sums is None else sums
            given_rstd = add_normed(total, given, frozen.mlp_norm, frozen.mlp_eps, target, centered)
        if frozen.rows is not None and sums is not None:
            output.view(x.shape).index_copy_(0, frozen.rows, sums)

        ctx.kinds = kinds_of(adapters)
        ctx.kinds_of_others = [None if one is None else (one.shape, one.dtype) for one in others]
        # without the tensors that save_for_backward keeps and watches
        ctx.frozen = frozen._replace(
            input_norm=None, post_norm=None, attended_norm=None, mlp_norm=None, rows=None,
            head_norms=None, seed=None,
        )  # fmt: skip
        head_weights = (frozen.head_norms or (None, None))[:2]
        ctx.of_head_norms = (frozen.head_norms or ())[2:]
        bits, ctx.scales = parts_of(masks)
        ctx.save_for_backward(
            hidden, cos, sin, mask, frozen.rows,
            *normed, input_rstd, raw, qkv, attended, z_o,
            projected, projected_rstd, total, *post_normed, post_rstd, gate_up, z_down,
            given, given_rstd, frozen.input_norm, frozen.post_norm, frozen.attended_norm,
            frozen.mlp_norm, *head_weights, *adapters, *bits, *attention_saved,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(ctx, grad_output):
        # see LoRA_W's for why not once_differentiable
        if torch.is_grad_enabled():
            raise RuntimeError(
                "DecoderLayer is not twice differentiable: call backward without "
                "create_graph=True, or use the unfused layer"
            )
        (
            hidden, cos, sin, mask, rows,
            n, zn, n_scales, input_rstd, raw, qkv, attended, z_o,
            projected, projected_rstd, total, m, zm, m_scales, post_rstd, gate_up, z_down,
            given, given_rstd, input_norm, post_norm, attended_norm,
            mlp_norm, q_norm, k_norm, *rest,
        ) = ctx.saved_tensors  # fmt: skip
        count = len(ctx.scales or ())
        adapters, rest = rest[: len(ctx.kinds)], rest[len(ctx.kinds) :]
        masks_qkv, masks_o, masks_gate_up, masks_down = masks_by_group(
            masks_of(rest[:count], ctx.scales)
        )
        attention_saved = rest[count:]
        frozen = ctx.frozen
        of_qkv, of_o, of_gate_up, of_down = groups = [getattr(frozen, name) for name in GROUPS]
        frozen.borders.refill(groups, adapters)
        need_hidden = ctx.needs_input_grad[0]
        needs = ctx.needs_input_grad[4:-1]
        need_qkv, need_o, need_gate_up, need_down = by_group(needs[:ADAPTERS])
        kinds_qkv, kinds_o, kinds_gate_up, kinds_down = by_group(ctx.kinds)
        need_gate_A, need_gate_B, need_up_A, need_up_B = need_gate_up
        need_down_A, need_down_B = need_down
        _, kind_gate_B, _, kind_up_B = kinds_gate_up
        kind_down_A, _ = kinds_down
        width = hidden.shape[2]
        x = as_rows(hidden)
        centered = frozen.zero_centered
        adapter_sums = AdapterSums()
        grads = Others()
        if ctx.kinds_of_others:
            grads = new_gradients(x, ctx.kinds_of_others, needs[ADAPTERS:])
        biases_qkv, biases_o, biases_gate_up, biases_down = grads.biases

        with without_autocast(hidden):
            # output = total + down(activation(gate) up)
            grad = frozen.borders.handover.take(grad_output, of_down.grad_columns)
            if grad is None or rows is not None:
                grad = empty_rows(x, len(total), of_down.grad_columns)
                grad[:, :width].copy_(wanted_rows(as_rows(grad_output), rows))
            grad_residual = grad[:, :width]
            grad = gradient_of_added(
                grad, width, frozen.multiplier, given, mlp_norm, given_rstd, centered,
                grads.mlp_norm,
            )  # fmt: skip
            sum_biases(grad, of_down, biases_down)
            grad_normed, pm, (grad_down_A, grad_gate_B, grad_up_B) = through_swiglu(
                grad, gate_up, zm, of_down, of_gate_up,
                (kind_down_A, kind_gate_B, kind_up_B), (need_down_A, need_gate_B, need_up_B),
                biases_gate_up, None if masks_down is None else masks_down[0], masks_gate_up,
                frozen.activation, m_scales,
            )  # fmt: skip
            _, grad_down_B = adapter_sums.add(
                of_down, kinds_down, (False, need_down_B), None, grad[:, :width], z_down, None
            )

            # gate and up of the norm of total
            grad_gate_A, _, grad_up_A, _ = adapter_sums.add(
                of_gate_up, kinds_gate_up, (need_gate_A, False, need_up_A, False),
                m, None, None, pm, masks_gate_up,
            )  # fmt: skip
            grad_total = empty_rows(x, len(total), of_o.grad_columns)
            as_it_is = attended_norm is None and frozen.multiplier == 1.0 and masks_o is None
            codes = norm_backward(
                grad_normed, grad_residual, total, post_norm, post_rstd, centered,
                grad_total[:, :width], grads.post_norm, of_o if as_it_is else None,
            )  # fmt: skip
            del grad_normed
            grad_residual = grad_total[:, :width]
            grad_total = gradient_of_added(
                grad_total, width, frozen.multiplier, projected, attended_norm, projected_rstd,
                centered, grads.attended_norm,
            )  # fmt: skip

            # total = x + o(attended)
            sum_biases(grad_total, of_o, biases_o)
            grad_attended, pa = grow_k_backward(grad_total, of_o, masks_o, None, codes)
            grad_o = adapter_sums.add(
                of_o, kinds_o, need_o,
                wanted_rows(attended, rows), grad_total[:, :width], z_o, pa, masks_o,
            )  # fmt: skip
            del grad_total, codes
            if rows is not None:
                adapter_sums.compute()  # of as many tokens, and not of all as those that follow
                grad_attended = spread_rows(grad_attended, rows, len(x))
                grad_residual = spread_rows(grad_residual, rows, len(x))
            grad_qkv = empty_rows(x, len(x), of_qkv.grad_columns)
            attention_backward(
                grad_attended, qkv, cos, sin, mask, attended, attention_saved, ctx.attention,
                grad_qkv[:, : of_qkv.out],
            )  # fmt: skip
            if raw is not None:
                q, k, _ = split_heads(raw, hidden.shape[1], frozen.heads, frozen.kv_heads)
                head_norms = HeadNorms(q_norm, k_norm, *ctx.of_head_norms)
                head_norms_backward(q, k, head_norms, grad_qkv[:, : of_qkv.out])
            del grad_attended

            # q, k and v of the norm of x
            sum_biases(grad_qkv, of_qkv, biases_qkv)
            pn = grad_hidden = None
            if need_hidden or grads.input_norm is not None:
                grad_normed, pn = grow_k_backward(grad_qkv, of_qkv, masks_qkv, n_scales)
                # as the layer before would have it, in whose backward it is most likely to go
                wide = empty_rows(x, len(x), of_down.grad_columns)
                norm_backward(
                    grad_normed, grad_residual, x, input_norm, input_rstd, centered,
                    wide[:, :width], grads.input_norm,
                )  # fmt: skip
                frozen.borders.handover.offer(wide)
                grad_hidden = wide[:, :width].view(hidden.shape)
            elif any(need_qkv[::2]):
                pn = grad_qkv[:, : of_qkv.out] @ of_qkv.sB
                if n_scales is not None:
                    pn *= n_scales
            grad_attention = adapter_sums.add(
                of_qkv, kinds_qkv, need_qkv,
                n, grad_qkv[:, : of_qkv.out], zn, pn, masks_qkv,
            )  # fmt: skip
            adapter_sums.compute()
        return (
            grad_hidden, None, None, None, *grad_attention, *grad_o,
            grad_gate_A, grad_gate_B, grad_up_A, grad_up_B, grad_down_A, grad_down_B,
            *grads[: len(ctx.kinds_of_others)], None,
        )  # fmt: skip
