"""Attention and RoPE, each alone and together, compute the right thing. They run as one function
where they can, otherwise separately. (Families: test_families.py. What stays with PEFT:
test_fuse_reasons.py.)"""

import copy
from collections import Counter

import pytest
import torch
from cases.fused_case import assert_right, assert_same, batch, functions_of, step
from cases.layer_case import pair
from cases.peft_models import ATTENTION, adapt, base_model, layers
from cases.reasons import hook
from cases.reference import assert_near
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fused_lora import Fusion, fuse, unfuse
from fused_lora.weights.borders import borders_of

BOTH = Fusion(attention=True, rope=True)
# Our functions in a layer.
ONE = Counter(LoRA_Attention=1)
QKV, OUT, ROPE = Counter(LoRA_QKV=1), Counter(LoRA_W=1), Counter(RoPE=1)
APART = QKV + OUT + ROPE


# The model's options, what we fuse, what we then do to every attention, and which of our functions
# a layer runs.
CASES = {
    "nothing": ({}, BOTH, None, ONE),
    "norms of heads": ({"family": "Qwen3"}, BOTH, None, ONE),
    "a hook on o": ({}, BOTH, lambda a: a.o_proj.register_forward_hook(hook), QKV + ROPE),
    "dropout, of which nothing is seen": (
        {}, BOTH, lambda a: setattr(a, "attention_dropout", 1e-9), APART
    ),
    "not causal": ({}, BOTH, lambda a: setattr(a, "is_causal", False), APART),
    "eager": (
        {}, BOTH, lambda a: setattr(a.config, "_attn_implementation", "eager"), APART
    ),
    "a hook on a norm of heads": (
        {"family": "Qwen3"}, BOTH, lambda a: a.k_norm.register_forward_hook(hook), APART
    ),
    "norms of heads that are trained": (
        {"family": "Qwen3"}, BOTH, lambda a: a.q_norm.weight.requires_grad_(), APART
    ),
    "o has no adapter": ({"target_modules": ATTENTION[:3]}, BOTH, None, ONE),
    "base biases that are trained": ({"bias": "all"}, BOTH, None, ONE),
    "attention alone": ({}, Fusion(attention=True), None, QKV + OUT),
    "rope alone": ({}, Fusion(rope=True), None, ROPE),
}  # fmt: skip


@pytest.mark.slow(
    "attention alone",
    "not causal",
    "norms of heads",
    "base biases that are trained",
    "dropout, of which nothing is seen",
)
@pytest.mark.parametrize("name", CASES)
def test_one_function_or_apart_and_right(name, device):
    options, fusion, change, functions = CASES[name]
    fused, plain, done = pair(device, fusion, **options)
    assert not done.left
    for layer in (*layers(fused), *layers(plain)) if change else ():
        change(layer.self_attn)
    assert assert_same(fused, plain) == functions + functions


def test_dropout_of_attention_is_left_out_in_eval_mode(device):
    fused, plain, _ = pair(device, BOTH)
    for layer in (*layers(fused), *layers(plain)):
        layer.self_attn.attention_dropout = 0.5
    got, want = (model.eval()(**batch(model)).logits for model in (fused, plain))
    assert_near(got, want, 1e-5)
    assert not got.equal(fused.train()(**batch(fused)).logits)


def test_another_attention_registered_as_sdpa_is_called(device, monkeypatch):
    calls = []

    def theirs(*inputs, **options):
        calls.append(1)
        return sdpa_attention_forward(*inputs, **options)

    fused, plain, _ = pair(device, BOTH)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", theirs)
    assert assert_same(fused, plain) == APART + APART
    assert len(calls) == 4  # two layers of two models


def bases(layer):
    return [getattr(layer.self_attn, name).base_layer for name in ATTENTION]


def test_weights_lie_in_two_buffers_until_a_layer_runs_whole_or_unfuse(device):
    fused, plain, _ = pair(device, BOTH)

    def memories(layer):
        return [base.weight.untyped_storage().data_ptr() for base in bases(layer)]

    assert assert_same(fused, plain) == ONE + ONE
    assert [len({*memories(layer)}) for layer in layers(fused)] == [2, 2]
    saved = fused.state_dict()
    assert all(saved[name].is_contiguous() for name in saved if ".self_attn." in name)
    fuse(fused, Fusion(layer=True))
    assert all(borders_of(layer.self_attn) is None for layer in layers(fused))
    assert assert_same(fused, plain) == Counter(DecoderLayer=2)
    whole = [memories(layer) for layer in layers(fused)]
    for layer in (*layers(fused), *layers(plain)):  # the layer steps aside, its attention runs
        layer.input_layernorm.register_forward_hook(hook)
    with pytest.warns(UserWarning, match="stepped aside"):
        assert assert_same(fused, plain) == APART + APART
    assert [memories(layer) for layer in layers(fused)] == whole
    unfuse(fused)
    assert all(base.weight.is_contiguous() for layer in layers(fused) for base in bases(layer))
    assert all(len({*memories(layer)}) == 4 for layer in layers(fused))


def test_of_attentions_with_the_same_weights_the_first_runs_as_one(device):
    base = base_model(device, "Llama", attn_implementation="sdpa")
    base.config.use_cache = False
    options = {"layer_replication": [[0, 2], [0, 1]], "target_modules": ATTENTION}
    plain = adapt(base, device, **options).train()
    fused = copy.deepcopy(plain)
    assert not fuse(fused, BOTH).left
    assert assert_same(fused, plain, most=1e-4) == ONE + ONE + APART


def test_autocast_over_weights_in_fp32_runs_apart(device):
    """A buffer is multiplied in its weights' dtype."""
    fused, plain, _ = pair(device, BOTH)
    assert step(fused, autocast=True).functions == APART + APART
    assert_right(fused, plain, autocast=True)
    assert assert_same(fused, plain) == ONE + ONE


def test_a_cache_is_kept(device):
    fused, plain, _ = pair(device, BOTH)
    got, want = (model(**batch(model), use_cache=True) for model in (fused, plain))
    assert functions_of(got.loss) == APART + APART
    caches = got.past_key_values.layers, want.past_key_values.layers
    for one, other in zip(*caches, strict=True):
        assert torch.allclose(one.keys, other.keys, atol=1e-5)
    more = batch(plain)["input_ids"][:, :1]
    logits = [
        model.eval()(input_ids=more, past_key_values=one.past_key_values).logits
        for model, one in ((fused, got), (plain, want))
    ]
    torch.testing.assert_close(*logits)
    assert [one.past_key_values.get_seq_length() for one in (got, want)] == [6, 6]
