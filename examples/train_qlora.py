"""QLoRA: LoRA on weights in 4 bits, first with plain PEFT, then fused with one call.

    pip install -e ".[examples,qlora]"
    python examples/train_qlora.py --model Qwen/Qwen2.5-7B-Instruct --memory-gib 16

Prints the peak of reserved memory and tokens/s of both, and saves the adapter. Without a GPU it
runs but fuses nothing.
"""

import argparse
import time
from typing import Any

try:
    import bitsandbytes  # noqa: F401
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from transformers import DataCollatorWithFlattening as Flattening

    from fused_lora import fill_row, fuse, pack
except ModuleNotFoundError as missing:
    line = 'pip install -e ".[examples,qlora]"'
    raise SystemExit(f"{missing.name} is not installed: {line}") from None

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def packed_rows(model: str, data: str, size: int) -> list[dict[str, torch.Tensor]]:
    """Pack whole chats into rows of one size."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    chats = load_dataset("json", data_files=data, split="train")
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats["messages"]]
    chats = [{"input_ids": one[:size]} for one in tokenizer(texts)["input_ids"]]
    groups = pack([len(chat["input_ids"]) for chat in chats], size)
    return [fill_row(Flattening()([chats[i] for i in group]), size) for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="data/sft_train.jsonl")
    for size, usual in (("--warm-up", 5), ("--steps", 50), ("--batch-size", 8), ("--tokens", 512)):
        parser.add_argument(size, type=int, default=usual)
    parser.add_argument("--memory-gib", type=float, help="leave the rest of the GPU's memory alone")
    parser.add_argument("--out", default="adapter")
    asked = parser.parse_args()
    if asked.memory_gib and ON_GPU:
        all_of_it = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(asked.memory_gib * 2**30 / all_of_it)

    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPE,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        asked.model, dtype=DTYPE, quantization_config=in_4_bits
    )
    model.config.use_cache = False
    # no prepare_model_for_kbit_training: it would make norms and activations fp32, in all layers
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.train().gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    rows = packed_rows(asked.model, asked.data, asked.batch_size * asked.tokens)

    def speed() -> str:
        if ON_GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for step in range(asked.warm_up + asked.steps):
            if step == asked.warm_up:  # libraries have loaded, kernels compiled
                began = time.perf_counter()
            row = {name: tensor.to(model.device) for name, tensor in rows[step % len(rows)].items()}
            with torch.autocast(model.device.type, DTYPE, enabled=ON_GPU):
                loss = model(**row).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")
        per_s = asked.steps * asked.batch_size * asked.tokens / (time.perf_counter() - began)
        return f"{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB, {per_s:,.0f} tokens/s"

    print(f"vanilla PEFT: {speed()}")
    print(done := fuse(model))  # what runs fused now, and why the rest does not
    print(f"{'fused' if any(done.fused.values()) else 'not fused'}: {speed()}")
    model.save_pretrained(asked.out)


if __name__ == "__main__":
    main()
