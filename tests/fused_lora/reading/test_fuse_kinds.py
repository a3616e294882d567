"""Kinds of LoRA that PEFT has beside the plain one, adapters on some of the projections, and what
else may be trained: which parts run fused, and that it trains as vanilla PEFT does."""

import copy
from dataclasses import replace

import pytest
import torch
from cases.families_case import FAMILIES
from cases.fused_case import (
    ALL,
    assert_right,
    assert_same,
    assert_trains_alike,
    batch,
    beside,
    functions_of,
)
from cases.layer_case import layer_of, peft_model
from cases.peft_models import MLP as MLP_LAYERS
from cases.peft_models import set_weights
from cases.reasons import readapt, replace_weight
from peft import LoraConfig

from fused_lora import Fusion, fuse, report

ONE = {"num_hidden_layers": 1}
WHOLE = {"DecoderLayer": 1}  # or its attention, beside projections by themselves
MLP = {"LoRA_MLP": 1}
PARTS = MLP | {"LoRA_Attention": 1}
FUNCTIONS = {*PARTS, *WHOLE, "LoRA_W", "LoRA_QKV"}


def made(config=ONE, **options):
    return lambda device: peft_model(device, config=config, **options)


def with_trained_norms(family, named="norm.weight", config=()):
    def make(device):
        model = peft_model(device, family, config=ONE | dict(config))
        for name, parameter in model.named_parameters():
            if name.endswith(named):
                parameter.requires_grad_()
        return model

    return make


PLAIN = made()


def add_variant(projection):
    readapt(projection, init_lora_weights="mica")


def add_dora(projection):
    readapt(projection, use_dora=True)


def with_one(names, change=add_variant, make=PLAIN):
    def made_and_changed(device):
        model = make(device)
        for name in names.split():
            change(layer_of(model).get_submodule(name))
        return model

    return made_and_changed


def phi(**options):
    family = replace(FAMILIES["Phi-3"], config=FAMILIES["Phi-3"].config | ONE)
    return lambda device: family.peft_model(device, **options)


NORMS = ["input_layernorm", "post_attention_layernorm"]
OF_BASE = ONE | {"mlp_bias": True, "attention_bias": True}  # which are frozen
# How a model of one layer is made, and what of it `fuse(model)` runs, by our functions.
KINDS = {
    "rsLoRA": (made(use_rslora=True), WHOLE),
    "lora_bias": (made(lora_bias=True), WHOLE),
    "lora_bias of o alone": (made(lora_bias=True, target_modules=["o_proj"]), WHOLE),
    "lora_bias, no other biases": (made(lora_bias=True, family="Llama"), WHOLE),
    "joined projections": (phi(), WHOLE),
    "lora_bias, joined projections": (phi(lora_bias=True), WHOLE),
    "bias all": (made(bias="all"), WHOLE),
    "bias all, of projections without adapters": (
        made(bias="all", target_modules=["gate_proj"]), WHOLE
    ),
    "bias lora_only": (made(bias="lora_only", target_modules=["q_proj"]), WHOLE),
    "biases of an MLP's base layers": (made(OF_BASE, family="Llama"), WHOLE),
    "bias all, an MLP's too": (made(OF_BASE, family="Llama", bias="all"), WHOLE),
    "lora_bias and bias all, multiplied": (
        made(OF_BASE, family="Granite", bias="all", lora_bias=True), WHOLE
    ),
    "norms that are trained": (with_trained_norms("Qwen2"), WHOLE),
    "norms of outputs that are trained": (
        with_trained_norms("Olmo2", "layernorm.weight", {"pad_token_id": 0}), WHOLE
    ),
    "norms around that are trained, about one": (
        with_trained_norms("Gemma3Text", "layernorm.weight", {"pad_token_id": 0}), WHOLE
    ),
    "norms of heads, too": (with_trained_norms("Qwen3"), MLP | {"LoRA_QKV": 1, "LoRA_W": 1}),
    "norms in modules_to_save": (made(modules_to_save=NORMS), WHOLE),
    "DoRA": (made(use_dora=True), WHOLE),
    "DoRA, joined projections": (phi(use_dora=True), WHOLE),
    "DoRA on k, up and down, beside LoRA": (
        with_one("self_attn.k_proj mlp.up_proj mlp.down_proj", add_dora), WHOLE
    ),
    "DoRA on o and gate, q without an adapter": (
        with_one("self_attn.o_proj mlp.gate_proj", add_dora,
                 made(OF_BASE, family="Llama", target_modules=["o_proj", "k_proj", *MLP_LAYERS])),
        WHOLE,
    ),
    "a variant on up": (with_one("mlp.up_proj"), WHOLE | {"LoRA_W": 2}),
    "a variant on gate and up, joined": (
        with_one("mlp.gate_up_proj", make=phi()), WHOLE | {"LoRA_W": 1}
    ),
    "a variant on down, beside joined ones with biases": (
        with_one("mlp.down_proj", make=phi(lora_bias=True)), WHOLE | {"LoRA_W": 1}
    ),
    "a variant on k": (with_one("self_attn.k_proj"), MLP | {"LoRA_W": 3}),
    "a variant on k, normed heads": (
        with_one("self_attn.k_proj", make=made(family="Qwen3")), MLP | {"LoRA_W": 3}
    ),
    "a variant on gate, up without an adapter": (
        with_one("mlp.gate_proj", make=made(target_modules=["q_proj", "gate_proj", "down_proj"])),
        WHOLE | {"LoRA_W": 1},
    ),
    "a variant on q, k and v, joined": (
        with_one("self_attn.qkv_proj", make=phi()), MLP | {"LoRA_W": 1}
    ),
    "a variant on o": (with_one("self_attn.o_proj"), MLP | {"LoRA_QKV": 1}),
    "a quantised v": (with_one("self_attn.v_proj", replace_weight), MLP | {"LoRA_W": 3}),
    "a quantised down, beside biases": (
        with_one("mlp.down_proj", replace_weight, made(lora_bias=True)), WHOLE | {"LoRA_W": 2}
    ),
}  # fmt: skip


