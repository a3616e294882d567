"""A variant's recipe -> a model ready to train.

All variants start from the same checkpoint and the same adapters. Only their recipes differ.
Unsloth patches transformers and peft and must be imported before them. So we import all of these
only when a variant is built, in its own process.
"""

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from variants import BF16, NF4, Base, Lora, Recipe, Settings, recipe_of

VARLEN = "varlen"
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
CUBLASLT_WORKSPACE = "CUBLASLT_WORKSPACE_SIZE"


class Graph(NamedTuple):
    """The means to capture a model's training step in CUDA graphs.

    step_for: makes the `GraphedStep` of an optimizer and a number of micro-batches. eager_calls:
    its eager calls before the one that captures it. takes_max_labelled: the model computes the loss
    on `max_labelled_tokens` tokens only.
    """

    step_for: Callable[..., Any]
    eager_calls: int
    takes_max_labelled: bool = False


@dataclass
class Built:
    """A model ready to train.

    autocast_dtype: that of its forward; None for no autocast. settings: those it was built with.
    fused_modules: "module name: fused function". graph: how to capture its step, if the recipe asks
    for it. lengths_as: turns documents' lengths into inputs, if the model takes them.
    """

    model: torch.nn.Module
    autocast_dtype: torch.dtype | None
    settings: Settings
    fused_modules: list[str] = field(default_factory=list)
    graph: Graph | None = None
    lengths_as: Callable[[torch.Tensor], dict[str, Any]] | None = None

    def autocast(self) -> torch.autocast:
        device = next(self.model.parameters()).device.type
        on = self.autocast_dtype is not None
        return torch.autocast(device, dtype=self.autocast_dtype, enabled=on)


def build(
    variant: str,
    checkpoint: Path,
    lora: Lora,
    seq_len: int,
    device: str,
    seed: int,
    base: Base = BF16,
    host_layers: int = 0,
) -> Built:
    """Build `variant` from the base weights in `checkpoint`, in training mode on `device`.

    By default base weights are bf16 and frozen, adapters are fp32 (as in PEFT and Unsloth) under
    bf16 autocast, and attention is PyTorch's scaled_dot_product_attention. With
    checkpointing the backward recomputes each layer from its input in the recipe's mode:
    non-reentrant for PEFT, Unsloth's choice at this `seq_len` for Unsloth.

    On a `base` in NF4 the layers' weights are quantised as they are loaded. Embeddings, norms and
    lm_head stay in bf16: we leave out PEFT's `prepare_model_for_kbit_training`, which turns them to
    fp32 and makes every step slower.

    host_layers: how many layers have their base in host memory, with our `host_base` or Unsloth's
    `offload_layers`.
    """
    recipe = recipe_of(variant)
    make = _unsloth_model if recipe.library == "unsloth" else _peft_model
    model = make(recipe, checkpoint, lora, seq_len, device, seed, base, host_layers)
    set_adapters(model, seed)
    model.train()
    is_mixed = (recipe.base_dtype, recipe.adapter_dtype) == ("bfloat16", "float32")
    autocast_dtype = torch.bfloat16 if is_mixed else None
    settings = Settings(
        checkpointing=_checkpointing_in_words(recipe, seq_len),
        adapter_dtype=str(next(_adapters(model))[1].dtype).removeprefix("torch."),
        autocast=str(autocast_dtype).removeprefix("torch."),
        attention=model.config._attn_implementation,
        compile=recipe.compiled,
        graph=recipe.graph,
        # Unsloth sets it on import; other variants have it if the user set it
        allocator=next(filter(None, map(os.environ.get, ALLOCATOR_SETTINGS)), None),
        cublaslt_workspace=os.environ.get(CUBLASLT_WORKSPACE),
    )
    built = Built(model, autocast_dtype, settings)
    if recipe.fused:
        from fused_lora import Fusion, fuse

        switches: dict[str, Any] = {part: True for part in recipe.fused if part != "checkpoint"}
        fusion = Fusion(**switches, fp8=recipe.fp8)
        if "checkpoint" in recipe.fused:
            fusion = replace(
                fusion, checkpoint=recipe.checkpointing, checkpoint_gib=recipe.checkpoint_gib
            )
        fused = fuse(model, fusion).fused
        built.fused_modules = [f"{name}: {part}" for part in fused for name in fused[part]]
    elif recipe.library == "unsloth":
        built.fused_modules = _unsloth_fused(model)
        built.lengths_as = lambda lengths: {"packed_seq_lengths": lengths}
    elif recipe.attention == VARLEN:
        built.lengths_as = _lengths_for_flash_attention
    if recipe.compiled:
        # torch.compile caches 8 versions per function, other lengths included, then silently runs
        # eagerly.
        torch.compiler.reset()
        for layer in model.get_submodule("base_model.model.model.layers"):
            layer.compile(dynamic=False)
    if recipe.graph:
        built.graph = _graph_of(built, takes_max_labelled="cross_entropy" in recipe.fused)
    return built


def _graph_of(built: Built, takes_max_labelled: bool) -> Graph:
    from fused_lora.step.graph import EAGER_CALLS, GraphedStep

    step_for = partial(GraphedStep, built.model, autocast=built.autocast)
    return Graph(step_for, EAGER_CALLS, takes_max_labelled)


