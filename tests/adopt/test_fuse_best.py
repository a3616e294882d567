"""`fuse(model)`: whatever is right for the model, never an error, and a report in few lines."""

import copy

import pytest
from fused_case import assert_same
from layer_case import peft_model
from torch import nn

from fused_lora import Fusion, fuse, report

LAYERS = "base_model.model.model.layers"
WHOLE = {"layer": 2, "rms_norm": 1, "cross_entropy": 1}
CASES = {  # options of the model: what runs fused, and what the report says of the rest
    "all seven": ({}, WHOLE, ""),
    "dropout": ({"lora_dropout": 0.5}, WHOLE, ""),
    "DoRA": (
        {"use_dora": True},
        {"rope": 2, "rms_norm": 5, "cross_entropy": 1},
        f"left to PEFT: {LAYERS}.0.mlp as mlp and 1 others like it: gate_proj: it uses DoRA: "
        "leave use_dora out",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "wanted", "said"), CASES.values(), ids=CASES)
def test_what_is_right_for_a_model(options, wanted, said, device):
    plain = peft_model(device, **options)
    fused = copy.deepcopy(plain)
    found = fuse(fused)
    assert {part: len(names) for part, names in found.fused.items() if names} == wanted
    assert said in str(found).splitlines() or not (said or found.left)
    if "lora_dropout" in options:
        fused.eval(), plain.eval()
    assert_same(fused, plain)


def test_a_model_of_another_kind_is_left_alone_with_the_reasons(device):
    model = nn.Sequential(nn.Linear(2, 2))
    assert str(fuse(model)).startswith("nothing is fused\nleft to PEFT: mlp: it has no MLP with")
    assert [*vars(model)] == [*vars(nn.Sequential(nn.Linear(2, 2)))]
    other = peft_model(device, family="Cohere")
    found = fuse(other)
    assert "attention: 2 of 8 projections fused" in str(found).splitlines()  # its o
    assert "CohereAttention is not an attention class" in str(found)
    assert report(other).fused == {"attention": report(other).fused["attention"]}


def test_without_room_for_a_layer_twice_its_parts_run(device, monkeypatch):
    model = peft_model(device)
    monkeypatch.setitem(fuse.__globals__, "_has_room", lambda layer: False)
    assert "layer" not in fuse(model).fused


def test_of_an_asked_for_fusion_what_fuses_nothing_is_left_where_that_is_no_error():
    model = peft_model("cpu", use_dora=True)
    with pytest.raises(ValueError, match="mlp=True fuses no module"):
        fuse(model, Fusion(mlp=True, rope=True))
    assert report(model).fused == {}
    found = fuse(model, Fusion(mlp=True, rope=True), strict=False)
    assert {*found.fused} == {"rope"} and "it uses DoRA" in str(found)
