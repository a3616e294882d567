"""Every reason for one projection to stay with PEFT: what to do to it, and what the report says."""

from cases.peft_models import set_weights
from peft import LoraConfig
from torch import nn


class Wrapped(nn.Parameter):
    """Stands for a quantised weight, which is a Parameter of a class of its own."""


def readapt(projection, **lora):
    """Give a projection's adapter other settings."""
    config = LoraConfig(**lora)
    projection.update_layer("default", r=8, lora_alpha=12, config=config)
    set_weights(projection, projection.weight.device, only="lora_")


def add_active(projection):
    projection.update_layer("second", r=4, lora_alpha=4, config=LoraConfig())
    set_weights(projection, projection.weight.device, only=".second.")
    projection.set_adapter(["default", "second"])


def replace_weight(projection):
    base = projection.base_layer
    base.weight = Wrapped(base.weight.detach(), requires_grad=False)


def subclass_base(projection):
    projection.base_layer.__class__ = type("Linear4bit", (nn.Linear,), {})


def replace_forward(module):
    original = module.forward
    module.forward = lambda *arguments, **options: original(*arguments, **options)


def hook(*_):
    return None


REASONS = {
    "dropout of all": (lambda p: readapt(p, lora_dropout=1.0), "lora_dropout is 1.0"),
    "dropout in place": (
        lambda p: p.lora_dropout.update({"default": nn.Dropout(0.25, inplace=True)}),
        "its lora_dropout is inplace",
    ),
    "another dropout": (
        lambda p: p.lora_dropout.update({"default": nn.AlphaDropout(0.25)}),
        "its lora_dropout is AlphaDropout, not torch.nn.Dropout",
    ),
    "DoRA": (lambda p: readapt(p, use_dora=True), "it uses DoRA: leave use_dora out"),
    "a LoRA variant": (
        lambda p: readapt(p, init_lora_weights="mica"),
        "it uses a variant of LoRA (MiCALinearVariant)",
    ),
    "two active adapters": (add_active, "2 adapters are active: default, second"),
    "merged": (lambda p: p.merge(), "adapters are merged"),
    "disabled": (lambda p: p.enable_adapters(False), "adapters are disabled"),
    "trainable base": (
        lambda p: p.base_layer.weight.requires_grad_(), "its base weight is trained: freeze it"
    ),
    "wrapped weight": (replace_weight, "its base weight is quantised or wrapped (Wrapped)"),
    "other base layer": (subclass_base, "its base layer is Linear4bit"),
    "forward": (replace_forward, "its forward has been replaced"),
    "forward of A": (
        lambda p: replace_forward(p.lora_A["default"]), "its forward has been replaced"
    ),
}  # fmt: skip

HOOKED = {
    "projection": lambda p: p,
    "base": lambda p: p.base_layer,
    "A": lambda p: p.lora_A["default"],
    "B": lambda p: p.lora_B["default"],
    "dropout": lambda p: p.lora_dropout["default"],
}
HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre")
for where, find in HOOKED.items():
    for kind in HOOKS:
        REASONS[f"{kind} hook on {where}"] = (
            lambda p, find=find, kind=kind: getattr(find(p), f"register_{kind}_hook")(hook),
            "it has hooks",
        )
