"""Tiny models on bitsandbytes' 4-bit weights, and on the weights that these stand for."""

import copy
from typing import Any

from bitsandbytes import nn as bnb
from bitsandbytes.functional import dequantize_4bit
from torch import nn


def quantised(model, only=".layers.", compute_dtype: Any = "the model's", **options):
    """Put bitsandbytes' linear layers into a model's decoder layers, in place, as transformers does
    when it loads a model in 4 bits.

    only: a part of the names of those that it quantises. options: of Linear4bit.
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
            setattr(model.get_submodule(parent), child, packed.to(model.device))
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True
    return model


def prepared(model):
    """Return a quantised model as prepare_model_for_kbit_training leaves it."""
    return rest_in_fp32(quantised(model))


def rest_in_fp32(model):
    """Cast all but 4-bit weights."""
    for parameter in model.parameters():
        if not isinstance(parameter, bnb.Params4bit):
            parameter.data = parameter.data.float()
    return model


def dequantised(model):
    """Return a copy of a model with plain layers of the weights that its 4 bits stand for."""
    plain = copy.deepcopy(model)
    for name, packed in list(plain.named_modules()):
        if isinstance(packed, bnb.Linear4bit):
            linear = nn.Linear(1, 1, bias=False)
            state = packed.weight.quant_state
            weight = dequantize_4bit(packed.weight.data, state).to(packed.compute_dtype)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.bias = packed.bias
            linear.out_features, linear.in_features = weight.shape
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, linear)
    plain.is_loaded_in_4bit = False
    return plain
