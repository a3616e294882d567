"""Speed of TRL's trainers: plain PEFT, Unsloth, fused, and fused in CUDA graphs.

    python -m dev.measure.trainers --model configs/qwen2.5-3b.json

SFT packs chats into rows; "padded SFT", DPO and GRPO pad them. Weights are random, chats are ours,
and all runs see the same ones. Each computes its library's own loss, so memory differs by that too.
Steps are timed by the wall, for GRPO also without generation. In the first 40 a trainer captures a
graph for each of up to eight lengths. The other runs skip all but the last 10 of these, and are
timed on the same batches. --no-checkpointing keeps all activations. Plain PEFT a second time,
--runs "plain PEFT" fused "plain PEFT", shows the noise. Needs trl, and a GPU.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from batches import read_chats
from bench.options import HERE, Parser
from bench.weights import read_config, resolve
from models import build, lora_options, nf4_config
from report.table import thousands
from variants import BASES, BF16, NF4, WITHOUT, Lora

from .table import ON_GPU, add_sizes, draw_weights, print_rows, result_of

PLAIN, UNSLOTH, FUSED, GRAPHED = "plain PEFT", "Unsloth", "fused", "fused, in graphs"
RUNS = {
    "SFT": (PLAIN, UNSLOTH, FUSED, GRAPHED),
    "padded SFT": (PLAIN, UNSLOTH, FUSED, GRAPHED),
    "DPO": (PLAIN, FUSED, GRAPHED),
    "GRPO": (PLAIN, FUSED, GRAPHED),
}
SIZES = {"--warm-up": 40, "--steps": 20, "--batch-size": 4, "--tokens": 1024, "--completion": 128}
WITHOUT_GRAPHS = 10  # steps of the warm-up that a run without graphs takes
LORA = Lora(rank=32, alpha=64)
COLUMNS = (
    "trainer", "run", "ms a step", "ms without generation", "labelled tokens/s", "speedup",
    "peak GiB", "loss",
)  # fmt: skip


class Speed(NamedTuple):
    ms_per_step: float
    generation_ms: float  # of each step; 0 where a trainer generates nothing
    tokens_per_s: float  # those with a label; 0 where the trainer makes labels itself
    peak_gib: float  # reserved; 0 without a GPU
    loss: float  # the mean of the timed steps


def data_of(kind: str) -> list[dict[str, Any]]:
    """Return our chats as a trainer takes them. Rejected answers are those of the next chat."""
    chats = [
        [{"role": one.role, "content": one.content} for one in chat]
        for chat in read_chats(HERE / "data" / "sft_train.jsonl")
    ]
    if kind.endswith("SFT"):
        return [{"text": "\n".join(one["content"] for one in chat)} for chat in chats]
    if kind == "GRPO":
        return [{"prompt": chat[:-1]} for chat in chats]
    return [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": other[-1:]}
        for chat, other in zip(chats, [*chats[1:], chats[0]], strict=True)
    ]


def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward completions for the tokens that they do not repeat."""
    return [float(len({*one})) for one in completion_ids]


def model_of(run: str, asked: argparse.Namespace, checkpoint: Path) -> tuple[Any, Any]:
    """Return the model, and the adapters that the trainer is to add to it: Unsloth has its own."""
    if run == UNSLOTH:
        device = "cuda" if ON_GPU else "cpu"
        built = build(
            "full_unsloth" + ("" if asked.checkpointing else WITHOUT), checkpoint, LORA,
            asked.tokens, device, seed=0, base=asked.base,
        )  # fmt: skip
        with torch.no_grad():
            for name, parameter in built.model.named_parameters():
                if ".lora_B." in name:  # as a trainer begins
                    parameter.zero_()
        return built.model, None
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.bfloat16 if ON_GPU else torch.float32,
        device_map={"": 0} if ON_GPU else None,
        quantization_config=nf4_config() if asked.base == NF4 else None,
    )
    model.config.use_cache = False
    return model, LoraConfig(**lora_options(LORA))


def trainer_of(
    kind: str, run: str, asked: argparse.Namespace, checkpoint: Path, folder: str, clock: Any
) -> Any:
    model, adapters = model_of(run, asked, checkpoint)
    import trl  # after Unsloth, which patches it
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    given: dict[str, Any] = {"callbacks": [clock], "processing_class": tokenizer}
    settings = {
        "output_dir": folder, "max_steps": asked.warm_up + asked.steps, "report_to": [],
        "per_device_train_batch_size": asked.batch_size, "bf16": ON_GPU, "use_cpu": not ON_GPU,
        "gradient_checkpointing": asked.checkpointing, "save_strategy": "no", "logging_steps": 50,
        "learning_rate": 1e-5, "disable_tqdm": True,
        # as TRL has them: Unsloth changes these defaults
        "gradient_accumulation_steps": 1, "seed": 42, "weight_decay": 0.0, "warmup_steps": 0,
        "optim": "adamw_torch_fused" if ON_GPU else "adamw_torch",
    }  # fmt: skip
    if kind == "GRPO":
        settings |= {
            "num_generations": asked.batch_size, "max_completion_length": asked.completion,
            # at 64, 192, 320 ... positions plain PEFT's gradients are NaN on an H100: with a mask
            # cuDNN's are (PyTorch's issue 196678)
            "pad_to_multiple_of": 128,
        }  # fmt: skip
        given["reward_funcs"] = distinct_tokens
    elif kind == "DPO":
        settings |= {"max_length": asked.tokens, "truncation_mode": "keep_end"}
    else:
        settings |= {"max_length": asked.tokens, "packing": kind == "SFT"}
        settings |= {"padding_free": False} if kind == "padded SFT" else {}
    if adapters is not None:
        given["peft_config"] = adapters
    name = kind.split()[-1]
    return getattr(trl, f"{name}Trainer")(
        model, args=getattr(trl, f"{name}Config")(**settings),
        train_dataset=Dataset.from_list(data_of(kind)), **given,
    )  # fmt: skip


