"""The share of a small adapter that each variant shows: its change of outputs, losses and rewards,
over the change in fp32.

    python -m dev.measure.small_adapters      without a GPU a rehearsal

Vanilla PEFT trains adapters from B = 0 for a few steps at small learning rates, on chats and with
DPO's loss on pairs. Every variant then runs forward in training mode on other chats, with B = 0 and
with each of these adapters. It ends with the tables of fused_lora/docs/small_adapters.md.
"""

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from batches import sha256_of
from bench import machine, processes
from bench.option_checks import check_variant
from bench.options import HERE, Parser, list_of_variants, why_unavailable
from bench.results import write_atomically
from bench.terminal import console
from bench.weights import resolve
from variants import IN_FP32, Lora, title_of

from .small_adapter_processes import (
    DPO_LR,
    PAIRS_A_STEP,
    TRAINER,
    Asked,
    run_variant,
    train_adapters,
)
from .small_adapter_records import (
    Seen,
    SmallAdapters,
    TrainedAdapter,
    tables,
)

ON_GPU: dict[str, Any] = {
    "model": HERE / "configs" / "qwen2.5-3b.json", "batches": 16, "rows": 8, "seq_len": 256,
    "pairs": 24, "rates": (1e-6, 1e-5, 1e-4), "steps": (1, 8, 64), "device": "cuda",
    "variants": (TRAINER, "fused_layer_no_checkpointing", "fp8_layer_no_checkpointing",
                 "fused_mlp_no_checkpointing", "full_unsloth_no_checkpointing",
                 "fused_all_no_checkpointing", "compiled_peft_no_checkpointing"),
}  # fmt: skip
REHEARSED: dict[str, Any] = {
    "model": HERE / "configs" / "tiny.json", "batches": 2, "rows": 2, "seq_len": 32, "pairs": 8,
    "rates": (1e-4,), "steps": (1, 2), "device": "cpu",
    "variants": (TRAINER, "fused_layer_no_checkpointing"),
}  # fmt: skip
DPO_STEPS = 4
DATA = HERE / "data" / "sft_train.jsonl"
SILENCE_LIMIT_S = 600  # a variant silent for longer hangs and is given up


def new_file(asked: Asked) -> SmallAdapters:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return SmallAdapters(
        now, machine.environment(), asked.source.label, asked.source.weights, Lora(), asked.batches,
        asked.rows * asked.seq_len, asked.pairs, asked.adapters, [], {},
        sha256_of(asked.data),
    )  # fmt: skip


def looked_at(asked: Asked, variant: str) -> tuple[str | None, list[Seen]]:
    """Run `run_variant` in a fresh process. Return its error, if any, and what it saw."""
    if error := why_unavailable(variant, asked.device):
        return error, []
    seen: list[Seen] = []
    ended = processes.run(
        run_variant, asked, variant, on_message=lambda sent: seen.append(sent["seen"]),
        silence_limit_s=SILENCE_LIMIT_S,
    )  # fmt: skip
    return ended.error and f"{ended.error}: {ended.output_tail}", seen


def run_all(asked: Asked, variants: tuple[str, ...], path: Path) -> None:
    """Train the adapters, run every variant on them, and write the file after each."""
    found = new_file(asked)
    ended = processes.run(
        train_adapters, asked, on_message=lambda sent: console.print(sent["doing"])
    )
    if ended.error:
        raise RuntimeError(f"training the adapters: {ended.error}\n{ended.output_tail}")
    for variant in (IN_FP32, *variants):
        began = time.monotonic()
        error, seen = looked_at(asked, variant)
        if error and variant == IN_FP32:
            raise RuntimeError(f"{title_of(variant)}: {error}")
        found.seen += seen
        if error:
            found.failed[variant] = error
        write_atomically(path, msgspec.json.encode(found) + b"\n")
        outcome = error.splitlines()[-1] if error else f"{time.monotonic() - began:.0f} s"
        console.print(f"{title_of(variant)}: {outcome}")
    console.print(tables(found), soft_wrap=True, markup=False)


def main(argv: list[str] | None = None) -> int:
    defaults = ON_GPU if machine.has_gpu() else REHEARSED
    parser = Parser(
        prog="small_adapters", description=__doc__, epilog=list_of_variants(), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", help="architecture file, checkpoint folder or hub name")
    parser.add_argument("--variants", nargs="+", metavar="NAME")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache")
    parser.add_argument("--out", type=Path, default=HERE / "runs" / "small-adapters")
    parser.set_defaults(**{name: defaults[name] for name in ("model", "variants")})
    given = parser.parse_args(argv)
    if defaults is REHEARSED:
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        console.print("No GPU: a rehearsal in Triton's interpreter, not a result.")
    try:
        for variant in given.variants:
            check_variant(variant, defaults["device"])
        source = resolve(str(given.model), given.cache.resolve(), seed=0)
        adapters = [
            TrainedAdapter(rate, n) for rate in defaults["rates"] for n in defaults["steps"]
        ]
        dpo_steps = min(DPO_STEPS, defaults["pairs"] // PAIRS_A_STEP)
        adapters += [TrainedAdapter(DPO_LR, n, is_dpo=True) for n in range(1, dpo_steps + 1)]
        sizes = {name: defaults[name] for name in ("device", "batches", "rows", "seq_len", "pairs")}
        given.out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as folder:
            asked = Asked(source, DATA, Path(folder), adapters=adapters, **sizes)
            run_all(asked, tuple(given.variants), given.out / "small_adapters.json")
    except RuntimeError as error:
        print(f"small_adapters: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"small_adapters: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
