"""From the command line to the plan of a run. All checks come first, in a locked folder."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from batches import load_tokenizer, sha256_of, token_shares
from bench import chats, machine, options
from bench import results as store
from bench.experiment_records import Experiment, Optimizer, Tokens
from bench.folders import check_writable, locked, remove_unfinished
from bench.option_checks import check_options
from bench.options import fill_in, variants_of
from bench.records import Run
from bench.run_folder import run_folder
from bench.weights import (
    Source,
    check_architecture,
    check_documents,
    projections,
    read_config,
    resolve,
)
from variants import TARGETS, Lora

if TYPE_CHECKING:
    from bench.plan import Plan


@contextmanager
def planned(arguments: argparse.Namespace, argv: list[str]) -> Iterator[tuple["Plan", Run, Path]]:
    """Give the plan, the run it continues and that run's file. The folder is locked meanwhile.

    Raises:
        ValueError: what is wrong and what to do, in one line. Nothing was written.
    """
    asked = fill_in(arguments)
    check_options(asked)
    source = resolve(str(asked.model), asked.cache.resolve(), asked.seed)
    check_writable("--cache", asked.cache)
    data = chats.gather(asked.data, asked.cache)
    check_model(source, asked)
    folder = run_folder(asked, source, data)
    with locked(folder):
        remove_unfinished(folder, asked.cache)
        plan = make_plan(asked, source, data)
        if not plan.is_prepared():
            check_architecture(source, plan.lora.targets)
        check_lengths(plan)
        if plan.documents:
            check_documents(source)
        rehearsal = plan.device == "cpu"
        fresh = store.new_run(
            recorded(argv), machine.environment(), planned_experiment(plan), rehearsal
        )
        path = folder / "results.json"
        run = store.continue_from(path, fresh)
        # the last check: wrong arguments are reported whoever else is on the GPU
        if others := options.others_on_gpu(plan.device, plan.allow_shared_gpu, plan.gpus):
            raise ValueError(others)
        yield plan, run, path


def make_plan(asked: argparse.Namespace, source: Source, data: Path) -> "Plan":
    from bench.plan import Plan  # imports torch, which takes seconds

    return Plan(
        source=source,
        data=data,
        cache=asked.cache.resolve(),
        lora=Lora(asked.rank, 2 * asked.rank, asked.lora_dropout,
                  targets=targets_of(source, asked.targets), dora=asked.dora),
        variants=variants_of(asked),
        seq_lens=tuple(sorted(set(asked.seq_lens))),
        batch_size=asked.batch_size,
        steps=asked.steps // asked.rounds,
        rounds=asked.rounds,
        padded=asked.padded,
        documents=asked.documents,
        seed=asked.seed,
        device=asked.device,
        interleave=asked.interleave,
        quick=asked.quick,
        cell_timeout_s=asked.cell_timeout,
        allow_shared_gpu=asked.allow_shared_gpu,
        accumulate=asked.accumulate,
        base=asked.base,
        published=asked.published,
        gpus=asked.gpus,
    )  # fmt: skip


def targets_of(source: Source, asked: list[str]) -> tuple[str, ...]:
    """Return the projections to adapt, in the model's order, or raise ValueError."""
    if set(asked) == set(TARGETS):
        return TARGETS
    there = projections(source)
    if unknown := [name for name in asked if name not in there]:
        raise ValueError(
            f"--targets {' '.join(unknown)}: {source.name} has none; give some of {' '.join(there)}"
        )
    return tuple(name for name in there if name in asked)


def check_model(source: Source, asked: argparse.Namespace) -> None:
    """Check the model's configuration against the tokenizer, --rank and --seq-lens.

    A token beyond the embedding's last row would crash the GPU instead of raising.
    """
    config = read_config(source)
    tokens = load_tokenizer(source.tokenizer).get_vocab_size()
    if (rows := config.get("vocab_size", tokens)) < tokens:
        raise ValueError(
            f"--model {source.name}: its vocab_size is {rows}, its tokenizer has {tokens} tokens; "
            "give a model with one row for each"
        )
    for name, size in (("rank", "hidden_size"), ("seq_lens", "max_position_embeddings")):
        asked_for = getattr(asked, name)
        given = asked_for if isinstance(asked_for, int) else max(asked_for)
        if given > (most := config.get(size, given)):
            raise ValueError(
                f"{options.flag(name)} {given}: the {size} of {source.name} is {most}; give no more"
            )


def check_lengths(plan: "Plan") -> None:
    """Raise ValueError for a length too short to reach an answer, where nothing is trained."""
    for seq_len in plan.seq_lens:
        if not plan.trains_at(seq_len):
            raise ValueError(
                f"--seq-lens {seq_len}: no row of --data reaches far enough into an answer to "
                "train every adapter; give more, or other --data"
            )


def recorded(argv: list[str]) -> list[str]:
    """Return the command line for results.json, without its folders: they are the user's own."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("--out", "--cache"):
            next(words, None)
        elif not word.startswith(("--out=", "--cache=")):
            kept.append(Path(word).name if not kept else word)
    return kept


def planned_experiment(plan: "Plan") -> Experiment:
    """Return the plan as results.json keeps it."""
    from bench.plan import LEARNING_RATE

    tokens = {}
    for seq_len in plan.seq_lens:
        shares = token_shares(plan.timed_batches_of_all(seq_len))
        tokens[seq_len] = Tokens(shares.padding, shares.labelled)
    return Experiment(
        model=plan.source.label,
        weights=plan.source.weights,
        dtype="bfloat16",
        batch_size=plan.batch_size,
        accumulate=plan.accumulate,
        seq_lens=list(plan.seq_lens),
        variants=list(plan.variants),
        rounds=plan.rounds,
        steps=plan.steps * plan.rounds,
        interleave=plan.interleave,
        gpus=plan.gpus,
        checkpointing="on",
        base=plan.base,
        padded=plan.padded,
        documents=plan.documents,
        lora=plan.lora,
        optimizer=Optimizer("AdamW", LEARNING_RATE, fused=plan.device == "cuda"),
        seed=plan.seed,
        data_sha256=sha256_of(plan.data),
        tokens=tokens,
    )
