"""Each reason for one MLP to stay with PEFT, before fuse() and after."""

import warnings
from itertools import cycle

import pytest
import torch
import transformers
from peft_models import MLP, MLP_NAMES, MLP_ON, layers, logits, peft_model
from projection_case import HOOKS, hook, replace_forward
from projection_case import REASONS as OF_A_PROJECTION
from reference import random
from torch import nn

from fused_lora import FusionReport, fuse, report, unfuse

# --- each reason for one MLP to stay with PEFT ----------------------------------------------------


class OtherMLP(transformers.models.qwen2.modeling_qwen2.Qwen2MLP):
    pass


def set_bias(base):
    base.bias = nn.Parameter(torch.ones_like(base.weight[:, 0]), requires_grad=False)


REASONS = {
    "not adapted": (
        lambda mlp: setattr(mlp, "up_proj", mlp.up_proj.base_layer), "up_proj: no LoRA adapter"
    ),
    "base bias": (
        lambda mlp: set_bias(mlp.gate_proj.base_layer), "gate_proj: its base layer has a bias"
    ),
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
        outputs.append(forward(x))
    assert torch.equal(*outputs) and len(calls) == 1


def test_a_forward_set_by_somebody_else_is_kept_and_reported(calls, device):
    model = peft_model(device)
    mlp = layers(model)[0].mlp
    replace_forward(mlp)
    forward = mlp.forward
    done = fuse(model, MLP_ON)
    assert done.left == {MLP_NAMES[0]: "its forward has been replaced by something else"}
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
