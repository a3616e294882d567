"""The operands of every operation in `contract.py`'s table: how a case of each is made."""

from dataclasses import dataclass
from typing import Any

import torch
from cases import (
    attention_case,
    cross_entropy_case,
    experts_case,
    lora_attention_case,
    lora_mlp_case,
    rms_norm_case,
    rope_case,
)
from cases.reference import ADAPTER_NAMES, random
from torch import Tensor

from fused_lora.functions.causal_conv import Conv
from fused_lora.functions.lora_linear import FrozenLayers
from fused_lora.functions.rms_norm import rms_norm
from fused_lora.kernels.routed_rows import SWIGLU

BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OF_W = ("x", "A", "B")
OF_GROUP = ("x", *(f"{layer}_{one}" for layer in "qzba" for one in "AB"))
OF_QKV = ("x", "q_A", "q_B", "k_A", "k_B", "v_A", "v_B")


@dataclass(frozen=True)
class Case:
    """The arguments of a call by name, in its order, and a gradient for each output."""

    inputs: dict[str, Any]
    gradients: list[Tensor]


MIXED = (FP32, BF16, BF16, FP32, FP16, FP32, BF16, FP32)


def in_dtypes(adapters, adapter_dtype):
    """All in one dtype, or each in its own."""
    dtypes = adapter_dtype if isinstance(adapter_dtype, tuple) else (adapter_dtype,) * len(adapters)
    return [t.to(dtype) for t, dtype in zip(adapters, dtypes, strict=False)]


def with_dropout(frozen, device, *dropouts):
    """What is frozen, with these in its fields of dropout, and a seed."""
    seed = torch.tensor([-77 * 2**32 + 5], device=device)
    if isinstance(frozen, FrozenLayers):
        return FrozenLayers(drops(frozen.layers, dropouts), seed)
    names = [name for name in frozen._fields if name.endswith("dropout")]
    return frozen._replace(**dict(zip(names, dropouts, strict=True)), seed=seed)


def drops(layers, dropouts):
    return tuple(one._replace(dropout=p) for one, p in zip(layers, dropouts, strict=True))


def make_lora_mlp(
    shape,
    *,
    dtype,
    device,
    r=8,
    adapter_dtype=None,
    frozen_dtype=None,
    activation="silu",
    dropout=None,
):
    x, gradient = lora_mlp_case.tokens(*shape, dtype=dtype, device=device)
    ranks = (r, r, r) if isinstance(r, int) else r
    adapters, frozen = lora_mlp_case.mlp(frozen_dtype or dtype, device, r=ranks, adapter_dtype=FP32)
    adapters = in_dtypes(adapters, adapter_dtype or dtype)
    frozen = frozen._replace(activation=activation)
    if dropout is not None:
        frozen = with_dropout(frozen, device, *dropout)
    return Case({"x": x, **dict(zip(ADAPTER_NAMES, adapters, strict=True)), "frozen": frozen},
                [gradient])  # fmt: skip


def make_linear(layers):
    def make(
        shape, *, dtype, device, r=8, bias=True, adapter_dtype=None, frozen_dtype=None,
        dropout=None,
    ):  # fmt: skip
        x, adapters, frozen, gradients = attention_case.make_case(
            *shape, layers=layers, dtype=dtype, device=device, bias=bias, frozen_dtype=frozen_dtype,
            r=(r,) * layers if isinstance(r, int) else r,
        )  # fmt: skip
        adapters = in_dtypes(adapters, adapter_dtype or dtype)
        if dropout is not None:
            frozen = with_dropout(frozen, device, *dropout)
        names = {1: OF_W, 3: OF_QKV, 4: OF_GROUP}[layers]
        return Case(dict(zip((*names, "frozen"), (x, *adapters, frozen), strict=True)), gradients)

    return make


def padded(shape, device):
    """Return the mask of causal attention with padding in front of the last sequence."""
    mask = torch.ones(shape[0], 1, shape[1], shape[1], dtype=torch.bool, device=device).tril()
    mask[-1, :, 3:, :2] = False
    return mask


ATTENTIONS = {  # what `make_lora_attention` changes of the usual heads, angles and mask
    "usual": {},
    "MHA of 26": {"heads": 4, "kv_heads": 4, "head_dim": 26},
    "MQA of 3, a mask": {"heads": 3, "kv_heads": 1, "head_dim": 10, "mask": padded},
    "angles of each sequence": {"change": lambda t: torch.cat((t, t.flip(1))).float()},
    "two tables": {"change": lambda t: torch.cat((t[..., :16], t[..., 16:].flip(1)), -1)},
    "MHA, not rotated": {"heads": 4, "kv_heads": 4, "change": lambda _: None},
    "sinks and a window": {"window": 3},
    "q scaled by position": {"scales": (0.5, 2.0)},
}
ON_A_GPU = {"heads of 64": {"head_dim": 64}}  # which every backend takes


