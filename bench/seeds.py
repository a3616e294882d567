"""Trainings of one variant from one base, a seed after the other, with one model and one graph.

A seed is the adapters' start, with B = 0 as PEFT has it, and the order of the batches, which are
the same ones for all. Between seeds the loop puts adapters and optimizer back (`trainer.py`).

Held-out losses are those of vanilla PEFT in bf16 with the adapters, as most are used: that of a
variant in FP8 is larger for what its own forward loses.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import models
from batches import Batch
from bench import audit
from bench.training_records import Trained, TrainingSettings
from models import Built
from trainer import MAX_WARMUP_STEPS, CudaClock, Trainer, WallClock

PLAIN = "vanilla_peft_no_checkpointing"
LOOKS_AT_HELD_OUT = 6  # in a run, evenly spread, beside the one at its start
SAME_START = 1e-4  # relative: B = 0 leaves the base's own loss, whatever A is


def train_seeds(
    base: str, folder: Path, variant: str, seeds: Sequence[int], settings: TrainingSettings,
    batches: Sequence[Batch], held_out: Sequence[Batch], on_step: Callable[[int], None],
) -> Iterator[Trained]:  # fmt: skip
    """Train on all batches for each seed, from the base weights in `folder`.

    Raises:
        RuntimeError: a run did not do what it should, or began with another loss than the first.
    """
    gc.collect()  # the model of an earlier call is free by now
    device = batches[0].input_ids.device.type
    if device == "cuda":
        torch.cuda.empty_cache()
    built, plain = (
        models.build(one, folder, settings.lora, settings.seq_len, True, device, seed=0)
        for one in (variant, PLAIN)
    )
    clock, warmup = (CudaClock(), MAX_WARMUP_STEPS) if device == "cuda" else (WallClock(), 1)
    trainer = Trainer(
        built.model, built.autocast, clock, settings.optimizer.lr, warmup, built.graph
    )
    steps, start = len(batches), None
    for seed in seeds:
        models.set_adapters(built.model, seed)
        _set_B_to_zero(built.model)
        found: dict[int, float | None] = {}

        def look(done: int, found: dict[int, float | None] = found) -> None:
            if done % max(1, steps // LOOKS_AT_HELD_OUT) == 0:
                found[done] = held_out_loss(plain, built.model, held_out)

        timings = trainer.run(random.Random(seed).sample(batches, steps), steps, on_step, look)
        found[steps] = held_out_loss(plain, built.model, held_out)
        began = found[0] or 0.0
        start = start or began
        problem = audit.skipped_updates(timings) or audit.changed_batches(timings)
        if abs(began - start) > SAME_START * start:
            problem = f"it began with a held-out loss of {began:.4f}, another with {start:.4f}"
        if problem:
            raise RuntimeError(f"{base}, {variant}, seed {seed}: {problem}")
        yield Trained(base, variant, seed, list(timings.losses), found)


@torch.no_grad()
def _set_B_to_zero(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.zero_()


@torch.no_grad()
def held_out_loss(plain: Built, trained: torch.nn.Module, batches: Sequence[Batch]) -> float:
    """Return the mean loss of all labelled tokens of `plain` with the adapters of `trained`."""
    adapters = dict(trained.named_parameters())
    for name, parameter in plain.model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(adapters[name])
    with plain.autocast():
        sums = [plain.model(**one.inputs()).loss.item() * one.labelled for one in batches]
    return sum(sums) / sum(batch.labelled for batch in batches)
