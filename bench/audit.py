"""Checks after timing: did the timed steps do the work their times stand for?

Each check returns one line that says what is wrong, or None. The gate in parity.py finds a wrong
model before it is timed. These find a right model whose timed steps cannot be believed.
"""

import time
from math import inf, isfinite, isnan
from statistics import median

import torch

from batches import Batch
from bench.records import Cell, Run
from trainer import Timings, Trainer
from variants import counterpart, variant_of

# A step's host time may exceed its GPU time by what synchronising and reading the loss take.
WALL_SHARE = 1.05
WALL_MS = 1.0
QUIET_MS = 20.0  # after a step, in which nothing may work

# As they are before a variant's library is imported.
TIMEKEEPERS = (
    ("time.perf_counter", time, "perf_counter"),
    ("torch.cuda.synchronize", torch.cuda, "synchronize"),
    ("torch.cuda.Event", torch.cuda, "Event"),
    ("torch.cuda.Event.record", torch.cuda.Event, "record"),
    ("torch.cuda.Event.elapsed_time", torch.cuda.Event, "elapsed_time"),
)
ORIGINALS = [getattr(owner, name) for _, owner, name in TIMEKEEPERS]

# All variants train on the same batches from the same start. On an H200 their losses stay within
# 0.05% of vanilla's for 25 steps and fall by about 1% a step. Later steps are not judged: training
# amplifies differences in rounding.
LOSS_SHARE = 0.0025
LOSS_STEPS = 25


def hidden_time(timings: Timings, on_gpu: bool = True) -> str | None:
    """Report time that passed in the steps but outside their marks: sleep, or another stream.

    A busy host may lose time in fewer than half of the steps. So we compare each step with its own
    marks, and the median decides. A rehearsal has few steps, and its times are no result: without
    a GPU only time that every step hides is reported.
    """
    hidden = [
        wall_ms - (WALL_SHARE * step_ms + WALL_MS)
        for wall_ms, step_ms in zip(timings.wall_ms, timings.step_ms, strict=True)
    ]
    if (median(hidden) if on_gpu else min(hidden)) <= 0:
        return None
    wall_ms, step_ms = median(timings.wall_ms), median(timings.step_ms)
    return (
        f"a step took {wall_ms:.1f} ms by the wall and {step_ms:.1f} ms between its marks: "
        "the rest was spent where the marks do not see it"
    )


def replaced_timekeeper() -> str | None:
    """Report a function that tells the time and is not what it was before the variant was built."""
    for (title, owner, name), original in zip(TIMEKEEPERS, ORIGINALS, strict=True):
        if getattr(owner, name) is not original:
            return f"{title} was replaced while the variant was built or timed: no time counts"
    return None


def step_again(trainer: Trainer, batches: list[Batch], timings: Timings) -> str | None:
    """Train on the first timed batch once more. Report a loss that all the steps since have not
    changed, and work that goes on after the step: no mark sees what a thread does then."""
    _, loss = trainer.step(batches[: trainer.accumulate])
    trainer.clock.synchronize()
    busy_ms = trainer.clock.busy_ms(QUIET_MS)
    if loss.item() == timings.losses[0]:
        return (
            f"the first batch has exactly the loss {timings.losses[0]} of before training: its "
            "result was kept and not computed"
        )
    if busy_ms > (WALL_SHARE - 1) * QUIET_MS + WALL_MS:
        return (
            f"the step still worked for {busy_ms:.1f} of the {QUIET_MS:.0f} ms after its last mark"
        )
    return None


def skipped_updates(timings: Timings) -> str | None:
    """Report optimizer steps that were left out, or adapters that none of them changed."""
    steps = len(timings.step_ms)
    if timings.optimizer_steps != steps:
        return f"the optimizer took {timings.optimizer_steps} of {steps} timed steps"
    if timings.unmoved_adapters:
        return f"{timings.unmoved_adapters} adapter matrices are what they were before training"
    return None


def changed_batches(timings: Timings) -> str | None:
    """Report batches that a step wrote to: later steps then train on something else."""
    if timings.changed_batches:
        return f"{timings.changed_batches} batches were changed by the steps that trained on them"
    return None


def diverged(timings: Timings) -> str | None:
    """Report a loss that is not finite: nothing was trained from there on."""
    for step, loss in enumerate(timings.losses, start=1):
        if not isfinite(loss):
            return f"the loss of step {step} is {loss}"
    return None


def loss_gap(losses: list[float | None], baseline: list[float | None]) -> float:
    """Return the largest relative distance of a loss from the baseline's, in the first LOSS_STEPS.

    A loss that is not finite (None in results.json) is infinitely far.

    Raises:
        ValueError: the runs have different numbers of steps.
    """
    gaps = [
        abs(a - b) / abs(b) if a is not None and b is not None else inf
        for a, b in zip(losses, baseline, strict=True)
    ][:LOSS_STEPS]
    return max((inf if isnan(gap) else gap for gap in gaps), default=0.0)


def check_floor(run: Run, cell: Cell) -> None:
    """Fail a cell whose steps beat the floor of their precision and tokens."""
    floor = run.floor_of(cell.variant, cell.seq_len)
    floor_ms = run.ms_by_round(floor).get(cell.round)
    if cell.status == "ok" and floor_ms and median(cell.step_ms) < floor_ms:
        cell.status = "error"
        cell.error = (
            f"a step took {median(cell.step_ms):.1f} ms, less than the {floor_ms:.1f} ms of its "
            "frozen matmuls, attention and lm_head alone: it cannot have done them all"
        )


def check_losses(run: Run, cell: Cell) -> None:
    """Compare a new cell's losses with its baseline's.

    A new baseline also judges the cells that had none before it. Checkpointing changes no loss. So
    if the baseline has no time, its twin with or without checkpointing stands in. With dropout we
    compare nothing: each library draws different masks.
    """
    if run.experiment.lora.dropout:
        return
    if cell.variant == variant_of(cell.variant).baseline.id:
        held = [other for other in run.cells if other.loss_gap is None] + [cell]
        baselines = [*run.cells, cell]
    else:
        held, baselines = [cell], run.cells
    for other in held:
        own = variant_of(other.variant).baseline
        for vanilla in (own, counterpart(own.id, not own.checkpoints)):
            wanted = (vanilla.id, other.seq_len, "ok")
            found = [
                baseline
                for baseline in baselines
                if (baseline.variant, baseline.seq_len, baseline.status) == wanted
                and baseline is not other
            ]
            if found and other.status == "ok":
                _judge_losses(other, found[0])
                break


def _judge_losses(cell: Cell, baseline: Cell) -> None:
    """Fail a cell whose losses leave vanilla's on the same batches: it did other work."""
    gap = cell.loss_gap = loss_gap(cell.losses, baseline.losses)
    if not gap <= LOSS_SHARE:
        cell.status = "parity_failed"
        cell.error = f"its losses leave vanilla PEFT's by {gap:.2%} in the timed steps"


def ran_out_of_memory(allocator_failures: int, error: str) -> str | None:
    """Doubt a claim of "out of memory" if the allocator has counted no failure."""
    if allocator_failures:
        return None
    return f"it said that memory ran out, but the allocator never failed: {error}"
