"""Tiny PEFT models of four families."""

import warnings

import torch
import transformers
from cases.reference import random, seeded
from peft import LoraConfig, get_peft_model

from fused_lora import Fusion

FAMILIES = ("Qwen2", "Llama", "Mistral", "Qwen3")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LAYERS = "base_model.model.model.layers"
DECODER = LAYERS.removesuffix(".layers")
MLP_NAMES = [f"{LAYERS}.{index}.mlp" for index in range(2)]
MLP_ON = Fusion(mlp=True)


def set_weights(model, device, only=""):
    """Weights of a size at which every part of the model shows in the logits; no B is zero."""
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if only not in name:
                continue
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.1
            mean = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(random(*parameter.shape, seed=seed, scale=scale) + mean)
    return model.to(device)


def base_model(device, family="Qwen2", dtype=torch.float32, **changes):
    """Two layers; attention is the eager one, whose gradients are deterministic on a GPU too."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 52,
        "intermediate_size": 139,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 26,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{family}Config")(**(sizes | changes))
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    return set_weights(model, device).to(dtype)


def adapt(model, device, autocast_adapter_dtype=True, **lora):
    options = {"r": 8, "lora_alpha": 12, "target_modules": [*ATTENTION, *MLP]}
    config = LoraConfig(**(options | lora))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, that lora_bias cannot be merged
        model = get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)
    return set_weights(model, device, only=".lora_")


def peft_model(device, family="Qwen2", dtype=torch.float32, autocast_adapter_dtype=True, **lora):
    return adapt(base_model(device, family, dtype), device, autocast_adapter_dtype, **lora)


def ids(device, seed=3):
    generator = seeded(seed)
    return torch.randint(96, (2, 17), generator=generator, device="cpu").to(device)


def logits(model, length=5):
    torch.manual_seed(0)  # for those that drop out
    with torch.no_grad():
        return model(input_ids=ids(next(model.parameters()).device)[:, :length]).logits


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def layers(model):
    return model.get_submodule(LAYERS)
