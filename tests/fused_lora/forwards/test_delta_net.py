"""Gated delta nets (Qwen3.5) where `test_families.py` does not look: what stays with PEFT, padding,
checkpointing, autocast, and whose recurrence runs. In whole layers short convolutions (LFM2) as
well; `test_mixer_layer.py` tests these layers one at a time."""

import copy
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from cases.families_case import FAMILIES
from cases.fused_case import ALL, assert_close, values_of
from cases.peft_models import ids
from cases.reasons import readapt
from cases.reference import assert_as_one_within_budget, over_draws, relative_error

from fused_lora import Fusion, fuse, report, unfuse
from fused_lora.foreign import delta_rule

LAYER = "base_model.model.model.layers.0"
NET = f"{LAYER}.linear_attn"
# in the layer with the net
FUSED = {"LoRA_QKV": 1, "CausalConv": 1, "LoRA_W": 1, "GatedRMSNorm": 1}
PARTS = Fusion(attention=True, rms_norm=True)
WHOLE = Fusion(**ALL, layer=True)
BOTH = "Qwen3.5", "LFM2"
EACH = pytest.mark.parametrize("family", BOTH)


def pair(
    device, change=lambda model: None, fusion=PARTS, family="Qwen3.5", is_last=False, **options
):
    """is_last: the layer with the mixer follows the one with attention."""
    family = FAMILIES[family]
    if is_last:
        types = {"layer_types": family.config["layer_types"][::-1]}
        family = replace(family, config=family.config | types)
    plain = family.peft_model(device, **options).train()
    change(plain)
    fused = copy.deepcopy(plain)
    return fused, plain, fuse(fused, fusion)


def step(model, **inputs):
    tokens = ids(next(model.parameters()).device)[:, :6]
    return values_of(model, model(input_ids=tokens, labels=tokens, **inputs).loss)


def functions_in_net(functions):
    """Leave out the functions of an attention that does not run as one: its q, k and v, and its
    o."""
    apart = "LoRA_Attention" not in functions
    return {
        name: functions.get(name, 0) - (apart and name in ("LoRA_QKV", "LoRA_W")) for name in FUSED
    }


def net_of(model):
    return model.get_submodule(NET)


LEFT = {
    "nothing": (lambda model: None, "", FUSED),
    "DoRA of z": (
        lambda model: readapt(net_of(model).in_proj_z, use_dora=True), "it uses DoRA",
        FUSED | {"LoRA_QKV": 0, "LoRA_W": 4},
    ),
    "DoRA of out_proj": (
        lambda model: readapt(net_of(model).out_proj, use_dora=True), "it uses DoRA",
        FUSED | {"LoRA_W": 0},
    ),
    "a hook on conv1d": (
        lambda model: add_hook_to_module(net_of(model).conv1d, ModelHook()),
        "conv1d: accelerate's ModelHook has replaced its forward",
        FUSED | {"LoRA_QKV": 0, "CausalConv": 0},
    ),
    "another activation": (
        lambda model: setattr(net_of(model), "activation", "gelu"),
        "conv1d: its activation is gelu, not silu", FUSED | {"LoRA_QKV": 0, "CausalConv": 0},
    ),
    "a trained convolution": (
        lambda model: net_of(model).conv1d.weight.requires_grad_(), "", FUSED,
    ),
    "another activation of the norm": (
        lambda model: setattr(net_of(model).norm, "activation", "gelu"),
        "its activation is gelu, not silu", FUSED | {"GatedRMSNorm": 0},
    ),
    "a trained norm": (
        lambda model: net_of(model).norm.weight.requires_grad_(), "", FUSED,
    ),
}  # fmt: skip


@pytest.mark.slow("DoRA of z", "another activation of the norm", "another activation")
@pytest.mark.parametrize("change", LEFT)
def test_what_stays_with_peft_is_named_and_the_rest_runs_fused(change, device):
    do, reason, functions = LEFT[change]
    fused, plain, done = pair(device, do)
    others = {name: why for name, why in done.left.items() if "it is transformers' own" not in why}
    assert all(reason in why for why in others.values()) and bool(others) == bool(reason)
    got, want = step(fused), step(plain)
    assert functions_in_net(got.functions) == functions
    assert_close(got, want, 2e-4)
    unfuse(fused)
    assert not step(fused).functions


def test_projections_without_an_adapter_run_with_the_others(device):
    targets = ["in_proj_qkv", "out_proj"]
    fused, plain, done = pair(device, target_modules=targets)
    assert done.counts["attention"] == "8 of 8 projections"
    assert_close(step(fused), step(plain), 2e-4)


@EACH
def test_a_last_layer_that_runs_whole_computes_labelled_tokens_alone(family, device):
    fused, plain, done = pair(device, fusion=WHOLE, family=family, is_last=True)
    assert done.counts["layer"] == "2 of 2 layers"
    tokens = ids(device)[:, :6]
    labels = tokens.clone()
    labels[:, [1, 4, 5]] = -100
    got, want = (
        values_of(model, model(input_ids=tokens, labels=labels).loss) for model in (fused, plain)
    )
    assert got.functions["BeforeMixer"] == 1
    assert_close(got, want, 2e-4)


def train(tensor):
    return lambda model: model.get_submodule(LAYER).get_parameter(tensor).requires_grad_()


def whole(mixer):
    return {"modules_to_save": [mixer], "target_modules": ["q_proj", "k_proj", "v_proj"]}


