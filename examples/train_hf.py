"""LoRA fine-tuning with transformers' Trainer: first plain PEFT, then fused with one call.

    pip install -e ".[examples]"
    python examples/train_hf.py --model Qwen/Qwen2.5-3B-Instruct --data data/sft_train.jsonl

Prints tokens/s of both and saves the adapter. Without a GPU it runs but fuses nothing. With
--graphs the fused decoder runs as CUDA graphs, with one more call, and neither run checkpoints.
"""

import argparse
import time
from typing import Any

try:
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from fused_lora import fuse, graph_steps
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[examples]"') from None

ON_GPU = torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="data/sft_train.jsonl")
    for size, usual in (("--warm-up", 5), ("--steps", 50), ("--batch-size", 8), ("--tokens", 512)):
        parser.add_argument(size, type=int, default=usual)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--out", default="adapter")
    asked = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(asked.model, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    chats = load_dataset("json", data_files=asked.data, split="train")

    def tokenize(chat):
        text = tokenizer.apply_chat_template(chat["messages"], tokenize=False)
        row = tokenizer(text, truncation=True, padding="max_length", max_length=asked.tokens)
        ids, labelled = row["input_ids"], row["attention_mask"]
        labels = [token if one else -100 for token, one in zip(ids, labelled, strict=True)]
        return {"input_ids": ids, "labels": labels}  # no mask: tokens never see padding after them

    data = chats.map(tokenize, remove_columns=chats.column_names)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype)
    model.config.use_cache = False
    model = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"))

    settings = TrainingArguments(
        f"{asked.out}/checkpoints", max_steps=asked.warm_up + asked.steps, save_strategy="no",
        per_device_train_batch_size=asked.batch_size, learning_rate=1e-4, bf16=ON_GPU, report_to=[],
        gradient_checkpointing=not asked.graphs,
    )  # fmt: skip

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == asked.warm_up:  # libraries have loaded, kernels compiled
                self.began = time.perf_counter()

    def tokens_per_s(in_graphs: bool) -> float:
        clock = Clock()
        trainer = Trainer(model, settings, train_dataset=data, callbacks=[clock])
        if in_graphs:
            graph_steps(trainer)
        trainer.train()
        return asked.steps * asked.batch_size * asked.tokens / (time.perf_counter() - clock.began)

    print(f"vanilla PEFT: {tokens_per_s(in_graphs=False):,.0f} tokens/s")
    print(done := fuse(model))  # what runs fused now, and why the rest does not
    fused = tokens_per_s(in_graphs=asked.graphs)
    print(f"{'fused' if any(done.fused.values()) else 'not fused'}: {fused:,.0f} tokens/s")
    model.save_pretrained(asked.out)


if __name__ == "__main__":
    main()
