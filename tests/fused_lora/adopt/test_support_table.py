"""The tables of what works with what, in docs/support.md: held to what `fuse` and `report` answer.

If a row differs, the failure shows the row that the page should have.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from cases.families_case import FAMILIES as OTHERS
from cases.families_case import PARTS, outcome
from cases.layer_case import peft_model
from cases.peft_models import ATTENTION, FAMILIES, MLP
from cases.reasons import MODELS, add_active, ia3, readapt, replace_weight, subclass_base
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from fused_lora import fuse

OTHERS = {name: one for name, one in OTHERS.items() if name not in FAMILIES}
GEMMA_2 = OTHERS.pop("Gemma 2")
EAGER = GEMMA_2.config | {"attn_implementation": "eager"}


def each_projection(change, named="_proj"):
    def make(device):
        model = peft_model(device)
        for name, module in list(model.named_modules()):
            if name.endswith(named):
                change(module)
        return model

    return make


def with_peft(**lora):
    return lambda device: peft_model(device, **lora)


def merged(device):
    model = peft_model(device)
    model.merge_adapter()
    return model


CASES = {
    **{family: with_peft(family=family) for family in FAMILIES},
    **{name: family.peft_model for name, family in OTHERS.items()},
    "Gemma 2 under sdpa": GEMMA_2.peft_model,
    "Gemma 2, eager": replace(GEMMA_2, config=EAGER).peft_model,
    "fp16 base weights": with_peft(dtype=torch.float16),
    "bf16 adapters": with_peft(dtype=torch.bfloat16, autocast_adapter_dtype=False),
    "rsLoRA": with_peft(use_rslora=True),
    "other ranks by projection": with_peft(rank_pattern={"q_proj": 4, "down_proj": 16}),
    "some layers only (`layers_to_transform`)": with_peft(layers_to_transform=[1]),
    "attention's projections only": with_peft(target_modules=list(ATTENTION)),
    "the MLP's projections only": with_peft(target_modules=list(MLP)),
    "`q_proj` and `v_proj` only": with_peft(target_modules=["q_proj", "v_proj"]),
    "`lora_dropout` > 0": with_peft(lora_dropout=0.25),
    "`lora_bias`": with_peft(lora_bias=True),
    '`bias="all"` or `"lora_only"`': with_peft(bias="all"),
    "norms that are trained": with_peft(modules_to_save=["input_layernorm"]),
    "DoRA": with_peft(use_dora=True),
    **{
        f"DoRA of `{name}` alone": each_projection(lambda one: readapt(one, use_dora=True), name)
        for name in ("k_proj", "up_proj")
    },
    "several adapters active": each_projection(add_active),
    "base weights in int8, GPTQ, AWQ": each_projection(replace_weight),
    "merged": merged,
}


def page_lines():
    text = (Path(__file__).resolve().parents[3] / "fused_lora" / "docs" / "support.md").read_text()
    return text.splitlines()


def assert_on_page(row):
    assert row in page_lines(), f"fused_lora/docs/support.md should have this row:\n{row}"


def all_fused_on_page():
    """Return the names on the lines of what fuses completely."""
    said = re.compile(r"\*\*\w+ that fuse completely:\*\* (.*)")
    return [
        name for line in page_lines() if (one := said.match(line)) for name in one[1].split(" · ")
    ]


def test_the_lines_of_what_all_runs_fused_name_nothing_else():
    assert CASES.keys() >= set(all_fused_on_page())


@pytest.mark.slow(
    "DoRA of `k_proj` alone",
    "`lora_bias`",
    "merged",
    "norms that are trained",
    "base weights in int8, GPTQ, AWQ",
    "several adapters active",
    "Gemma 2 under sdpa",
    "Qwen2-MoE",
    "Phi-3",
)
@pytest.mark.parametrize("name", CASES)
def test_the_table_of_what_works_with_what(name, device):
    if name == "Gemma 2 under sdpa" and GEMMA_2.not_whole:
        pytest.skip("transformers refuses it from 5.24 on")
    model = CASES[name](device)
    found = [outcome(model, part) for part in PARTS]
    is_all = set(found) == {"fused"}
    assert (name in all_fused_on_page()) is is_all, f"fused_lora/docs/support.md: {name} is {found}"
    if not is_all:
        assert_on_page(f"| {name} | {' | '.join(found)} |")


# --- what a report says ---------------------------------------------------------------------------


def then(do, **lora):
    """A model to which something of PEFT's is done after it was adapted."""

    def make(device):
        model = peft_model(device, **lora)
        do(model)
        return model

    return make


def in_fp8(projection):
    base = projection.base_layer
    in_fp8 = FP8Linear(base.in_features, base.out_features, (128, 128))
    projection.base_layer = in_fp8.to(base.weight.device)


def compress(projection):
    weight = projection.base_layer.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)


def quantised_experts(family, cls):
    """As transformers loads them where its hub has kernels."""

    def make(device):
        model = OTHERS[family].peft_model(device, target_parameters=None)
        for layer in model.get_base_model().model.layers:
            layer.mlp.experts = cls(model.config).to(device)
        return model

    return make


def with_config(**config):
    return lambda device: peft_model(device, config=config)


SETTINGS = {  # of PEFT and transformers, by what makes such a model
    '`init_lora_weights="mica"`': with_peft(init_lora_weights="mica"),
    "`lora_dropout=1.0`": with_peft(lora_dropout=1.0),
    '`modules_to_save=["down_proj"]`': with_peft(
        modules_to_save=["down_proj"], target_modules=[*ATTENTION]
    ),
    '`modules_to_save=["q_norm"]`': with_peft(family="Qwen3", modules_to_save=["q_norm"]),
    '`target_modules=["q_proj", "lm_head"]`': MODELS["an adapter on lm_head"].make,
    "`layer_replication`": with_peft(family="Llama", layer_replication=[[0, 2], [1, 2]]),
    "`IA3Config`": partial(ia3, attn_implementation="sdpa"),
    "two adapters, `base_model.set_adapter([...])`": each_projection(add_active),
    "`merge_adapter()`": merged,
    "`prepare_model_for_compiled_hotswap`": then(
        lambda model: prepare_model_for_compiled_hotswap(model, target_rank=8)
    ),
    "`quantization_config`, of weights": each_projection(replace_weight),
    "`load_in_8bit=True`": each_projection(subclass_base),
    "`FineGrainedFP8Config`, without `fp8=True`": each_projection(in_fp8),
    "`CompressedTensorsConfig()` of FP8 weights": each_projection(compress),
    "gpt-oss in MXFP4, on a GPU": quantised_experts("gpt-oss", Mxfp4GptOssExperts),
    "`FineGrainedFP8Config`, of experts": quantised_experts("Qwen3-MoE", FP8Experts),
    '`attn_implementation="eager"`': with_config(attn_implementation="eager"),
    "`attention_dropout=0.1`": with_config(attention_dropout=0.1),
    "`resid_pdrop=0.1`, of Phi": lambda device: (
        replace(OTHERS["Phi-3"], config={"resid_pdrop": 0.1}).peft_model(device).train()
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_table_of_what_a_report_says(name, device):
    """One line of words, whichever projection it is of."""
    left = fuse(SETTINGS[name](device)).left.values()
    (reason,) = {re.sub(r"^(\w+: )+", "", one) for one in left}
    assert_on_page(f"| {name} | {reason} |")
