"""Losses over many steps: do variants train alike? For runs of one round, each with a seed of its
own, in which every variant starts from the same adapters and trains on the same batches.

Rounding differs from variant to variant, and training carries it on: losses may come apart by
rounding, not drift apart. Where plain PEFT in fp32 is one of the variants, all others are held
against it, else against vanilla.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bench.records import Run
from report.looks import markdown_table
from variants import IN_FP32, title_of, variant_of

HEADER = ["variant", "held against", "seed", "% away, mean", "at most", "steps below"]


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
    """Write a table of how far the losses come apart, in Markdown: a row a variant and seed."""
    apart = [(run, variant, own) for run in runs for variant, own in percent_apart(run).items()]
    lines = [
        [title_of(variant), held_against(run), str(run.experiment.seed), f"{fmean(own):+.3f}",
         f"{max(own, key=abs):+.3f}", f"{sum(x < 0 for x in own)} of {len(own)}"]
        for run, variant, own in sorted(apart, key=lambda one: (one[1], one[0].experiment.seed))
    ]  # fmt: skip
    return markdown_table(HEADER, lines) if lines else "Not measured yet."


def held_against(run: Run) -> str:
    """The title of the variant that the others are held against, short of its checkpointing."""
    return variant_of(next(iter(curves(run)))).plain_title
