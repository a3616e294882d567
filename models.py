"""The variants: a name -> a recipe, and a recipe -> a model ready to train.

Every variant starts from the same checkpoint and the same adapters; what differs between them is
what the recipe says. Unsloth patches transformers and peft when it is imported, and wants to be
imported before them, so nothing here is imported until a variant is built, in a process of its own.
"""

import importlib.util
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """How a variant differs from vanilla PEFT.

    library: "peft", or "unsloth" for FastLanguageModel.
    fused: the parts given to `fused_lora.fuse`.
    """

    library: str = "peft"
    fused: tuple[str, ...] = ()


VARIANTS = {
    "vanilla_peft": Recipe(),
    "fused_mlp": Recipe(fused=("mlp",)),
    "full_unsloth": Recipe(library="unsloth"),
    # the same code once more: how far the two come out apart is the noise (A/A). Last, so that the
    # alternating rounds put all the others between the two.
    "vanilla_peft_again": Recipe(),
}


class Evidence(NamedTuple):
    """What a step has run if a part did: its autograd functions, each at least once for every
    module that the part fuses, and on a GPU its kernels."""

    functions: tuple[str, ...]
    kernels: tuple[str, ...]


EVIDENCE = {  # by fused part, and for Unsloth as a whole
    "mlp": Evidence(("LoRA_MLP",), ("_swiglu_forward_kernel", "_swiglu_backward_kernel")),
    "unsloth": Evidence((), ("_fg_kernel", "_rms_layernorm_forward", "_rope_embedding_QK")),
}


@dataclass(frozen=True)
class Lora:
    """The adapters, the same in every variant. Scale = alpha / rank."""

    rank: int = 32
    alpha: int = 64
    dropout: float = 0.0
    bias: str = "none"
    targets: tuple[str, ...] = TARGETS


@dataclass
class Built:
    """A model ready to train, and what it is made of.

    autocast_dtype: what its forward runs in; None for no autocast.
    settings: what results.json records of it. fused_modules: names of the modules that run fused,
    with the function that they run.
    """

    model: torch.nn.Module
    autocast_dtype: torch.dtype | None
    settings: dict[str, Any]
    fused_modules: list[str] = field(default_factory=list)

    def autocast(self) -> torch.autocast:
        device = next(self.model.parameters()).device.type
        on = self.autocast_dtype is not None
        return torch.autocast(device, dtype=self.autocast_dtype, enabled=on)


def is_available(variant: str) -> bool:
    """Whether the package that the variant needs is installed (it is not imported)."""
    library = VARIANTS[variant].library
    return library == "peft" or importlib.util.find_spec(library) is not None


def build(
    variant: str,
    checkpoint: Path,
    lora: Lora,
    seq_len: int,
    checkpointing: bool,
    device: str,
    seed: int,
) -> Built:
    """Build `variant` from the base weights in `checkpoint`, in training mode on `device`.

    Base weights are bf16 and frozen; adapters are fp32 (the default of PEFT and of Unsloth) under
    bf16 autocast; attention is PyTorch's scaled_dot_product_attention. With `checkpointing` each
    layer's input is kept and the layer computed again in backward: non-reentrant for PEFT, for
    Unsloth whatever it does at this `seq_len` when asked for "unsloth".
    """
    recipe = VARIANTS[variant]
    make = _unsloth_model if recipe.library == "unsloth" else _peft_model
    model, checkpointing_name = make(checkpoint, lora, seq_len, checkpointing, device, seed)
    set_adapters(model, seed)
    model.train()
    built = Built(
        model,
        torch.bfloat16,
        {
            "checkpointing": checkpointing_name if checkpointing else "none",
            "adapter_dtype": str(next(_adapters(model))[1].dtype).removeprefix("torch."),
            "autocast": "bfloat16",
            "attention": model.config._attn_implementation,
            "compile": False,
        },
    )
    if recipe.fused:
        from fused_lora import Fusion, fuse

        fused = fuse(model, Fusion(**dict.fromkeys(recipe.fused, True))).fused
        built.fused_modules = [f"{name}: {part}" for part in fused for name in fused[part]]
    elif recipe.library == "unsloth":
        built.fused_modules = _unsloth_fused(model)
    return built


def set_adapters(model: torch.nn.Module, seed: int) -> None:
    """Give every adapter weights that depend on its name and `seed` alone.

    A is uniform with PEFT's own bound, 1 / sqrt(in). B is normal with deviation 0.02 and not zero,
    as PEFT starts it: B = 0 makes every dA zero and would hide a wrong one.
    """
    with torch.no_grad():
        for name, parameter in _adapters(model):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            value = torch.empty(parameter.shape)
            if ".lora_A." in name:
                bound = parameter.shape[1] ** -0.5
                value.uniform_(-bound, bound, generator=generator)
            else:
                value.normal_(std=0.02, generator=generator)
            parameter.copy_(value)


def _adapters(model: torch.nn.Module):
    return ((name, p) for name, p in model.named_parameters() if ".lora_" in name)


def _peft_model(checkpoint, lora, seq_len, checkpointing, device, seed):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.bfloat16,
        device_map={"": device},
        attn_implementation="sdpa",
        local_files_only=True,
    )
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias=lora.bias,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config), "non-reentrant"


def _unsloth_model(checkpoint, lora, seq_len, checkpointing, device, seed):
    from unsloth import FastLanguageModel

    mode = "unsloth" if checkpointing else False
    model, _ = FastLanguageModel.from_pretrained(
        str(checkpoint),
        max_seq_length=seq_len,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        local_files_only=True,
        use_exact_model_name=True,
        use_gradient_checkpointing=mode,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias=lora.bias,
        target_modules=list(lora.targets),
        max_seq_length=seq_len,
        use_gradient_checkpointing=mode,
        random_state=seed,
    )
    # Unsloth itself turns "unsloth" (offload to the host) into plain checkpointing below 512
    return model, "unsloth (offloaded)" if seq_len >= 512 else "unsloth (plain)"


def _unsloth_fused(model: torch.nn.Module) -> list[str]:
    """Which of Unsloth's functions the layers will call, read from what it set on them.

    Its names for PEFT's own path, which it keeps where a projection has a bias, begin with
    "original".
    """
    found = []
    for name, module in model.named_modules():
        functions = [vars(module).get(key) for key in ("apply_qkv", "apply_o", "forward")]
        for function in functions:
            function = getattr(function, "__func__", function)
            called = getattr(function, "__name__", "original")
            of_unsloth = getattr(function, "__module__", "").startswith("unsloth")
            if of_unsloth and not called.startswith("original"):
                found.append(f"{name}: {called}")
    return found
