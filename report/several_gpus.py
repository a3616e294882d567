"""The table of runs on several GPUs: how near all come to the speed that each has by itself."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor
from typing import NamedTuple

from bench.records import Run, SummaryRow
from report.statistics import median_or_none, summarize
from report.table import Column, number, table, thousands
from report.wording import caption_with_commit, step_or_status, title_in


class Scaled(NamedTuple):
    """One variant at one length on some GPUs. Efficiencies are medians over rounds (`Cell`)."""

    run: Run
    row: SummaryRow
    efficiency: float | None
    efficiency_over_one: float | None


COLUMNS = (
    Column[Scaled]("tokens", lambda one: str(one.row.seq_len)),
    Column[Scaled]("variant", lambda one: title_in(one.row.variant, one.run)),
    Column[Scaled]("ms a step", lambda one: step_or_status(one.row)),
    Column[Scaled]("tokens/s", lambda one: thousands(one.row.tokens_per_s)),
    Column[Scaled]("efficiency", lambda one: _percent(one.efficiency)),
    Column[Scaled]("over one GPU", lambda one: _percent(one.efficiency_over_one)),
)


def _percent(share: float | None) -> str:
    return number(share and 100 * share, 1, "%")


def scaled(run: Run) -> list[Scaled]:
    """Return every variant at every length of a run on several GPUs."""
    found = []
    for row in summarize(run):
        cells = run.cells_of(row.variant, row.seq_len, "ok")
        efficiency = median_or_none(cell.efficiency for cell in cells)
        over_one = median_or_none(cell.efficiency_over_one for cell in cells)
        found.append(Scaled(run, row, efficiency, over_one))
    return found


def several_gpus_section(runs: Iterable[Run]) -> str:
    """Write the finding and a table for each run; one sentence without any."""
    runs = list(runs)
    if not runs:
        return "No run of `lora_bench.py --gpus` is published yet."
    said = (
        'Efficiency compares with the same GPUs at once without averaging gradients. "Over one '
        "GPU\" compares with the first GPU's speed alone, times their number."
    )
    parts = [f"**{finding(runs)}.**", said]
    for run in runs:
        parts += [caption_with_commit(run), table(COLUMNS, scaled(run))]
    return "\n\n".join(parts)


def finding(runs: Iterable[Run]) -> str:
    """Say which share of its speed a GPU keeps, at the least, when it trains with others.

    In each run and at each length we take the fastest variant. Slower ones wait for the host, and
    show its noise.
    """
    fastest: list[Scaled] = []
    for run in runs:
        timed = [one for one in scaled(run) if one.efficiency]
        for seq_len in {one.row.seq_len for one in timed}:
            here = (one for one in timed if one.row.seq_len == seq_len)
            fastest.append(max(here, key=lambda one: one.row.tokens_per_s or 0))
    gpus = max(one.run.experiment.gpus for one in fastest)
    least = min(one.efficiency or 0 for one in fastest)
    words = "two GPUs" if gpus == 2 else f"up to {gpus} GPUs"
    share = f"{floor(100 * least)}% or more"
    return f"On {words}, the fastest variant keeps {share} of each one's own speed"
