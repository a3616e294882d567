"""Attention and RoPE, both fused: as one function where that may stand in for them, else apart."""

import warnings

import pytest
import torch
from fused_case import ALL, SHORT, assert_right, assert_same, batch, step
from layer_case import pair
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fused_lora import Fusion

BOTH = Fusion(attention=True, rope=True)
ONE = ["LoRA_Attention"]
APART = ["LoRA_QKV", "LoRA_W"]


# --- one function ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fusion"),
    [("Qwen2", BOTH), ("Llama", Fusion(**ALL)), ("Mistral", Fusion(**ALL))],
    ids=("Qwen2, both", "Llama, all", "Mistral, all"),
)
def test_both_are_one_function_and_right(family, fusion, ran, device):
    fused, plain, _ = pair(device, fusion, family=family)
    assert_same(fused, plain)
    assert ran == ONE * 2


@pytest.mark.parametrize("autocast", [False, True])
def test_it_is_right_in_bf16(autocast, ran, device):
    fused, plain, _ = pair(device, BOTH, dtype=torch.bfloat16, autocast_adapter_dtype=autocast)
    assert_right(fused, plain, autocast, length=9)
    assert set(ran) == {*ONE}


def test_padding_is_right(ran, device):
    mask = torch.ones(2, SHORT, dtype=torch.int64, device=device)
    mask[1, 4:] = 0
    fused, plain, _ = pair(device, BOTH)
    assert_same(fused, plain, attention_mask=mask)
    assert ran == ONE * 2


@pytest.mark.parametrize(
    ("policy", "gib", "runs"),
    [("full", None, 3), ("offload", None, 3), ("selective", 200e3 / 2**30, 2)],
    ids=("full", "offload", "selective"),
)
def test_it_runs_again_where_a_layer_is_checkpointed(policy, gib, runs, ran, device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused, plain, _ = pair(device, Fusion(**ALL, checkpoint=policy, checkpoint_gib=gib))
    step(fused, length=SHORT)  # from which it knows what a layer holds
    ran.clear()
    assert_same(fused, plain)
    assert ran == ONE * runs


# --- apart ----------------------------------------------------------------------------------------


def attentions(model):
    return [module for name, module in model.named_modules() if name.endswith(".self_attn")]


def hook_o(model):
    for attention in attentions(model):
        attention.o_proj.register_forward_hook(lambda *_: None)


def drop_out(model):
    for attention in attentions(model):
        attention.attention_dropout = 1e-9  # of which nothing is seen


def attend_to_all(model):
    for attention in attentions(model):
        attention.is_causal = False


def attend_eagerly(model):
    attentions(model)[0].config._attn_implementation = "eager"


# Of each: options of the model, what is fused and what is done to it, and what a layer runs then.
CASES = {
    "a hook on o": ({}, BOTH, hook_o, ["LoRA_QKV"]),
    "dropout": ({}, BOTH, drop_out, APART),
    "not causal": ({}, BOTH, attend_to_all, APART),
    "eager": ({}, BOTH, attend_eagerly, APART),
    "norms of q and k": ({"family": "Qwen3"}, BOTH, None, APART),
    "o has no adapter": (
        {"target_modules": ["q_proj", "k_proj", "v_proj"]}, BOTH, None, ["LoRA_QKV"]
    ),
    "attention alone": ({}, Fusion(attention=True), None, APART),
    "rope alone": ({}, Fusion(rope=True), None, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_apart_and_right_where_the_one_function_may_not_stand_in(name, ran, device):
    options, fusion, change, functions = CASES[name]
    fused, plain, _ = pair(device, fusion, **options)
    for model in (fused, plain) if change else ():
        change(model)
    assert_same(fused, plain)
    assert ran == functions * 2


def test_another_attention_registered_as_sdpa_is_called(ran, device, monkeypatch):
    calls = []

    def theirs(*inputs, **options):
        calls.append(1)
        return sdpa_attention_forward(*inputs, **options)

    fused, plain, _ = pair(device, BOTH)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", theirs)
    assert_same(fused, plain)
    assert ran == APART * 2 and len(calls) == 4


def test_apart_and_right_while_torch_compile_traces(ran, device, monkeypatch):
    fused, plain, _ = pair(device, BOTH)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_same(fused, plain)
    assert ran == APART * 2


def test_a_cache_is_kept(ran, device):
    fused, plain, _ = pair(device, BOTH)
    with torch.no_grad():
        got, want = (m(**batch(m), use_cache=True).past_key_values for m in (fused, plain))
    assert ran == APART * 2
    for one, other in zip(got.layers, want.layers, strict=True):
        assert torch.allclose(one.keys, other.keys, atol=1e-5)
