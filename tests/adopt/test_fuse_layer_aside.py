"""When a fused layer runs as its class has it, and why."""

import pytest
import torch
from fused_case import ALL, SHORT, assert_close, batch, step
from layer_case import (
    EVERYTHING,
    LAYER,
    NAMES,
    layer_of,
    operands_of_calls,
    pair,
    peft_model,
)
from projection_case import hook, replace_forward
from torch import nn

from fused_lora import Fusion, fuse, report


@pytest.fixture
def calls(monkeypatch):
    return operands_of_calls(monkeypatch)


def test_fp32_weights_under_autocast_run_as_the_other_fused_parts_with_a_warning(device):
    fused, plain, _ = pair(device, EVERYTHING)
    fuse(plain, Fusion(**ALL))
    with pytest.warns(UserWarning, match="ran as its class has it: "):
        got = step(fused, autocast=True, length=SHORT)
    want = step(plain, autocast=True, length=SHORT)
    assert got.functions == want.functions and "LoRA_MLP" in got.functions
    assert_close(got, want, 0.0)


def test_a_step_with_a_cache_warns(calls, device):
    fused, plain, _ = pair(device)
    for model in (fused, plain):
        model.config.use_cache = True
    with pytest.warns(UserWarning, match="given past_key_values; in training, set .*use_cache"):
        got = step(fused)
    want = step(plain)
    assert not calls and all(torch.equal(got[name], want[name]) for name in want)


class OtherLayer(type(layer_of(peft_model("cpu")))):
    pass


class OtherNorm(type(layer_of(peft_model("cpu", "Qwen3")).self_attn.q_norm)):
    pass


def add_hook(module):
    module.register_forward_hook(hook)


def double(projection):
    projection.lora_A.double(), projection.lora_B.double()


# Which module of a layer, what is done to it, and why the layer does not run as one after it.
REASONS = [
    ("", lambda m: setattr(m, "__class__", OtherLayer), "OtherLayer is not a layer class"),
    ("mlp.up_proj", double, "an adapter is torch.float64, should be"),
    ("self_attn", replace_forward, "self_attn: its forward has been replaced"),
    ("mlp", replace_forward, "mlp: its forward has been replaced"),
    ("self_attn", add_hook, "self_attn: it has hooks"),
    ("mlp", add_hook, "mlp: it has hooks"),
    ("input_layernorm", add_hook, "input_layernorm: it has hooks"),
    ("mlp.act_fn", add_hook, "mlp: act_fn: it has hooks"),
    ("self_attn.o_proj", add_hook, "o_proj: it has hooks"),
    (
        "post_attention_layernorm",
        lambda m: m.weight.requires_grad_(),
        "post_attention_layernorm: its weight is trained",
    ),
    (
        "self_attn",
        lambda m: setattr(m, "attention_dropout", 0.1),
        "self_attn: attention_dropout is 0.1",
    ),
    ("self_attn", lambda m: setattr(m, "is_causal", False), "self_attn: it is not causal"),
    ("mlp", lambda m: setattr(m, "act_fn", nn.GELU()), "mlp: its activation is GELU, not SiLU"),
    ("self_attn.k_norm", add_hook, "self_attn: k_norm: it has hooks"),
    ("self_attn.q_norm", replace_forward, "self_attn: q_norm: its forward has been replaced"),
    ("self_attn.q_norm", lambda m: setattr(m, "__class__", OtherNorm), "q_norm: OtherNorm is not"),
    (
        "self_attn.k_norm",
        lambda m: m.weight.requires_grad_(),
        "self_attn: k_norm: its weight is trained",
    ),
    ("self_attn.q_norm", lambda m: m.half(), "self_attn: a norm of heads is torch.float16"),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("where", "change", "reason"), REASONS, ids=[one[-1] for one in REASONS])
@pytest.mark.parametrize("fused_first", [True, False])
def test_a_layer_that_may_not_be_fused_runs_as_its_class_has_it(
    where, change, reason, fused_first, calls, device
):
    model = peft_model(device, "Qwen3" if where.endswith(("q_norm", "k_norm")) else "Qwen2")
    if fused_first:
        fuse(model, LAYER)
    change(layer_of(model).get_submodule(where))
    done = report(model) if fused_first else fuse(model, LAYER)
    assert done.fused == {"layer": NAMES[1:]}
    assert list(done.left) == NAMES[:1] and reason in done.left[NAMES[0]]
    model(**batch(model))
    assert len(calls) == 1


def test_a_model_in_which_nothing_fuses_is_left_as_it_is(device):
    model = peft_model(device, config={"attn_implementation": "eager"})
    reason = "self_attn: its attention is eager: call"
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with pytest.raises(ValueError, match=f"layer=True fuses no module.*{reason}"):
        fuse(model, LAYER)
    assert not any("forward" in vars(module) for module in model.modules())
    assert weights == {p.untyped_storage().data_ptr() for p in model.parameters()}
