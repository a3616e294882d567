"""Summary of a run: medians, speedups over vanilla PEFT, and whether they exceed the noise."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from math import ceil, exp, log
from statistics import median
from typing import Any

from msgspec.structs import replace

from bench.records import Interval, Run, SummaryRow, Verdict
from variants import AGAIN, title_of, variant_of

NOISE: Verdict = "not distinguishable"
TWINS_WITHIN = 0.05  # two measurements of vanilla PEFT should agree this well
TIMES = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")


def median_or_none(values: Iterable[float | None]) -> float | None:
    """Return the median of the values; None without any."""
    found = [value for value in values if value]
    return median(found) if found else None


def summarize(run: Run) -> list[SummaryRow]:
    """Return one row for each length and variant that has a cell: medians over steps, then over
    rounds.

    A speedup is the median over rounds of baseline time / variant time within one round. That
    cancels clock drift from round to round. Its verdict needs the A/A twin: a speedup inside the
    noise band, or with an interval that reaches 1, is not distinguishable.
    """
    return [_summary_row(run, variant, seq_len) for variant, seq_len in run.measured()]


def rows_by_variant_and_length(run: Run) -> dict[tuple[str, int], SummaryRow]:
    return {(row.variant, row.seq_len): row for row in summarize(run)}


def by_gpu_time(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Return the rows with speedups in GPU time, without interval and verdict. A speedup is None if
    the row or its baseline has no profile."""
    rows = list(rows)
    gpu_ms = {(row.variant, row.seq_len): row.gpu_ms for row in rows}
    found = []
    for row in rows:
        base_ms = gpu_ms.get((variant_of(row.variant).baseline.id, row.seq_len))
        speedup = base_ms / row.gpu_ms if base_ms and row.gpu_ms else None
        found.append(replace(row, speedup=speedup, speedup_ci95=None, verdict=None))
    return found


def _summary_row(run: Run, variant: str, seq_len: int) -> SummaryRow:
    timed = run.cells_of(variant, seq_len, "ok")
    rounds_ms = {part: list(run.round_ms(variant, seq_len, part).values()) for part in TIMES}
    medians = {part: median(values) if values else None for part, values in rounds_ms.items()}
    step_ms = medians.pop("step_ms")
    ratios = speedups(run, variant, seq_len)
    speedup = median_or_none(ratios)
    ci95 = None if variant_of(variant).baseline.id == variant else interval95_of_ratios(ratios)
    verdict = None
    if speedup is not None and not variant_of(variant).is_baseline:
        verdict = verdict_of(speedup, ci95, noise_band(run, seq_len, variant))
    peaks = [cell.peak_allocated_bytes for cell in timed if cell.peak_allocated_bytes]
    tokens = run.experiment.tokens_a_step(seq_len)
    measured = {
        "median_step_ms": step_ms,
        "step_ms_ci95": interval95_of_ratios(rounds_ms["step_ms"]),
        "tokens_per_s": tokens / step_ms * 1000 if step_ms else None,
        "speedup": speedup,
        "speedup_ci95": ci95,
        "ratio_to_floor": median_or_none(_ratios_to_floor(run, variant, seq_len)),
        **medians,
        "gpu_ms": median_or_none(cell.gpu_busy_ms for cell in timed),
        "peak_gib": max(peaks) / 2**30 if peaks else None,
    }
    return SummaryRow(
        variant=variant,
        seq_len=seq_len,
        status=run.status_of(variant, seq_len) or "unavailable",
        rounds=len(timed),
        steps=sum(len(cell.step_ms) for cell in timed),
        verdict=verdict,
        **{name: _six_digits(value) for name, value in measured.items()},
    )


def _six_digits(value: Any) -> Any:
    """Round to six digits: far finer than any noise, and short in a diff."""
    if isinstance(value, tuple):
        return tuple(map(_six_digits, value))
    return None if value is None else float(f"{value:.6g}")


