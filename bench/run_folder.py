"""The folder of a run, named after its settings. Runs share one only if one can continue another.

    runs/nvidia-h200                                  the experiment
    runs/nvidia-h200-quick-batch-size-8               python lora_bench.py --quick --batch-size 8
    runs/nvidia-h200-my_chats-1a2b3c4d-documents      --data my_chats.jsonl --documents

Variants, lengths and rounds are not in the name: a run can grow by them.
"""

import argparse
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from batches import sha256_of
from bench import machine, options
from bench.options import HERE
from bench.weights import Source

LONGEST = 120  # characters; file systems take 255 bytes


def run_folder(asked: argparse.Namespace, source: Source, data: Path) -> Path:
    """Return the folder asked for, or the one of this GPU and these settings.

    Quick runs and runs in a published setting have their own next to the experiment's.
    """
    if asked.out is not None:
        return asked.out
    kind = ["quick"] if asked.quick else [f"{asked.gpus}-gpus"] if asked.gpus > 1 else []
    if asked.published:
        kind = ["published", asked.published.model]
    here = HERE / "rehearsal"
    if asked.device == "cuda":
        here = HERE / "runs" / machine.gpu_name().lower().replace(" ", "-")
    words = [re.sub(r"[^\w.+-]+", "-", word) for word in _settings(asked, source, data)]
    name = "-".join([here.name, *kind, *words])
    if len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return here.with_name(name)


def _settings(asked: argparse.Namespace, source: Source, data: Path) -> Iterator[str]:
    """Yield, in words, the settings that differ from the defaults and keep runs apart."""
    gpus = ["--gpus", str(asked.gpus)] if asked.gpus > 1 else []
    nothing = options.parse(["--quick"] if asked.quick else gpus, None)
    usual = options.with_defaults(nothing, asked.device, asked.published)
    if not asked.published and source.config != usual.model:
        yield _name_of(source)
    if data.stem != sha256_of(usual.data)[: len(data.stem)]:
        yield f"{Path(asked.data).stem}-{data.stem[:8]}"
    for name in ("padded", "documents", "dora"):
        if getattr(asked, name):
            yield name
    for name in ("base", "batch_size", "accumulate", "rank", "lora_dropout",
                 "interleave", "seed"):  # fmt: skip
        if (value := getattr(asked, name)) != getattr(usual, name):
            yield f"{options.flag(name)[2:]}-{value}"
    if set(asked.targets) != set(usual.targets):
        yield "+".join(sorted(set(asked.targets)))
    steps = asked.steps // asked.rounds
    if steps != usual.steps // usual.rounds:
        yield f"{steps}-steps-a-round"


def _name_of(source: Source) -> str:
    """Return a model's name, with a digest for the user's own folders and files."""
    if source.weights == "checkpoint" and Path(source.name).is_dir():
        digest = hashlib.sha256(source.name.encode()).hexdigest()[:6]
        return f"{source.folder.name}-{digest}"
    return source.label.replace("/", "--")  # no name on the hub has two hyphens
