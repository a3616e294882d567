"""Attention and RoPE, alone and both: as one function where that may stand in for them, else apart;
under every setting of PEFT right where they run fused, and left where not."""

import copy
import warnings
from itertools import cycle

import pytest
import torch
from fused_case import ALL, SHORT, assert_close, assert_right, assert_same, batch, step
from layer_case import pair, peft_model
from pairwise import pairwise
from peft import LoraConfig
from peft_models import ATTENTION, LAYERS, MLP, layers, set_weights
from projection_case import REASONS
from reference import relative_error
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fused_lora import Fusion, fuse, report

BOTH = Fusion(attention=True, rope=True)
ONE = ["LoRA_Attention"]
APART = ["LoRA_QKV", "LoRA_W"]
NAMES = [f"{LAYERS}.{index}.self_attn" for index in range(2)]
# Of each: what is fused, and what a layer runs then.
FUSIONS = {"attention": (Fusion(attention=True), APART), "attention and rope": (BOTH, ONE)}


def logits(model):
    return model(**batch(model)).logits


def assert_runs(fused, plain, ran, functions, **inputs):
    """Right, and with these functions in a step."""
    ran.clear()
    assert_same(fused, plain, **inputs)
    assert ran == functions


# --- one function ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fusion"),
    [
        ("Qwen2", BOTH),
        ("Llama", Fusion(**ALL)),
        ("Mistral", Fusion(**ALL)),
        ("Qwen3", BOTH),
        ("Qwen3", Fusion(**ALL)),
    ],
    ids=("Qwen2, both", "Llama, all", "Mistral, all", "Qwen3, both", "Qwen3, all"),
)
def test_both_are_one_function_and_right(family, fusion, ran, device):
    fused, plain, done = pair(device, fusion, family=family)
    assert not done.left
    assert_runs(fused, plain, ran, ONE * 2)


