"""What is the fastest that fits my card? From a results document alone.

Memory is what torch had reserved at most. That was with all of a large card to itself, so a smaller
one may do with a little less; what was allocated at most is the least that it needs.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from report.looks import markdown_table
from report.names import name_of
from report.statistics import (
    BASELINE,
    NO_CHECKPOINTING,
    baseline_of,
    key_of,
    round_ms,
    speedups,
    twin_of,
)

CONTEXT_GIB = 0.6  # what CUDA's context takes of a card beside torch's memory
LISTED = 8  # of what fits at a length, the fastest


class Point(NamedTuple):
    """One variant at one length: medians over rounds, the peak of all rounds. speedup: over one and
    the same baseline for all variants of a length, see `speedup_over`."""

    variant: str
    seq_len: int
    step_ms: float
    peak_gib: float
    speedup: float | None


class Fit(NamedTuple):
    """A length, what fits there (by its speedup, the largest first, those without one last), and
    the least that any variant takes."""

    seq_len: int
    points: list[Point]
    least: Point | None


def points_of(results: dict, seq_len: int) -> list[Point]:
    """The variants with a time and a peak at this length, fastest first; without the A/A twins."""
    found = []
    for variant in results["experiment"]["variants"]:
        own = round_ms(results, variant, seq_len)
        peaks = [
            cell["peak_reserved_bytes"] or cell["peak_allocated_bytes"] or 0
            for cell in results["cells"]
            if key_of(cell)[:2] == (variant, seq_len) and cell["status"] == "ok"
        ]
        if own and max(peaks) and variant != twin_of(variant):
            speedup = speedup_over(_reference(results, seq_len), results, variant, seq_len)
            step_ms = median(own.values())
            found.append(Point(variant, seq_len, step_ms, max(peaks) / 2**30, speedup))
    return sorted(found, key=lambda point: (point.step_ms, point.peak_gib))


def speedup_over(reference: str, results: dict, variant: str, seq_len: int) -> float | None:
    """How many times as fast as `reference` a variant is, from pairs of the same round alone, as
    the rounds of a merged run are of several visits: its speedup over its own block's baseline,
    times that baseline's over the reference. None where rounds lack the pairs."""
    ratios = speedups(results, variant, seq_len)
    own, other = (round_ms(results, b, seq_len) for b in (baseline_of(variant), reference))
    baselines = [other[number] / own[number] for number in own.keys() & other.keys()]
    return median(ratios) * median(baselines) if ratios and baselines else None


def _reference(results: dict, seq_len: int) -> str:
    """What all variants of a length are held against: vanilla PEFT, with checkpointing where a run
    has it."""
    without = BASELINE + NO_CHECKPOINTING
    timed = [name for name in (BASELINE, without) if round_ms(results, name, seq_len)]
    return timed[0] if timed else BASELINE


def pareto(points: list[Point]) -> list[Point]:
    """Those that no other beats in time without taking more memory; from the least memory up."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.peak_gib, each.step_ms)):
        if not best or point.step_ms < best[-1].step_ms:
            best.append(point)
    return best


def fits(results: dict, gib: float) -> list[Fit]:
    """For each length what fits a card of this size beside the CUDA context."""
    found = []
    for seq_len in results["experiment"]["seq_lens"]:
        points = points_of(results, seq_len)
        inside = [point for point in points if point.peak_gib <= gib - CONTEXT_GIB]
        inside.sort(key=lambda point: -(point.speedup or 0))
        least = min(points, key=lambda point: point.peak_gib, default=None)
        found.append(Fit(seq_len, inside, least))
    return found


def fits_table(results: dict, gib: float) -> str:
    """`fits` in Markdown: the fastest few of each length, how many more fit, and by what they are
    ranked."""
    lines = []
    for seq_len, points, least in fits(results, gib):
        for point in points[:LISTED]:
            over = "" if point.speedup is None else f"{point.speedup:.2f}"
            numbers = [over, f"{point.step_ms:.1f}", f"{point.peak_gib:.1f}"]
            lines.append([str(seq_len), name_of(point.variant), *numbers])
        if more := len(points[LISTED:]):
            lines.append([str(seq_len), f"and {more} slower", "", "", ""])
        if not points:
            why = "nothing measured"
            if least:
                why = f"nothing: {name_of(least.variant)} takes the least"
            peak = f"{least.peak_gib:.1f}" if least else ""
            lines.append([str(seq_len), why, "", "", peak])
    header = ["tokens", "fits", "speedup", "step, ms", "reserved, GiB"]
    references = {_reference(results, seq_len) for seq_len in results["experiment"]["seq_lens"]}
    said = (
        f"Ranked by the speedup over {' or '.join(sorted(map(name_of, references)))}, measured in "
        "the same rounds; what has none comes last. Milliseconds are medians of a variant's own "
        "rounds: those of two variants may be of different visits, and do not rank them."
    )
    return f"{markdown_table(header, lines)}\n\n{said}"