def make_lora_attention(shape, *, dtype, device, r=8, adapter_dtype=None, dropout=None,
                        kind="usual", heads=4, **options):  # fmt: skip
    sizes = {"heads": heads, "kv_heads": heads // 2, "head_dim": 32} | (ATTENTIONS | ON_A_GPU)[kind]
    change, mask, scales = (sizes.pop(name, None) for name in ("change", "mask", "scales"))
    inputs, gradient = lora_attention_case.make(
        *shape, dtype=dtype, device=device, r=(r,) * 4 if isinstance(r, int) else r,
        adapter_dtypes=(FP32,) * 8, mask=mask and mask(shape, device), **sizes, **options,
    )  # fmt: skip
    if scales is not None:
        q_scale = torch.tensor(scales).repeat(shape[1])[None, : shape[1]].to(device, dtype)
        inputs[-1] = inputs[-1]._replace(q_scale=q_scale)
    if change is not None:
        inputs[1:3] = map(change, inputs[1:3])
    inputs[4:-1] = in_dtypes(inputs[4:-1], adapter_dtype or dtype)
    if dropout is not None:
        frozen = with_dropout(inputs[-1], device)
        inputs[-1] = frozen._replace(layers=drops(frozen.layers, dropout))
    names = ("x", "cos", "sin", "mask", *lora_attention_case.NAMES, "frozen")
    return Case(dict(zip(names, inputs, strict=True)), [gradient])


def make_lora_experts(
    shape,
    *,
    dtype,
    device,
    r=(4, 8),
    spread="usual",
    adapter_dtype=None,
    frozen_dtype=None,
    gate=SWIGLU,
    residual=True,
):
    x, gradient, before = (
        random(*shape, experts_case.HIDDEN, dtype=dtype, device=device, seed=seed)
        for seed in (1, 2, 4)
    )
    adapters, frozen = experts_case.mixture(
        frozen_dtype or dtype, device, r=r, adapter_dtype=FP32, gate=gate
    )
    adapters = in_dtypes(adapters, adapter_dtype or dtype)
    chosen = experts_case.choices(*shape, spread=spread, device=device)
    weights = random(*chosen.shape, dtype=dtype, device=device, seed=3).abs()
    if gate != SWIGLU:
        frozen = experts_case.with_limit_in_a_gap(frozen, x, adapters, chosen)
    names = ("x", "weights", *experts_case.NAMES, "residual", "chosen", "frozen")
    values = x, weights, *adapters, before if residual else None, chosen, frozen
    return Case(dict(zip(names, values, strict=True)), [gradient])


def make_norm(function):
    def make(shape, *, dtype, device, zero_centered=False):
        inputs, gradients = rms_norm_case.make(function, *shape, dtype=dtype, device=device)
        names = ("x", "weight") if function is rms_norm else ("x", "delta", "weight")
        options = {"eps": rms_norm_case.EPS, "zero_centered": zero_centered}
        return Case(dict(zip(names, inputs, strict=True)) | options, gradients)

    return make


def make_gated_norm(shape, *, dtype, device, gate_dtype=None):
    (x, gate, weight), gradients = rms_norm_case.make(None, *shape, dtype=dtype, device=device)
    gate = gate.to(gate_dtype or dtype)
    options = {"gate": gate, "weight": weight, "eps": rms_norm_case.EPS}
    return Case({"x": x} | options, gradients[:1])


def make_causal_conv(shape, *, dtype, device, taps=4, outputs=3, is_packed=False):
    """q and k have as many channels, v the others. outputs: 1 is a convolution without SiLU.
    is_packed: each row holds documents of 1, 2, 3 ... tokens."""
    options = {"dtype": dtype, "device": device}
    channels = shape[-1]
    sizes = channels // 4, channels // 4, channels - 2 * (channels // 4)
    if outputs == 1:
        sizes = (channels,)
    seq_idx = None
    if is_packed:
        place = torch.arange(shape[-2], device=device)
        seq_idx = ((8 * place + 1).sqrt() - 1).div(2).int().expand(shape[:-1]).contiguous()
    conv = Conv(sizes, has_silu=outputs == 3, seq_idx=seq_idx)
    weight = random(channels, taps, seed=1, scale=taps**-0.5, **options)
    bias = random(channels, seed=2, scale=0.5, **options)
    inputs = {"x": random(*shape, **options), "weight": weight, "bias": bias, "conv": conv}
    gradients = [random(*shape[:-1], one, seed=3 + i, **options) for i, one in enumerate(sizes)]
    return Case(inputs, gradients)


def make_rope(size, *, dtype, device, angle_dtype=None, interleaved=False, tables=1):
    """tables: 2 rotate the halves of a head by different angles."""
    inputs, gradients = rope_case.make(size, dtype=dtype, device=device, angle_dtype=angle_dtype)
    q, k, *angles = inputs
    if tables == 2:
        angles = [random(*t.shape, seed=8 + i).to(t) for i, t in enumerate(angles)]
    inputs = dict(zip(("q", "k", "cos", "sin"), (q, k, *angles), strict=True))
    return Case(inputs | {"interleaved": interleaved}, list(gradients))


def make_log_probs(shape, *, dtype, device, outputs=2):
    operands = cross_entropy_case.inputs(*shape, dtype=dtype, device=device)
    names = ("x", "weight", "bias", "labels")
    gradients = [random(*shape, device=device, seed=seed) for seed in range(outputs)]
    return Case(dict(zip(names, operands, strict=True)), gradients)


def make_cross_entropy(shape, *, dtype, device, **sizes):
    operands = cross_entropy_case.inputs(*shape, dtype=dtype, device=device, **sizes)
    names = ("x", "weight", "bias", "labels", "num_items")
    gradient, num_items = torch.tensor(3.0, device=device), torch.tensor(9.0, device=device)
    return Case(dict(zip(names, (*operands, num_items), strict=True)), [gradient])
