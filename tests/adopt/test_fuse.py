"""fuse() in tiny models of four families: right where it fuses, and what it reports."""

import copy

import peft
import pytest
import torch
import transformers
from peft import get_peft_model
from peft_models import (
    ATTENTION,
    FAMILIES,
    MLP,
    MLP_NAMES,
    MLP_ON,
    adapt,
    assert_equal,
    assert_right,
    base_model,
    ids,
    layers,
    logits,
    pair,
    peft_model,
    step,
)
from reference import assert_within_budget
from torch import nn

from fused_lora import Fusion, FusionReport, fuse, report, unfuse

# --- right where it fuses -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "fp32_adapters", "autocast"),
    [
        (torch.float32, True, False),
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, True),
        (torch.bfloat16, True, False),
    ],
    ids=("fp32", "bf16", "fp32 adapters, autocast", "fp32 adapters"),
)
def test_fused_model_is_within_the_error_budget(
    family, dtype, fp32_adapters, autocast, calls, device
):
    options = {"family": family, "dtype": dtype, "autocast_adapter_dtype": fp32_adapters}
    fused, plain = pair(device, **options)
    adapter = layers(plain)[0].mlp.up_proj.lora_B["default"].weight
    assert adapter.dtype == (torch.float32 if fp32_adapters else dtype)
    assert_right(fused, plain, autocast)
    assert len(calls) == 2  # one for each layer of the fused model, none of the others


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"rank_pattern": {"gate_proj": 4, "layers.1.mlp.down_proj": 12}},
        {"alpha_pattern": {"up_proj": 32, "layers.0.mlp.gate_proj": 3}},
        {"target_modules": [*MLP]},
    ],
    ids=("rsLoRA", "rank_pattern", "alpha_pattern", "MLP alone"),
)
def test_other_ranks_scales_and_targets_are_within_the_error_budget(lora, calls, device):
    fused, plain = pair(device, **lora)
    assert_right(fused, plain)
    assert len(calls) == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_are_bitwise_equal(use_reentrant, calls, device):
    model, _ = pair(device)
    want = step(model.train())
    model.enable_input_require_grads()  # a reentrant checkpoint sees no other gradient
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    calls.clear()
    assert_equal(step(model), want)
    assert len(calls) == 4  # each MLP once more


def test_accumulated_steps_are_within_the_error_budget(device):
    fused, plain = pair(device, dtype=torch.bfloat16)
    double = copy.deepcopy(plain).double()
    gradients = []
    for model in (fused, plain, double):
        for row in ids(device):
            model(input_ids=row[None], labels=row[None]).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for name, truth in gradients[2].items():
        assert_within_budget(name, gradients[0][name], gradients[1][name], truth)


def test_frozen_adapters_get_no_gradient_and_the_others_the_right_one(device):
    fused, plain = pair(device)
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            if ".lora_A." in name or "layers.0.mlp" in name:
                parameter.requires_grad_(False)
    assert_right(fused, plain)


# --- what it reports, and what it leaves alone ----------------------------------------------------


def test_report_names_every_fused_module(device):
    model = peft_model(device)
    assert report(model) == FusionReport({}, {})
    assert str(report(model)) == "nothing is fused"
    done = fuse(model, MLP_ON)
    assert done == report(model) == FusionReport({"mlp": MLP_NAMES}, {})
    assert str(done) == "mlp: 2 modules fused"


def test_fusing_again_changes_nothing_and_unfuse_restores(calls, device):
    model = peft_model(device)
    want = logits(model)
    first = fuse(model, MLP_ON)
    got = logits(model)
    assert len(calls) == 2
    assert fuse(model, MLP_ON) == first
    assert torch.equal(logits(model), got)
    calls.clear()
    assert unfuse(model) == MLP_NAMES
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(logits(model), want) and not calls
    assert unfuse(model) == [] and report(model) == FusionReport({}, {})


def test_only_instances_are_patched(calls, device):
    cls = transformers.models.qwen2.modeling_qwen2.Qwen2MLP
    forward, names = cls.forward, set(vars(cls))
    fused, other = peft_model(device), peft_model(device)
    fuse(fused, MLP_ON)
    assert cls.forward is forward and set(vars(cls)) == names
    assert not any("forward" in vars(module) for module in other.modules())
    logits(other)
    assert not calls


def test_a_fusion_of_nothing_is_a_value_error(device):
    with pytest.raises(ValueError, match="asks for nothing; set at least one of mlp"):
        fuse(peft_model(device), Fusion())


NOTHING_TO_FUSE = {
    "dropout": (lambda d: peft_model(d, lora_dropout=0.1), "gate_proj: lora_dropout is 0.1"),
    "DoRA": (lambda d: peft_model(d, use_dora=True), "gate_proj: it uses DoRA"),
    "lora_bias": (lambda d: peft_model(d, lora_bias=True), "its adapter has a bias"),
    "attention alone": (
        lambda d: peft_model(d, target_modules=[*ATTENTION]),
        r"gate_proj: no LoRA adapter of PEFT's plain kind \(torch.nn.modules.linear.Linear\)",
    ),
    "no down_proj": (
        lambda d: peft_model(d, target_modules=["gate_proj", "up_proj"]),
        "down_proj: no LoRA adapter",
    ),
    "not PEFT": (base_model, "gate_proj: no LoRA adapter"),
    "no MLP": (
        lambda d: nn.Sequential(nn.Linear(2, 2)),
        "it has no MLP with gate_proj, up_proj and down_proj",
    ),
    "GeGLU": (
        lambda d: adapt(base_model(d, hidden_act="gelu_pytorch_tanh"), d),
        "its activation is GELUTanh, not SiLU",
    ),
    "Gemma": (
        lambda d: peft_model(d, "Gemma"),
        "GemmaMLP is not an MLP class that is known to compute SwiGLU",
    ),
    "other tuner": (
        lambda d: get_peft_model(
            base_model(d), peft.IA3Config(target_modules=[*MLP], feedforward_modules=["down_proj"])
        ),
        r"no LoRA adapter of PEFT's plain kind \(peft.tuners.ia3",
    ),
}


@pytest.mark.parametrize("name", NOTHING_TO_FUSE)
def test_a_model_in_which_nothing_fuses_is_a_value_error_with_the_reason(name, calls, device):
    make, reason = NOTHING_TO_FUSE[name]
    model = make(device)
    wanted = f"fuse: mlp=True fuses no module.*{reason}.*; leave mlp out"
    with pytest.raises(ValueError, match=wanted):
        fuse(model, MLP_ON)
    assert not any("forward" in vars(module) for module in model.modules())
    if name != "no MLP":
        logits(model)
        assert not calls
