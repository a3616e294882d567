"""The table of other recipes: adapters on some projections alone, or with dropout, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from bench.records import Run
from report.looks import STATUS_WORDS, caption, markdown_table
from report.statistics import summarize
from report.tables import number_or_blank
from variants import title_of

HEADER = ["variant", "step, ms", "speedup", "GPU, ms", "peak, GiB"]


def recipes_section(runs: Iterable[Run]) -> str:
    """Write a table of each run with its caption, which names the projections and the dropout."""
    return "\n\n".join(f"{_rows(run)}\n\n{caption(run)}" for run in runs) or "Not measured yet."


def _rows(run: Run) -> str:
    lines = []
    for row in summarize(run):
        step = number_or_blank(row.median_step_ms, 1) or STATUS_WORDS.get(row.status, "")
        numbers = [(row.speedup, 2), (row.gpu_ms, 1), (row.peak_gib, 1)]
        lines.append([title_of(row.variant), step, *(number_or_blank(*one) for one in numbers)])
    return markdown_table(HEADER, lines)
