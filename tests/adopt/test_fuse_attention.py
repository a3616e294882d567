"""Attention and RoPE, both fused: as one function where that may stand in for them, else apart."""

import copy
import warnings

import pytest
import torch
from fused_case import ALL, assert_right
from layer_case import assert_model_right, peft_model
from peft_models import ids
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fused_lora import Fusion, fuse

BOTH = Fusion(attention=True, rope=True)
BF16 = {"dtype": torch.bfloat16, "autocast_adapter_dtype": False}


def pair(device, fusion=BOTH, **options):
    plain = peft_model(device, **options)
    fused = copy.deepcopy(plain)
    fuse(fused, fusion)
    return fused, plain


def functions_of(model, ran, **inputs):
    """Those of one forward."""
    del ran[:]
    tokens = ids(next(model.parameters()).device)
    model(input_ids=tokens, labels=tokens, **inputs)
    return ran


@pytest.mark.thinned
@pytest.mark.parametrize("family", ["Qwen2", "Llama", "Mistral"])
@pytest.mark.parametrize("fusion", [BOTH, Fusion(**ALL), Fusion(**ALL, checkpoint="full")],
                         ids=("both", "all", "all, checkpointed"))  # fmt: skip
def test_both_are_one_function_and_right(fusion, family, ran, device):
    fused, plain = pair(device, fusion, family=family)
    assert functions_of(fused, ran) == ["LoRA_Attention"] * 2
    assert_model_right(fused, plain)


@pytest.mark.parametrize("autocast", [False, True])
def test_it_is_right_in_bf16(autocast, ran, device):
    fused, plain = pair(device, **(BF16 | {"autocast_adapter_dtype": autocast}))
    assert_right(fused, plain, autocast)
    assert set(ran) == {"LoRA_Attention"}


def test_padding_is_right(ran, device):
    mask = torch.ones_like(ids(device))
    mask[1, 9:] = 0
    fused, plain = pair(device)
    assert_model_right(fused, plain, attention_mask=mask)
    assert set(ran) == {"LoRA_Attention"}


def without(fused, plain, name):
    for model in (fused, plain):
        for attention in (m for n, m in model.named_modules() if n.endswith(".self_attn")):
            if name == "a hook on o":
                attention.o_proj.register_forward_hook(lambda *_: None)
            elif name == "dropout":
                attention.attention_dropout = 1e-9  # of which nothing is seen
            elif name == "not causal":
                attention.is_causal = False
            elif name == "eager":
                attention.config._attn_implementation = "eager"


PARTS = ["LoRA_QKV", "LoRA_W"] * 2


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("a hook on o", ["LoRA_QKV"] * 2),
        ("dropout", PARTS),
        ("not causal", PARTS),
        ("eager", PARTS),
    ],
)
def test_apart_and_right_where_the_one_function_may_not_stand_in(name, functions, ran, device):
    fused, plain = pair(device)
    without(fused, plain, name)
    assert functions_of(fused, ran) == functions
    assert_model_right(fused, plain)


def test_another_attention_registered_as_sdpa_is_called(ran, device, monkeypatch):
    calls = []

    def theirs(*inputs, **options):
        calls.append(1)
        return sdpa_attention_forward(*inputs, **options)

    fused, plain = pair(device)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", theirs)
    assert functions_of(fused, ran) == PARTS and len(calls) == 2
    assert_model_right(fused, plain)


def test_apart_and_right_while_torch_compile_traces(ran, device, monkeypatch):
    fused, plain = pair(device)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert functions_of(fused, ran) == PARTS
    assert_model_right(fused, plain)


def test_a_norm_of_q_and_k_stays_between_them(ran, device):
    fused, plain = pair(device, family="Qwen3")
    assert functions_of(fused, ran) == PARTS
    assert_model_right(fused, plain)


def test_a_cache_is_kept(ran, device):
    fused, plain = pair(device)
    with torch.no_grad():
        got, want = (m(input_ids=ids(device), use_cache=True) for m in (fused, plain))
    assert ran == PARTS
    for one, other in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
        assert torch.allclose(one.keys, other.keys, atol=1e-5)


@pytest.mark.parametrize(
    ("fusion", "functions"),
    [
        (Fusion(attention=True), PARTS),
        (Fusion(rope=True), []),
    ],
    ids=("attention", "rope"),
)
def test_one_of_them_alone_is_itself(fusion, functions, ran, device):
    fused, plain = pair(device, fusion)
    assert functions_of(fused, ran) == functions
    assert_model_right(fused, plain)


def test_without_an_adapter_on_o_it_runs_as_it_is(ran, device):
    targets = ["q_proj", "k_proj", "v_proj"]
    fused, plain = pair(device, target_modules=targets)
    assert functions_of(fused, ran) == ["LoRA_QKV"] * 2
    assert_model_right(fused, plain)


def test_disabled_adapters_are_left_out(ran, device):
    fused, plain = pair(device)
    with torch.no_grad(), fused.disable_adapter(), plain.disable_adapter():
        got, want = (m(input_ids=ids(device)).logits for m in (fused, plain))
    assert not ran and torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("policy", ["offload", "selective"])
def test_checkpointing_is_right(policy, ran, device):
    gib = 50e3 / 2**30 if policy == "selective" else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused, plain = pair(device, Fusion(**ALL, checkpoint=policy, checkpoint_gib=gib))
    assert_model_right(fused, plain)
    assert set(ran) == {"LoRA_Attention"}
