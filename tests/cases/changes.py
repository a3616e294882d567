"""Changes that users make to a fused model which runs fused after them as well."""

import copy
import importlib
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
import transformers.loss.loss_utils
from cases.fused_case import SHORT, step
from cases.layer_case import layer_of
from cases.peft_models import ATTENTION, MLP, logits, set_weights
from cases.reference import random
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.utils.hotswap import hotswap_adapter_from_state_dict, prepare_model_for_compiled_hotswap
from torch import nn
from torch.nn.utils import parametrize
from transformers import activations


def adapters(model):
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def train(model, **options):
    # not Adam: its step is as large for the smallest gradient, noise and all
    optimizer = torch.optim.SGD(adapters(model).values(), lr=0.1, **options)
    for seed in (3, 4):
        step(model, seed=seed, length=SHORT)
        optimizer.step()


def load(model):
    state = {n: t + 0.05 if ".lora_" in n else t for n, t in model.state_dict().items()}
    model.load_state_dict(state)


def assign_state(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for parameter in adapters(model).values():
        parameter.requires_grad_(True)


def hot_swap(model, r=8):
    """Swap in an adapter with the same scaling, which PEFT writes through .data."""
    config = LoraConfig(r=r, lora_alpha=1.5 * r, target_modules=[*ATTENTION, *MLP])
    device = next(model.parameters()).device
    state = {
        name: random(*p.shape, seed=seed, scale=0.2, device=device)
        for seed, (name, p) in enumerate(adapters(model).items())
    }
    hotswap_adapter_from_state_dict(model, state, "default", config)


def prepare_hot_swap(model):
    prepare_model_for_compiled_hotswap(model, target_rank=12)
    for parameter in adapters(model).values():  # the new ones are frozen
        parameter.requires_grad_(True)
    hot_swap(model, r=12)


def average(model):
    """Overwrite the adapters in place, as a moving average of the weights does."""
    for parameter in adapters(model).values():
        parameter.data.copy_(parameter.data * 1.5)


def assign(model):
    for parameter in adapters(model).values():
        parameter.data = parameter.data * 1.5


def scale(model, by=3.0):
    for name, projection in model.named_modules():
        if name.endswith("_proj"):
            projection.set_scale("default", by)


def add_second(model, r):
    """Add an adapter small enough that rounding decides no token, like layer_case's first one."""
    parameters = model.peft_config["default"].target_parameters  # PEFT wants the same ones
    modules = ATTENTION if parameters else (*ATTENTION, *MLP)
    config = LoraConfig(r=r, lora_alpha=r, target_modules=[*modules], target_parameters=parameters)
    model.add_adapter("second", config)
    set_weights(model, next(model.parameters()).device, only=".second.")
    for name, parameter in model.named_parameters():
        if ".second." in name:
            parameter.data.mul_(0.25 if ".q_proj.lora_B" in name else 0.5)


def switch(model, r):
    add_second(model, r)
    model.set_adapter("second")


def there_and_back(model):
    switch(model, 12)
    step(model, length=SHORT)
    model.set_adapter("default")


def activate_both(model):
    add_second(model, 3)
    model.base_model.set_adapter(["default", "second"])


def merge_and_unmerge(model, **options):
    model.merge_adapter(**options)
    logits(model)
    model.unmerge_adapter()


def cast(model):
    model.to(torch.bfloat16).float()


def cast_and_run(model):
    logits(model.to(torch.bfloat16))
    model.float()


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrise(model):
    parametrize.register_parametrization(
        layer_of(model).mlp.up_proj.lora_A["default"], "weight", Doubled()
    )


# The changes. (Copies: test_fuse_peft.py.)
DONE = {
    "optimizer": partial(train, foreach=True),
    "fused optimizer": partial(train, fused=True),
    "load_state_dict": load,
    "load_state_dict(assign=True)": assign_state,
    "hot-swap": hot_swap,
    "moving average through .data": average,
    "other .data": assign,
    "set_scale": scale,
    "set_scale to a number of NumPy's": partial(scale, by=np.float32(3.0)),
    "to another dtype and back": cast,
    "to another dtype, a forward, and back": cast_and_run,
    "an adapter of a larger rank": partial(switch, r=12),
    "an adapter of a smaller rank": partial(switch, r=3),
    "another adapter and back": there_and_back,
    "merged and unmerged": merge_and_unmerge,
    "safely merged and unmerged": partial(merge_and_unmerge, safe_merge=True),
    "a parametrised A": parametrise,
}


qwen2 = importlib.import_module("transformers.models.qwen2.modeling_qwen2")
loss_utils = transformers.loss.loss_utils
PATCHES = [  # the part, and what is patched
    ("mlp", qwen2.Qwen2MLP, "forward"),
    ("mlp", activations.SiLUActivation, "forward"),
    ("mlp", LoraLinear, "forward"),
    ("mlp", nn.Linear, "forward"),
    ("attention", qwen2.Qwen2Attention, "forward"),
    ("rope", qwen2, "apply_rotary_pos_emb"),
    ("rope", qwen2, "rotate_half"),
    ("rms_norm", qwen2.Qwen2RMSNorm, "forward"),
    ("cross_entropy", qwen2.Qwen2ForCausalLM, "forward"),
    ("cross_entropy", loss_utils, "fixed_cross_entropy"),
    ("cross_entropy", F, "cross_entropy"),
    ("layer", qwen2.Qwen2DecoderLayer, "forward"),
    ("layer", qwen2.Qwen2RMSNorm, "forward"),
    ("layer", qwen2, "apply_rotary_pos_emb"),
    ("layer", F, "scaled_dot_product_attention"),
]
