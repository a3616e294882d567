"""The switch `mlp` in tiny models: what it reports, and each reason for a module to stay with PEFT.
(That it is right: test_fuse_parts.py.)"""

import warnings
from itertools import cycle

import peft
import pytest
import torch
from peft import get_peft_model
from peft_models import MLP, MLP_NAMES, MLP_ON, base_model, layers, logits, peft_model
from projection_case import HOOKS, hook, replace_forward
from projection_case import REASONS as OF_A_PROJECTION
from reference import random
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from fused_lora import Fusion, FusionReport, fuse, report, unfuse

# --- what it reports, and what it leaves alone ----------------------------------------------------


def test_fusing_is_reported_and_fusing_again_changes_nothing_and_unfuse_restores(calls, device):
    model = peft_model(device)
    want = logits(model)
    assert report(model) == FusionReport({}, {}) and str(report(model)) == "nothing is fused"
    done = fuse(model, MLP_ON)
    assert done == report(model) == FusionReport({"mlp": MLP_NAMES}, {})
    assert str(done) == "mlp: 2 of 2 MLPs fused"
    got = logits(model)
    assert len(calls) == 2
    assert fuse(model, MLP_ON) == done
    assert torch.equal(logits(model), got)
    calls.clear()
    assert unfuse(model) == MLP_NAMES
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(logits(model), want) and not calls
    assert unfuse(model) == [] and report(model) == FusionReport({}, {})


def test_a_fusion_of_nothing_is_a_value_error(device):
    with pytest.raises(ValueError, match="asks for nothing; set at least one of mlp"):
        fuse(peft_model(device), Fusion())


def test_a_model_in_which_nothing_fuses_is_a_value_error_with_the_reason(device):
    config = peft.IA3Config(target_modules=[*MLP], feedforward_modules=["down_proj"])
    model = get_peft_model(base_model(device), config)
    reason = "its adapter is peft.tuners.ia3.layer.Linear: take LoraConfig's plain LoRA"
    wanted = f"fuse: mlp=True fuses no module.*{reason}.*; leave mlp out"
    with pytest.raises(ValueError, match=wanted):
        fuse(model, MLP_ON)
    assert not any("forward" in vars(module) for module in model.modules())


# --- each reason for one MLP to stay with PEFT ----------------------------------------------------


class OtherMLP(Qwen2MLP):
    pass


REASONS = {
    "GeGLU": (lambda mlp: setattr(mlp, "act_fn", nn.GELU()), "its activation is GELU, not SiLU"),
    "unknown class": (
        lambda mlp: setattr(mlp, "__class__", OtherMLP), "OtherMLP is not an MLP class"
    ),
    "forward of the activation": (
        lambda mlp: replace_forward(mlp.act_fn), "act_fn: its forward has been replaced"
    ),
}  # fmt: skip
for kind in HOOKS:
    REASONS[f"{kind} hook on activation"] = (
        lambda mlp, kind=kind: getattr(mlp.act_fn, f"register_{kind}_hook")(hook),
        "act_fn: it has hooks",
    )
for (name, (change, reason)), part in zip(OF_A_PROJECTION.items(), cycle(MLP), strict=False):
    REASONS[f"{name} of {part}"] = (
        lambda mlp, change=change, part=part: change(mlp.get_submodule(part)),
        f"{part}: {reason}",
    )


@pytest.mark.thinned
@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("fused_first", [True, False])
def test_an_mlp_that_may_not_be_fused_runs_as_peft_has_it(name, fused_first, calls, device):
    change, reason = REASONS[name]
    model = peft_model(device)
    mlp, other = (layer.mlp for layer in layers(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, that lora_bias cannot be merged
        if fused_first:
            fuse(model, MLP_ON)
            change(mlp)
            done = report(model)
        else:
            change(mlp)
            done = fuse(model, MLP_ON)
    assert done.fused == {"mlp": MLP_NAMES[1:]}
    assert list(done.left) == MLP_NAMES[:1] and reason in done.left[MLP_NAMES[0]]
    assert f"left to PEFT: {MLP_NAMES[0]}: {done.left[MLP_NAMES[0]]}" in str(done)
    logits(model)
    assert len(calls) == 1 and calls[0] is other.gate_proj.base_layer.weight
    x = random(2, 3, 52, device=device)
    outputs = []
    for forward in (mlp, lambda x: type(mlp).forward(mlp, x)):
        torch.manual_seed(0)
        outputs.append(forward(x.clone()))  # which dropout in place changes
    assert torch.equal(*outputs) and len(calls) == 1


def test_a_forward_set_by_somebody_else_is_kept_and_reported(device):
    model = peft_model(device)
    mlp = layers(model)[0].mlp
    replace_forward(mlp)
    forward = mlp.forward
    done = fuse(model, MLP_ON)
    assert done.left == {
        MLP_NAMES[0]: f"its forward has been replaced by {replace_forward.__module__}: undo that"
    }
    assert mlp.forward is forward and unfuse(model) == MLP_NAMES[1:] and mlp.forward is forward


def test_an_mlp_that_becomes_fit_is_reported_until_fuse_is_called_again(calls, device):
    model = peft_model(device)
    projection = layers(model)[0].mlp.up_proj
    projection.base_layer.weight.requires_grad_(True)
    fuse(model, MLP_ON)
    projection.base_layer.weight.requires_grad_(False)
    assert report(model).left[MLP_NAMES[0]].startswith("not asked for")
    logits(model)
    assert len(calls) == 1
    assert fuse(model, MLP_ON) == FusionReport({"mlp": MLP_NAMES}, {})
    logits(model)
    assert len(calls) == 3
