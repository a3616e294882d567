"""Attention with adapters to test LoRA_Attention on, and eager PyTorch to compare with.

A case is ([x, cos, sin, mask, eight adapters, frozen], the gradient of the output).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from cases import rope_case
from cases.attention_case import adapted, with_trained
from cases.reference import masks_drawn, random
from cases.rms_norm_case import eager_rms_norm
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fused_lora.functions.lora_linear import FrozenLinear
from fused_lora.kernels.head_norms import HeadNorms
from fused_lora.layer.attention_block import AttentionBlock
from fused_lora.layer.decoder_layer import LoRA_Attention
from fused_lora.layer.operands import Frame
from fused_lora.reading.projection import Projection
from fused_lora.weights.borders import LayerBorders
from fused_lora.weights.default_border import DefaultBorder
from fused_mlp.utils import compute_dtype

IN, OUT = 52, 44  # not multiples of a tile


class FrozenAttention(NamedTuple):
    """The operands of an attention that it does not train. Its seed serves all four masks."""

    layers: tuple[FrozenLinear, ...]  # q, k, v and o
    head_dim: int
    scaling: float
    head_norms: HeadNorms | None = None
    seed: Tensor | None = None
    q_scale: Tensor | None = None
    sinks: Tensor | None = None
    window: int | None = None


NAMES = ["q_A", "q_B", "k_A", "k_B", "v_A", "v_B", "o_A", "o_B"]
OPERANDS = ("x", "found", "gate", *NAMES)


def make(
    batch=2, positions=9, *, device, heads=4, kv_heads=2, head_dim=26, dtype=torch.bfloat16,
    r=(8, 8, 8, 8), bias=True, adapter_dtypes=None, frozen_dtype=None, mask=None, norms=False,
    window=None,
):  # fmt: skip
    """Return x, cos, sin, mask, eight adapters (no B zero) and frozen, and a gradient. Head norms
    are optional; "together" normalises all heads of a token as one. With a window there are sinks.
    """
    options = {"dtype": frozen_dtype or dtype, "device": device}
    wide, narrow = heads * head_dim, kv_heads * head_dim
    sizes = [(IN, wide), (IN, narrow), (IN, narrow), (wide, OUT)]
    adapters, layers = [], []
    for i, ((inputs, out), rank) in enumerate(zip(sizes, r, strict=True)):
        A_dtype, B_dtype = (adapter_dtypes or (dtype,) * 8)[2 * i : 2 * i + 2]
        # scores at unit scale: with larger ones rounding decides a token here and there
        small = 0.5 if i < 2 else 1.0
        scale = small * inputs**-0.5
        adapters.append(
            random(rank, inputs, seed=10 + i, scale=scale, device=device, dtype=A_dtype)
        )
        scale = small * max(rank, 1) ** -0.5
        adapters.append(random(out, rank, seed=20 + i, scale=scale, device=device, dtype=B_dtype))
        weight = random(out, inputs, seed=30 + i, scale=small * inputs**-0.5, **options)
        one_bias = random(out, seed=40 + i, scale=small, **options) if bias else None
        layers.append(FrozenLinear(weight, one_bias, (2.0, 0.5, 1.5, 0.75)[i]))
    frozen = FrozenAttention(
        tuple(layers), head_dim, head_dim**-0.5,
        head_norms(*((heads, kv_heads) if norms == "together" else (1, 1)), head_dim, **options)
        if norms else None, window=window,
        sinks=None if window is None else random(heads, seed=50, **options),
    )  # fmt: skip
    angle = random(1, positions, head_dim // 2, seed=7, scale=3.0, device=device).repeat(1, 1, 2)
    x = random(batch, positions, IN, seed=1, device=device, dtype=dtype)
    grad = random(batch, positions, OUT, seed=2, device=device, dtype=dtype)
    return [x, angle.cos().to(dtype), angle.sin().to(dtype), mask, *adapters, frozen], grad


def head_norms(heads, kv_heads, head_dim, **options):
    """Return head norms with different weights and eps, which keep scores at unit scale."""
    weights = (
        0.5 + random(count * head_dim, seed=seed, scale=0.25, **options)
        for seed, count in ((60, heads), (61, kv_heads))
    )
    return HeadNorms(*weights, 1e-6, 1e-2, v_eps=1e-3)


def eager_head_norm(x, weight, eps, zero_centered=False):
    """Normalise x [batch, heads, positions, head_dim] by head, or as one if the weight covers all
    heads."""
    if len(weight) == x.shape[3]:
        return eager_rms_norm(x, weight, eps, zero_centered)
    by_token = eager_rms_norm(x.transpose(1, 2).flatten(2), weight, eps, zero_centered)
    return by_token.unflatten(2, (-1, x.shape[3])).transpose(1, 2)


# By q's weight: base layers and their borders, which a CUDA graph finds as it had them eagerly.
KNOWN = WeakIdKeyDictionary()


def base_of(layer, dtype, has_bias):
    base = nn.Module()
    base.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    bias = layer.bias if has_bias else None
    base.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
    return base


def lora_attention(x, cos, sin, mask, *rest):
    """Run LoRA_Attention on buffers that hold the weights in the dtype of the computation."""
    *adapters, frozen = rest
    adapters, biases = adapters[:8], adapters[8:]
    dtype, layers = compute_dtype(x), frozen.layers
    known, key = KNOWN.setdefault(layers[0].weight, {}), (dtype, bool(biases))
    if key not in known:
        bases = [base_of(layer, dtype, not biases) for layer in layers]
        known[key] = bases, LayerBorders(DefaultBorder, groups=2)
    bases, borders = known[key]
    reads = [
        Projection(base.weight, base.bias, A, B, layer.scaling, layer.dropout, base=base)
        for layer, base, A, B in zip(layers, bases, adapters[::2], adapters[1::2], strict=True)
    ]
    groups = [reads[:3], reads[3:]]
    ranks = [[len(read.A) for read in group] for group in groups]
    inputs, output = borders.find_or_make(groups, groups, ranks, dtype)
    frame = Frame(
        None, inputs, output, borders, adds=False, seed=frozen.seed,
        dropout_rates=tuple(read.dropout for read in reads), trains_others=bool(biases),
    )  # fmt: skip
    q, k, _ = inputs.out_features
    block = AttentionBlock(
        frame, q // frozen.head_dim, k // frozen.head_dim, frozen.scaling, frozen.head_norms,
        sinks=frozen.sinks, positions=x.shape[1], cos=cos, sin=sin, mask=mask,
        q_scale=frozen.q_scale, window=frozen.window,
    )  # fmt: skip
    others = (*biases, *[None] * len(biases), None, None) if biases else ()
    return LoRA_Attention.apply(x, None, None, *adapters, *others, (block,))


def eager(x, cos, sin, mask, q_A, q_B, k_A, k_B, v_A, v_B, o_A, o_B, *rest):
    *biases, frozen = rest
    layers = q_layer, k_layer, v_layer, o_layer = with_trained(frozen.layers, biases)
    *masks, mask_of_o = masks_drawn(*(one.dropout for one in layers))

    def heads_of(A, B, layer, drawn):
        features = adapted(x, A, B, layer, frozen.seed, *drawn)
        return features.unflatten(-1, (-1, frozen.head_dim)).transpose(1, 2)

    q = heads_of(q_A, q_B, q_layer, masks[0])
    k = heads_of(k_A, k_B, k_layer, masks[1])
    v = heads_of(v_A, v_B, v_layer, masks[2])

    if frozen.head_norms is not None:
        q_weight, k_weight, q_eps, k_eps, centered, v_eps = frozen.head_norms
        q = eager_head_norm(q, q_weight, q_eps, centered)
        k = eager_head_norm(k, k_weight, k_eps, centered)
        v = eager_head_norm(v, v.new_ones(frozen.head_dim), v_eps)
    if cos is not None:
        q, k = rope_case.eager(q, k, cos, sin)
    if frozen.q_scale is not None:
        q = q * frozen.q_scale[:, None, :, None]
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    if frozen.sinks is not None:  # the score of one more key, whose value is 0
        q = torch.cat((q, frozen.sinks[:, None, None].expand(*q.shape[:3], 1)), -1)
        last = torch.zeros_like(q[:, :, :1])
        last[..., -1] = 1 / frozen.scaling
        k = torch.cat((F.pad(k, (0, 1)), last), 2)
        v = F.pad(v, (0, 0, 0, 1))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril()
        mask = mask.triu(1 - frozen.window)
        mask[:, -1] = True
    is_causal = mask is None and q.shape[2] > 1
    attended = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=frozen.scaling
    )
    attended = attended.transpose(1, 2).flatten(2)
    return adapted(attended, o_A, o_B, o_layer, frozen.seed, *mask_of_o)