@pytest.mark.parametrize(("autocast", "family"), [
    (False, "Qwen3"),
    (True, "Qwen2"),
    pytest.param(False, "Qwen2", marks=pytest.mark.exhaustive),
    pytest.param(True, "Qwen3", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_it_is_right_in_bf16(autocast, family, ran, device):
    options = {"dtype": torch.bfloat16, "autocast_adapter_dtype": autocast}
    fused, plain, _ = pair(device, BOTH, family=family, **options)
    assert_right(fused, plain, autocast, length=9)
    assert set(ran) == {*ONE}


def test_padding_is_right(ran, device):
    mask = torch.ones(2, SHORT, dtype=torch.int64, device=device)
    mask[1, 4:] = 0
    fused, plain, _ = pair(device, BOTH)
    assert_runs(fused, plain, ran, ONE * 2, attention_mask=mask)


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
    assert_runs(fused, plain, ran, ONE * runs)


# --- apart ----------------------------------------------------------------------------------------


def attentions(model):
    return [module for name, module in model.named_modules() if name.endswith(".self_attn")]


def hook_o(model):
    for attention in attentions(model):
        attention.o_proj.register_forward_hook(lambda *_: None)


def hook_k_norm(model):
    for attention in attentions(model):
        attention.k_norm.register_forward_hook(lambda *_: None)


def train_q_norm(model):
    for attention in attentions(model):
        attention.q_norm.weight.requires_grad_(True)


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
    "a hook on a norm of heads": ({"family": "Qwen3"}, BOTH, hook_k_norm, APART),
    "norms of heads that are trained": ({"family": "Qwen3"}, BOTH, train_q_norm, APART),
    "o has no adapter": (
        {"target_modules": ["q_proj", "k_proj", "v_proj"]}, BOTH, None, ["LoRA_Attention"]
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
    assert_runs(fused, plain, ran, functions * 2)


def test_another_attention_registered_as_sdpa_is_called(ran, device, monkeypatch):
    calls = []

    def theirs(*inputs, **options):
        calls.append(1)
        return sdpa_attention_forward(*inputs, **options)

    fused, plain, _ = pair(device, BOTH)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", theirs)
    assert_runs(fused, plain, ran, APART * 2)
    assert len(calls) == 4  # two layers of two models


def test_apart_and_right_while_torch_compile_traces(ran, device, monkeypatch):
    fused, plain, _ = pair(device, BOTH)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_runs(fused, plain, ran, APART * 2)


def test_a_cache_is_kept(ran, device):
    fused, plain, _ = pair(device, BOTH)
    with torch.no_grad():
        got, want = (m(**batch(m), use_cache=True).past_key_values for m in (fused, plain))
    assert ran == APART * 2
    for one, other in zip(got.layers, want.layers, strict=True):
        assert torch.allclose(one.keys, other.keys, atol=1e-5)


# --- settings of PEFT -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True, "lora_alpha": 4},
        {"rank_pattern": {"q_proj": 4, "k_proj": 16, "o_proj": 12}},
        {"alpha_pattern": {"q_proj": 16, "v_proj": 7, "layers.0.self_attn.o_proj": 3}},
        {"target_modules": [*ATTENTION]},
    ],
    ids=("rsLoRA", "rank_pattern", "alpha_pattern", "attention alone"),
)
@pytest.mark.parametrize(("fusion", "functions"), FUSIONS.values(), ids=FUSIONS)
def test_other_ranks_scales_and_targets_are_right(lora, fusion, functions, ran, device):
    fused, plain, done = pair(device, fusion, **lora)
    assert not done.left
    assert_runs(fused, plain, ran, functions * 2)


@pytest.mark.parametrize(("fusion", "functions"), FUSIONS.values(), ids=FUSIONS)
def test_adapters_that_are_switched_disabled_and_merged_are_right(fusion, functions, ran, device):
    fused, plain, _ = pair(device, fusion)
    for model in (fused, plain):
        config = LoraConfig(r=4, lora_alpha=4, target_modules=[*ATTENTION, *MLP])
        model.add_adapter("second", config)
        set_weights(model, device, only=".second.")
    before = fused(**batch(fused)).loss
    for model in (fused, plain):
        model.set_adapter("second")
    assert_runs(fused, plain, ran, functions * 2)
    with fused.disable_adapter(), plain.disable_adapter():
        ran.clear()
        got, want = logits(fused), logits(plain)
        assert relative_error(got, want) < 2e-5 and not ran
        assert "adapters are disabled" in report(fused).left[NAMES[0]]
    for model in (fused, plain):
        model.merge_adapter()
    ran.clear()
    assert relative_error(logits(fused), logits(plain)) < 2e-5 and not ran
    for model in (fused, plain):
        model.unmerge_adapter()
        model.set_adapter("default")
        model.delete_adapter("second")
    assert_runs(fused, plain, ran, functions * 2)
    assert relative_error(fused(**batch(fused)).loss, before) < 1e-5


# --- each reason for one projection to stay with PEFT ---------------------------------------------


def test_base_biases_that_are_trained_get_their_gradients(ran, device):
    """Of Qwen2's projections q, k and v have biases, and o has none."""
    fused, plain, done = pair(device, BOTH, bias="all")
    assert not done.left
    assert_runs(fused, plain, ran, ["LoRA_Attention"] * 2)
    assert layers(fused)[0].self_attn.k_proj.base_layer.bias.grad.any()


# The other kinds of hook are tried on an MLP, and so is dropout that nothing trains through.
ELSEWHERE = ("_pre", "backward", "dropout of all", "dropout in place")
CHANGES = [name for name in REASONS if not any(part in name for part in ELSEWHERE)]
CHOICES = {"fused_first": [True, False], "of_o": [False, True], "fusion": [*FUSIONS]}
PART_OF = dict(zip(CHANGES, cycle(ATTENTION[:3]), strict=False))


@pytest.mark.parametrize("case", pairwise(**CHOICES, name=CHANGES))
def test_a_projection_that_may_not_be_fused_runs_as_peft_has_it(case, ran, device):
    change, reason = REASONS[case["name"]]
    part = "o_proj" if case["of_o"] else PART_OF[case["name"]]
    fusion, functions = FUSIONS[case["fusion"]]
    plain = peft_model(device)
    fused = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, that lora_bias cannot be merged
        if case["fused_first"]:
            fuse(fused, fusion)
        for model in (plain, fused):
            change(layers(model)[0].self_attn.get_submodule(part))
        done = report(fused) if case["fused_first"] else fuse(fused, fusion)
    where = f"{NAMES[0]}.{part}"
    assert list(done.left) == [where] and reason in done.left[where]
    assert "attention: 7 of 8 projections fused" in str(done).splitlines()
    got, want = {}, {}
    for model, values in ((fused, got), (plain, want)):
        torch.manual_seed(0)  # for those that drop out
        values |= step(model, length=SHORT)
    assert ran == [*(APART[:1] if case["of_o"] else ["LoRA_W"] * 3), *functions]
    assert_close(got, want)