@pytest.mark.slow(
    "a variant on k", "lora_bias and bias all, multiplied", "DoRA on k, up and down, beside LoRA"
)
@pytest.mark.parametrize("name", KINDS)
def test_no_more_is_lost_than_has_to_be_and_it_trains_as_plain_peft_does(name, device):
    make, wanted = KINDS[name]
    fused, plain, _ = beside(make(device).train())
    ran = assert_trains_alike(fused, plain)
    assert {name: count for name, count in ran.items() if name in FUNCTIONS} == wanted


def test_of_projections_beside_one_that_is_left_those_without_an_adapter_are_not_counted(device):
    plain = peft_model(device, config=ONE, target_modules=["q_proj", "v_proj"])
    assert "attention: 3 of 3 projections fused" in str(fuse(copy.deepcopy(plain), APART))
    readapt(layer_of(plain).self_attn.v_proj, use_dora=True)
    assert "attention: 1 of 3 projections fused" in str(fuse(plain, APART))  # q


def test_a_bias_that_is_trained_stays_in_the_memory_that_its_optimizer_may_hold(device):
    model = peft_model(device, config=ONE, bias="all")
    biases = [p for name, p in model.named_parameters() if name.endswith(".bias")]
    before = [bias.data_ptr() for bias in biases]
    fuse(model, AGAIN)
    assert functions_of(model(**batch(model)).loss)["DecoderLayer"] == 1
    assert before and [bias.data_ptr() for bias in biases] == before


APART = Fusion(mlp=True, attention=True)  # q, k and v as one function, and o as another
AGAIN = Fusion(**ALL, layer=True, checkpoint="full")


@pytest.mark.slow("{'lora_bias': True}-apart")
@pytest.mark.parametrize("fusion", [APART, AGAIN], ids=("apart", "again"))
@pytest.mark.parametrize("options", [
    {"lora_bias": True}, {"bias": "all"}, {"modules_to_save": NORMS},
    {"lora_bias": True, "family": "Llama", "target_modules": ["q_proj", "k_proj"]},  # v has none
], ids=str)  # fmt: skip
def test_biases_and_norms_are_trained_in_any_fusion(options, fusion, device):
    fused, plain, _ = beside(peft_model(device, config=ONE, **options), fusion, strict=False)
    assert_trains_alike(fused, plain)


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
    fused, plain, done = beside(peft_model(device, **options), fusion)
    assert not done.left
    return fused, plain


@pytest.mark.slow("q and v-parts")
@pytest.mark.thinned
@pytest.mark.parametrize("fusion", OF_SUBSETS.values(), ids=OF_SUBSETS)
@pytest.mark.parametrize("subset", SUBSETS.values(), ids=SUBSETS)
def test_any_subset_of_adapters_runs_fused_as_a_whole_and_right(subset, fusion, device):
    assert_same(*fused_and_plain(device, fusion, **subset))


@pytest.mark.slow("layers")
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
