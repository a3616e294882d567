"""Losses over many steps: do variants train alike? For runs of one round, each with a seed of its
own, in which every variant starts from the same adapters and trains on the same batches.

Rounding differs from variant to variant, and training carries it on: losses may come apart by
rounding, not drift apart. Where vanilla PEFT in fp32 is one of the variants, all others are held
against it, else against vanilla.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bench.records import Run
from report.looks import markdown_table
from variants import IN_FP32, variant_of

LAST = 25  # steps, which tell whether a difference still grows

HEADER = ["variant", "seed", "loss above that, %: mean", f"mean of the last {LAST} steps",
          "furthest away", "steps with a lower loss"]  # fmt: skip


def curves(run: Run) -> dict[str, list[float]]:
    """The losses of the first round at the longest length, by variant, first of the one that the
    others are held against; empty unless another variant has as many steps as that one."""
    found = {
        cell.variant: [loss for loss in cell.losses if loss is not None]
        for cell in run.cells_of(seq_len=run.experiment.seq_lens[-1], status="ok", round=1)
    }
    baselines = sorted(id for id in found if variant_of(id).baseline.id == id)
    first = IN_FP32 if IN_FP32 in found else next(iter(baselines), None)
    if first is None:
        return {}
    steps = len(found[first])
    kept = {v: losses for v, losses in found.items() if len(losses) == steps > 1}
    return {first: kept.pop(first), **kept} if len(kept) > 1 else {}


def percent_apart(run: Run) -> dict[str, list[float]]:
    """Return each other variant's distance from the first one's losses, in percent, by step."""
    if not (found := curves(run)):
        return {}
    (_, wanted), *others = found.items()
    return {
        variant: [100 * (a - b) / b for a, b in zip(losses, wanted, strict=True)]
        for variant, losses in others
    }


def losses_section(runs: Sequence[Run]) -> str:
    """Write a table of how far the losses come apart for each setting and what is held against, in
    Markdown: a row a variant and seed."""
    tables: dict[str, list[tuple[str, int, list[float]]]] = {}
    for run in runs:
        for variant, own in percent_apart(run).items():
            row = (variant, run.experiment.seed, own)
            tables.setdefault(_setting(run), []).append(row)
    blocks = [f"**{words}:**\n\n{_table(rows)}" for words, rows in tables.items()]
    return "\n\n".join(blocks) or "Not measured yet."


def _setting(run: Run) -> str:
    experiment, device = run.experiment, run.environment.device
    shape = f"{experiment.batch_size} rows of {experiment.seq_lens[-1]} tokens a step"
    return f"Held against {held_against(run)}, {shape}, {device}"


def _table(rows: list[tuple[str, int, list[float]]]) -> str:
    lines = [
        [variant_of(variant).plain_title, str(seed), f"{fmean(own):+.3f}",
         f"{fmean(own[-LAST:]):+.3f}", f"{max(own, key=abs):+.3f}",
         f"{sum(x < 0 for x in own)} of {len(own)}"]
        for variant, seed, own in sorted(rows)
    ]  # fmt: skip
    return markdown_table(HEADER, lines)


def held_against(run: Run) -> str:
    """The title of the variant that the others are held against, short of its checkpointing."""
    return variant_of(next(iter(curves(run)))).plain_title
