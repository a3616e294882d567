"""A layer whose MLP its class runs, beside an attention or a mixer that is a block."""

import warnings

import pytest
import torch
from cases.families_case import FAMILIES
from cases.fused_case import beside, functions_of, loss_of
from cases.layer_case import LAYER, assert_layer_right, layer_of, peft_model

from fused_lora import fuse
from fused_lora.forwards.layer_reading import mlp_of
from fused_lora.weights.borders import borders_of


def called(model):
    """Return our functions in the loss, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        functions = functions_of(loss_of(model))
    said = [str(one.message) for one in caught]
    return functions, [one for one in said if "stepped aside" in one]


# Layers with and without a norm before the MLP, with a factor, with dropout modules, with a mixer.
@pytest.mark.filterwarnings("ignore:.*stepped aside")
@pytest.mark.parametrize(
    "name", ["Qwen2", "Qwen3-MoE", "OLMo 2", "GLM-4", "Granite", "Phi-3", "LFM2"]
)
def test_a_layer_with_one_block_is_within_the_error_budget(name, device):
    fused, plain, _ = beside(FAMILIES[name].peft_model(device, torch.bfloat16).train(), LAYER)
    mlp_of(layer_of(fused)).register_forward_hook(lambda *_: None)
    assert_layer_right(fused, plain, (2, 9), torch.bfloat16)


def test_weights_of_an_mlp_that_does_not_run_stay_where_they_are(device):
    model = FAMILIES["ERNIE 4.5, mixture"].peft_model(device).train()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    fuse(model, LAYER)
    moved = {
        name.partition(".layers.")[2].removesuffix(".weight").removesuffix(".base_layer")
        for name, parameter in model.named_parameters()
        if parameter.data_ptr() != before[name]
    }
    attention = {f"self_attn.{one}_proj" for one in "qkvo"}
    mlp = {f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    assert moved == {
        *(f"0.{name}" for name in attention | mlp),
        *(f"1.{name}" for name in attention),
    }


def test_an_mlp_that_steps_aside_is_said_once_and_comes_back(device):
    fused, _, _ = beside(peft_model(device, config={"num_hidden_layers": 1}), LAYER)
    layer, one = layer_of(fused), {"DecoderLayer": 1}
    buffers = [border.buffer() for border in borders_of(layer).by_group]
    hook = layer.mlp.register_forward_hook(lambda *_: None)
    functions, (said,) = called(fused)
    assert functions == one and "Qwen2DecoderLayer stepped aside: mlp: it has hooks" in said
    assert called(fused) == (one, [])
    hook.remove()
    assert called(fused) == (one, [])
    found = [border.buffer() for border in borders_of(layer).by_group]
    assert all(new is old for new, old in zip(found, buffers, strict=True))
