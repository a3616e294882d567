"""LoRA fine-tuning on several GPUs: each packs its own chats, and gradients are averaged.

    pip install -e ".[examples]"
    torchrun --nproc-per-node 2 examples/train_ddp.py --model Qwen/Qwen2.5-3B-Instruct

Prints tokens/s of all GPUs, for plain PEFT under DistributedDataParallel and fused in CUDA graphs.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

    from fused_lora import GraphedStep, fill_row, fuse, pack, shard_base
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[examples]"') from None

ON_GPU = torch.cuda.is_available()
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def packed_share(asked: argparse.Namespace, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Pack this rank's share of the chats into rows of one size, again and again."""
    tokenizer: Any = AutoTokenizer.from_pretrained(asked.model)
    chats = load_dataset("json", data_files=asked.data, split="train").shard(RANKS, RANK)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats["messages"]]
    budget = asked.batch_size * asked.tokens
    ids = [one[:budget] for one in tokenizer(texts)["input_ids"]]
    while True:
        for group in pack(map(len, ids), budget):
            row = DataCollatorWithFlattening()([{"input_ids": ids[i]} for i in group])
            yield {name: one.to(device) for name, one in fill_row(row, budget).items()}


def eager_step(model: Any, optimizer: torch.optim.Optimizer) -> Callable:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)

    def update(**batch) -> None:
        wrapped(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="data/sft_train.jsonl")
    for size, usual in (("--warm-up", 5), ("--steps", 50), ("--batch-size", 8), ("--tokens", 512)):
        parser.add_argument(size, type=int, default=usual)
    parser.add_argument("--shard-base", action="store_true", help="for a large base model")
    parser.add_argument("--out", default="adapter")
    asked = parser.parse_args()

    dtype, device = (torch.bfloat16, "cuda") if ON_GPU else (torch.float32, "cpu")
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    torch.manual_seed(RANK)  # for dropout; the weights will be those of rank 0
    model: Any = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype, use_cache=False)
    lora = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, target_modules="all-linear")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    if asked.shard_base:
        shard_base(model)  # on the CPU, as it may not fit on a GPU
    trained = [p for p in model.to(device).parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, capturable=ON_GPU)
    data = packed_share(asked, device)

    def tokens_per_s(update: Callable) -> float:
        for step in range(asked.warm_up + asked.steps):
            if step == asked.warm_up:  # libraries have loaded, kernels compiled, graphs captured
                began = time.perf_counter()
            update(**next(data))
        dist.barrier()
        return RANKS * asked.batch_size * asked.tokens * asked.steps / (time.perf_counter() - began)

    plain = tokens_per_s(eager_step(model, optimizer))
    done = fuse(model)
    fused = tokens_per_s((GraphedStep if ON_GPU else eager_step)(model, optimizer))
    if RANK == 0:
        print(f"vanilla PEFT: {plain:,.0f} tokens/s")
        print(done)  # what runs fused now, and why the rest does not
        print(f"{'fused' if any(done.fused.values()) else 'not fused'}: {fused:,.0f} tokens/s")
        model.save_pretrained(asked.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