def measure(send: Any, kind: str, run: str, asked: argparse.Namespace, checkpoint: Path) -> None:
    """Train, and send what `fuse` reports, then the speed."""
    if run == UNSLOTH:
        import unsloth  # noqa: F401
    from transformers import TrainerCallback

    labels: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    generation_s: list[float] = []

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == asked.warm_up:
                synchronize()
                labels.clear()
                losses.clear()
                generation_s.clear()
                self.began = time.perf_counter()

    with TemporaryDirectory() as folder:
        clock = Clock()
        trainer = trainer_of(kind, run, asked, checkpoint, folder, clock)
        if run in (FUSED, GRAPHED):
            from fused_lora import Fusion, fuse, graph_steps

            policy = "offload" if run == FUSED else ""  # graph_steps chooses its own
            fusion = Fusion(
                layer=True, rms_norm=True, cross_entropy=True,
                checkpoint=policy if asked.checkpointing else "none",
            )  # fmt: skip
            send(str(fuse(trainer.model, fusion)))
            graphs = graph_steps(trainer) if run == GRAPHED else None
        step, first = trainer.training_step, asked.warm_up - WITHOUT_GRAPHS

        def counted_step(model: Any, inputs: Any, *others: Any, **options: Any) -> torch.Tensor:
            if run != GRAPHED and trainer.state.global_step < first:
                return torch.zeros((), device=trainer.args.device)
            if "labels" in inputs:
                labels.append(inputs["labels"])
            losses.append(step(model, inputs, *others, **options))
            return losses[-1]

        trainer.training_step = counted_step
        if kind == "GRPO":
            trainer._generate = timed(trainer._generate, generation_s)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        synchronize()
        seconds = time.perf_counter() - clock.began
        if run == GRAPHED:
            send(str(graphs))
    tokens = sum(int((label != -100).sum()) for label in labels)
    peak_gib = torch.cuda.max_memory_reserved() / 2**30 if ON_GPU else 0.0
    ms_per_step, generation_ms = (1e3 * one / asked.steps for one in (seconds, sum(generation_s)))
    loss = torch.stack(losses).mean().item()
    send(Speed(ms_per_step, generation_ms, tokens / seconds, peak_gib, loss))


def timed(function: Any, seconds: list[float]) -> Any:
    """Return the function. Each call adds how long it took, from an idle GPU to an idle GPU."""

    def call(*given: Any, **options: Any) -> Any:
        synchronize()
        began = time.perf_counter()
        result = function(*given, **options)
        synchronize()
        seconds.append(time.perf_counter() - began)
        return result

    return call


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def measured_rows(asked: argparse.Namespace, checkpoint: Path) -> Iterator[list[str]]:
    for kind in asked.kinds:
        plain = None
        for run in (one for one in asked.runs if one in RUNS[kind]):
            speed = result_of(Speed, measure, kind, run, asked, checkpoint)
            if isinstance(speed, str):
                yield [kind, run, speed]
                continue
            if run == PLAIN and plain is None:
                plain = speed
            rest_ms = speed.ms_per_step - speed.generation_ms if speed.generation_ms else None
            yield [
                kind, run, thousands(speed.ms_per_step), thousands(rest_ms) or "-",
                thousands(speed.tokens_per_s or None) or "-", speedup_of(speed, plain),
                f"{speed.peak_gib:.1f}", f"{speed.loss:.4f}",
            ]  # fmt: skip


def speedup_of(speed: Speed, plain: Speed | None) -> str:
    """Compare labelled tokens, because libraries may pack otherwise."""
    if plain is None:
        return "-"
    if plain.tokens_per_s:
        return f"{speed.tokens_per_s / plain.tokens_per_s:.2f}"
    return f"{plain.ms_per_step / speed.ms_per_step:.2f}"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="trainers", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    usual_model = "qwen2.5-3b.json" if ON_GPU else "tiny.json"
    parser.add_argument("--model", default=str(HERE / "configs" / usual_model),
                        help="(default: Qwen2.5-3B, or a tiny one without a GPU)")  # fmt: skip
    parser.add_argument("--kinds", nargs="+", choices=[*RUNS], default=[*RUNS])
    parser.add_argument("--runs", nargs="+", choices=RUNS["SFT"], default=RUNS["SFT"],
                        help="in this order, each compared with the first plain PEFT")  # fmt: skip
    parser.add_argument("--base", choices=BASES, default=BF16)
    parser.add_argument("--no-checkpointing", action="store_false", dest="checkpointing")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache")
    add_sizes(parser, SIZES)
    asked = parser.parse_args(argv)
    if not {run for kind in asked.kinds for run in RUNS[kind]} & {*asked.runs}:
        parser.error(f"{UNSLOTH} is timed in SFT and padded SFT: name one, or another run")
    try:
        source = resolve(asked.model, asked.cache.resolve(), seed=0)
        read_config(source)
    except ValueError as error:
        print(f"trainers: {error}", file=sys.stderr)
        return 2
    draw_weights([source])
    return print_rows(COLUMNS, measured_rows(asked, source.folder))


if __name__ == "__main__":
    sys.exit(main())
