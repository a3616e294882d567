"""Whole layers with a mixture of experts, beside plain PEFT. `test_families.py` has each family in
fp32, and `contract.py` the experts alone."""

import copy
from dataclasses import replace

import pytest
import torch
from cases.families_case import EXPERTS, FAMILIES, TOP_2, everywhere
from cases.fused_case import (
    ALL,
    assert_close,
    assert_right,
    assert_same,
    assert_trains_alike,
    beside,
    step,
)
from cases.layer_case import LAYER
from cases.reference import relative_error

from fused_lora import Fusion, fuse, quantize_experts, report
from fused_lora.forwards import layer_reading

PACKED = [[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2
ATTENTION_ALONE = {"target_modules": ["q_proj", "o_proj"], "target_parameters": None}
CONVOLUTIONS_ALONE = {"target_modules": ["in_proj", "out_proj"], "target_parameters": None}
EXPERTS_ALONE = {"target_modules": [], **EXPERTS}
# ten tokens choose of sixteen experts: some get none
MANY = TOP_2 | {"num_experts": 16, "num_local_experts": 16}


ONE_OF_MANY = MANY | {"moe_num_experts": 16, "num_experts_per_tok": 1, "moe_k": 1}


def model(device, name, dtype=torch.bfloat16, config=None, **lora):
    family = FAMILIES[name]
    family = replace(family, config=family.config | (config or {}))
    return family.peft_model(device, dtype, **lora).train()


@pytest.mark.thinned
@pytest.mark.parametrize("policy", ["", "full", "offload"])
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("Qwen3-MoE", {}),  # the router has an adapter as well
        ("Qwen3-MoE", ATTENTION_ALONE),
        ("Qwen3-MoE", ATTENTION_ALONE | {"use_dora": True}),
        ("Qwen2-MoE", {}),
        ("ERNIE 4.5, mixture", EXPERTS_ALONE),
        ("gpt-oss", {}),
        ("Qwen3.5-MoE", {}),
        ("LFM2-MoE", {}),
        ("LFM2-MoE", CONVOLUTIONS_ALONE | {"use_dora": True}),
    ],
)
def test_a_mixture_is_within_the_error_budget(name, lora, policy, device):
    plain = model(device, name, **lora)
    fused, _, done = beside(plain, Fusion(layer=True, checkpoint=policy))
    assert done.counts["layer"] == "2 of 2 layers"
    assert assert_right(fused, plain, length=9)
    assert "LoRA_Experts" in step(fused, length=9).functions


@pytest.mark.parametrize("policy", ["", "full", "offload"])
def test_documents_of_a_mixture_are_kept_apart(policy, device):
    plain = model(device, "Qwen3-MoE")
    fused, _, _ = beside(plain, Fusion(**ALL, layer=True, checkpoint=policy))
    places = torch.tensor(PACKED, device=device)
    assert assert_right(fused, plain, length=9, position_ids=places)
    apart = step(fused, length=9, position_ids=places)["loss"]
    assert relative_error(step(fused, length=9)["loss"], apart) > 1e-3


def train_routers(one):
    for name, parameter in one.named_parameters():
        if name.endswith((".gate.weight", ".router.weight", ".router.bias")):
            parameter.requires_grad_()


def send_all_to_one(one):
    """Have the correction of a router's choice prefer the third expert, for whatever token."""
    gate = one.get_base_model().model.layers[1].mlp.gate
    gate.moe_statics.e_score_correction_bias.data[0, 2] = 1e3


@pytest.mark.parametrize(
    ("name", "config", "change", "length"),
    [
        ("Mixtral", MANY, train_routers, 5),
        ("ERNIE 4.5, mixture", ONE_OF_MANY, send_all_to_one, 5),
        ("Qwen3-MoE", MANY, train_routers, 2),
        ("ERNIE 4.5, mixture", {"moe_num_shared_experts": 0}, train_routers, 5),
    ],
    ids=["some get no token", "one gets all", "two tokens a row", "none shared"],
)
def test_tokens_of_experts(name, config, change, length, device):
    plain = model(device, name, torch.float32, config, **EXPERTS, target_modules=["q_proj"])
    change(plain)
    fused, _, _ = beside(plain, LAYER)
    functions = assert_same(fused, plain, length, 2e-4)
    assert functions["DecoderLayer"] == 2 and "LoRA_Experts" in functions