def speedups(run: Run, variant: str, seq_len: int) -> list[float]:
    """Return baseline time / variant time, in each round that has both."""
    baseline = run.round_ms(variant_of(variant).baseline.id, seq_len)
    own = run.round_ms(variant, seq_len)
    return [baseline[round] / own[round] for round in sorted(baseline.keys() & own.keys())]


def _ratios_to_floor(run: Run, variant: str, seq_len: int) -> list[float]:
    """Return variant time / the floor's, in each round that has the variant."""
    floor = run.ms_by_round(run.floor_of(variant, seq_len))
    own = run.round_ms(variant, seq_len)
    return [ms / floor[number] for number, ms in sorted(own.items())] if floor else []


def noise_band(run: Run, seq_len: int, variant: str = "vanilla_peft") -> Interval | None:
    """Return the range (low, high) about 1 of two measurements of the same code; None without the
    A/A twin. `variant` picks the block: the twins with checkpointing, or those without."""
    ratios = speedups(run, variant_of(variant).again.id, seq_len)
    both_ways = ratios + [1 / ratio for ratio in ratios]  # which comes first is chance
    return (min(both_ways), max(both_ways)) if ratios else None


def interval95(values: list[float]) -> Interval | None:
    """Return the 95% interval of the mean, by Student's t; None with fewer than two values.

    A bootstrap of two or four rounds cannot reach beyond their values. With two it holds the truth
    half the time. As in Georges et al., "Statistically Rigorous Java Performance Evaluation",
    OOPSLA 2007.
    """
    from scipy import stats  # takes half a second: the command line should not wait for it

    if len(values) < 2:
        return None
    with warnings.catch_warnings(action="ignore"):  # rounds that agree have a narrow interval
        low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return float(low), float(high)


def interval95_of_ratios(values: list[float]) -> Interval | None:
    """Return the 95% interval of times, or of their ratios. It is computed on logarithms: it stays
    above zero, and inverting a ratio inverts its interval."""
    bounds = interval95([log(value) for value in values])
    return bounds and (exp(bounds[0]), exp(bounds[1]))


def verdict_of(speedup: float, ci95: Interval | None, band: Interval | None) -> Verdict | None:
    """Return "faster" or "slower" if a speedup is outside the noise band and its interval does not
    reach 1, otherwise "not distinguishable". None if that stays open: without a band, or without an
    interval, because a single number has no spread."""
    if ci95 is not None and ci95[0] <= 1 <= ci95[1]:
        return NOISE
    if ci95 is None or band is None:
        return None
    if band[0] <= speedup <= band[1]:
        return NOISE
    return "faster" if speedup > 1 else "slower"


def why_no_verdicts(run: Run) -> str | None:
    """Say what a run lacks for verdicts on its speedups, and what provides it. None: nothing, or it
    shows none, as on several GPUs."""
    if run.experiment.gpus > 1:
        return None
    if run.experiment.rounds < 2:
        return "one round gives numbers without verdicts: --rounds 4 gives both"
    if AGAIN not in run.experiment.variants:
        return f"nothing is called faster or slower without {AGAIN}: it measures the noise"
    return None


def twins_too_far_apart(run: Run) -> list[str]:
    """Say where two measurements of vanilla PEFT are more than TWINS_WITHIN apart, and how many
    steps would fix that: the distance shrinks with the square root of their number."""
    said = []
    for row in summarize(run):
        if variant_of(row.variant).again.id != row.variant or row.speedup is None:
            continue
        apart = abs(log(row.speedup))
        if apart > log(1 + TWINS_WITHIN):
            rounds = run.experiment.rounds
            steps = row.steps * (apart / log(1 + TWINS_WITHIN)) ** 2
            said.append(
                f"At {row.seq_len} tokens {title_of(row.variant)} came out {apart:.0%} away: "
                f"within {TWINS_WITHIN:.0%} takes about --steps {ceil(steps / rounds) * rounds}"
            )
    return said
