"""Speed of training on several GPUs, and of a base model larger than one: plain PEFT and fused.

    torchrun --nproc-per-node 8 -m bench.sharded --model configs/qwen2.5-32b.json --tokens 4096

--base says where base weights lie, and who averages gradients: "sharded" over the ranks (FSDP2),
"replicated" on each with sharded adapters (FSDP2), "ddp", or "alone", which averages nothing.
Weights and tokens are random. No rank ever holds a sharded model whole.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fused_lora import Fusion, fuse
from fused_lora.step.checkpoint import POLICIES

ON_GPU = torch.cuda.is_available()
RUNS = ("plain", "fused")


def shard(model: Any) -> Any:
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def shard_adapters(model: Any) -> Any:
    return fully_shard(model, ignored_params={p for p in model.parameters() if not p.requires_grad})


BASES: dict[str, Callable[[Any], Any]] = {
    "sharded": shard,
    "replicated": shard_adapters,
    "ddp": DistributedDataParallel,
    "alone": lambda model: model,
}


def model_without_memory(config: str, lora_rank: int) -> Any:
    """Return a PEFT model whose parameters are shapes alone."""
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.bfloat16 if ON_GPU else torch.float32
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config), dtype=dtype
        )
        model.config.use_cache = False
        lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
        return get_peft_model(model, lora, autocast_adapter_dtype=False).train()


@torch.no_grad()
def draw_weights(model: Any, device: torch.device) -> None:
    """Give every parameter memory on the device, of this rank's part alone, and random values."""
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for name, parameter in model.named_parameters():
        values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if "norm" in name:
            values.fill_(1.0)
        elif "lora_B" in name or parameter.ndim == 1:
            values.zero_()
        else:
            values.normal_(0.0, 0.02)


def report_speed(
    name: str, model: Any, asked: argparse.Namespace, device: torch.device
) -> list[float]:
    """Train, and print tokens/s a GPU and peak memory. Return this rank's losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    vocabulary = (model.module if asked.base == "ddp" else model).config.vocab_size
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = asked.batch_size, asked.tokens
    losses, seconds = [], 0.0
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    for step in range(asked.warm_up + asked.steps):
        if step == asked.warm_up:
            seconds = -synchronized_s()
        tokens = torch.randint(vocabulary, shape, generator=generator, device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    seconds += synchronized_s()
    found = [loss.item() for loss in losses]
    if dist.get_rank() == 0:
        tokens_per_s = asked.steps * asked.batch_size * asked.tokens / seconds
        peak_gib = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
        print(
            f"{name}, {asked.base}: {tokens_per_s:,.0f} tokens/s a GPU, peak {peak_gib:.1f} GiB, "
            f"loss {found[0]:.4f} to {found[-1]:.4f}",
            flush=True,
        )
    return found


def synchronized_s() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a config.json")
    parser.add_argument("--base", choices=BASES, default="sharded")
    parser.add_argument("--checkpoint", choices=POLICIES, default="full")
    parser.add_argument("--checkpoint-gib", type=float, help="for selective")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    for size, usual in (
        ("tokens", 4096), ("batch-size", 1), ("lora-rank", 16), ("warm-up", 3), ("steps", 10)
    ):  # fmt: skip
        parser.add_argument(f"--{size}", type=int, default=usual)
    asked = parser.parse_args(arguments)
    if not Path(asked.model).exists():
        parser.exit(2, f"--model {asked.model}: no such file; give one of configs/*.json\n")
    if "LOCAL_RANK" not in os.environ:
        parser.exit(2, "start it with torchrun --nproc-per-node N -m bench.sharded\n")
    return asked


def train_each(asked: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Train a new model in each run, from the same weights. Return the losses of each."""
    fusion = Fusion(
        layer=True, rms_norm=True, cross_entropy=True, checkpoint=asked.checkpoint,
        checkpoint_gib=asked.checkpoint_gib,
    )  # fmt: skip
    losses = {}
    for run in asked.runs:
        gc.collect()  # the model before this one
        torch.manual_seed(dist.get_rank() if asked.base == "sharded" else 0)
        model = model_without_memory(asked.model, asked.lora_rank)
        if run == "plain" and asked.checkpoint != "none":
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        if asked.base == "sharded":
            shard(model)
        draw_weights(model, device)
        if run == "fused" and (done := fuse(model, fusion)) and dist.get_rank() == 0:
            print(done)
        wrapped = model if asked.base == "sharded" else BASES[asked.base](model)
        losses[run] = report_speed(run, wrapped, asked, device)
        del model, wrapped
    return losses


def main() -> None:
    asked = parsed()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    train_each(asked, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