def test_a_trained_mixture_takes_the_steps_that_plain_peft_takes(device):
    plain = model(device, "Qwen2-MoE", torch.float32, MANY)
    fused, _, _ = beside(plain, LAYER)
    assert assert_trains_alike(fused, plain)["LoRA_Experts"] == 2


@pytest.mark.parametrize("policy", ["", "full"])
@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss"])
def test_experts_in_4_bits_run_in_whole_layers(name, policy, device):
    """As they do in parts, though both layers' weights lie in the same memory."""
    if name == "gpt-oss" and device == "cuda":
        pytest.skip("attention with sinks runs fused in 16 bits alone there")
    parts = model(device, name, torch.float32)
    quantize_experts(parts)
    whole = copy.deepcopy(parts)
    fuse(parts, Fusion(mlp=True)), fuse(whole, Fusion(layer=True, checkpoint=policy))
    got, want = (step(one, length=5) for one in (whole, parts))
    assert got.functions == {"DecoderLayer": 2, "LoRA_Experts": 2}
    assert want.functions == {"LoRA_Experts": 2}
    assert_close(got, want, 2e-4)


@pytest.mark.parametrize("name", ["Qwen2-MoE", "Qwen3-MoE"])  # without an adapter on the router
def test_a_steady_call_reads_nothing_anew(name, device, monkeypatch):
    fused, _, _ = beside(model(device, name), LAYER)
    seen, read = [], layer_reading.read_running

    def counted(layer):
        seen.append(layer)
        return read(layer)

    monkeypatch.setattr(layer_reading, "read_running", counted)
    first, again, last = (step(fused, length=5) for _ in range(3))
    assert len(seen) == 2
    assert all(torch.equal(first[one], again[one]) for one in first)
    assert all(torch.equal(first[one], last[one]) for one in first)


def hook(module):
    module.register_forward_hook(lambda *_: None)


REASONS = {  # the module that is changed, and how
    "mlp: it has hooks": ("mlp", hook),
    "mlp: experts: it has hooks": ("mlp.experts", lambda one: hook(one.get_base_layer())),
    "mlp: shared_expert: it has hooks": ("mlp.shared_expert", hook),
    "mlp: shared_expert: up_proj: it has hooks": ("mlp.shared_expert.up_proj", hook),
    "post_attention_layernorm: its weight is trained": (
        "post_attention_layernorm", lambda norm: norm.requires_grad_()
    ),
    "mlp: experts: its base weight is trained": (
        "mlp.experts", lambda one: one.get_base_layer().gate_up_proj.requires_grad_()
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*stepped aside")
@pytest.mark.parametrize("reason", REASONS)
def test_a_mixture_that_its_class_has_to_run_says_why(reason, device):
    where, change = REASONS[reason]
    plain = model(device, "Qwen2-MoE", torch.float32)
    fused, _, _ = beside(plain, LAYER)
    for one in (fused, plain):
        change(one.get_submodule(everywhere(where)[0]))
    (left,) = report(fused).left.items()
    assert left[0] == everywhere("mlp")[0].removesuffix(".mlp") and left[1].startswith(reason)
    functions = assert_same(fused, plain, 5, 2e-4)
    assert functions["DecoderLayer"] == 2 and functions["LoRA_Experts"] == 1


def test_experts_in_another_dtype_than_attention_are_left_to_their_class(device):
    plain = model(device, "Qwen3-MoE", torch.float32)
    for layer in plain.get_base_model().model.layers:
        layer.mlp.experts.to(torch.bfloat16)
    (reason,) = set(beside(plain, LAYER)[2].left.values())
    assert reason == "mlp: its projections compute in torch.bfloat16 and torch.float32"


def test_experts_of_layers_in_fp8_are_said_to_be_in_16_bits(device):
    plain = model(device, "Qwen3-MoE", config={"hidden_size": 64, "head_dim": 32})
    done = beside(plain, Fusion(layer=True, fp8=True))[2]
    reason = "they do not run in FP8, but in 16 bits"
    assert done.left == dict.fromkeys(everywhere("mlp.experts"), reason)
    assert done.counts["layer"] == "2 of 2 layers in FP8"


def test_noise_in_a_router_is_left_to_its_class(device):
    plain = model(device, "Mixtral", config={"router_jitter_noise": 0.1})
    _, _, done = beside(plain, LAYER)
    reason = "mlp: its router_jitter_noise is 0.1: load the model with router_jitter_noise=0.0"
    assert set(done.left.values()) == {reason}
    assert not beside(plain.eval(), LAYER)[2].left
