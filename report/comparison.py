"""Two results files side by side: is a cell slower or faster than before, beyond noise?

Within one run we pair variants round by round. Two runs may come from two machines, and even one
machine changes from day to day. Both files hold two measurements that none of our changes touch.
The floor tells how much faster the GPU was, and small launches tell it of the host. The share of
idle GPU time says how much of each a cell feels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import exp, log, sqrt
from statistics import mean, median, variance
from typing import Any

from bench.records import Interval, Run, Status
from bench.results import first_few, flat_items, in_words
from report.statistics import median_or_none, noise_band, verdict_of
from report.table import markdown_table, number, spread
from report.wording import STATUS_WORDS, title_in
from variants import Settings

# Two runs may differ by this much with no change in the code, beyond the floor's and the host's
# difference. On two H200s on the same day, vanilla's 512-token steps came out 2.4% apart, while the
# rounds on one card agree within 0.2%.
BETWEEN_RUNS = 0.03


@dataclass(frozen=True)
class ComparedCell:
    """One cell in both files. name: the variant's, with both releases of a peer. speedup: old time
    / new time. band: the range of speedups that noise explains."""

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


def comparison_table(compared: Comparison) -> str:
    """Write every cell in both files."""
    header = ["tokens", "variant", "first, ms", "second, ms", "first / second", "noise", "verdict"]
    return markdown_table(header, [
        [str(row.seq_len), row.name, _ms_or_status(row.old_ms, row.old),
         _ms_or_status(row.new_ms, row.new), number(row.speedup, 2) + spread(row.ci95, 2),
         spread(row.band, 2).strip(" ()"), row.verdict or ""]
        for row in compared.rows
    ])  # fmt: skip


def _ms_or_status(ms: float | None, status: Status | None) -> str:
    return number(ms, 1) or STATUS_WORDS.get(status or "", "")


def compare(old: Run, new: Run) -> Comparison:
    """Compare `new` with `old`.

    Raises ValueError if they have no cell in common, or one is a rehearsal.
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
    old_ms, new_ms = median_or_none(before), median_or_none(after)
    old_status, new_status = (run.status_of(variant, seq_len) for run in (old, new))
    name = title_in(variant, old, new)
    cell = partial(ComparedCell, variant, name, seq_len, old_status, new_status, old_ms, new_ms)
    if old_ms and new_ms:
        speedup, ci95 = old_ms / new_ms, _interval95_of_ratio(before, after)
        band = _band(old, new, variant, seq_len)
        return cell(speedup, ci95, band, verdict_of(speedup, ci95, band))
    return cell(verdict="no time any more" if old_ms else "has a time now" if new_ms else None)


def _band(old: Run, new: Run, variant: str, seq_len: int) -> Interval:
    """Return the speedups that the noise of both runs and their machines explain."""
    machine = _machine_speedup(old, new, variant, seq_len)
    twins = [noise_band(run, seq_len, variant) or (1.0, 1.0) for run in (old, new)]
    low = min(1.0, machine, *(band[0] for band in twins)) / (1 + BETWEEN_RUNS)
    high = max(1.0, machine, *(band[1] for band in twins)) * (1 + BETWEEN_RUNS)
    return low, high


def _machine_speedup(old: Run, new: Run, variant: str, seq_len: int) -> float:
    """Return the speedup of this cell that the new run's machine alone would give."""
    floors = [run.floor[seq_len].floor_ms if seq_len in run.floor else None for run in (old, new)]
    cells = [run.cells_of(variant, seq_len, "ok") for run in (old, new)]
    launches = [median_or_none(cell.host_launch_us for cell in found) for found in cells]
    step_ms = median_or_none(median(cell.step_ms) for cell in cells[0])
    busy_ms = median_or_none(cell.gpu_busy_ms for cell in cells[0])
    busy = min(1.0, busy_ms / step_ms) if busy_ms and step_ms else 1.0
    return 1 / (busy / _over(*floors) + (1 - busy) / _over(*launches))


def _over(old: float | None, new: float | None) -> float:
    return old / new if old and new else 1.0


def _interval95_of_ratio(old_ms: list[float], new_ms: list[float]) -> Interval | None:
    """Return the 95% interval of old / new, unpaired, by Student's t on logarithms. It has the
    degrees of freedom of the run with fewer rounds, the most cautious choice."""
    from scipy import stats

    fewer = min(len(old_ms), len(new_ms))
    if fewer < 2:
        return None
    old, new = ([log(ms) for ms in times] for times in (old_ms, new_ms))
    middle = mean(old) - mean(new)
    error = sqrt(variance(old) / len(old) + variance(new) / len(new))
    half = float(stats.t.ppf(0.975, fewer - 1)) * error
    return exp(middle - half), exp(middle + half)


def _differences(old: Run, new: Run, keys: list[tuple[str, int]]) -> list[str]:
    """List everything else that differs, the environment first."""
    found = _unequal(old.environment, new.environment) + _unequal(old.experiment, new.experiment)
    for variant, seq_len in keys:
        settings = [_settings(run, variant, seq_len) for run in (old, new)]
        if Settings() not in settings:  # otherwise one of them built nothing
            where = f"{variant} at {seq_len}, "
            found += [where + difference for difference in _unequal(*settings)]
    return found


def _settings(run: Run, variant: str, seq_len: int) -> Settings:
    cells = run.cells_of(variant, seq_len)
    return next((cell.settings for cell in cells if cell.settings != Settings()), Settings())


def _unequal(old: Any, new: Any) -> list[str]:
    there, here = (dict(flat_items(part)) for part in (old, new))
    return [
        f"{name}: {_change(there.get(name), here.get(name))}"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]


def _change(there: Any, here: Any) -> str:
    """Say how a value changed. For a long list, name the items that only one side has."""
    if not isinstance(there, list) or not isinstance(here, list):
        return f"{in_words(there)} -> {in_words(here)}"
    gone, new = ([str(x) for x in a if x not in b] for a, b in ((there, here), (here, there)))
    parts = [("gone", gone), ("new", new)]
    said = [f"{words} {first_few(items, ', ')}" for words, items in parts if items]
    return "; ".join(said) or "in another order"
