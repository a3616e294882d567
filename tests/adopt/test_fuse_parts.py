"""Every fused part alone, and all together, against plain PEFT: the loss and every gradient."""

import copy
import warnings

import pytest
import torch
from fused_case import (
    ALL,
    BOOLEAN_PARTS,
    FUSIONS,
    SHORT,
    assert_right,
    assert_same,
    batch,
    functions_of,
    pair,
    step,
)
from peft_models import LAYERS, base_model, peft_model
from reference import assert_within_budget

from fused_lora import Fusion, fuse, report

# Of each: options of the model, and whether it runs under autocast.
DTYPES = {
    "fp32": ({}, False),
    # what the Trainer's bf16=True makes of a model that was loaded in fp32: projections give bf16,
    # and the residual, to which they are added, is fp32
    "fp32, autocast": ({}, True),
    "bf16, fp32 adapters, autocast": ({"dtype": torch.bfloat16}, True),
    "bf16": ({"dtype": torch.bfloat16, "autocast_adapter_dtype": False}, False),
}


# Of every part alone: fp32 that becomes bf16 between parts, and bf16.
TRIED = {
    **dict.fromkeys(BOOLEAN_PARTS, ("fp32, autocast", "bf16")),
    "checkpoint full": ("fp32, autocast",),
    "checkpoint selective": ("bf16",),
    "all": tuple(DTYPES),
    "all, checkpointed": ("bf16, fp32 adapters, autocast",),
}


@pytest.mark.parametrize(("name", "dtypes"), [
    pytest.param(name, dtypes, marks=() if dtypes in TRIED[name] else pytest.mark.exhaustive)
    for name in FUSIONS
    for dtypes in DTYPES
])  # fmt: skip
def test_parts_are_right(name, dtypes, device):
    options, autocast = DTYPES[dtypes]
    fused, plain, done = pair(device, FUSIONS[name], **options)
    assert not done.left
    assert_right(fused, plain, autocast, length=9)


def test_the_report_names_every_module_and_each_runs_once(device):
    """What the benchmark takes for proof that a part ran."""
    fused, _, done = pair(device, Fusion(**ALL))
    blocks = [f"{LAYERS}.{index}" for index in range(2)]
    assert done.fused == {
        "mlp": [f"{block}.mlp" for block in blocks],
        "attention": [f"{block}.self_attn" for block in blocks]
        + [f"{block}.self_attn.o_proj" for block in blocks],
        "rope": [f"{block}.self_attn" for block in blocks],
        "rms_norm": [
            *(f"{b}.{n}" for b in blocks for n in ("input_layernorm", "post_attention_layernorm")),
            "base_model.model.model.norm",
        ],
        "cross_entropy": ["base_model.model"],
    }
    seen = functions_of(fused(**batch(fused)).loss)
    expected = {
        "mlp": ("LoRA_MLP",),
        "attention": ("LoRA_QKV", "LoRA_W"),
        "rope": ("RoPE",),
        "rms_norm": ("RMSNorm", "AddRMSNorm"),
        "cross_entropy": ("LinearCrossEntropy",),
    }
    for part, names in expected.items():
        ran = sum(seen.get(name, 0) for name in names)
        # nothing before the first norm is trained, so it has no backward
        assert ran == len(done.fused[part]) - (part == "rms_norm"), part


def test_parts_join_those_that_are_there(device):
    fused, plain, _ = pair(device, Fusion(rope=True))
    done = fuse(fused, Fusion(attention=True))
    assert done.fused.keys() == {"rope", "attention"}
    assert_same(fused, plain)


def test_a_part_that_fuses_nothing_changes_nothing(device):
    model = peft_model(device, use_dora=True, target_modules=["q_proj", "k_proj", "v_proj"])
    with pytest.raises(ValueError, match=r"attention=True fuses no module.*it uses DoRA"):
        fuse(model, Fusion(mlp=True, attention=True))
    assert report(model).fused == {}


def test_padding_and_hidden_states_are_as_without_fusion(device):
    mask = torch.ones(2, SHORT, dtype=torch.int64, device=device)
    mask[1, 4:] = 0
    fused, plain, _ = pair(device, Fusion(**ALL))
    assert_right(fused, plain, length=SHORT, attention_mask=mask)
    ours, theirs, truth = (
        model(**batch(model), output_hidden_states=True).hidden_states
        for model in (fused, plain, copy.deepcopy(plain).double())
    )
    for got, want, exact in zip(ours, theirs, truth, strict=True):
        assert_within_budget("hidden states", got, want, exact)


@pytest.mark.parametrize(
    ("norms", "fusion", "family"),
    [
        (("layernorm.weight",), Fusion(rms_norm=True), "Qwen2"),
        (("q_norm.weight", "k_norm.weight"), Fusion(rms_norm=True), "Qwen3"),
        (("q_norm.weight", "k_norm.weight"), Fusion(**ALL), "Qwen3"),
    ],
    ids=("a layer's", "of q and k, alone", "of q and k, with all"),
)
def test_frozen_norms_get_no_gradients_and_trained_ones_their_own(norms, fusion, family, device):
    fused, plain, _ = pair(device, fusion, family=family)
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            if name.endswith(norms):
                parameter.requires_grad_(True)
    assert_right(fused, plain, length=9)
    assert {name for name in step(fused) if "norm" in name} == {
        name for name, _ in fused.named_parameters() if name.endswith(norms)
    }


def test_base_models_without_adapters_fuse_their_norms_and_loss(device):
    plain = base_model(device).train()
    fused = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(fused, Fusion(rope=True, rms_norm=True, cross_entropy=True))
    assert_right(fused, plain, length=9)
