"""LoRA fine-tuning with TRL's SFTTrainer on packed chats: plain PEFT, then fused, in CUDA graphs.

    pip install -e ".[examples]"
    python examples/train_trl.py --model Qwen/Qwen2.5-3B-Instruct --data data/sft_train.jsonl

Prints tokens/s of both and saves the adapter. Needs a GPU, like TRL's own loss.
"""

import argparse
import gc
import os
import time
from typing import Any

try:
    import torch

    ON_GPU = torch.cuda.is_available()
    if not (ON_GPU or os.environ.get("TRITON_INTERPRET")):
        argparse.ArgumentParser().exit(2, "TRL's loss needs an NVIDIA GPU, and none is visible\n")
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from fused_lora import fuse, graph_steps
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[examples]"') from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="data/sft_train.jsonl")
    for size, usual in (("--warm-up", 5), ("--steps", 50), ("--batch-size", 8), ("--tokens", 512)):
        parser.add_argument(size, type=int, default=usual)
    parser.add_argument("--out", default="adapter")
    asked = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(asked.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    chats = load_dataset("json", data_files=asked.data, split="train")

    settings = SFTConfig(
        output_dir=f"{asked.out}/checkpoints",
        max_steps=asked.warm_up + asked.steps,
        per_device_train_batch_size=asked.batch_size,
        max_length=asked.tokens,
        packing=True,
        learning_rate=1e-4,
        bf16=ON_GPU,
        save_strategy="no",
        report_to=[],
    )

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == asked.warm_up:  # libraries have loaded, kernels compiled
                self.began = time.perf_counter()

    def train(is_fused: bool) -> None:
        gc.collect()  # the model before this one
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype)
        model.config.use_cache = False  # or packed chats see each other
        clock = Clock()
        lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")
        trainer: Any = SFTTrainer(
            model, settings, train_dataset=chats.select_columns(["messages"]), peft_config=lora,
            processing_class=tokenizer, callbacks=[clock],
        )  # fmt: skip
        name = "vanilla PEFT"
        if is_fused:
            print(done := fuse(trainer.model))  # what runs fused now, and why the rest does not
            name = "fused" if any(done.fused.values()) else "not fused"
            graph_steps(trainer)
        trainer.train()
        seconds = time.perf_counter() - clock.began
        trainer.save_model(asked.out)
        rows: Any = trainer.train_dataset
        tokens_per_row = sum(map(len, rows["input_ids"])) / len(rows)
        tokens = asked.steps * asked.batch_size * tokens_per_row
        print(f"{name}: {tokens / seconds:,.0f} tokens/s")

    train(is_fused=False)
    train(is_fused=True)


if __name__ == "__main__":
    main()
