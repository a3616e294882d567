"""Each reason for one MLP to stay with PEFT, before fuse() and after."""

import warnings

import pytest
import torch
import transformers
from peft import LoraConfig
from peft_models import MLP_NAMES, MLP_ON, layers, logits, peft_model, set_weights
from reference import random
from torch import nn

from fused_lora import FusionReport, fuse, report, unfuse

# --- each reason for one MLP to stay with PEFT ----------------------------------------------------


class Wrapped(nn.Parameter):
    """Stands for a quantised weight, which is a Parameter of a class of its own."""


class OtherMLP(transformers.models.qwen2.modeling_qwen2.Qwen2MLP):
    pass


def readapt(projection, **lora):
    """Give a projection's adapter other settings."""
    config = LoraConfig(**lora)
    projection.update_layer("default", r=8, lora_alpha=12, config=config)
    set_weights(projection, projection.weight.device, only="lora_")


def add_active(projection):
    projection.update_layer("second", r=4, lora_alpha=4, config=LoraConfig())
    projection.set_adapter(["default", "second"])


def replace_weight(base):
    base.weight = Wrapped(base.weight.detach(), requires_grad=False)


def set_bias(base):
    base.bias = nn.Parameter(torch.ones_like(base.weight[:, 0]), requires_grad=False)


def subclass_base(projection):
    projection.base_layer.__class__ = type("Linear4bit", (nn.Linear,), {})


def replace_forward(module):
    original = module.forward
    module.forward = lambda *arguments, **options: original(*arguments, **options)


def hook(*_):
    return None


REASONS = {
    "dropout": (
        lambda mlp: readapt(mlp.down_proj, lora_dropout=0.25), "down_proj: lora_dropout is 0.25"
    ),
    "DoRA": (lambda mlp: readapt(mlp.up_proj, use_dora=True), "up_proj: it uses DoRA"),
    "a LoRA variant": (
        lambda mlp: readapt(mlp.up_proj, init_lora_weights="mica"),
        "up_proj: it uses a variant of LoRA (MiCALinearVariant)",
    ),
    "lora_bias": (
        lambda mlp: readapt(mlp.up_proj, lora_bias=True), "up_proj: its adapter has a bias"
    ),
    "two active adapters": (
        lambda mlp: add_active(mlp.gate_proj), "gate_proj: 2 adapters are active: default, second"
    ),
    "no such adapter": (
        lambda mlp: mlp.gate_proj.set_adapter("other"),
        "gate_proj: it has no adapter named other",
    ),
    "merged": (lambda mlp: mlp.down_proj.merge(), "down_proj: adapters are merged"),
    "disabled": (
        lambda mlp: mlp.down_proj.enable_adapters(False), "down_proj: adapters are disabled"
    ),
    "not adapted": (
        lambda mlp: setattr(mlp, "up_proj", mlp.up_proj.base_layer), "up_proj: no LoRA adapter"
    ),
    "base bias": (
        lambda mlp: set_bias(mlp.gate_proj.base_layer), "gate_proj: its base layer has a bias"
    ),
    "trainable base": (
        lambda mlp: mlp.gate_proj.base_layer.weight.requires_grad_(),
        "gate_proj: its base weight is trainable",
    ),
    "wrapped weight": (
        lambda mlp: replace_weight(mlp.up_proj.base_layer),
        "up_proj: its base weight is quantised or wrapped (Wrapped)",
    ),
    "other base layer": (
        lambda mlp: subclass_base(mlp.up_proj), "up_proj: its base layer is Linear4bit"
    ),
    "GeGLU": (lambda mlp: setattr(mlp, "act_fn", nn.GELU()), "its activation is GELU, not SiLU"),
    "unknown class": (
        lambda mlp: setattr(mlp, "__class__", OtherMLP), "OtherMLP is not an MLP class"
    ),
    "forward of a projection": (
        lambda mlp: replace_forward(mlp.up_proj), "up_proj: its forward has been replaced"
    ),
    "forward of A": (
        lambda mlp: replace_forward(mlp.up_proj.lora_A["default"]),
        "up_proj: its forward has been replaced",
    ),
    "forward of the activation": (
        lambda mlp: replace_forward(mlp.act_fn), "act_fn: its forward has been replaced"
    ),
}  # fmt: skip

HOOKED = {
    "projection": (lambda mlp: mlp.down_proj, "down_proj"),
    "base": (lambda mlp: mlp.down_proj.base_layer, "down_proj"),
    "A": (lambda mlp: mlp.down_proj.lora_A["default"], "down_proj"),
    "B": (lambda mlp: mlp.down_proj.lora_B["default"], "down_proj"),
    "dropout": (lambda mlp: mlp.down_proj.lora_dropout["default"], "down_proj"),
    "activation": (lambda mlp: mlp.act_fn, "act_fn"),
}
for where, (find, part) in HOOKED.items():
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        REASONS[f"{kind} hook on {where}"] = (
            lambda mlp, find=find, kind=kind: getattr(find(mlp), f"register_{kind}_hook")(hook),
            f"{part}: it has hooks",
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
