"""Speed of TRL's trainers: plain PEFT, fused, and fused in CUDA graphs.

    python -m bench.trainers --model configs/qwen2.5-3b.json      SFT, DPO and GRPO

Weights are random, chats are ours, and all three runs see the same batches. Steps are timed by the
wall, generation included. --no-checkpointing keeps all activations. Needs trl, and a GPU.
"""

import argparse
import gc
import sys
import time
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from batches import read_chats
from bench.options import HERE, Parser
from fused_lora import Fusion, fuse, graph_steps

RUNS = ("plain PEFT", "fused", "fused, in graphs")
KINDS = ("SFT", "DPO", "GRPO")


class Speed(NamedTuple):
    ms_per_step: float
    peak_gib: float  # reserved; 0 without a GPU
    loss: float  # the mean of all steps


def data_of(kind: str) -> list[dict[str, Any]]:
    """Return our chats as a trainer takes them. Rejected answers are those of the next chat."""
    chats = [
        [{"role": one.role, "content": one.content} for one in chat]
        for chat in read_chats(HERE / "data" / "sft_train.jsonl")
    ]
    if kind == "SFT":
        return [{"messages": chat} for chat in chats]
    if kind == "GRPO":
        return [{"prompt": chat[:-1]} for chat in chats]
    return [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": other[-1:]}
        for chat, other in zip(chats, [*chats[1:], chats[0]], strict=True)
    ]


def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward completions for the tokens that they do not repeat."""
    return [float(len({*one})) for one in completion_ids]


def trainer_of(kind: str, asked: argparse.Namespace, folder: str, clock: Any) -> Any:
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(asked.model),
            dtype=torch.bfloat16 if on_gpu else torch.float32,
        )
    model.config.use_cache = False
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "data" / "tokenizer.json"))
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    given: dict[str, Any] = {"callbacks": [clock], "processing_class": tokenizer}
    settings = {
        "output_dir": folder, "max_steps": asked.warm_up + asked.steps, "report_to": [],
        "per_device_train_batch_size": asked.batch_size, "bf16": on_gpu, "use_cpu": not on_gpu,
        "gradient_checkpointing": asked.checkpointing, "save_strategy": "no", "logging_steps": 50,
        "learning_rate": 1e-5, "disable_tqdm": True,
    }  # fmt: skip
    if kind == "GRPO":
        settings |= {"num_generations": asked.batch_size, "pad_to_multiple_of": 64,
                     "max_completion_length": asked.completion}  # fmt: skip
        given["reward_funcs"] = distinct_tokens
    elif kind == "DPO":
        settings |= {"max_length": asked.tokens, "pad_to_multiple_of": asked.tokens,
                     "truncation_mode": "keep_end"}  # fmt: skip
    else:
        settings |= {"max_length": asked.tokens, "packing": True}
    return getattr(trl, f"{kind}Trainer")(
        model, args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=Dataset.from_list(data_of(kind)),
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"), **given,
    )  # fmt: skip


def measured(kind: str, run: str, asked: argparse.Namespace) -> Speed:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == asked.warm_up:
                synchronize()
                self.began = time.perf_counter()

    gc.collect()  # the model before this one
    torch.cuda.empty_cache()
    with TemporaryDirectory() as folder:
        clock = Clock()
        trainer = trainer_of(kind, asked, folder, clock)
        if run != RUNS[0]:
            policy = "full" if asked.checkpointing else "none"
            fusion = Fusion(layer=True, rms_norm=True, cross_entropy=True, checkpoint=policy)
            print(fuse(trainer.model, fusion))
        if run == RUNS[2]:
            graph_steps(trainer)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        loss = trainer.train().training_loss
        synchronize()
    seconds = time.perf_counter() - clock.began
    return Speed(1e3 * seconds / asked.steps, torch.cuda.max_memory_reserved() / 2**30, loss)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="trainers", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--model", default=str(HERE / "configs" / "qwen2.5-3b.json"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--no-checkpointing", action="store_false", dest="checkpointing")
    for flag, usual in (("--warm-up", 5), ("--steps", 20), ("--batch-size", 4), ("--tokens", 1024),
                        ("--completion", 128)):  # fmt: skip
        parser.add_argument(flag, type=int, default=usual)
    asked = parser.parse_args(argv)
    rows = ["| trainer | run | ms a step | speedup | peak GiB | loss |", "| --- " * 6 + "|"]
    for kind in asked.kinds:
        speeds = {run: measured(kind, run, asked) for run in RUNS}
        for run, (ms, gib, loss) in speeds.items():
            speedup = speeds[RUNS[0]].ms_per_step / ms
            rows.append(f"| {kind} | {run} | {ms:,.0f} | {speedup:.2f} | {gib:.1f} | {loss:.4f} |")
    print(*rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
