"""Every reason for a module to stay with PEFT: what causes it, and what we say.

`test_fuse_reasons.py` checks `fuse`, `report` and the forward.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import peft
import torch
from cases.codes_case import BLOCKS, ROWS, models
from cases.families_case import FAMILIES, UNKNOWN
from cases.fp8_case import FP8
from cases.layer_case import LAYER, layer_of, peft_model
from cases.peft_models import ATTENTION, MLP, MLP_ON, base_model, set_weights
from peft import LoraConfig
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fused_lora import Fusion


class Wrapped(nn.Parameter):
    """A stand-in for a quantised weight, which is a Parameter of a special class."""


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
    projection.base_layer.__class__ = type("Linear8bitLt", (nn.Linear,), {})


def replace_forward(module):
    original = module.forward
    module.forward = lambda *arguments, **options: original(*arguments, **options)


def hook(*_):
    return None


# --- one projection: what is done to it, and what is said -----------------------------------------

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
    "an Identity that drops": (
        lambda p: p.lora_dropout.update({"default": type("Drop", (nn.Identity,), {})()}),
        "its lora_dropout is Drop, not torch.nn.Dropout",
    ),
    "a LoRA variant": (
        lambda p: readapt(p, init_lora_weights="mica"),
        "it uses a variant of LoRA (MiCALinearVariant)",
    ),
    "two active adapters": (add_active, "2 adapters are active: default, second"),
    "merged": (lambda p: p.merge(), "adapters are merged"),
    "trainable base": (
        lambda p: p.base_layer.weight.requires_grad_(), "its base weight is trained: freeze it"
    ),
    "wrapped weight": (replace_weight, "its base weight is quantised or wrapped (Wrapped)"),
    "other base layer": (subclass_base, "its base layer is Linear8bitLt"),
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


# --- a module of a layer --------------------------------------------------------------------------


class OtherMLP(Qwen2MLP):
    pass


class OtherLayer(Qwen2DecoderLayer):
    pass


class OtherNorm(Qwen3RMSNorm):
    pass


def with_class(cls):
    return lambda module: setattr(module, "__class__", cls)


def add_hook(module):
    module.register_forward_hook(hook)


def double(projection):
    projection.lora_A.double(), projection.lora_B.double()


def train(module):
    module.weight.requires_grad_()


def use_gelu(mlp):
    mlp.act_fn = nn.GELU()


# The kind, the module of a layer that we change, the change, and what we say about it.
MODULES = [
    ("mlp", "mlp", use_gelu, "its activation is GELU, not SiLU"),
    ("mlp", "mlp", lambda mlp: setattr(mlp, "act_fn", type("Swish", (nn.SiLU,), {})()),
     "its activation is Swish, not SiLU"),
    ("mlp", "mlp", with_class(OtherMLP), "OtherMLP is not an MLP class"),
    ("mlp", "mlp.act_fn", replace_forward, "act_fn: its forward has been replaced"),
    *(
        ("mlp", "mlp.act_fn", lambda act, kind=kind: getattr(act, f"register_{kind}_hook")(hook),
         "act_fn: it has hooks")
        for kind in HOOKS
    ),
    ("layer", "", with_class(OtherLayer), "OtherLayer is not a layer class"),
    ("layer's mlp", "mlp.up_proj", double, "an adapter is torch.float64, should be"),
    ("layer", "self_attn", replace_forward, "self_attn: its forward has been replaced"),
    ("layer's mlp", "mlp", replace_forward, "mlp: its forward has been replaced"),
    ("layer", "self_attn", add_hook, "self_attn: it has hooks"),
    ("layer's mlp", "mlp", add_hook, "mlp: it has hooks"),
    ("layer", "input_layernorm", add_hook, "input_layernorm: it has hooks"),
    ("layer's mlp", "mlp.act_fn", add_hook, "mlp: act_fn: it has hooks"),
    ("layer", "self_attn.o_proj", add_hook, "o_proj: it has hooks"),
    ("layer's mlp", "post_attention_layernorm", lambda m: m.half(),
     "its norms are torch.float16"),
    ("layer", "self_attn", lambda m: setattr(m, "attention_dropout", 0.1),
     "self_attn: attention_dropout is 0.1"),
    ("layer", "self_attn", lambda m: setattr(m, "is_causal", False),
     "self_attn: it is not causal"),
    ("layer's mlp", "mlp", use_gelu, "mlp: its activation is GELU, not SiLU"),
    ("layer", "self_attn.k_norm", add_hook, "self_attn: k_norm: it has hooks"),
    ("layer", "self_attn.q_norm", replace_forward, "q_norm: its forward has been replaced"),
    ("layer", "self_attn.q_norm", with_class(OtherNorm), "q_norm: OtherNorm is not"),
    ("layer", "self_attn.k_norm", train, "self_attn: k_norm: its weight is trained"),
    ("layer", "self_attn.q_norm", lambda m: m.half(),
     "its norms are torch.float16"),
]  # fmt: skip
MODULES += [
    ("mlp's", f"mlp.{part}", change, reason)
    for part, (change, reason) in zip(cycle(MLP), REASONS.values(), strict=False)
]
# We test the other kinds of hook on an MLP, and dropout that nothing trains through as well.
ELSEWHERE = ("_pre", "backward", "dropout of all", "dropout in place")
FOR_ATTENTION = [name for name in REASONS if not any(part in name for part in ELSEWHERE)]
PLACES = cycle(product(("attention", "attention and rope"), ATTENTION))
for (kind, part), name in zip(PLACES, FOR_ATTENTION + FOR_ATTENTION[::-1], strict=False):
    o = " o" if part == "o_proj" else ""
    MODULES.append((f"{kind}'s{o}", f"self_attn.{part}", *REASONS[name]))


# --- models in which nothing fuses ----------------------------------------------------------------


class Model(NamedTuple):
    """A model in which nothing fuses.

    make: device -> the model. fusion: the request. runs: whether the model's own forward runs on a
    CPU, where transformers' FP8 GEMMs do not.
    """

    make: Callable
    fusion: Fusion
    says: str
    runs: bool = True


def family(name, **config):
    found = UNKNOWN if name == "Helium" else FAMILIES[name]
    return replace(found, config=found.config | config).peft_model


def with_options(**options):
    return partial(peft_model, **options)


def ia3(device, **options):
    config = peft.IA3Config(target_modules=[*ATTENTION, *MLP], feedforward_modules=["down_proj"])
    return peft.get_peft_model(base_model(device, **options), config)


def in_fp8(change=None, of=ROWS, **options):
    """Return a function that makes a model on a checkpoint's FP8 layers and changes k's layer."""

    def make(device):
        model, _ = models(device, of, **options)
        if change is not None:
            change(layer_of(model).self_attn.k_proj.base_layer)
        return model

    return make


def compress_checkpoint(base):
    """Leave a linear layer as compressed-tensors does until the model's first forward."""
    base.__class__ = nn.Linear
    base.register_parameter("weight_scale", nn.Parameter(torch.ones(len(base.weight), 1)))


