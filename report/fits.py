"""The fastest variants that fit a GPU's memory, from a run alone.

Memory is the most that torch reserved with a large card to itself. A smaller card may do with a
little less, but it needs at least the most that was allocated.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from bench.records import Run
from report.statistics import speedups
from report.table import markdown_table, number
from report.wording import on_base
from variants import BASELINE, counterpart, title_of, variant_of

CONTEXT_GIB = 0.6  # of a card, for CUDA's context beside torch's memory
LISTED = 8  # rows per length: the fastest variants that fit


class Point(NamedTuple):
    """One variant at one length: medians over rounds, and the peak of all rounds. speedup: all
    variants of a length share one baseline, see `speedup_over`."""

    variant: str
    seq_len: int
    step_ms: float
    peak_gib: float
    speedup: float | None


def points_of(run: Run, seq_len: int) -> list[Point]:
    """Return the variants with a time and a peak at this length, fastest first, without the A/A
    twins."""
    found = []
    for variant in run.experiment.variants:
        cells = run.cells_of(variant, seq_len, "ok")
        peaks = [cell.peak_reserved_bytes or cell.peak_allocated_bytes or 0 for cell in cells]
        if max(peaks, default=0) and variant != variant_of(variant).again.id:
            speedup = speedup_over(_reference(run, seq_len), run, variant, seq_len)
            step_ms = median(run.round_ms(variant, seq_len).values())
            found.append(Point(variant, seq_len, step_ms, max(peaks) / 2**30, speedup))
    return sorted(found, key=lambda point: (point.step_ms, point.peak_gib))


def speedup_over(reference: str, run: Run, variant: str, seq_len: int) -> float | None:
    """Return a variant's speedup over `reference`. That is its speedup over its own block's
    baseline, times that baseline's over the reference. Only pairs of the same round count, because
    a merged run has rounds of several runs. None where rounds lack the pairs."""
    ratios = speedups(run, variant, seq_len)
    baseline = variant_of(variant).baseline.id
    own, other = (run.round_ms(id, seq_len) for id in (baseline, reference))
    baselines = [other[number] / own[number] for number in own.keys() & other.keys()]
    return median(ratios) * median(baselines) if ratios and baselines else None


def _reference(run: Run, seq_len: int) -> str:
    """Return the one baseline for a length: vanilla PEFT, with checkpointing if a run has it."""
    ids = [counterpart(BASELINE, checkpoints).id for checkpoints in (True, False)]
    return next((id for id in ids if run.round_ms(id, seq_len)), BASELINE)


def fitting_points(points: list[Point], gib: float) -> list[Point]:
    """Return the points that fit a card of this size beside the CUDA context. The largest speedup
    comes first, those without one last."""
    inside = [point for point in points if point.peak_gib <= gib - CONTEXT_GIB]
    return sorted(inside, key=lambda point: -(point.speedup or 0))


RANKING = (
    "Ranked by the speedup, measured in the same rounds; what has none comes last. Milliseconds "
    "are medians of a variant's own rounds: those of two variants may be of different runs, and do "
    "not rank them."
)


def fits_table(run: Run, gib: float) -> str:
    """Write the fastest few of each length and how many more fit, below a line that names model,
    base, batch, card and what speedups are over. `RANKING` explains the order."""
    lines = []
    for seq_len in run.experiment.seq_lens:
        points = points_of(run, seq_len)
        fitting = fitting_points(points, gib)
        for point in fitting[:LISTED]:
            numbers = [number(point.speedup, 2), f"{point.step_ms:.1f}", f"{point.peak_gib:.1f}"]
            lines.append([str(seq_len), title_of(point.variant), *numbers])
        if more := len(fitting[LISTED:]):
            lines.append([str(seq_len), f"and {more} slower", "", "", ""])
        if points and not fitting:
            least = min(points, key=lambda point: point.peak_gib)
            why = f"nothing: {title_of(least.variant)} takes the least"
            lines.append([str(seq_len), why, "", "", f"{least.peak_gib:.1f}"])
        elif not points:
            lines.append([str(seq_len), "nothing measured", "", "", ""])
    references = {title_of(_reference(run, seq_len)) for seq_len in run.experiment.seq_lens}
    said = (
        f"{run.experiment.model}{on_base(run)}, batch {run.experiment.batch_size}, on an "
        f"{run.environment.device}; speedup over {' or '.join(sorted(references))}:"
    )
    header = ["tokens", "fits", "speedup", "step, ms", "reserved, GiB"]
    return f"{said}\n\n{markdown_table(header, lines)}"
