"""Adapters on some of the projections or layers: what has none is a frozen product in the same
fused functions."""

import copy

import pytest
import torch
from fused_case import assert_right, assert_same
from layer_case import peft_model
from peft import LoraConfig
from peft_models import set_weights

from fused_lora import Fusion, fuse, report

SUBSETS = {
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "gate and up": {"target_modules": ["gate_proj", "up_proj"]},
    "k, o and down": {"target_modules": ["k_proj", "o_proj", "down_proj"]},
    "the second layer": {"layers_to_transform": [1]},
}
FUSIONS = {
    "parts": Fusion(mlp=True, attention=True, rope=True, rms_norm=True, cross_entropy=True),
    "layers": Fusion(layer=True, rms_norm=True, cross_entropy=True),
}


@pytest.mark.thinned
@pytest.mark.parametrize("fusion", FUSIONS.values(), ids=FUSIONS)
@pytest.mark.parametrize("subset", SUBSETS.values(), ids=SUBSETS)
def test_any_subset_of_adapters_runs_fused_as_a_whole_and_right(subset, fusion, device):
    plain = peft_model(device, dtype=torch.bfloat16, **subset)
    fused = copy.deepcopy(plain)
    assert fuse(fused, fusion).left == {}
    assert_right(fused, plain, length=9)


@pytest.mark.parametrize("fusion", FUSIONS.values(), ids=FUSIONS)
def test_another_adapter_may_be_on_other_projections(fusion, device):
    plain = peft_model(device, config={"num_hidden_layers": 1})
    plain.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    set_weights(plain, device, only=".second.")
    fused = copy.deepcopy(plain)
    fuse(fused, fusion)
    for adapter in ("second", "default"):
        for model in (plain, fused):
            model.set_adapter(adapter)
        assert report(fused).left == {}
        assert_same(fused, plain)


def test_a_projection_without_an_adapter_runs_under_autocast_over_weights_in_fp32(device):
    plain = peft_model(device, target_modules=["v_proj", "gate_proj"])
    fused = copy.deepcopy(plain)
    assert fuse(fused, FUSIONS["parts"]).left == {}
    assert_right(fused, plain, autocast=True, length=9)
