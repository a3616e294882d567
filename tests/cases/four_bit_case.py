"""Tiny models on bitsandbytes' 4-bit weights, and on the weights that these stand for."""

import copy
from typing import Any

import torch
from bitsandbytes import nn as bnb
from cases.layer_case import layer_of
from cases.peft_models import ATTENTION
from peft import prepare_model_for_kbit_training
from torch import nn

from fused_lora import quantize_experts


def quantised(model, only=".layers.", compute_dtype: Any = "the model's", is_moved=True, **options):
    """Put bitsandbytes' linear layers into a model's decoder layers, in place, as transformers does
    when it loads a model in 4 bits.

    only: a part of the names of those that it quantises. is_moved: False leaves them to a move of
    the model, which quantises them. options: of Linear4bit.
    """
    if compute_dtype == "the model's":
        compute_dtype = model.dtype
    options = {"quant_type": "nf4", "compress_statistics": True} | options
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and only in name:
            packed = bnb.Linear4bit(
                linear.in_features, linear.out_features, linear.bias is not None,
                compute_dtype=compute_dtype, **options,
            )  # fmt: skip
            packed.weight = bnb.Params4bit(
                linear.weight.detach().cpu(), requires_grad=False, module=packed,
                **options,
            )  # fmt: skip
            packed.bias = linear.bias
            # where a CPU can, bitsandbytes packs weights anew in inference: 32 rows at a time
            packed.support_avx512bf16_for_cpu = False
            parent, _, child = name.rpartition(".")
            packed = packed.to(model.device) if is_moved else packed
            setattr(model.get_submodule(parent), child, packed)
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True
    return model


def with_experts(model):
    quantize_experts(model)
    return model


# Options of `layer_case.peft_model`: a mixture whose experts are in 4 bits and adapted. In bf16:
# in fp32 a GPU's grouped matmuls wait for the host.
EXPERTS = {
    "family": "Qwen3Moe",
    "dtype": torch.bfloat16,
    "change": with_experts,
    "target_modules": [*ATTENTION],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "config": {
        "hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "pad_token_id": 0, "experts_implementation": "grouped_mm",
    },
}  # fmt: skip


def prepared(model):
    """Return a quantised model as PEFT prepares it."""
    return prepare_model_for_kbit_training(quantised(model), use_gradient_checkpointing=False)


def rest_in_fp32(model):
    """Cast all but 4-bit weights."""
    for parameter in model.parameters():
        if not isinstance(parameter, bnb.Params4bit):
            parameter.data = parameter.data.float()
    return model


def values_times_scales(codes, values, absmax, blocksize, shape, nested=None):
    """Return what 4-bit codes stand for, in fp32: each one's value times its block's absmax.

    The truth for bitsandbytes as well: 0.50.2 on CPUs with AVX-512 takes another row's absmax for
    blocks that straddle rows, if in_features is a multiple of 16.

    nested: the values of codes of absmax, the absmax and offset of these, and their blocksize.
    """
    if nested is not None:
        values_of_absmax, outer, offset, outer_blocksize = nested
        outer = outer.repeat_interleave(outer_blocksize)[: len(absmax)]
        absmax = values_of_absmax[absmax.int()] * outer + offset
    codes = codes.view(torch.uint8).flatten()
    codes = torch.stack([codes >> 4, codes & 15], 1).flatten()[: shape[0] * shape[1]]
    absmax = absmax.repeat_interleave(blocksize)[: len(codes)]
    return (values[codes.int()] * absmax).view(shape)


def weight_of(packed):
    """Return the weight that a layer in 4 bits stands for, in the dtype that was quantised."""
    state, nested = packed.weight.quant_state, None
    if state.nested:
        outer = state.state2
        nested = outer.code, outer.absmax, state.offset, outer.blocksize
    weight = values_times_scales(
        packed.weight.data, state.code, state.absmax, state.blocksize, state.shape, nested
    )
    return weight.to(state.dtype)


def dequantised(model):
    """Return a copy of a model with plain layers of the weights that its 4 bits stand for."""
    plain = copy.deepcopy(model)
    for name, packed in list(plain.named_modules()):
        if isinstance(packed, bnb.Linear4bit):
            linear = nn.Linear(1, 1, bias=False)
            weight = weight_of(packed).to(packed.compute_dtype)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.bias = packed.bias
            linear.out_features, linear.in_features = weight.shape
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, linear)
    plain.is_loaded_in_4bit = False
    return plain


# --- changes after which nothing runs fused -------------------------------------------------------


def with_norms_in_fp16(model):
    layer_of(model).to(torch.float16)


def transposed(model):
    state = layer_of(model).self_attn.q_proj.base_layer.weight.quant_state
    state.shape = (*state.shape[::-1], 1)


def unquantised(model):
    base = layer_of(model).mlp.up_proj.base_layer
    base.weight = bnb.Params4bit(torch.zeros(base.out_features, base.in_features))
    base.quant_state = None


def replaced(model):
    base = layer_of(model).mlp.up_proj.base_layer
    base.weight = torch.nn.Parameter(base.weight.data, requires_grad=False)


REFUSED = {
    "another dtype": (
        {"compute_dtype": torch.float16}, lambda model: None,
        "bnb_4bit_compute_dtype is torch.float16, its norms are torch.bfloat16: make them alike",
    ),
    "norms in fp16": ({}, with_norms_in_fp16, "its norms are torch.float16: make them alike"),
    "another shape": ({}, transposed, "q_proj: its 4-bit weight is [52, 52, 1], not [out, in]"),
    "not quantised": ({}, unquantised, "up_proj: its weight is not quantised yet: move the model"),
    "a plain parameter": ({}, replaced, "up_proj: its 4-bit weight has become a Parameter"),
}  # fmt: skip
