"""Checkpoints with experts in MXFP4, loaded as they are.

transformers loads gpt-oss in one of two ways: for kernels of its hub, which pass no gradients on,
or with all experts dequantised. This is a third, in the place that it has for quantisation methods
of other libraries. Its own loader moves and places the codes, and none is ever dequantised.
"""

import copy
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from ..forwards.experts import PARAMETERS
from ..weights.expert_weight import Encoding, ExpertWeight
from ..weights.mxfp4 import packed_in_mxfp4
from ..weights.wrapped_weight import NOT_SAVED

METHOD = "mxfp4_kept"  # our name among transformers' quantisation methods
BYTES = 17 / 32  # of a value: half a byte, and a scale for each 32


def keep_mxfp4(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration with which transformers keeps a checkpoint's experts in MXFP4::

        config = keep_mxfp4(AutoConfig.from_pretrained("openai/gpt-oss-20b"))
        model = AutoModelForCausalLM.from_pretrained(
            "openai/gpt-oss-20b", config=config, dtype=torch.bfloat16, device_map="cuda"
        )

    The model is like one whose experts `quantize_experts` has put into MXFP4, but its codes and
    scales are the checkpoint's.

    Raises:
        ValueError: the checkpoint is not in MXFP4.
    """
    given: Any = getattr(config, "quantization_config", None)
    method = given.get("quant_method") if isinstance(given, dict) else given
    if method != "mxfp4":
        raise ValueError(
            f"keep_mxfp4: the checkpoint's quant_method is {method}, not mxfp4: load it without, "
            "then call quantize_experts"
        )
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(_Config)
        register_quantizer(METHOD)(_Quantizer)
    config = copy.deepcopy(config)
    config.quantization_config = {"quant_method": METHOD}
    return config


class _Config(Mxfp4Config):
    def __init__(self, **_: Any):
        super().__init__(dequantize=True)  # afterwards the model counts as any other
        self.quant_method = METHOD  # type: ignore[assignment]


class _Quantizer(Mxfp4HfQuantizer):
    def get_weight_conversions(self) -> list[WeightConverter]:
        return [
            WeightConverter([f"{name}_blocks", f"{name}_scales"], name, [_Keep()])
            for name in PARAMETERS
        ]

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        is_kept = param.ndim == 3 and param_name.endswith(PARAMETERS)
        return BYTES if is_kept else super().param_element_size(model, param_name, param)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not any(isinstance(one, ExpertWeight) for one in model.parameters()):
            raise RuntimeError(
                f"keep_mxfp4: transformers {transformers.__version__} found no experts in MXFP4 in "
                "the checkpoint: load it with Mxfp4Config(dequantize=True), then call "
                "quantize_experts"
            )
        return super()._process_model_after_weight_loading(model, **kwargs)


class _Keep(ConversionOps):
    """Make a parameter of blocks and scales."""

    def convert(self, input_dict: dict, *_: Any, **known: Any) -> dict:
        by_kind = {
            given.rpartition("_")[2]: one[0] if isinstance(one, list) else one
            for given, one in input_dict.items()
        }
        name = known["full_layer_name"]
        like = known["model"].get_parameter(name)
        packed = packed_in_mxfp4(by_kind["blocks"], by_kind["scales"])
        weight = ExpertWeight.of(
            packed, Encoding("mxfp4", is_transposed=True), like.shape, like.dtype
        )
        return {name: nn.Parameter(weight, requires_grad=False)}

    @property
    def reverse_op(self) -> ConversionOps:
        raise RuntimeError(NOT_SAVED.format(ExpertWeight.kept))
