"""Projections on bordered weights in tiny models, against plain PEFT."""

import pytest
import torch
from layer_case import assert_model_right, layer_of, pair, peft_model
from peft_models import FAMILIES, LAYERS, MLP, ids
from reference import relative_error

from fused_lora import Fusion, fuse, layer_sites, report, unfuse
from fused_lora.adopt import layer as module

BORDERED = Fusion(bordered=True)
NAMES = [
    *(f"{LAYERS}.{index}.self_attn" for index in range(2)),
    *(f"{LAYERS}.{index}.self_attn.o_proj" for index in range(2)),
    *(f"{LAYERS}.{index}.mlp" for index in range(2)),
]


@pytest.fixture
def calls(monkeypatch):
    """How many projections every call of BorderedLinear has."""
    seen = []
    apply = module.BorderedLinear.apply
    monkeypatch.setattr(
        module.BorderedLinear,
        "apply",
        lambda *inputs: seen.append(len(inputs[-1].out_features)) or apply(*inputs),
    )
    return seen


def logits(model):
    with torch.no_grad():
        return model(input_ids=ids(next(model.parameters()).device)).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("options", "autocast"),
    [
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.bfloat16, "autocast_adapter_dtype": False}, False),
        ({"dtype": torch.bfloat16}, True),
    ],
    ids=("fp32", "bf16", "fp32 adapters, autocast"),
)
def test_projections_are_right_in_every_family(family, options, autocast, calls, device):
    fused, plain, done = pair(device, BORDERED, family=family, **options)
    assert done.fused == {"bordered": NAMES} and not done.left
    assert_model_right(fused, plain, autocast=autocast)
    assert calls == 3 * 2 * [3, 1, 2, 1]  # q, k and v; o; gate and up; down


@pytest.mark.parametrize("policy", [{}, {"checkpoint": "full"}], ids=("kept", "checkpointed"))
def test_they_join_other_parts(policy, calls, device, monkeypatch):
    turned = []
    rope = layer_sites.rope
    monkeypatch.setattr(layer_sites, "rope", lambda *inputs: turned.append(1) or rope(*inputs))
    fusion = Fusion(bordered=True, rope=True, rms_norm=True, cross_entropy=True, **policy)
    fused, plain, done = pair(device, fusion, dtype=torch.bfloat16)
    assert done.fused["bordered"] == NAMES and len(done.fused["rope"]) == 2
    assert_model_right(fused, plain, autocast=True)
    assert calls[:4] == [3, 1, 2, 1]
    # with a fused loss the last one of two layers runs once
    assert len(turned) == 3 * (3 if policy else 2)


def test_a_window_and_padding_are_as_without_fusion(calls, device):
    mask = torch.ones_like(ids(device))
    mask[1, 9:] = 0
    for implementation in ("sdpa", "eager"):
        config = {"sliding_window": 4, "attn_implementation": implementation}
        fused, plain, _ = pair(device, BORDERED, family="Mistral", config=config)
        assert_model_right(fused, plain, attention_mask=mask)
    assert calls


def test_generation_is_as_without_fusion(calls, device):
    fused, plain, _ = pair(device, BORDERED)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    got, want = (m.eval().generate(input_ids=ids(device)[:, :5], **options) for m in (fused, plain))
    assert torch.equal(got, want) and calls


def test_what_is_not_adapted_is_left_with_the_reason(calls, device):
    fused, plain, done = pair(device, BORDERED, target_modules=[*MLP, "q_proj", "o_proj"])
    assert done.fused == {"bordered": NAMES[2:]}
    assert "k_proj: no LoRA adapter" in done.left[NAMES[0]] and list(done.left) == NAMES[:2]
    assert_model_right(fused, plain)
    assert calls[:3] == [1, 2, 1]


def test_disabled_adapters_and_hooks_are_left_to_peft(calls, device):
    fused, plain, _ = pair(device, BORDERED)
    with fused.disable_adapter(), plain.disable_adapter():
        left = report(fused).left
        assert left[NAMES[2]] == "adapters are disabled" and len(left) == 6
        assert torch.equal(logits(fused), logits(plain))
    layer_of(fused).mlp.act_fn.register_forward_hook(lambda *_: None)
    layer_of(fused).self_attn.v_proj.register_forward_hook(lambda *_: None)
    assert report(fused).left == {
        NAMES[0]: "v_proj: it has hooks, which a fused function would not call",
        NAMES[4]: "act_fn: it has hooks, which a fused function would not call",
    }
    assert relative_error(logits(fused), logits(plain)) < 1e-5
    assert calls == [1, 3, 1, 2, 1]


def test_mlp_and_attention_are_another_way_to_run_the_same(device):
    with pytest.raises(ValueError, match="bordered=True runs the projections that mlp=True and"):
        fuse(peft_model(device), Fusion(bordered=True, mlp=True))
    model = peft_model(device)
    fuse(model, Fusion(attention=True))
    with pytest.raises(ValueError, match="after unfuse if they are there"):
        fuse(model, BORDERED)


def test_layers_join_projections_and_unfuse_gives_all_back(calls, device):
    fused, plain, _ = pair(device, BORDERED)
    done = fuse(fused, Fusion(layer=True))
    assert done.fused == {"bordered": [], "layer": [f"{LAYERS}.{i}" for i in range(2)]}
    assert_model_right(fused, plain)
    assert not calls
    layer_of(fused).input_layernorm.register_forward_hook(lambda *_: None)
    assert report(fused).fused["bordered"] == NAMES[::2]
    assert_model_right(fused, plain)
    assert calls == 3 * [3, 1, 2, 1]
    unfuse(fused)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in fused.parameters())
    assert torch.equal(logits(fused), logits(plain))
