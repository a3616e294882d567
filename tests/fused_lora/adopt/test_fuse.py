"""`fuse` and its report. Every part alone and all of them together match vanilla PEFT, and
`fuse(model)` does whatever is right for the model."""

import copy
import sys
import warnings

import pytest
import torch
from cases import layer_case
from cases.fused_case import (
    ALL,
    BOOLEAN_PARTS,
    FUSIONS,
    SHORT,
    assert_right,
    assert_same,
    batch,
    beside,
    functions_of,
    pair,
)
from cases.peft_models import (
    DECODER,
    LAYERS,
    MLP_NAMES,
    MLP_ON,
    adapt,
    base_model,
    logits,
    peft_model,
)
from cases.reference import assert_near
from torch import nn

from fused_lora import Fusion, FusionReport, fuse, report, unfuse
from fused_lora.adopt.report import ABLE_NOW, NO_ADAPTERS
from fused_lora.adopt.switches import SWITCHES

# The model's options, and whether it runs under autocast.
DTYPES = {
    "fp32": ({}, False),
    # the Trainer's bf16=True on a model loaded in fp32: projections return bf16, and the residual
    # that they are added to is fp32
    "fp32, autocast": ({}, True),
    "bf16, fp32 adapters, autocast": ({"dtype": torch.bfloat16}, True),
    "bf16, fp32 adapters": ({"dtype": torch.bfloat16}, False),
    "bf16": ({"dtype": torch.bfloat16, "autocast_adapter_dtype": False}, False),
}

# By default we test each part alone in bf16, and in fp32 that becomes bf16 between parts.
TRIED = {
    **dict.fromkeys(BOOLEAN_PARTS, ("fp32, autocast", "bf16")),
    "mlp": ("bf16, fp32 adapters", "bf16"),
    "checkpoint full": ("fp32, autocast",),
    "checkpoint selective": ("bf16",),
    "all": ("fp32, autocast", "bf16, fp32 adapters, autocast", "bf16"),
    "all, checkpointed": (),
}


@pytest.mark.slow("checkpoint selective-bf16", "cross_entropy-bf16", "all-bf16")
@pytest.mark.parametrize(("name", "dtypes"), [
    pytest.param(name, dtypes, marks=() if dtypes in TRIED[name] else pytest.mark.exhaustive)
    for name in FUSIONS
    for dtypes in DTYPES
])  # fmt: skip
def test_parts_are_right(name, dtypes, device):
    options, autocast = DTYPES[dtypes]
    fused, plain, done = pair(device, FUSIONS[name], **options)
    assert not done.left
    # fewer tokens would be faster, but eager's loss is then exact by chance in one of these cases
    assert_right(fused, plain, autocast, length=17 if name == "mlp" else 9)


# --- what it reports ------------------------------------------------------------------------------


def test_fusing_is_reported_and_fusing_again_changes_nothing_and_unfuse_restores(calls, device):
    model = peft_model(device)
    want = logits(model)
    assert report(model) == FusionReport({}, {}) and str(report(model)) == "nothing is fused"
    done = fuse(model, MLP_ON)
    assert done == report(model) == FusionReport({"mlp": MLP_NAMES}, {})
    assert str(done) == "mlp: 6 of 6 projections fused"
    got = logits(model)
    assert len(calls) == 2
    assert fuse(model, MLP_ON) == done
    assert torch.equal(logits(model), got)
    calls.clear()
    assert unfuse(model) == [DECODER, *MLP_NAMES]
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(logits(model), want) and not calls
    assert unfuse(model) == [] and report(model) == FusionReport({}, {})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: fuse(model, Fusion()), "asks for nothing; set at least one of mlp"),
        (lambda model: fuse(None), r"^fuse needs a model, a torch\.nn\.Module, got NoneType$"),
        (lambda model: report("model"), "^report needs a model, .* got str$"),
        (lambda model: unfuse(None), "^unfuse needs a model, .* got NoneType$"),
        (lambda model: fuse(model, {"mlp": True}), "as a Fusion, got dict: pass fused_lora.F"),
        *(
            (lambda model, asked=asked: fuse(model, Fusion(**asked)), message)
            for asked, message in (
                ({"mlp": "False"}, "^Fusion needs mlp=True or False, got 'False'$"),
                ({"checkpoint": True}, "^Fusion needs checkpoint as one of .*True$"),
                ({"checkpoint": "most"}, "'most' is unknown; give one of none, full, offload, sel"),
                ({"checkpoint": "selective"}, "selective needs checkpoint_gib"),
                ({"checkpoint": "selective", "checkpoint_gib": float("nan")},
                 "selective needs checkpoint_gib, .* a number of GiB; got nan$"),
                ({"checkpoint": "full", "checkpoint_gib": 3.0}, "is for selective, not for full"),
                ({"checkpoint_gib": 3.0}, "is for selective, not for checkpoint=''$"),
                ({"checkpoint": "full", "host_gib": 3.0}, "host_gib is for offload, not for full$"),
                ({"host_gib": 3.0}, "host_gib is for offload, not for checkpoint=''$"),
                ({"checkpoint": "offload", "host_gib": -1},
                 "host_gib, .* that offload may pin, should be a number of GiB; got -1$"),
                ({"fp8": True, "mlp": True}, "fp8=True needs whole layers: ask for layer=True "),
                ({"fp8_lm_head": True}, "ask for cross_entropy=True as well"),
            )
        ),
    ],
)  # fmt: skip
def test_what_fuse_cannot_take_is_a_value_error(call, message, device):
    with pytest.raises(ValueError, match=message):
        call(peft_model(device))


