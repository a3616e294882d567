"""A layer whose MLP its class runs, beside an attention or a mixer that is a block."""

import warnings

import pytest
import torch
from cases.families_case import FAMILIES, everywhere
from cases.fused_case import ALL, assert_right, beside, functions_of, loss_of, step
from cases.layer_case import LAYER, assert_layer_right, layer_of, peft_model
from cases.reference import relative_error

from fused_lora import Fusion, fuse
from fused_lora.forwards import layer_reading
from fused_lora.forwards.layer_reading import mlp_of
from fused_lora.weights.borders import borders_of

WHOLE_TOO = Fusion(**ALL, layer=True)
PACKED = [[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2


def mixture(device, name, fusion=WHOLE_TOO):
    return beside(FAMILIES[name].peft_model(device, torch.bfloat16).train(), fusion)


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
    fused, plain, _ = mixture(device, name, LAYER)
    mlp_of(layer_of(fused)).register_forward_hook(lambda *_: None)
    assert_layer_right(fused, plain, (2, 9), torch.bfloat16)


@pytest.mark.thinned
@pytest.mark.parametrize("policy", ["", "full", "offload"])
def test_an_attention_with_sinks_runs_as_a_block(policy, device):
    fused, plain, _ = mixture(device, "gpt-oss", Fusion(**ALL, layer=True, checkpoint=policy))
    assert assert_right(fused, plain, length=9)
    assert step(fused, length=9).functions["DecoderLayer"] == 2


@pytest.mark.parametrize("policy", ["", "full", "offload"])
def test_documents_of_a_mixture_are_kept_apart(policy, device):
    fused, plain, _ = mixture(device, "Qwen3-MoE", Fusion(**ALL, layer=True, checkpoint=policy))
    places = torch.tensor(PACKED, device=device)
    assert assert_right(fused, plain, length=9, position_ids=places)
    apart = step(fused, length=9, position_ids=places)["loss"]
    assert relative_error(step(fused, length=9)["loss"], apart) > 1e-3


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


def test_a_report_of_a_mixture_lists_what_runs_beside_its_blocks(device):
    fused, _, done = mixture(device, "Qwen2-MoE")
    assert sorted(done.fused["layer"]) == sorted(done.left)
    assert not done.fused["attention"] and not done.fused["rope"]
    assert done.fused["mlp"] == everywhere("mlp.shared_expert") + everywhere("mlp.experts")
    beside_blocks = everywhere("post_attention_layernorm")
    assert done.fused["rms_norm"] == [*beside_blocks, "base_model.model.model.norm"]
    _, said = called(fused)
    assert not said


def test_a_steady_call_of_a_mixture_reads_nothing_anew(device, monkeypatch):
    fused, _, _ = mixture(device, "Qwen2-MoE")
    seen, read = [], layer_reading.read_running

    def counted(layer):
        seen.append(layer)
        return read(layer)

    monkeypatch.setattr(layer_reading, "read_running", counted)
    first, again = (step(fused, length=5) for _ in range(2))
    assert len(seen) == 2 and all(torch.equal(first[name], again[name]) for name in first)


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
