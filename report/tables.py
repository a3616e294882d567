"""Tables of a run in Markdown: its results, its kernels, and its steps in other recipes and beside
the floor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from textwrap import shorten

from bench.records import Cell, KernelRow, Run, SummaryRow
from report import statistics, wording
from report.kernel_time import KINDS, bars
from report.statistics import rows_by_variant_and_length, summarize
from report.table import Column, markdown_table, number, spread, table, thousands
from report.wording import STATUS_WORDS, caption_with_commit, step_or_status, title_in
from variants import VARIANTS, Settings, title_of, variant_of

NOT_MEASURED = "Not measured yet."
TOKENS_PER_S = Column[SummaryRow]("tokens/s", lambda row: thousands(row.tokens_per_s))
OVER_FLOOR = Column[SummaryRow]("× floor", lambda row: number(row.ratio_to_floor, 2))
PEAK = Column[SummaryRow]("peak allocated, GiB", lambda row: number(row.peak_gib, 1))
GPU_MS = Column[SummaryRow]("GPU, ms", lambda row: number(row.gpu_ms, 1))
STEP = Column[SummaryRow]("step, ms", step_or_status)
KERNEL_COLUMNS = (
    Column[KernelRow]("kernel", lambda row: row.kernel),
    Column[KernelRow]("shape", lambda row: " × ".join(map(str, row.shape))),
    Column[KernelRow]("dtype", lambda row: row.dtype),
    Column[KernelRow]("median, µs", lambda row: number(row.median_us, 1)),
    Column[KernelRow]("GB/s", lambda row: thousands(row.gb_per_s)),
    Column[KernelRow]("of a copy's GB/s", lambda row: f"{row.share_of_copy:.0%}"),
)
# The same layers in bf16 and in FP8 differ in nothing else.
_BY_RECIPE = {variant.recipe: variant.id for variant in VARIANTS.values()}


def title_column(*runs: Run) -> Column[SummaryRow]:
    return Column("variant", lambda row: title_in(row.variant, *runs))


# --- a run's results ------------------------------------------------------------------------------


def results_section(run: Run) -> str:
    """Write every row of the summary, the run's caption, what went wrong, and the settings."""
    rows = summarize(run)
    columns: list[Column[SummaryRow]] = [
        Column("tokens per row", lambda row: str(row.seq_len)),
        title_column(run),
        Column("step, ms", lambda row: step_or_status(row) + spread(row.step_ms_ci95, 1)),
        TOKENS_PER_S,
        Column("speedup", lambda row: number(row.speedup, 2) + spread(row.speedup_ci95, 2)),
        *(OVER_FLOOR, PEAK, GPU_MS),
    ]
    if any(row.verdict for row in rows):
        columns.append(Column("against the A/A noise", lambda row: row.verdict or ""))
    blocks = [
        f"**{wording.REHEARSAL_NOTICE}.**" if run.rehearsal else "",
        table(columns, rows),
        caption_with_commit(run),
        _remarks(run),
        _settings_table(run),
    ]
    return "\n\n".join(block for block in blocks if block)


def _remarks(run: Run) -> str:
    """List why cells have no time, and what may have disturbed those that have one."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for cell in run.cells:
        if cell.status != "ok":
            why = STATUS_WORDS[cell.status]
            if cell.error:
                why += f": `{shorten(cell.error.replace('`', ''), 160)}`"
            reasons.setdefault((title_of(cell.variant), why), {})[str(cell.seq_len)] = None
    lines = [f"{title} at {', '.join(at)} tokens: {why}" for (title, why), at in reasons.items()]
    timed = run.cells_of(status="ok")
    for cell in timed:
        if cell.throttled:
            where = f"{title_of(cell.variant)} at {cell.seq_len} tokens in round {cell.round}"
            held = [reason for reason in cell.clock_reasons if reason != "power cap"]
            lines.append(f"Throttled: {where} ({', '.join(held)}).")
    if count := sum(bool(cell.other_gpu_processes) for cell in timed):
        lines.append(f"The GPU was shared in {count} of {len(timed)} timed cells.")
    if run.experiment.lora.dropout:
        lines.append(
            "Losses were not held against vanilla PEFT's: dropout masks are others in each."
        )
    if lacking := statistics.why_no_verdicts(run):
        lines.append(f"{lacking[0].upper()}{lacking[1:]}.")
    lines += [f"{said}." for said in statistics.twins_too_far_apart(run)]
    return "\n".join(f"- {line}" for line in lines)


def _settings_table(run: Run) -> str:
    names = ["checkpointing", "adapter_dtype", "autocast", "attention", "compile"]
    for name in ("graph", "allocator", "cublaslt_workspace"):  # shown only if any variant has it
        if any(getattr(cell.settings, name) for cell in run.cells):
            names.append(name)
    lines = []
    for variant in run.experiment.variants:
        cells = [cell for cell in run.cells_of(variant) if cell.settings != Settings()]
        if cells:
            columns = [[getattr(cell.settings, name) for cell in cells] for name in names]
            columns.append([len(cell.fused_modules) for cell in cells])
            lines.append([title_of(variant), *(_by_length(cells, values) for values in columns)])
    header = ["variant", *(name.replace("_", " ") for name in names), "fused modules"]
    return _without_the_same(header, lines) if lines else ""


def _without_the_same(header: list[str], lines: list[list[str]]) -> str:
    """Write a table of settings. Those that all variants share become one sentence below."""
    same = [i for i, column in enumerate(zip(*lines, strict=True)) if len({*column}) == 1]
    if len(lines) == 1 or not same:
        return markdown_table(header, lines)
    left = [i for i in range(len(header)) if i not in same]
    shown = markdown_table([header[i] for i in left], [[line[i] for i in left] for line in lines])
    return f"{shown}\n\nIn all: {', '.join(f'{header[i]} {lines[0][i]}' for i in same)}."


def _by_length(cells: list[Cell], values: list) -> str:
    """Return the cells' value in words. If lengths differ, give each value with its lengths."""
    lengths: dict[str, dict[str, None]] = {}
    for cell, value in sorted(zip(cells, values, strict=True), key=lambda one: one[0].seq_len):
        words = {"None": "none", "True": "on", "False": "off"}.get(str(value), str(value))
        lengths.setdefault(words, {})[str(cell.seq_len)] = None
    if len(lengths) == 1:
        return next(iter(lengths))
    return "; ".join(f"{words} at {', '.join(at)}" for words, at in lengths.items())