def _checkpointing_in_words(recipe: Recipe, seq_len: int) -> str:
    if recipe.checkpointing == "none":
        return "none"
    if recipe.library == "unsloth":
        # below 512 tokens it replaces its own mode, which offloads, by plain checkpointing
        offloads = recipe.checkpointing == "unsloth" and seq_len >= 512
        return "unsloth (offloaded)" if offloads else "unsloth (plain)"
    if "checkpoint" not in recipe.fused:
        return "non-reentrant"
    budget = f", {recipe.checkpoint_gib:g} GiB" if recipe.checkpoint_gib is not None else ""
    return f"fused {recipe.checkpointing}{budget}"


def set_adapters(model: torch.nn.Module, seed: int) -> None:
    """Give every adapter weights that depend only on its name and `seed`.

    A is uniform with PEFT's own bound, 1 / sqrt(in). B is normal with deviation 0.02. PEFT's B = 0
    would make every dA zero and hide a wrong one. Magnitudes are PEFT's, moved by 2%.
    """
    with torch.no_grad():
        for name, parameter in _adapters(model):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            value = torch.empty(parameter.shape)
            if ".lora_magnitude_vector." in name:
                # kept for the next call, before which it is trained
                norms = vars(parameter).setdefault("norms", parameter.cpu().clone())
                value = norms * value.normal_(1.0, 0.02, generator=generator)
            elif ".lora_A." in name:
                bound = parameter.shape[1] ** -0.5
                value.uniform_(-bound, bound, generator=generator)
            else:
                value.normal_(std=0.02, generator=generator)
            parameter.copy_(value)


def _adapters(model: torch.nn.Module):
    return ((name, p) for name, p in model.named_parameters() if ".lora_" in name)


def _peft_model(recipe, checkpoint, lora, seq_len, device, seed, base, host_layers):
    from peft import LoraConfig, get_peft_model
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    if recipe.library == "liger":
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

        _apply_liger_kernel(AutoConfig.from_pretrained(checkpoint).model_type)
    if recipe.attention == VARLEN:
        AttentionInterface.register(VARLEN, _attend_by_lengths)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=getattr(torch, recipe.base_dtype),
        device_map={"": "cpu" if host_layers else device},
        attn_implementation=recipe.attention,
        quantization_config=nf4_config() if base == NF4 else None,
        local_files_only=True,
    )
    model.config.use_cache = False
    if recipe.checkpointing != "none" and "checkpoint" not in recipe.fused:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = LoraConfig(**lora_options(lora), task_type="CAUSAL_LM")
    in_fp32 = recipe.adapter_dtype == "float32"
    adapted = get_peft_model(model, config, autocast_adapter_dtype=in_fp32)
    if host_layers:
        from fused_lora import host_base

        host_base(adapted, model.config.get_text_config().num_hidden_layers - host_layers)
        adapted.to(device)
    return adapted


def nf4_config() -> Any:
    """Return QLoRA's configuration, which is Unsloth's too. Blocks have 64 values."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def lora_options(lora: Lora) -> dict[str, Any]:
    """Return the arguments of PEFT's LoraConfig for these adapters."""
    return {
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "bias": lora.bias,
        "target_modules": list(lora.targets), **({"use_dora": True} if lora.dora else {}),
    }  # fmt: skip


def _unsloth_model(recipe, checkpoint, lora, seq_len, device, seed, base, host_layers):
    from unsloth import FastLanguageModel

    mode = {"unsloth": "unsloth", "full": True, "none": False}[recipe.checkpointing]
    model, _ = FastLanguageModel.from_pretrained(
        str(checkpoint),
        max_seq_length=seq_len,
        dtype=torch.bfloat16,
        load_in_4bit=base == NF4,
        local_files_only=True,
        use_exact_model_name=True,
        use_gradient_checkpointing=mode,
        **({"offload_layers": host_layers} if host_layers else {}),
    )
    return FastLanguageModel.get_peft_model(
        model, **lora_options(lora), max_seq_length=seq_len, use_gradient_checkpointing=mode,
        random_state=seed,
    )  # fmt: skip


def _unsloth_fused(model: torch.nn.Module) -> list[str]:
    """List the functions that Unsloth has set on the layers.

    Where a projection has a bias it keeps PEFT's own path, under names that begin with "original".
    """
    found = []
    for name, module in model.named_modules():
        functions = [vars(module).get(key) for key in ("apply_qkv", "apply_o", "forward")]
        for function in functions:
            function = getattr(function, "__func__", function)
            called = getattr(function, "__name__", "original")
            is_unsloths = getattr(function, "__module__", "").startswith("unsloth")
            if is_unsloths and not called.startswith("original"):
                found.append(f"{name}: {called}")
    return found


# PEFT's users train on documents with FlashAttention. transformers' "flash_attention_2" needs a
# package built for one torch and one CUDA. PyTorch has the same kernels. The functions below give
# them what transformers gives that package.


def _lengths_for_flash_attention(lengths: torch.Tensor) -> dict[str, Any]:
    """Return the inputs that DataCollatorWithFlattening(return_flash_attn_kwargs=True) adds."""
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def _attend_by_lengths(
    module, query, key, value, attention_mask, scaling, cu_seq_lens_q=None, max_length_q=0, **_
):
    """Attend within documents, with transformers' signature. The CPU lacks those kernels and goes
    through the documents one by one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if cu_seq_lens_q is None:  # full rows
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=True
        )
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
        ends, longest = cu_seq_lens_q, max_length_q
        attended = varlen_attn(
            q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0)
        )
        return attended[None], None  # type: ignore[call-overload]
    each = []
    for first, end in pairwise(cu_seq_lens_q.tolist()):
        q, k, v = (heads[:, :, first:end] for heads in (query, key, value))
        each.append(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        )
    return torch.cat(each, 2).transpose(1, 2), None
