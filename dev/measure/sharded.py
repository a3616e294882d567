"""Speed of training on several GPUs, and of a base model larger than one: plain PEFT, fused, and
fused in a CUDA graph.

    torchrun --nproc-per-node 8 -m dev.measure.sharded --model configs/qwen2.5-32b.json

--wrapper says where base weights lie, and who averages gradients: "sharded" over the ranks (FSDP2),
"shard_base", the same by our function and under DistributedDataParallel, "replicated" on each with
sharded adapters (FSDP2), "ddp", or "alone", which averages nothing. Tokens are random, and weights
too, unless --model is a checkpoint's folder. Adapters are in fp32, as PEFT makes them.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.weights import Source, check_architecture
from fused_lora import Fusion, GraphedStep, fuse
from fused_lora.step.checkpoint import POLICIES, Checkpoint
from variants import BASES, BF16, NF4, TARGETS

from .sharded_model import SHARD_BASE, SHARDED, built_model, save_adapters

ON_GPU = torch.cuda.is_available()
GRAPH = "graph"
RUNS = ("plain", "fused", GRAPH)
SIZES = {"tokens": 4096, "batch-size": 1, "lora-rank": 16, "warm-up": 3, "steps": 10}
RANK_0_SPEAKS_S = 10.0  # how long the other ranks leave an error to rank 0


def shard_adapters(model: Any) -> Any:
    return fully_shard(model, ignored_params={p for p in model.parameters() if not p.requires_grad})


DDP = "ddp"
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    SHARDED: lambda model: model,  # by `built_model`
    SHARD_BASE: DistributedDataParallel,  # the base likewise
    "replicated": shard_adapters,
    DDP: DistributedDataParallel,
    "alone": lambda model: model,
}


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
        parser.add_argument(f"--{size}", type=int, default=usual, metavar="N",
                            help=f"(default: {usual})")  # fmt: skip
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
        raise ValueError("start it with torchrun --nproc-per-node N -m dev.measure.sharded")
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