# --- its kernels ----------------------------------------------------------------------------------


def kinds_section(run: Run) -> str:
    """Write what the GPU does in a step of the longest and of the shortest length: the kernels'
    time by kind of work, then the wait for the host."""
    lengths = run.experiment.seq_lens
    tables = []
    for seq_len in dict.fromkeys((lengths[-1], lengths[0])):
        shown = bars(run, seq_len)
        if not shown:
            continue
        lines = [
            [words, *(f"{bar.kernel_ms.get(kind, 0.0):.1f}" for bar in shown)]
            for kind, words in KINDS.items()
            if any(kind in bar.kernel_ms for bar in shown)
        ]
        lines.append(["waits for the host", *(f"{bar.idle_ms:.1f}" for bar in shown)])
        lines.append(["**step**", *(f"**{bar.step_ms:.1f}**" for bar in shown)])
        least = [f"{shown[0].step_ms - bar.step_ms:.1f}" for bar in shown[1:]]
        lines.append([f"less than {title_of(shown[0].variant)}", "", *least])
        header = [f"ms at {seq_len} tokens per row", *(title_in(bar.variant, run) for bar in shown)]
        tables.append(markdown_table(header, lines))
    return "\n\n".join(tables) or "No cell has a profile."


def kernels_section(run: Run) -> str:
    """Write how long each Triton kernel takes alone, beside a device copy of the same bytes."""
    kernels = run.kernels
    if kernels is None:
        return "Not measured yet: `python lora_bench.py --kernels`."
    copy = f"A device copy of as many bytes; the fastest: {kernels.copy_gb_per_s:,.0f} GB/s."
    return f"{table(KERNEL_COLUMNS, kernels.rows)}\n\n{copy}"


# --- other runs -----------------------------------------------------------------------------------


def beside_floor_section(runs: Iterable[Run]) -> str:
    """Write a table for each run. A variant is compared with the floor, and with the recomputation
    added if it checkpoints. An FP8 variant is also compared with the same layers in bf16."""
    blocks = [f"{_floor_table(run)}\n\n{caption_with_commit(run)}" for run in runs]
    return "\n\n".join(blocks) or NOT_MEASURED


def _floor_table(run: Run) -> str:
    rows = rows_by_variant_and_length(run)

    def over_bf16(row: SummaryRow) -> str:
        in_bf16 = rows.get((_in_bf16(row.variant), row.seq_len))
        return _ratio(in_bf16.median_step_ms, row.median_step_ms) if in_bf16 else ""

    def over_floor(row: SummaryRow) -> str:
        if not variant_of(row.variant).checkpoints:
            return number(row.ratio_to_floor, 2)
        floor = run.floor_of(row.variant, row.seq_len)
        if not floor or not floor.recomputation_ms:
            return ""
        return _ratio(row.median_step_ms, floor.floor_ms + floor.recomputation_ms)

    columns = [
        Column[SummaryRow]("tokens", lambda row: f"{row.seq_len:,}"),
        *(title_column(run), STEP),
        Column("× bf16's speed", over_bf16),
        Column("× floor and recomputation", over_floor),
        PEAK,
    ]
    said = [column for column in columns if any(column.words(row) for row in rows.values())]
    return table(said, rows.values())


def _ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}" if over and under else ""


def _in_bf16(id: str) -> str:
    """Return the variant with the same layers in bf16; "" if this one is not in FP8."""
    recipe = variant_of(id).recipe
    if recipe is None or not wording.is_in_fp8(variant_of(id)):
        return ""
    fused = tuple(part for part in recipe.fused if part != "fp8_lm_head")
    return _BY_RECIPE.get(replace(recipe, fp8=False, fused=fused), "")
