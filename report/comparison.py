"""Two results files side by side: is a cell slower or faster than it was, beyond noise?

Within one run, variants are paired round by round. Two runs are two visits to a machine, perhaps
to two machines, and these differ too. Two pieces of work that no change of ours touches are in both
files and tell by how much: the floor, for the GPU, and small launches, for the host. A cell's own
share of idle GPU time says how far each of them bears on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import mean, median, variance
from typing import Any

from report.names import first_few, in_words
from report.statistics import STATUSES, noise_band, quantile, round_ms, verdict_of

# What two visits may differ by without anything having changed, beside what the floor and the host
# tell: on two H200s of one day vanilla's 512-token steps came out 2.4% apart, where the rounds on
# one card agree within 0.2%.
BETWEEN_RUNS = 0.03


@dataclass(frozen=True)
class Row:
    """One cell in both files. speedup: old time / new time; band: what is noise."""

    variant: str
    seq_len: int
    old: str  # status
    new: str
    old_ms: float | None
    new_ms: float | None
    speedup: float | None = None
    ci95: list[float] | None = None
    band: tuple[float, float] | None = None
    verdict: str | None = None


@dataclass(frozen=True)
class Comparison:
    """rows: the cells in both. differences: what else is not the same, as "name: old -> new"."""

    rows: list[Row]
    differences: list[str]

    @property
    def is_slower(self) -> bool:
        """Whether a cell is slower beyond noise, or has lost its time."""
        return any(row.verdict in ("slower", "no time any more") for row in self.rows)


def compare(old: dict, new: dict) -> Comparison:
    """Hold `new` against `old`, two results documents.

    Raises:
        ValueError: they have no cell in common, or one is a rehearsal.
    """
    if old["rehearsal"] != new["rehearsal"]:
        raise ValueError("--compare: one of the two is a rehearsal without a GPU: compare two runs")
    keys = [
        (variant, seq_len)
        for seq_len in old["experiment"]["seq_lens"]
        for variant in old["experiment"]["variants"]
        if _cells(old, variant, seq_len) and _cells(new, variant, seq_len)
    ]
    if not keys:
        raise ValueError("--compare: the two have no variant and length in common")
    return Comparison([_row(old, new, *key) for key in keys], _differences(old, new, keys))


def _row(old: dict, new: dict, variant: str, seq_len: int) -> Row:
    before, after = (list(round_ms(run, variant, seq_len).values()) for run in (old, new))
    old_ms, new_ms = (median(values) if values else None for values in (before, after))
    row = Row(
        variant,
        seq_len,
        _status(old, variant, seq_len),
        _status(new, variant, seq_len),
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


def _band(old: dict, new: dict, variant: str, seq_len: int) -> tuple[float, float]:
    """Speedups that the noise of both runs and the difference of their machines explain."""
    machine = _machine_speedup(old, new, variant, seq_len)
    twins = [noise_band(run, seq_len, variant) or (1.0, 1.0) for run in (old, new)]
    low = min(1.0, machine, *(band[0] for band in twins)) / (1 + BETWEEN_RUNS)
    high = max(1.0, machine, *(band[1] for band in twins)) * (1 + BETWEEN_RUNS)
    return low, high


def _machine_speedup(old: dict, new: dict, variant: str, seq_len: int) -> float:
    """How much faster the new visit's machine alone would make this cell."""
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


def _floor_ms(run: dict, seq_len: int) -> float | None:
    return run["floor"].get(str(seq_len), {}).get("floor_ms")


def _median(run: dict, variant: str, seq_len: int, name: str) -> float | None:
    values = []
    for cell in _cells(run, variant, seq_len):
        value = cell[name]
        if cell["status"] == "ok" and value:
            values.append(median(value) if isinstance(value, list) else value)
    return median(values) if values else None


def _interval95_of_ratio(old_ms: list[float], new_ms: list[float]) -> list[float] | None:
    """The 95% interval of old / new by Student's t on logarithms, the rounds of the two unpaired.
    With the degrees of freedom of the run that has fewer rounds, the least that there can be."""
    fewer = min(len(old_ms), len(new_ms))
    if fewer < 2:
        return None
    old, new = ([log(ms) for ms in times] for times in (old_ms, new_ms))
    middle = mean(old) - mean(new)
    half = quantile(fewer - 1) * sqrt(variance(old) / len(old) + variance(new) / len(new))
    return [exp(middle - half), exp(middle + half)]


def _cells(run: dict, variant: str, seq_len: int) -> list[dict]:
    return [c for c in run["cells"] if (c["variant"], c["seq_len"]) == (variant, seq_len)]


def _status(run: dict, variant: str, seq_len: int) -> str:
    return min((cell["status"] for cell in _cells(run, variant, seq_len)), key=STATUSES.index)


def _settings(run: dict, variant: str, seq_len: int) -> dict:
    found = (cell["settings"] for cell in _cells(run, variant, seq_len) if cell["settings"])
    return next(found, {})


def _differences(old: dict, new: dict, keys: list[tuple[str, int]]) -> list[str]:
    """Everything else that is not the same in both, environment first."""
    found = []
    for part in ("environment", "experiment"):
        there, here = dict(_flat(old[part])), dict(_flat(new[part]))
        for name in {**there, **here}:
            if there.get(name) != here.get(name):
                found.append(f"{name}: {_change(there.get(name), here.get(name))}")
    for variant, seq_len in keys:
        there, here = (_settings(run, variant, seq_len) for run in (old, new))
        if not there or not here:
            continue  # nothing was built in one of them
        for name in {**there, **here}:
            if there.get(name) != here.get(name):
                where = f"{variant} at {seq_len}, {name}"
                found.append(f"{where}: {_change(there.get(name), here.get(name))}")
    return found


def _change(there: Any, here: Any) -> str:
    """Of a long list, what is in one alone."""
    if not isinstance(there, list) or not isinstance(here, list):
        return f"{in_words(there)} -> {in_words(here)}"
    gone, new = ([str(x) for x in a if x not in b] for a, b in ((there, here), (here, there)))
    parts = [("gone", gone), ("new", new)]
    said = [f"{words} {first_few(items, ', ')}" for words, items in parts if items]
    return "; ".join(said) or "in another order"


def _flat(part: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