def give_scales_of_another_size(base):
    base.weight_scale.data = base.weight_scale.data[:, :8]


LOSS, LOSS_IN_FP8 = (Fusion(cross_entropy=True, fp8_lm_head=fp8) for fp8 in (False, True))
ROPE = Fusion(rope=True)
ASK_FOR_FP8 = "FP8Linear: ask for layer=True, fp8=True, or"
MODELS = {
    "IA3, mlp": Model(
        ia3, MLP_ON, "its adapter is peft.tuners.ia3.layer.Linear: take LoraConfig's plain LoRA"
    ),
    "IA3, layer": Model(ia3, LAYER, "self_attn: its attention is eager: call"),
    "an adapter on lm_head": Model(
        with_options(target_modules=[*ATTENTION, "lm_head"]), LOSS,
        "its lm_head has an adapter: name it in modules_to_save, not in target_modules",
    ),
    "a routers' loss": Model(
        family("Qwen3-MoE", output_router_logits=True), LOSS,
        r"it adds its routers' loss",
    ),
    "another activation": Model(
        family("Gemma", hidden_act="gelu_python"), MLP_ON,
        r"its activation is GELUActivation, not SiLU or GELU by tanh \(gelu_pytorch_tanh\)",
    ),
    "another GELU by tanh": Model(
        family("Gemma 2", hidden_activation="gelu_python_tanh"), MLP_ON, "is GELUTanh, not"
    ),
    "an unknown family": Model(
        family("Helium"), ROPE,
        r"HeliumAttention is not an attention class that we know \(see fused_lora/docs",
    ),
    "a checkpoint's lm_head in FP8": Model(
        in_fp8(of=BLOCKS, only="lm_head"), LOSS_IN_FP8,
        "its lm_head is .*FP8Linear, not nn.Linear", runs=False,
    ),
    **{
        f"a checkpoint in FP8, {name}": Model(make, fusion, says, runs=False)
        for name, make, fusion, says in (
            ("40 wide", in_fp8(config={"intermediate_size": 40}), FP8, "FP8 needs multiples"),
            ("compressed", in_fp8(compress_checkpoint), FP8,
             "is FP8 codes: .*use_optimized_inference=True"),
            ("cast", in_fp8(lambda base: base.to(torch.float32)), FP8,
             "no longer FP8 codes"),
            ("trained", in_fp8(lambda base: base.weight.requires_grad_()), FP8,
             "its base weight is trained"),
            ("other scales", in_fp8(give_scales_of_another_size), FP8,
             r"\[16, 32\] has scales for another size"),
            ("layer", in_fp8(), LAYER, ASK_FOR_FP8),
            ("mlp", in_fp8(), MLP_ON, ASK_FOR_FP8),
        )
    },
}  # fmt: skip
