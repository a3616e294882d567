"""A Llama with adapters that multiplies as FP8 layers are specified to, in fp64 with autograd. It
rounds x, W and dy to codes and adapters to halves, and nothing else."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from cases.fp8_case import OracleBuffer, nearest, quantised
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fused_lora.layer.fp8.buffer import Codes

GUESSED = 32  # scale of SwiGLU's codes over that of the row's own largest (`fp8_swiglu.py`)


def emulate(model):
    """Make every layer of a vanilla PEFT model compute that way."""
    for layer in model.base_model.model.model.layers:
        layer.forward = partial(_forward, layer)
    return model


def _forward(layer, x, attention_mask=None, position_embeddings=None, **_):
    attention, mlp = layer.self_attn, layer.mlp
    qkv = attention.q_proj, attention.k_proj, attention.v_proj
    together = _product(layer.input_layernorm(x), True, *qkv)
    outs = [one.base_layer.out_features for one in qkv]
    q, k, v = (
        one.unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
        for one in together.split(outs, 2)
    )
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    total = x + _product(attended.transpose(1, 2).flatten(2), False, attention.o_proj)
    normed = layer.post_attention_layernorm(total)
    gate, up = _product(normed, True, mlp.gate_proj, mlp.up_proj).chunk(2, 2)
    return total + _product(F.silu(gate) * up, False, mlp.down_proj)


def _product(x, saves_codes, *projections):
    weight = torch.cat([one.base_layer.weight for one in projections]).detach()
    adapters = [
        parts["default"].weight for one in projections for parts in (one.lora_A, one.lora_B)
    ]
    scaling = projections[0].scaling["default"]
    return _Product.apply(x, saves_codes, scaling, weight, *adapters)


class _Product(torch.autograd.Function):
    """x W' + z (s B)' for projections with one input, where z = x A'. saves_codes: whether A's
    gradient reads codes of x as well."""

    @staticmethod
    def forward(ctx, x, saves_codes, scaling, weight, *adapters):
        A, B = adapters[::2], adapters[1::2]
        ctx.ranks, ctx.outs, ctx.scaling = [len(a) for a in A], [len(b) for b in B], scaling
        like = SimpleNamespace(A=torch.cat(A), sB=torch.block_diag(*B) * scaling)
        ctx.buffer = buffer = OracleBuffer(weight, None, like)
        buffer.A, buffer.sB, buffer.scales = like.A, like.sB, buffer.scales.double()
        buffer.encode([buffer])
        rows = x.flatten(0, 1)
        codes, scales = quantised(rows)
        y, z = buffer.from_rows(codes, scales, None, x.dtype)
        ctx.save_for_backward(codes * scales if saves_codes else rows, z)
        return y.unflatten(0, x.shape[:2])

    @staticmethod
    def backward(ctx, grad):
        (x, z), buffer = ctx.saved_tensors, ctx.buffer
        dy = grad.flatten(0, 1)
        codes, scales = quantised(dy * buffer.scales)
        if len(ctx.outs) == 2:
            scales = scales * GUESSED
            codes = nearest(dy * buffer.scales / scales)
        dx, p = buffer.gradient_of_codes(Codes(codes, scales, dy.dtype), None)
        if not ctx.needs_input_grad[0]:  # then nothing multiplies codes of dy
            p = dy @ buffer.sB
        grads = []
        parts = p.split(ctx.ranks, 1), z.split(ctx.ranks, 1), dy.split(ctx.outs, 1)
        for one_p, one_z, one_dy in zip(*parts, strict=True):
            grads += [one_p.t() @ x, ctx.scaling * one_dy.t() @ one_z]
        return dx.unflatten(0, grad.shape[:2]), None, None, None, *grads
