"""Speed of training on several GPUs, and of a base model larger than one: plain PEFT, fused, and
fused in a CUDA graph.

    torchrun --nproc-per-node 8 -m bench.sharded --model configs/qwen2.5-32b.json --tokens 4096

--wrapper says where base weights lie, and who averages gradients: "sharded" over the ranks (FSDP2),
"shard_base", the same by our function and under DistributedDataParallel, "replicated" on each with
sharded adapters (FSDP2), "ddp", or "alone", which averages nothing. Tokens are random, and weights
too, unless --model is a checkpoint's folder. No rank ever holds a sharded model whole: each draws
or reads its share, or one layer. For NF4 all gather one matrix at a time and quantise it. Adapters
are in fp32, as PEFT makes them.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, empty
from torch.nn.parallel import DistributedDataParallel

from bench.weights import Source, check_architecture
from fused_lora import Fusion, GraphedStep, fuse, shard_base
from fused_lora.step.checkpoint import POLICIES, Checkpoint
from variants import BASES, BF16, NF4, TARGETS

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
GRAPH = "graph"
RUNS = ("plain", "fused", GRAPH)
SIZES = {"tokens": 4096, "batch-size": 1, "lora-rank": 16, "warm-up": 3, "steps": 10}
RANK_0_SPEAKS_S = 10.0  # how long the other ranks leave an error to rank 0


def shard_adapters(model: Any) -> Any:
    return fully_shard(model, ignored_params={p for p in model.parameters() if not p.requires_grad})


SHARDED, SHARD_BASE, DDP = "sharded", "shard_base", "ddp"
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    SHARDED: lambda model: model,  # by `built_model`
    SHARD_BASE: DistributedDataParallel,  # the base likewise
    "replicated": shard_adapters,
    DDP: DistributedDataParallel,
    "alone": lambda model: model,
}


# --- a model, and its weights ---------------------------------------------------------------------


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


# --- training -------------------------------------------------------------------------------------


def report_speed(
    name: str, model: Any, vocabulary: int, asked: argparse.Namespace, device: torch.device
) -> list[float]:
    """Train, and print tokens/s a GPU and peak memory. Return this rank's losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, capturable=name == GRAPH)

    def eager_step(**batch: Tensor) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = GraphedStep(model, optimizer) if name == GRAPH else eager_step
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = asked.batch_size, asked.tokens
    losses, seconds = [], 0.0
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    for step in range(asked.warm_up + asked.steps):
        if step == asked.warm_up:
            seconds = -synchronized_s()
        tokens = torch.randint(vocabulary, shape, generator=generator, device=device)
        losses.append(train(input_ids=tokens, labels=tokens))
    seconds += synchronized_s()
    found = [loss.item() for loss in losses]
    if dist.get_rank() == 0:
        tokens_per_s = asked.steps * asked.batch_size * asked.tokens / seconds
        peak_gib = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
        print(
            f"{name}, {asked.wrapper}, {asked.base}: {tokens_per_s:,.0f} tokens/s a GPU, "
            f"peak {peak_gib:.1f} GiB, loss {found[0]:.4f} to {found[-1]:.4f}",
            flush=True,
        )
    return found


def synchronized_s() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


class RankParser(argparse.ArgumentParser):
    """A parser that raises its errors: `main` prints them, on one rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments. Raises ValueError, in one line, if they cannot run."""
    parser = RankParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a config.json, or a checkpoint's folder")
    parser.add_argument("--base", choices=BASES, default=BF16)
    parser.add_argument("--wrapper", choices=WRAPPERS, default=SHARDED)
    parser.add_argument("--out", type=Path, help="a folder for the adapters of the last run")
    parser.add_argument("--checkpoint", choices=POLICIES, default="full",
                        help="of fused; plain PEFT's is full, or none")  # fmt: skip
    parser.add_argument("--checkpoint-gib", type=float, help="for selective")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=("plain", "fused"),
                        help="graph: GraphedStep, with ddp or shard_base")  # fmt: skip
    for size, usual in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=usual)
    asked = parser.parse_args(arguments)
    for size in SIZES:
        least = 0 if size == "warm-up" else 1
        if (value := getattr(asked, size.replace("-", "_"))) < least:
            raise ValueError(f"--{size} is {value}: give {least} or more")
    Checkpoint(asked.checkpoint, asked.checkpoint_gib)  # raises ValueError
    check_trainable(Path(asked.model))
    if GRAPH in asked.runs and not (ON_GPU and asked.wrapper in (DDP, SHARD_BASE)):
        raise ValueError("--runs graph: give --wrapper ddp or shard_base, on GPUs")
    if asked.base == NF4 and asked.wrapper == SHARD_BASE:
        raise ValueError("--wrapper shard_base: weights in 4 bits stay whole; give sharded")
    if asked.base == NF4 and find_spec("bitsandbytes") is None:
        raise ValueError('--base nf4: bitsandbytes is not installed; pip install -e ".[qlora]"')
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("start it with torchrun --nproc-per-node N -m bench.sharded")
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if ON_GPU and ranks > gpus:
        raise ValueError(f"--nproc-per-node {ranks}: there are {gpus} GPUs, give {gpus}")
    return asked


def check_trainable(model: Path) -> None:
    """Raise ValueError unless it is an architecture, or a checkpoint's folder, that can train."""
    if not model.exists():
        raise ValueError(f"--model {model}: no such file; give one of configs/*.json, or a folder")
    for needed in ("config.json", "*.safetensors"):
        if model.is_dir() and not any(model.glob(needed)):
            raise ValueError(f"--model {model}: no {needed} in it; give a checkpoint's folder")
    config = None if model.is_dir() else model
    check_architecture(Source(str(model), "", model, config, tokenizer=Path()), TARGETS)


def train_each(asked: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Train a new model in each run, from the same weights. Return the losses of each."""
    fusion = Fusion(
        layer=True, rms_norm=True, cross_entropy=True, checkpoint=asked.checkpoint,
        checkpoint_gib=asked.checkpoint_gib,
    )  # fmt: skip
    losses = {}
    for run in asked.runs:
        gc.collect()  # the model before this one
        model = built_model(asked, device)
        if run == "plain" and asked.checkpoint != "none":
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        if run != "plain":
            try:
                done = fuse(model, fusion)
            except ValueError as error:
                sys.exit(refused(error))
            if dist.get_rank() == 0:
                print(done)
        wrapped = model if run == GRAPH else WRAPPERS[asked.wrapper](model)
        losses[run] = report_speed(run, wrapped, model.config.vocab_size, asked, device)
        if asked.out and run == asked.runs[-1]:
            save_adapters(model, asked.out)
        del model, wrapped
    return losses


def refused(error: ValueError) -> int:
    """Print a request's error in one line, on rank 0 if it has the same. Return the exit code."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(RANK_0_SPEAKS_S)  # torchrun ends all ranks when one has ended
    print(f"sharded: {error}", file=sys.stderr, flush=True)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        asked = parsed(arguments)
    except ValueError as error:
        return refused(error)
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    train_each(asked, device)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
