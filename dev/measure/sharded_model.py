"""A PEFT model whose base no rank ever holds whole.

Each rank draws or reads its share of every weight, or a layer at a time. For NF4 all gather one
matrix at a time and quantise it. What is not sharded is the same on all ranks.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, empty

from fused_lora import shard_base
from variants import NF4

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
SHARDED, SHARD_BASE = "sharded", "shard_base"  # the wrappers that shard the base


def model_without_memory(asked: argparse.Namespace) -> Any:
    """Return a PEFT model whose parameters are shapes alone."""
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.integrations import replace_with_bnb_linear

    with init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(asked.model)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        model.config.use_cache = False
        if asked.base == NF4:
            quantised = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=DTYPE,
                bnb_4bit_quant_storage=DTYPE,  # FSDP2 shards floating point alone
            )  # fmt: skip
            model = replace_with_bnb_linear(model, ["lm_head"], quantised)
            for one in filter(is_linear_4bit, model.modules()):
                one.to(DTYPE)  # bitsandbytes makes biases in fp32
            model.is_loaded_in_4bit = True
        rank = asked.lora_rank
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        model = get_peft_model(model, lora)
    model.tie_weights()  # a tied parameter had become two
    return model.train()


def built_model(asked: argparse.Namespace, device: torch.device) -> Any:
    """Return a PEFT model with its weights on the device, or this rank's share of them.

    Layers are quantised and sharded one by one, while the others are still shapes.
    """
    model = model_without_memory(asked)
    is_sharded = asked.wrapper == SHARDED
    torch.manual_seed(dist.get_rank() if is_sharded else 0)  # whole weights are the same on all
    for name, layer in model.named_modules():
        if name.rpartition(".")[0].endswith("model.layers"):
            if asked.base == NF4:
                quantise_layer(layer, f"{name}.", asked.model, device)
            if is_sharded:
                fully_shard(layer)
            if asked.wrapper == SHARD_BASE:
                give_weights(layer, f"{name}.", asked.model, device)
                shard_base(layer)
    if is_sharded:
        fully_shard(model)
    give_weights(model, "", asked.model, device)
    model.tie_weights()  # again
    if asked.wrapper == SHARD_BASE:
        shard_base(model)  # tells DistributedDataParallel
    return model


def give_weights(module: nn.Module, prefix: str, source: str, device: torch.device) -> None:
    """Give memory on the device, and values, to the parameters that are shapes. prefix: of their
    names in the source."""
    shapes = {name for name, one in module.named_parameters() if one.is_meta}
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    parameters = {f"{prefix}{n}": p for n, p in module.named_parameters() if n in shapes}
    fill_weights(parameters, source)


def is_linear_4bit(module: nn.Module) -> bool:
    return type(module).__name__ == "Linear4bit" and not hasattr(module, "base_layer")


def quantise_layer(layer: nn.Module, prefix: str, source: str, device: torch.device) -> None:
    """Give the 4-bit linear layers in a decoder layer their whole weights. prefix: its name.

    Each rank draws or reads its share of the rows. All gather one matrix at a time to quantise it.
    """
    from bitsandbytes.nn import Params4bit

    linears: dict[str, Any] = {n: one for n, one in layer.named_modules() if is_linear_4bit(one)}
    ranks = init_device_mesh(device.type, (dist.get_world_size(),))
    shares = {
        f"{prefix}{name}.weight": empty(
            one.out_features, one.in_features, dtype=DTYPE,
            device_mesh=ranks, placements=[Shard(0)],
        )
        for name, one in linears.items()
    }  # fmt: skip
    fill_weights(shares, source)
    for one, share in zip(linears.values(), shares.values(), strict=True):
        packed: Any = Params4bit(
            share.full_tensor(), requires_grad=False, quant_type="nf4", quant_storage=DTYPE,
            module=one,
        )  # fmt: skip
        one.weight = packed.to(device)


@torch.no_grad()
def fill_weights(parameters: Mapping[str, Tensor], source: str) -> None:
    """Write random values, or a checkpoint's. Each rank reads its own share of a DTensor."""
    for name, parameter in parameters.items():
        values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if "norm" in name:
            values.fill_(1.0)
        elif "lora_B" in name or parameter.ndim == 1:
            values.zero_()
        else:
            values.normal_(0.0, 0.02)
    if Path(source).is_dir():
        base = {
            name.removeprefix("base_model.model.").replace(".base_layer.", "."): parameter
            for name, parameter in parameters.items()
            if ".lora_" not in name
        }
        checkpoint.load(base, storage_reader=checkpoint.HuggingFaceStorageReader(source))


def save_adapters(model: Any, folder: Path) -> None:
    """Save them as PEFT does, from one rank. All have to call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
