"""Experts in 4 bits, which transformers leaves in 16 when it loads a model in 4 bits."""

from typing import Any, Literal

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from ..forwards.experts import PARAMETERS, experts
from ..reading.four_bit import codes_of
from ..reading.known import known_form


def quantize_experts(
    model: nn.Module,
    quant_type: Literal["nf4", "fp4"] = "nf4",
    double_quant: bool = True,
    device: torch.device | str | None = None,
) -> list[str]:
    """Keep the weights of a mixture's experts in 4 bits, by bitsandbytes' `replace_parameter_4bit`.

    For adapters on attention and other layers, before or after `get_peft_model`. Experts that run
    fused are dequantised into memory that all layers share. Without `fuse` each call dequantises
    them into memory of its own.

    Args:
        quant_type: the 16 values of a code.
        double_quant: quantise the scales as well, as `bnb_4bit_use_double_quant` does.
        device: where the codes should lie. One weight at a time moves there and is quantised, so a
            GPU never holds all experts of a model that was loaded on the CPU. None: where each is.

    Returns:
        The names of the modules whose experts are in 4 bits now.

    Raises:
        ImportError: there is no bitsandbytes.
        ValueError: the model has no experts of a class that we know, or experts have adapters: over
            such weights PEFT 0.21's own forward does not train them.
    """
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    found: list[tuple[str, Any]] = [*experts(model)]
    for name, module in found:
        if isinstance(module, ParamWrapper):
            raise ValueError(
                f"quantize_experts: {name} has adapters, which PEFT does not train over 4 bits: "
                "leave experts out of target_parameters"
            )
    known = [(name, module) for name, module in found if known_form(module, "Experts")]
    if not known:
        raise ValueError("quantize_experts: no experts of a class in fused_lora/docs/support.md")
    for _, module in known:
        for name in PARAMETERS:
            if codes_of(module, name) is None:
                weight = getattr(module, name)
                weight.data = weight.data.to(device or weight.device)
                replace_parameter_4bit(module, name, double_quant, quant_type)
    return [name for name, _ in known]
