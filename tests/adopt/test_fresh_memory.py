"""New memory may hold anything, NaN too: no part may let it into a result.

A product may read on past the end of a row, as bf16 ones of PyTorch 2.13 do on a CPU: what lies
between rows, and in columns that are written later, is then multiplied by zero, and NaN stays NaN.
"""

import copy

import pytest
import torch
from fused_case import BOOLEAN_PARTS, step
from layer_case import peft_model
from reference import relative_error, use_poisoned_memory

from fused_lora import Fusion, fuse

FUSIONS = {
    **{part: Fusion(**{part: True}) for part in BOOLEAN_PARTS},
    "attention and rope": Fusion(attention=True, rope=True),
    "layer": Fusion(layer=True),
    "layer, checkpointed, loss of some": Fusion(layer=True, cross_entropy=True, checkpoint="full"),
}
MODELS = {
    "fp32 adapters": {},
    "fp32 adapters, narrow": {"config": {"intermediate_size": 40}},
    "bf16 adapters, odd": {"autocast_adapter_dtype": False, "r": 3},
    "biases": {"family": "Llama", "config": {"attention_bias": True, "mlp_bias": True}},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_no_part_lets_what_lies_in_new_memory_into_a_result(fusion, model, device, monkeypatch):
    options = MODELS[model]
    autocast = "fp32" in model or model == "biases"
    fused = peft_model(device, dtype=torch.bfloat16, **options)
    if fusion == "mlp" and model == "biases":
        pytest.skip("it leaves those to PEFT")
    fuse(fused, FUSIONS[fusion])
    want = step(copy.deepcopy(fused), autocast)
    use_poisoned_memory(monkeypatch)
    got = step(copy.deepcopy(fused), autocast)
    assert got.keys() == want.keys() and len(got) > 1
    for name in want:
        assert relative_error(got[name], want[name]) == 0.0, name
