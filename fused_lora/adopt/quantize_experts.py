"""Experts in 4 bits, which transformers leaves in 16 when it loads a model in 4 bits."""

from typing import Any, Literal

import torch
from torch import nn

from ..forwards.experts import PARAMETERS, experts
from ..reading.known import known_form
from ..weights.expert_weight import Encoding, ExpertWeight


def quantize_experts(
    model: nn.Module,
    quant_type: Literal["nf4", "fp4", "mxfp4"] = "nf4",
    double_quant: bool = True,
    device: torch.device | str | None = None,
) -> list[str]:
    """Keep the weights of a mixture's experts in 4 bits: in bitsandbytes' codes, or in MXFP4.

    Call it before `fuse`, and before or after `get_peft_model`. Experts that run fused are
    dequantised into memory that all layers share. Without `fuse` each use dequantises them into
    temporary memory. Adapters of experts are trained, saved and loaded as before. Merging them
    quantises the sums again, as PEFT does for linear layers in 4 bits. The base cannot be saved.

    Args:
        quant_type: the 16 values of a code, and how blocks are scaled. Weights that were
            dequantised from MXFP4 are in MXFP4 again without error.
        double_quant: quantise the scales of nf4 and fp4 as well, as `bnb_4bit_use_double_quant`
            does.
        device: where the codes should lie. One weight at a time moves there and is quantised, so a
            GPU never holds all experts of a model that was loaded on the CPU. None: where each is.

    Returns:
        The names of the modules whose experts are in 4 bits now.

    Raises:
        ImportError: there is no bitsandbytes, for nf4 and fp4.
        ValueError: the model has no experts of a class that we know, or the sizes do not fit.
    """
    bases = [
        (name, getattr(one, "get_base_layer", lambda one=one: one)())
        for name, one in experts(model)
    ]
    known: list[tuple[str, Any]] = [pair for pair in bases if known_form(pair[1], "Experts")]
    if not known:
        raise ValueError("quantize_experts: no experts of a class in fused_lora/docs/support.md")
    for _, base in known:
        # MXFP4 scales values along `in`, as in checkpoints
        is_transposed = quant_type == "mxfp4" and known_form(base, "Experts").is_clamped
        encoding = Encoding(quant_type, double_quant, is_transposed)
        for name in PARAMETERS:
            weight = base._parameters[name]
            if not isinstance(weight, ExpertWeight):
                packed = encoding.encode(weight.detach().to(device or weight.device))
                coded = ExpertWeight.of(packed, encoding, weight.shape, weight.dtype)
                base._parameters[name] = nn.Parameter(coded, requires_grad=False)
    return [name for name, _ in known]
