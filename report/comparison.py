"""Two results files side by side: is a cell slower or faster than it was, beyond noise?

Within one run, variants are paired round by round. Two runs may be of two machines, and even
one machine differs from day to day. Two pieces of work that no change of ours touches are in both
files and tell by how much: the floor, for the GPU, and small launches, for the host. A cell's own
share of idle GPU time says how far each of them bears on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import mean, median, variance
from typing import Any

from bench.records import Interval, Run, Status
from bench.results import first_few, flat_items, in_words
from report.looks import title_in
from report.statistics import noise_band, verdict_of
from variants import Settings

# What two runs may differ by without anything having changed, beside what the floor and the host
# tell: on two H200s of one day vanilla's 512-token steps came out 2.4% apart, where the rounds on
# one card agree within 0.2%.
BETWEEN_RUNS = 0.03


@dataclass(frozen=True)
class ComparedCell:
    """One cell in both files. name: of its variant, with both releases of a peer. speedup: old
    time / new time; band: what is noise."""

    variant: str
    name: str
    seq_len: int
    old: Status | None
    new: Status | None
    old_ms: float | None
    new_ms: float | None
    speedup: float | None = None
    ci95: Interval | None = None
    band: Interval | None = None
    verdict: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs compared. rows: the cells in both. differences: everything else that differs, as
    "name: old -> new"."""

    rows: list[ComparedCell]
    differences: list[str]

    @property
    def is_slower(self) -> bool:
        """True if a cell is slower beyond noise, or has lost its time."""
        return any(row.verdict in ("slower", "no time any more") for row in self.rows)


def compare(old: Run, new: Run) -> Comparison:
    """Hold `new` against `old`.

    Raises:
        ValueError: they have no cell in common, or one is a rehearsal.
    """
    if old.rehearsal != new.rehearsal:
        raise ValueError("--compare: one of the two is a rehearsal without a GPU: compare two runs")
    others = {*new.measured()}
    keys = [key for key in old.measured() if key in others]
    if not keys:
        raise ValueError("--compare: the two have no variant and length in common")
    return Comparison([_row(old, new, *key) for key in keys], _differences(old, new, keys))


def _row(old: Run, new: Run, variant: str, seq_len: int) -> ComparedCell:
    before, after = (list(run.round_ms(variant, seq_len).values()) for run in (old, new))
    old_ms, new_ms = (median(values) if values else None for values in (before, after))
    row = ComparedCell(
        variant,
        title_in(variant, old, new),
        seq_len,
        old.status_of(variant, seq_len),
        new.status_of(variant, seq_len),
        old_ms,
        new_ms,
    )
    if old_ms is None or new_ms is None:
        lost, found = old_ms is not None, new_ms is not None
        verdict = "no time any more" if lost else "has a time now" if found else None
        return replace(row, verdict=verdict)
    speedup = old_ms / new_ms
    ci95 = _interval95_of_ratio(before, after)
    band = _band(old, new, variant, seq_len)
    verdict = verdict_of(speedup, ci95, band)
    return replace(row, speedup=speedup, ci95=ci95, band=band, verdict=verdict)


def _band(old: Run, new: Run, variant: str, seq_len: int) -> Interval:
    """Speedups that the noise of both runs and the difference of their machines explain."""
    machine = _machine_speedup(old, new, variant, seq_len)
    twins = [noise_band(run, seq_len, variant) or (1.0, 1.0) for run in (old, new)]
    low = min(1.0, machine, *(band[0] for band in twins)) / (1 + BETWEEN_RUNS)
    high = max(1.0, machine, *(band[1] for band in twins)) * (1 + BETWEEN_RUNS)
    return low, high


def _machine_speedup(old: Run, new: Run, variant: str, seq_len: int) -> float:
    """Return the speedup of this cell that the new run's machine alone would give."""
    gpu = _over(_floor_ms(old, seq_len), _floor_ms(new, seq_len))
    host = _over(
        _median(old, variant, seq_len, "host_launch_us"),
        _median(new, variant, seq_len, "host_launch_us"),
    )
    step_ms = _median(old, variant, seq_len, "step_ms")
    busy_ms = _median(old, variant, seq_len, "gpu_busy_ms")
    busy = min(1.0, busy_ms / step_ms) if busy_ms and step_ms else 1.0
    return 1 / (busy / gpu + (1 - busy) / host)


def _over(old: float | None, new: float | None) -> float:
    return old / new if old and new else 1.0


def _floor_ms(run: Run, seq_len: int) -> float | None:
    return run.floor[seq_len].floor_ms if seq_len in run.floor else None


def _median(run: Run, variant: str, seq_len: int, name: str) -> float | None:
    values = []
    for cell in run.cells_of(variant, seq_len, "ok"):
        if value := getattr(cell, name):
            values.append(median(value) if isinstance(value, list) else value)
    return median(values) if values else None


def _interval95_of_ratio(old_ms: list[float], new_ms: list[float]) -> Interval | None:
    """The 95% interval of old / new by Student's t on logarithms, the rounds of the two unpaired.
    With the degrees of freedom of the run that has fewer rounds, the least that there can be."""
    from scipy import stats

    fewer = min(len(old_ms), len(new_ms))
    if fewer < 2:
        return None
    old, new = ([log(ms) for ms in times] for times in (old_ms, new_ms))
    middle = mean(old) - mean(new)
    error = sqrt(variance(old) / len(old) + variance(new) / len(new))
    half = float(stats.t.ppf(0.975, fewer - 1)) * error
    return exp(middle - half), exp(middle + half)


def _settings(run: Run, variant: str, seq_len: int) -> Settings:
    cells = run.cells_of(variant, seq_len)
    return next((cell.settings for cell in cells if cell.settings != Settings()), Settings())


def _differences(old: Run, new: Run, keys: list[tuple[str, int]]) -> list[str]:
    """Everything else that is not the same in both, environment first."""
    found = _unequal(old.environment, new.environment) + _unequal(old.experiment, new.experiment)
    for variant, seq_len in keys:
        settings = [_settings(run, variant, seq_len) for run in (old, new)]
        if Settings() not in settings:  # else nothing was built in one of them
            where = f"{variant} at {seq_len}, "
            found += [where + difference for difference in _unequal(*settings)]
    return found


def _unequal(old: Any, new: Any) -> list[str]:
    there, here = (dict(flat_items(part)) for part in (old, new))
    return [
        f"{name}: {_change(there.get(name), here.get(name))}"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]


def _change(there: Any, here: Any) -> str:
    """Of a long list, what is in one alone."""
    if not isinstance(there, list) or not isinstance(here, list):
        return f"{in_words(there)} -> {in_words(here)}"
    gone, new = ([str(x) for x in a if x not in b] for a, b in ((there, here), (here, there)))
    parts = [("gone", gone), ("new", new)]
    said = [f"{words} {first_few(items, ', ')}" for words, items in parts if items]
    return "; ".join(said) or "in another order"
