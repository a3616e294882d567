"""The table of other recipes: adapters on some projections alone, or with dropout, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from bench.records import Run
from report.looks import STATUS_WORDS, caption, markdown_table, title_in
from report.statistics import summarize
from report.tables import commit_of, number_or_blank
from variants import TARGETS

HEADER = ["variant", "step, ms", "speedup", "GPU, ms", "peak, GiB"]


def recipes_section(runs: Iterable[Run]) -> str:
    """Write a table of each run under its recipe, with its caption."""
    blocks = [
        f"**{_recipe(run)}:**\n\n{_rows(run)}\n\n{caption(run)} {commit_of(run)}" for run in runs
    ]
    return "\n\n".join(blocks) or "Not measured yet."


def _recipe(run: Run) -> str:
    """The projections that are not all and the dropout that is not none, in words."""
    lora = run.experiment.lora
    found = []
    if len(lora.targets) < len(TARGETS):
        found.append(f"Adapters on {' and '.join(lora.targets)} alone")
    if lora.dropout:
        found.append(f"lora_dropout={lora.dropout:g}")
    return ", ".join(found) or "All seven projections"


def _rows(run: Run) -> str:
    lines = []
    for row in summarize(run):
        step = number_or_blank(row.median_step_ms, 1) or STATUS_WORDS.get(row.status, "")
        numbers = [(row.speedup, 2), (row.gpu_ms, 1), (row.peak_gib, 1)]
        name = title_in(row.variant, run)
        lines.append([name, step, *(number_or_blank(*one) for one in numbers)])
    return markdown_table(HEADER, lines)