IN_PARTS = [  # the family, what is trained beside plain adapters, and why its layer runs in parts
    ("Qwen3.5", train("linear_attn.A_log"), {}, "linear_attn.A_log is trained: freeze it"),
    ("Qwen3.5", train("post_attention_layernorm.weight"), {},
     "post_attention_layernorm.weight is trained: freeze it"),
    ("LFM2", train("operator_norm.weight"), {}, "operator_norm.weight is trained: freeze it"),
    *((family, None, {"lora_bias": True}, "an adapter has a bias") for family in BOTH),
    ("Qwen3.5", None, whole("linear_attn"), "linear_attn: it is trained whole"),
    ("LFM2", None, whole("conv"), "conv: it is trained whole"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "change", "lora", "reason"), IN_PARTS)
def test_what_is_trained_beside_keeps_a_layer_from_running_whole(
    family, change, lora, reason, device
):
    fused, plain, done = pair(device, change or (lambda model: None), WHOLE, family, **lora)
    assert reason in done.left[LAYER]
    assert_close(step(fused), step(plain), 2e-4)


@pytest.mark.slow("full-Qwen3.5", "offload-LFM2")
@EACH
@pytest.mark.parametrize("checkpoint", ["full", "offload"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_with_dropout_a_checkpoint_recomputes_a_whole_layer_with_the_same_masks(
    use_dora, checkpoint, family, device
):
    found, lora = [], {"lora_dropout": 0.3, "use_dora": use_dora}
    for policy in ("none", checkpoint):
        fusion = Fusion(layer=True, cross_entropy=True, checkpoint=policy)
        fused, _, _ = pair(device, fusion=fusion, family=family, **lora)
        torch.manual_seed(0)
        found.append(step(fused))
    assert found[0].functions["BeforeMixer"] == 1
    assert_close(found[1], found[0], 1e-5)


@pytest.mark.slow("offload-Qwen3.5", "-LFM2", "offload-LFM2")
@EACH
@pytest.mark.parametrize("checkpoint", ["", "full", "offload"])
def test_padding_does_not_reach_the_mixer(checkpoint, family, device):
    """Nor in layers that run whole."""
    fusion = Fusion(**ALL, layer=True, checkpoint=checkpoint)
    fused, plain, done = pair(device, fusion=fusion, family=family)
    assert done.counts["layer"] == "2 of 2 layers"
    mask = torch.ones(2, 6, dtype=torch.int64, device=device)
    mask[0, :2] = 0
    got, want = (step(model, attention_mask=mask) for model in (fused, plain))
    assert_close(got, want, 2e-4)
    assert relative_error(want["loss"], step(plain)["loss"]) > 1e-3
    assert_close(step(fused, attention_mask=2 * mask), got, 1e-6)  # as a mask of booleans


def test_a_call_with_a_cache_runs_unfused_and_says_so(device):
    fused, plain, _ = pair(device)
    with pytest.warns(match="GatedDeltaNet stepped aside: it was given past_key_values"):
        got = step(fused, use_cache=True)
    assert not functions_in_net(got.functions)["LoRA_QKV"]
    assert_close(got, step(plain, use_cache=True), 2e-4)


@pytest.mark.filterwarnings("ignore:a fused Qwen3_5RMSNorm stepped aside")
def test_bf16_over_fp32_weights_is_within_the_error_budget(device):
    fused, plain, _ = pair(device, fusion=Fusion(**ALL))
    exact = copy.deepcopy(plain).double()

    def check():
        with torch.autocast(device, torch.bfloat16):
            got, eager = step(fused), step(plain)
        assert functions_in_net(got.functions) == FUSED
        assert_as_one_within_budget(got, eager, step(exact))

    over_draws(check)


# --- whose recurrence -----------------------------------------------------------------------------


def fla_s(*arguments, **options):
    """Stand in for flash-linear-attention's function, with the error that its backward raises."""
    raise RuntimeError("produces incorrect results")


@pytest.mark.parametrize("is_mended", [False, True])
def test_where_fla_refuses_this_triton_transformers_own_runs_and_the_report_says_so(
    is_mended, monkeypatch, device
):
    fused, plain, done = pair(device)
    left = {f"{NET}.recurrence": delta_rule.NOT_INSTALLED}
    assert done.left == left and report(fused).left == left
    want = step(plain)

    fla_s.__module__ = "fla.ops.gated_delta_rule.chunk"
    utils = ModuleType("fla.utils")
    utils.IS_NVIDIA_HOPPER, utils.TRITON_ABOVE_3_4_0 = True, True
    utils.TRITON_ABOVE_3_7_1 = is_mended
    monkeypatch.setitem(sys.modules, "fla.utils", utils)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    modeling = sys.modules[type(net_of(plain)).__module__]
    own = modeling.torch_chunk_gated_delta_rule.__wrapped__

    def rule(*arguments, **options):
        return implementation(*arguments, **options)

    implementation, rule.__wrapped__ = fla_s, own
    monkeypatch.setattr(modeling, delta_rule.NAME, rule)
    if is_mended:
        assert not report(fused).left
        with pytest.raises(RuntimeError, match="incorrect"):
            step(fused)
    else:
        assert report(fused).left == {f"{NET}.recurrence": delta_rule.REFUSES_TRITON}
        with pytest.warns(match="flash-linear-attention refuses Triton"):
            assert_close(step(fused), want, 2e-4)