@pytest.mark.parametrize("shape", [(0, SHORT), (2, 0)])
@pytest.mark.parametrize("part", ["cross_entropy", "attention", "layer"])
def test_a_batch_of_no_tokens_is_a_value_error(part, shape, device):
    fused, plain, _ = layer_case.pair(device, Fusion(**{part: True}))
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    with pytest.raises((RuntimeError, IndexError)):
        plain(input_ids=tokens, labels=tokens)
    with pytest.raises(ValueError, match=r"a batch with tokens, got input_ids .*: skip empty"):
        fused(input_ids=tokens, labels=tokens)


def test_each_module_of_the_report_runs_once(device):
    """The benchmark takes this as proof that a part ran. (test_families.py says which modules.)"""
    fused, _, done = pair(device, Fusion(**ALL))
    seen = functions_of(fused(**batch(fused)).loss)
    assert all(done.fused[part] for part in BOOLEAN_PARTS)
    for part, names in done.fused.items():
        evidence = SWITCHES[part].evidence
        ran = sum(count * seen.get(name, 0) for name, count in evidence.functions.items())
        assert ran == len(names) - evidence.without_backward, part


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
        assert_near(got, want, 2e-5)


def test_base_models_without_adapters_fuse_their_norms_and_loss(device):
    plain = base_model(device).train()
    fused = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(fused, Fusion(rope=True, rms_norm=True, cross_entropy=True))
    assert_same(fused, plain)


def test_a_model_that_was_fused_before_it_had_adapters_says_so_until_it_is_fused_again(device):
    base, early = base_model(device), ABLE_NOW
    with pytest.raises(ValueError, match=r"no module: the model has no adapters: .* then fuse$"):
        fuse(base, MLP_ON)
    with pytest.warns(UserWarning, match=r"attention, mlp left out: .* peft\.get_peft_model first"):
        found = fuse(base, Fusion(**ALL), strict=False)
    assert {*found.fused} >= {"rms_norm", "rope"} and "the model has no adapters" in str(found)
    assert report(base).left == dict.fromkeys(report(base).left, NO_ADAPTERS)
    model = adapt(base, device)
    left = report(model).left
    assert left.keys() >= {*MLP_NAMES, f"{LAYERS}.0.self_attn"} and {*left.values()} == {early}
    assert f"left to PEFT: {MLP_NAMES[0]} and 5 others like it: {early}" in str(report(model))
    assert not fuse(copy.deepcopy(model), Fusion(**ALL)).left
    unfuse(model)
    assert report(model) == FusionReport({}, {})


# --- whatever is right, never an error, and a report in few lines ---------------------------------

WHOLE = {"layer": 2, "rms_norm": 1, "cross_entropy": 1}
BEST = {  # options of the model: what runs fused, and what the report says of the rest
    "all seven": ({}, WHOLE, ""),
    "dropout": ({"lora_dropout": 0.5}, WHOLE, ""),
    "DoRA": ({"use_dora": True}, WHOLE, ""),
    "DoRA with dropout": (
        {"use_dora": True, "lora_dropout": 0.5}, WHOLE, ""
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "wanted", "said"), BEST.values(), ids=BEST)
def test_what_is_right_for_a_model(options, wanted, said, device):
    fused, plain, found = beside(layer_case.peft_model(device, **options))
    assert {part: len(names) for part, names in found.fused.items() if names} == wanted
    assert said in str(found).splitlines() or not (said or found.left)
    if "lora_dropout" in options:
        fused.eval(), plain.eval()
    assert_same(fused, plain)


def test_a_model_of_another_kind_is_left_alone_with_the_reasons(device):
    model = nn.Sequential(nn.Linear(2, 2))
    assert str(fuse(model)).startswith("nothing is fused\nleft to PEFT: mlp: it has no MLP with")
    assert "forward" not in vars(model) and str(report(model)) == str(fuse(model))
    other = layer_case.peft_model(device, family="Cohere")
    found = fuse(other)
    assert "attention: 2 of 8 projections fused" in str(found).splitlines()  # its o
    assert "CohereAttention is not an attention class" in str(found)
    assert report(other) == found


def test_without_room_for_a_layer_twice_its_parts_run(device, monkeypatch):
    model = layer_case.peft_model(device)
    monkeypatch.setattr(sys.modules[fuse.__module__], "_has_room", lambda layer: False)
    assert "layer" not in fuse(model).fused


def test_of_an_asked_for_fusion_what_fuses_nothing_is_left_where_that_is_no_error(device):
    model = layer_case.peft_model(device, use_dora=True)
    with pytest.raises(ValueError, match="mlp=True fuses no module"):
        fuse(model, Fusion(mlp=True, rope=True))
    assert report(model).fused == {}
    found = fuse(model, Fusion(mlp=True, rope=True), strict=False)
    assert found.fused["mlp"] == [] and found.fused["rope"] and "it uses DoRA" in str(found)
    assert report(model) == found and report(model).counts["mlp"] == "0 of 6 projections"
