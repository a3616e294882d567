"""Every fused part alone, and all together, against plain PEFT: the loss and every gradient."""

import copy
import warnings

import layer_case
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
)
from peft_models import base_model
from reference import relative_error

from fused_lora import Fusion, fuse

# Of each: options of the model, and whether it runs under autocast.
DTYPES = {
    "fp32": ({}, False),
    # what the Trainer's bf16=True makes of a model that was loaded in fp32: projections give bf16,
    # and the residual, to which they are added, is fp32
    "fp32, autocast": ({}, True),
    "bf16, fp32 adapters, autocast": ({"dtype": torch.bfloat16}, True),
    "bf16, fp32 adapters": ({"dtype": torch.bfloat16}, False),
    "bf16": ({"dtype": torch.bfloat16, "autocast_adapter_dtype": False}, False),
}

# Of every part alone: fp32 that becomes bf16 between parts, and bf16.
TRIED = {
    **dict.fromkeys(BOOLEAN_PARTS, ("fp32, autocast", "bf16")),
    "mlp": ("bf16, fp32 adapters", "bf16"),
    "checkpoint full": ("fp32, autocast",),
    "checkpoint selective": ("bf16",),
    "all": ("fp32, autocast", "bf16, fp32 adapters, autocast", "bf16"),
    "all, checkpointed": (),
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
    # of fewer tokens, which take less time, eager's loss is exact by chance in one of these cases
    assert_right(fused, plain, autocast, length=17 if name == "mlp" else 9)


def test_each_module_of_the_report_runs_once(device):
    """What the benchmark takes for proof that a part ran. (Which they are: test_families.py.)"""
    fused, _, done = pair(device, Fusion(**ALL))
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


@pytest.mark.parametrize(
    ("fusion", "function"),
    [(Fusion(**ALL), "LoRA_Attention"), (Fusion(layer=True), "DecoderLayer")],
    ids=("parts", "layer"),
)
def test_padding_and_hidden_states_are_as_without_fusion(fusion, function, device):
    mask = torch.ones(2, SHORT, dtype=torch.int64, device=device)
    mask[1, 4:] = 0
    fused, plain, _ = layer_case.pair(device, fusion)
    assert assert_same(fused, plain, attention_mask=mask)[function] == 2
    ours, theirs = (
        model(**batch(model), output_hidden_states=True).hidden_states for model in (fused, plain)
    )
    for got, want in zip(ours, theirs, strict=True):
        assert relative_error(got, want) < 2e-5


def test_base_models_without_adapters_fuse_their_norms_and_loss(device):
    plain = base_model(device).train()
    fused = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(fused, Fusion(rope=True, rms_norm=True, cross_entropy=True))
    assert_same(fused, plain)
