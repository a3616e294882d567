"""Tables of a run's steps beside its floor, in Markdown: layers in FP8, and rows of many tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bench.records import Run, SummaryRow
from report.looks import STATUS_WORDS, caption, markdown_table, title_in
from report.statistics import summarize
from report.tables import commit_of, number_or_blank
from variants import VARIANTS, variant_of

HEADER = ["tokens", "variant", "step, ms", "tokens/s", "× bf16's speed", "× floor",
          "× floor and recomputation", "peak, GiB"]  # fmt: skip
_ID_OF = {variant.recipe: variant.id for variant in VARIANTS.values()}


def beside_floor_section(runs: Iterable[Run]) -> str:
    """Write a table of each run with its caption. A variant with checkpointing is held against the
    floor and what has to be computed again, too; one in FP8 against the same in bf16."""
    blocks = [f"{_table(run)}\n\n{caption(run)} {commit_of(run)}" for run in runs]
    return "\n\n".join(blocks) or "Not measured yet."


def _table(run: Run) -> str:
    rows = {(row.variant, row.seq_len): row for row in summarize(run)}
    lines = [_line(run, row, rows.get((_in_bf16(row.variant), row.seq_len)))
             for row in rows.values()]  # fmt: skip
    shown = [any(line[column] for line in lines) for column in range(len(HEADER))]
    return markdown_table(_of(shown, HEADER), [_of(shown, line) for line in lines])


def _line(run: Run, row: SummaryRow, in_bf16: SummaryRow | None) -> list[str]:
    first = [f"{row.seq_len:,}", title_in(row.variant, run)]
    if row.median_step_ms is None:
        return [*first, STATUS_WORDS.get(row.status, ""), *[""] * (len(HEADER) - 3)]
    over_bf16 = over_both = ""
    if in_bf16 is not None and in_bf16.median_step_ms:
        over_bf16 = f"{in_bf16.median_step_ms / row.median_step_ms:.2f}"
    floor = run.floor.get(row.seq_len)
    if floor and floor.recomputation_ms and variant_of(row.variant).checkpoints:
        both_ms = floor.floor_ms + floor.recomputation_ms
        over_both = f"{row.median_step_ms / both_ms:.2f}"
    return [
        *first, f"{row.median_step_ms:.1f}", f"{row.tokens_per_s:,.0f}", over_bf16,
        number_or_blank(row.ratio_to_floor, 2), over_both, number_or_blank(row.peak_gib, 1),
    ]  # fmt: skip


def _in_bf16(id: str) -> str:
    """Return the variant whose layers are the same in bf16; of one that is not in FP8, none."""
    recipe = variant_of(id).recipe
    if recipe is None or not recipe.fp8:
        return ""
    fused = tuple(part for part in recipe.fused if part != "fp8_lm_head")
    return _ID_OF.get(replace(recipe, fp8=False, fused=fused), "")


def _of(shown: list[bool], line: list[str]) -> list[str]:
    return [cell for cell, is_shown in zip(line, shown, strict=True) if is_shown]
