"""When a fused layer runs as its class has it, and why."""

import pytest
import torch
from fused_case import step
from layer_case import (
    EVERYTHING,
    LAYER,
    NAMES,
    assert_model_right,
    layer_of,
    logits,
    operands_of_calls,
    pair,
    peft_model,
)
from peft_models import ids
from torch import nn

from fused_lora import fuse, report


@pytest.fixture
def calls(monkeypatch):
    return operands_of_calls(monkeypatch)


def test_disabled_and_merged_adapters_are_left_to_peft(calls, device):
    fused, plain, _ = pair(device)
    with fused.disable_adapter(), plain.disable_adapter():
        assert report(fused).left == dict.fromkeys(NAMES, "q_proj: adapters are disabled")
        assert torch.equal(logits(fused), logits(plain))
    fused.merge_adapter(), plain.merge_adapter()
    assert "q_proj: adapters are merged" in report(fused).left[NAMES[0]]
    assert torch.allclose(logits(fused), logits(plain), atol=1e-5)
    assert not calls
    fused.unmerge_adapter(), plain.unmerge_adapter()
    assert torch.allclose(logits(fused), logits(plain), atol=1e-4)
    assert len(calls) == 2


def test_generation_with_a_cache_is_left_to_peft(calls, device):
    fused, plain, _ = pair(device)
    tokens = ids(device)[:, :5]
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    assert torch.equal(
        fused.eval().generate(input_ids=tokens, **options),
        plain.eval().generate(input_ids=tokens, **options),
    )
    assert not calls


def test_fp32_weights_under_autocast_run_as_the_other_fused_parts_with_a_warning(calls, device):
    fused, plain, _ = pair(device, EVERYTHING)
    with pytest.warns(UserWarning, match="ran as its class has it: "):
        assert_model_right(fused, plain, autocast=True)
    assert not calls


def test_a_step_with_a_cache_warns(calls, device):
    fused, plain, _ = pair(device)
    for model in (fused, plain):
        model.config.use_cache = True
    with pytest.warns(UserWarning, match="given past_key_values; in training, set .*use_cache"):
        got = step(fused)
    want = step(plain)
    assert not calls and all(torch.equal(got[name], want[name]) for name in want)


def hook(module):
    module.register_forward_hook(lambda *_: None)


def replace_forward(module):
    original = module.forward
    module.forward = lambda *inputs, **options: original(*inputs, **options)


class OtherLayer(type(layer_of(peft_model("cpu")))):
    pass


REASONS = {
    "adapter in double": (
        lambda layer: [
            getattr(layer.mlp.up_proj, name).double() for name in ("lora_A", "lora_B")
        ],
        "an adapter is torch.float64, should be",
    ),
    "unknown class": (
        lambda layer: setattr(layer, "__class__", OtherLayer), "OtherLayer is not a layer class"
    ),
    "forward of attention": (
        lambda layer: replace_forward(layer.self_attn), "self_attn: its forward has been replaced"
    ),
    "forward of the MLP": (
        lambda layer: replace_forward(layer.mlp), "mlp: its forward has been replaced"
    ),
    "hook on attention": (lambda layer: hook(layer.self_attn), "self_attn: it has hooks"),
    "hook on the MLP": (lambda layer: hook(layer.mlp), "mlp: it has hooks"),
    "hook on a norm": (
        lambda layer: hook(layer.input_layernorm), "input_layernorm: it has hooks"
    ),
    "hook on the activation": (lambda layer: hook(layer.mlp.act_fn), "mlp: act_fn: it has hooks"),
    "hook on A": (
        lambda layer: hook(layer.mlp.up_proj.lora_A["default"]), "up_proj: it has hooks"
    ),
    "hook on o_proj": (lambda layer: hook(layer.self_attn.o_proj), "o_proj: it has hooks"),
    "a trained norm": (
        lambda layer: layer.post_attention_layernorm.weight.requires_grad_(),
        "post_attention_layernorm: its weight is trainable",
    ),
    "attention dropout": (
        lambda layer: setattr(layer.self_attn, "attention_dropout", 0.1),
        "self_attn: attention_dropout is 0.1",
    ),
    "not causal": (
        lambda layer: setattr(layer.self_attn, "is_causal", False), "self_attn: it is not causal"
    ),
    "GELU": (
        lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()),
        "mlp: its activation is GELU, not SiLU",
    ),
    "trained base": (
        lambda layer: layer.mlp.down_proj.base_layer.weight.requires_grad_(),
        "down_proj: its base weight is trainable",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("fused_first", [True, False])
def test_a_layer_that_may_not_be_fused_runs_as_its_class_has_it(name, fused_first, calls, device):
    change, reason = REASONS[name]
    model = peft_model(device)
    layer = layer_of(model)
    if fused_first:
        fuse(model, LAYER)
        change(layer)
        done = report(model)
    else:
        change(layer)
        done = fuse(model, LAYER)
    assert done.fused == {"layer": NAMES[1:]}
    assert list(done.left) == NAMES[:1] and reason in done.left[NAMES[0]]
    logits(model)
    assert len(calls) == 1


NOTHING = {
    "Qwen3": ({"family": "Qwen3"}, "self_attn: it normalises q and k"),
    "eager attention": (
        {"config": {"attn_implementation": "eager"}}, "self_attn: its attention is eager, not sdpa"
    ),
    "dropout": ({"lora_dropout": 0.1}, "q_proj: lora_dropout is 0.1"),
    "DoRA": ({"use_dora": True}, "q_proj: it uses DoRA"),
    "Gemma": ({"family": "Gemma"}, "GemmaDecoderLayer is not a layer class"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_a_model_in_which_nothing_fuses_is_left_as_it_is(name, device):
    options, reason = NOTHING[name]
    model = peft_model(device, **options)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with pytest.raises(ValueError, match=f"layer=True fuses no module.*{reason}"):
        fuse(model, LAYER)
    assert not any("forward" in vars(module) for module in model.modules())
    assert weights == {p.untyped_storage().data_ptr() for p in model.parameters()}
