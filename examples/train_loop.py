"""LoRA fine-tuning in your own loop: packed chats, accumulation, the step as a CUDA graph.

    pip install -e ".[examples]"
    python examples/train_loop.py --model Qwen/Qwen2.5-3B-Instruct --data data/sft_train.jsonl

Prints tokens/s of plain PEFT and fused. Without a GPU both run eagerly and nothing is fused.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

try:
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

    from fused_lora import GraphedStep, fill_row, fuse, pack
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[examples]"') from None

ACCUMULATED = 2  # batches an update
ON_GPU = torch.cuda.is_available()


def batches(asked: argparse.Namespace, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Pack whole chats into rows of one size, again and again: one graph takes all rows."""
    tokenizer: Any = AutoTokenizer.from_pretrained(asked.model)
    chats = load_dataset("json", data_files=asked.data, split="train")
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats["messages"]]
    budget = asked.batch_size * asked.tokens
    ids = [one[:budget] for one in tokenizer(texts)["input_ids"]]
    collate = DataCollatorWithFlattening()
    while True:
        for group in pack(map(len, ids), budget):
            row = fill_row(collate([{"input_ids": ids[i]} for i in group]), budget)
            yield {name: tensor.to(device) for name, tensor in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="data/sft_train.jsonl")
    for size, usual in (("--warm-up", 5), ("--steps", 50), ("--batch-size", 8), ("--tokens", 512)):
        parser.add_argument(size, type=int, default=usual)
    parser.add_argument("--out", default="adapter")
    asked = parser.parse_args()

    dtype, device = (torch.bfloat16, "cuda") if ON_GPU else (torch.float32, "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype)
    model.to(device)
    model.config.use_cache = False
    lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, capturable=ON_GPU)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.0, 2 * (asked.warm_up + asked.steps)
    )

    data = batches(asked, device)
    next(data)  # tokenizes everything

    def accumulate(**batch) -> None:
        (model(**batch).loss / ACCUMULATED).backward()

    def update(**batch) -> None:
        accumulate(**batch)
        optimizer.step()
        optimizer.zero_grad()

    def tokens_per_s(accumulate: Callable, update: Callable) -> float:
        for step in range(asked.warm_up + asked.steps):
            if step == asked.warm_up:  # libraries have loaded, kernels compiled, graphs captured
                began = time.perf_counter()
            accumulate(**next(data))
            update(**next(data))
            schedule.step()
        if ON_GPU:
            torch.cuda.synchronize()
        batch = asked.batch_size * asked.tokens
        return asked.steps * ACCUMULATED * batch / (time.perf_counter() - began)

    print(f"vanilla PEFT: {tokens_per_s(accumulate, update):,.0f} tokens/s")
    print(done := fuse(model))  # what runs fused now, and why the rest does not
    if ON_GPU:
        update = GraphedStep(model, optimizer, accumulation_steps=ACCUMULATED)  # type: ignore
        accumulate = update.accumulate  # type: ignore
    fused = tokens_per_s(accumulate, update)
    print(f"{'fused' if any(done.fused.values()) else 'not fused'}: {fused:,.0f} tokens/s")
    model.save_pretrained(asked.out)


if __name__ == "__main__":
    main()
