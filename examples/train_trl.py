"""LoRA fine-tuning with TRL's SFTTrainer: first plain PEFT, then fused with one call.

    pip install -e ".[examples]"
    python examples/train_trl.py --model Qwen/Qwen2.5-3B-Instruct --data data/sft_train.jsonl

Prints tokens/s of both, padding counted, and saves the adapter. With --packed whole chats share
rows, without padding. Needs a GPU, like TRL's own loss.
"""

import argparse
import time
from typing import Any

try:
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from fused_lora import fuse
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[examples]"') from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="data/sft_train.jsonl")
    for size, usual in (("--warm-up", 5), ("--steps", 50), ("--batch-size", 8), ("--tokens", 512)):
        parser.add_argument(size, type=int, default=usual)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--out", default="adapter")
    asked = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(asked.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    chats = load_dataset("json", data_files=asked.data, split="train")
    data = chats.select_columns(["messages"])
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype)
    model.config.use_cache = False  # or packed chats see each other
    model = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"))

    settings = SFTConfig(
        output_dir=f"{asked.out}/checkpoints",
        max_steps=asked.warm_up + asked.steps,
        per_device_train_batch_size=asked.batch_size,
        max_length=asked.tokens,
        packing=asked.packed,
        pad_to_multiple_of=None if asked.packed else asked.tokens,
        include_num_input_tokens_seen="all",
        learning_rate=1e-4,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=True,
        save_strategy="no",
        report_to=[],
    )

    class Clock(TrainerCallback):
        """Starts after the first steps, in which libraries load and kernels compile."""

        def on_step_end(self, args, state, control, **_):
            if state.global_step == asked.warm_up:
                self.began, self.seen = time.perf_counter(), state.num_input_tokens_seen

    def tokens_per_s() -> float:
        options: dict = {"train_dataset": data, "processing_class": tokenizer}
        clock = Clock()
        trainer = SFTTrainer(model, settings, callbacks=[clock], **options)
        trainer.train()
        seconds = time.perf_counter() - clock.began
        return (trainer.state.num_input_tokens_seen - clock.seen) / seconds

    plain = tokens_per_s()
    print(fuse(model))  # prints what runs fused now
    print(f"vanilla PEFT: {plain:,.0f} tokens/s; fused: {tokens_per_s():,.0f} tokens/s")
    model.save_pretrained(asked.out)


if __name__ == "__main__":
    main()
