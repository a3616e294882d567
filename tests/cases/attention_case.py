"""Adapted linear layers to try LoRA_W and LoRA_QKV on, and what their results are held against.

A case is (x, adapters, frozen, grad_outputs): of one layer for LoRA_W, of three for LoRA_QKV.
"""

import torch
from cases.reference import adapted_linear, masks_drawn, random

from fused_lora.functions.lora_linear import FrozenLayers, FrozenLinear

IN, OUT = 52, (71, 23, 37)  # multiples of nothing
SCALINGS = (2.0, 0.5, 1.5)
RANKS = (1, 4, 8, 12, 32, 64)


def adapted(x, A, B, layer, seed, dropout, stream):
    return adapted_linear(x, layer.weight, A, B, layer.scaling, layer.bias, dropout, seed, stream)


def with_trained(layers, biases):
    """Layers with the biases that are given beside them, if there are any."""
    if not biases:
        return layers
    biases = [None if bias is None else bias.to(layers[0].weight.dtype) for bias in biases]
    return [layer._replace(bias=bias) for layer, bias in zip(layers, biases, strict=True)]


def lora_linears(x, *rest):
    *trained, frozen = rest
    count = 2 * len(frozen.layers)
    adapters, layers = trained[:count], with_trained(frozen.layers, trained[count:])
    drawn = masks_drawn(*(layer.dropout for layer in layers))
    return tuple(
        adapted(x, A, B, layer, frozen.seed, *mask)
        for A, B, layer, mask in zip(adapters[::2], adapters[1::2], layers, drawn, strict=True)
    )


def make_case(
    *shape, layers=3, dtype=torch.bfloat16, device, r=(8, 8, 8), bias=True, frozen_dtype=None,
):  # fmt: skip
    """x of `shape` tokens, adapters in fp32 (no B zero), frozen weights, and an incoming gradient
    each."""
    options = {"dtype": frozen_dtype or dtype, "device": device}
    adapters, weights, biases, grad_outputs = [], [], [], []
    for i, (rank, out) in enumerate(zip(r[:layers], OUT, strict=False)):
        adapters.append(random(rank, IN, seed=10 + i, scale=IN**-0.5, device=device))
        scale = max(rank, 1) ** -0.5
        adapters.append(random(out, rank, seed=20 + i, scale=scale, device=device))
        weights.append(random(out, IN, seed=30 + i, scale=IN**-0.5, **options))
        biases.append(random(out, seed=40 + i, **options) if bias else None)
        grad_outputs.append(random(*shape, out, seed=50 + i, device=device, dtype=dtype))
    x = random(*shape, IN, seed=1, device=device, dtype=dtype)
    return (
        x,
        adapters,
        FrozenLayers(tuple(map(FrozenLinear, weights, biases, SCALINGS))),
        grad_outputs,
    )
