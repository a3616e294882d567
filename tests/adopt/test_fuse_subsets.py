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

ONE_LAYER = {"num_hidden_layers": 1}
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


def fused_and_plain(device, fusion, **options):
    plain = peft_model(device, **options)
    fused = copy.deepcopy(plain)
    assert not fuse(fused, fusion).left
    return fused, plain


@pytest.mark.thinned
@pytest.mark.parametrize("fusion", FUSIONS.values(), ids=FUSIONS)
@pytest.mark.parametrize("subset", SUBSETS.values(), ids=SUBSETS)
def test_any_subset_of_adapters_runs_fused_as_a_whole_and_right(subset, fusion, device):
    assert_same(*fused_and_plain(device, fusion, **subset))


@pytest.mark.parametrize(
    ("dtype", "part"),
    [(torch.bfloat16, "parts"), (torch.bfloat16, "layers"), (torch.float32, "parts")],
    ids=str,
)
def test_a_projection_without_an_adapter_is_within_the_error_budget(dtype, part, device):
    """And over weights in fp32 it runs under autocast."""
    options = {"target_modules": ["v_proj", "gate_proj"], "config": ONE_LAYER, "dtype": dtype}
    fused, plain = fused_and_plain(device, FUSIONS[part], **options)
    assert_right(fused, plain, autocast=dtype is torch.float32, length=9)


@pytest.mark.parametrize("fusion", FUSIONS.values(), ids=FUSIONS)
def test_another_adapter_may_be_on_other_projections(fusion, device):
    plain = peft_model(device, config=ONE_LAYER)
    plain.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    set_weights(plain, device, only=".second.")
    fused = copy.deepcopy(plain)
    fuse(fused, fusion)
    for adapter in ("second", "default"):
        for model in (plain, fused):
            model.set_adapter(adapter)
        assert report(fused).left == {}
        assert_same(fused, plain)


def test_each_projection_may_have_a_rank_and_a_scale_of_its_own(device):
    """As one function and as several. (Of layers: test_decoder_layer.py.)"""
    options = {
        "use_rslora": True,
        "rank_pattern": {"gate_proj": 4, "k_proj": 16, "o_proj": 12, "layers.1.mlp.down_proj": 12},
        "alpha_pattern": {"up_proj": 32, "q_proj": 16, "v_proj": 7, "layers.0.mlp.gate_proj": 3},
    }
    for fusion in (FUSIONS["parts"], Fusion(attention=True)):
        assert_same(*fused_and_plain(device, fusion, **options))
