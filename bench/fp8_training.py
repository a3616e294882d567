"""Trainings in bf16 and in FP8 from the same start, a pair for each seed: held-out losses.

    python -m bench.fp8_training                            without a GPU a rehearsal
    python -m bench.fp8_training --model Qwen/Qwen3-0.6B    a checkpoint, as it is

Adapters of rank 32 on all seven projections are trained by the benchmark's own loop (`seeds.py`),
on base weights that were trained before, and on the same with outlier channels (`bases.py`).
Finished runs are kept, and the same command goes on; more --seeds are added.
"""

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from batches import Batch, load_tokenizer, make_batches, read_chats, sha256_of, tokenize
from bench import chats, machine
from bench.folders import locked
from bench.options import HERE, Parser, check_variant, flag, within
from bench.planning import check_model
from bench.records import Optimizer
from bench.terminal import console, progress_bar
from bench.training_records import Fp8Training, TrainingSettings, load_training, save_training
from bench.weights import Source, check_architecture, materialize, resolve
from variants import Lora, title_of

HELD_OUT_EVERY = 11  # chats: kinds of them come round in sixteens, every tenth would be eight kinds
HELD_OUT_BATCHES, HELD_OUT_WIDTH = 4, 4  # so many, each of so many training batches' rows
ON_GPU = {
    "model": HERE / "configs" / "qwen3-0.6b.json", "batch_size": 8, "seq_len": 512,
    "base_steps": 200, "steps": 300, "seeds": 5,
    "variants": ["fused_layer_graph_no_checkpointing", "fp8_layer_graph_no_checkpointing",
                 "fp8_lm_head_graph_no_checkpointing"],
}  # fmt: skip
REHEARSED = {
    "model": HERE / "configs" / "tiny.json", "batch_size": 2, "seq_len": 16,
    "base_steps": 20, "steps": 3, "seeds": 2,
    "variants": ["fused_layer_no_checkpointing", "fp8_layer_no_checkpointing"],
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    asked = parse_training(argv)
    path = asked.out / "fp8_training.json"
    if asked.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    # what deterministic sums want of cuBLAS (`bases.py`), read when CUDA is initialised
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        with locked(asked.out):
            source, data = checked(asked)
            training = go_on(path, begun(asked, source, data))
            try:
                train(asked, source, data, training, path)
            except KeyboardInterrupt:
                print(f"\nStopped; {path} has {len(training.runs)} runs, the same command goes on.")
                return 130
            except RuntimeError as error:
                print(f"fp8_training: {str(error).splitlines()[0]}", file=sys.stderr)
                return 1
    except (ValueError, OSError) as error:
        print(f"fp8_training: {error}", file=sys.stderr)
        return 2
    console.print(f"{path}: gzip it into docs/runs/GPU/, and lora_bench.py --plot-only draws it")
    return 0


def parse_training(argv: list[str] | None) -> argparse.Namespace:
    on_gpu = machine.has_gpu()
    folder = Path("runs", machine.gpu_name().lower().replace(" ", "-")) if on_gpu else "rehearsal"
    parser = Parser(
        prog="fp8_training", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    defaults = ON_GPU if on_gpu else REHEARSED
    add = parser.add_argument
    add("--model", help="architecture file, checkpoint folder or hub name")
    add("--variants", nargs="+", metavar="NAME", help="others are held against the first")
    for name in ("seeds", "steps", "batch_size", "base_steps"):
        add(flag(name), type=int, metavar="N", help=f"default: {defaults[name]}")
    add("--data", default=str(HERE / "data" / "sft_train.jsonl"), help="chats, as lora_bench.py")
    add("--cache", type=Path, default=HERE / ".cache")
    add("--out", type=Path, default=HERE / folder)
    parser.set_defaults(**defaults, device="cuda" if on_gpu else "cpu")
    return parser.parse_args(argv)


def checked(asked: argparse.Namespace) -> tuple[Source, Path]:
    """The base weights' source and the file of chats, if all that was asked for is right."""
    from bench.bases import check_family

    for name, least in (("seeds", 1), ("steps", 1), ("batch_size", 1), ("base_steps", 0)):
        within(flag(name), getattr(asked, name), least)
    for variant in asked.variants:
        check_variant(variant, asked.device)
    source = resolve(str(asked.model), asked.cache.resolve(), seed=0)
    data = chats.gather(asked.data, asked.cache)
    check_model(source, argparse.Namespace(rank=Lora().rank, seq_lens=asked.seq_len))
    check_architecture(source, Lora().targets)
    check_family(source)
    return source, data


def begun(asked: argparse.Namespace, source: Source, data: Path) -> Fp8Training:
    from bench.plan import LEARNING_RATE

    optimizer = Optimizer("AdamW", LEARNING_RATE, fused=asked.device == "cuda")
    settings = TrainingSettings(
        source.name, source.weights, asked.base_steps if source.config else 0, asked.steps,
        asked.batch_size, asked.seq_len, Lora(), optimizer, sha256_of(data),
    )  # fmt: skip
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Fp8Training(now, machine.environment(), settings, {}, [])


def go_on(path: Path, fresh: Fp8Training) -> Fp8Training:
    """The file's runs, if they are of the same settings and GPU."""
    if not path.exists():
        return fresh
    earlier = load_training(path)
    if (earlier.settings, earlier.environment.device) != (fresh.settings, fresh.environment.device):
        raise ValueError(f"{path} has runs of other settings or another GPU: give another --out")
    return earlier


class Parts(NamedTuple):
    """The batches that each part of the data gives."""

    of_base: list[Batch]
    trained_on: list[Batch]
    held_out: list[Batch]


def batches_of(source: Source, data: Path, settings: TrainingSettings, device: str) -> Parts:
    """The base is trained on the same chats as the adapters, in another order."""
    tokenized = tokenize(read_chats(data), load_tokenizer(source.tokenizer))
    rest = [one for i, one in enumerate(tokenized) if i % HELD_OUT_EVERY]
    rows, wide = settings.batch_size, settings.batch_size * HELD_OUT_WIDTH
    of_base = make_batches(rest, settings.seq_len, rows, max(1, settings.base_steps), seed=1)
    made = (
        of_base[: settings.base_steps],
        make_batches(rest, settings.seq_len, rows, settings.steps),
        make_batches(tokenized[::HELD_OUT_EVERY], settings.seq_len, wide, HELD_OUT_BATCHES),
    )
    return Parts(*([batch.to(device) for batch in part] for part in made))


def train(
    asked: argparse.Namespace, source: Source, data: Path, training: Fp8Training, path: Path
) -> None:
    """Do the runs that are missing, and write the file after each."""
    from bench.bases import checksum, make_bases
    from bench.seeds import train_seeds

    if asked.device == "cpu":
        from bench.interpreter import prepare_interpreter

        prepare_interpreter()
        console.print("No GPU: a rehearsal in Triton's interpreter, not a result.")
    settings, device = training.settings, asked.device
    batches = batches_of(source, data, settings, device)
    done = {(run.base, run.variant, run.seed) for run in training.runs}
    everything = settings.base_steps + 2 * len(asked.variants) * asked.seeds * settings.steps
    with progress_bar(everything) as (advance, say):
        say("base weights")
        materialize(source, 0, device)
        bases = make_bases(
            source, settings, batches.of_base, asked.cache, device, lambda: advance(1)
        )
        sums = {name: checksum(folder) for name, folder in bases.items()}
        if training.bases not in ({}, sums):
            raise RuntimeError(f"{path} has runs from other base weights: give another --out")
        training.bases = sums
        for base, folder in bases.items():
            for variant in asked.variants:
                seeds = [s for s in range(asked.seeds) if (base, variant, s) not in done]
                advance((asked.seeds - len(seeds)) * settings.steps)
                if not seeds:
                    continue
                say(f"{base}, {title_of(variant)}")
                for run in train_seeds(
                    base, folder, variant, seeds, settings, batches.trained_on, batches.held_out,
                    lambda _: advance(1),
                ):  # fmt: skip
                    training.runs.append(run)
                    save_training(path, training)
                    losses = " ".join(f"{one:.4f}" for one in run.held_out.values())
                    console.print(f"{base}, {title_of(variant)}, {run.seed}: {losses}")


if __name__ == "__main__":
    sys.exit(main())
