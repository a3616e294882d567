"""Kinds of LoRA that PEFT has beside the plain one, adapters on some of the projections, and what
else may be trained: which parts run fused, and that it trains as plain PEFT does."""

import copy
from dataclasses import replace

import pytest
import torch
from families_case import FAMILIES
from fused_case import ALL, assert_right, assert_same, assert_trains_alike
from layer_case import assert_layer_right, layer_of, pair, peft_model
from peft import LoraConfig
from peft_models import set_weights
from projection_case import readapt

from fused_lora import Fusion, fuse, report

ONE = {"num_hidden_layers": 1}
WHOLE = {"DecoderLayer": 1}
MLP, ATTENTION = {"LoRA_MLP": 1}, {"LoRA_Attention": 1}
PARTS = MLP | ATTENTION
FUNCTIONS = {*PARTS, *WHOLE, "LoRA_W", "LoRA_QKV"}


def made(config=ONE, **options):
    return lambda device: peft_model(device, config=config, **options)


def with_trained_norms(family):
    def make(device):
        model = peft_model(device, family, config=ONE)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.requires_grad_()
        return model

    return make


def with_dora_on(name):
    def make(device):
        model = peft_model(device, config=ONE)
        readapt(layer_of(model).get_submodule(name), use_dora=True)
        return model

    return make


def phi(**options):
    family = replace(FAMILIES["Phi-3"], config=FAMILIES["Phi-3"].config | ONE)
    return lambda device: family.peft_model(device, **options)


NORMS = ["input_layernorm", "post_attention_layernorm"]
OF_BASE = ONE | {"mlp_bias": True, "attention_bias": True}  # which are frozen
# How a model of one layer is made, and what of it `fuse(model)` runs, by our functions.
KINDS = {
    "rsLoRA": (made(use_rslora=True), WHOLE),
    "lora_bias": (made(lora_bias=True), PARTS),
    "lora_bias of o alone": (made(lora_bias=True, target_modules=["o_proj"]), PARTS),
    "lora_bias, no other biases": (made(lora_bias=True, family="Llama"), PARTS),
    "lora_bias, joined projections": (phi(lora_bias=True), PARTS),
    "bias all": (made(bias="all"), PARTS),
    "bias all, of projections without adapters": (
        made(bias="all", target_modules=["gate_proj"]), PARTS
    ),
    "bias lora_only": (made(bias="lora_only", target_modules=["q_proj"]), PARTS),
    "biases of an MLP's base layers": (made(OF_BASE, family="Llama"), WHOLE),
    "bias all, an MLP's too": (made(OF_BASE, family="Llama", bias="all"), PARTS),
    "norms that are trained": (with_trained_norms("Qwen2"), PARTS),
    "norms of heads, too": (with_trained_norms("Qwen3"), MLP | {"LoRA_QKV": 1, "LoRA_W": 1}),
    "norms in modules_to_save": (made(modules_to_save=NORMS), PARTS),
    "DoRA on up": (with_dora_on("mlp.up_proj"), ATTENTION),
    "DoRA on k": (with_dora_on("self_attn.k_proj"), MLP | {"LoRA_W": 1}),
    "DoRA on o": (with_dora_on("self_attn.o_proj"), MLP | {"LoRA_QKV": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_no_more_is_lost_than_has_to_be_and_it_trains_as_plain_peft_does(name, device):
    make, wanted = KINDS[name]
    plain = make(device).train()
    fused = copy.deepcopy(plain)
    fuse(fused)
    ran = assert_trains_alike(fused, plain)
    assert {name: count for name, count in ran.items() if name in FUNCTIONS} == wanted


APART = Fusion(mlp=True, attention=True)  # q, k and v as one function, and o as another
AGAIN = Fusion(**ALL, layer=True, checkpoint="full")


@pytest.mark.parametrize("fusion", [APART, AGAIN], ids=("apart", "again"))
@pytest.mark.parametrize("options", [{"lora_bias": True}, {"bias": "all"}], ids=str)
def test_biases_are_trained_in_any_fusion(options, fusion, device):
    plain = peft_model(device, config=ONE, **options)
    fused = copy.deepcopy(plain)
    fuse(fused, fusion, strict=False)
    assert_trains_alike(fused, plain)


@pytest.mark.parametrize("options", [{"lora_bias": True}, {"bias": "all"}], ids=str)
def test_trained_biases_are_within_the_error_budget_in_bf16(options, device):
    options |= {"dtype": torch.bfloat16, "autocast_adapter_dtype": False}
    fused, plain, done = pair(device, Fusion(**ALL), config=ONE, **options)
    assert not done.left
    assert_layer_right(fused, plain, (2, 21), torch.bfloat16)


# --- on some of the projections or layers: what has none is a frozen product ----------------------

SUBSETS = {
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "gate and up": {"target_modules": ["gate_proj", "up_proj"]},
    "k, o and down": {"target_modules": ["k_proj", "o_proj", "down_proj"]},
    "the second layer": {"layers_to_transform": [1]},
}
OF_SUBSETS = {
    "parts": Fusion(mlp=True, attention=True, rope=True, rms_norm=True, cross_entropy=True),
    "layers": Fusion(layer=True, rms_norm=True, cross_entropy=True),
}


def fused_and_plain(device, fusion, **options):
    plain = peft_model(device, **options)
    fused = copy.deepcopy(plain)
    assert not fuse(fused, fusion).left
    return fused, plain


@pytest.mark.thinned
@pytest.mark.parametrize("fusion", OF_SUBSETS.values(), ids=OF_SUBSETS)
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
    options = {"target_modules": ["v_proj", "gate_proj"], "config": ONE, "dtype": dtype}
    fused, plain = fused_and_plain(device, OF_SUBSETS[part], **options)
    assert_right(fused, plain, autocast=dtype is torch.float32, length=9)


@pytest.mark.parametrize("fusion", OF_SUBSETS.values(), ids=OF_SUBSETS)
def test_another_adapter_may_be_on_other_projections(fusion, device):
    plain = peft_model(device, config=ONE)
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
    for fusion in (OF_SUBSETS["parts"], Fusion(attention=True)):
        assert_same(*fused_and_plain(device, fusion, **options))
