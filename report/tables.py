"""The experiment's tables, in Markdown, from a run alone: no GPU, no torch."""

from __future__ import annotations

import re
from textwrap import shorten

from bench.records import Cell, Git, Interval, Run
from bench.small_adapter_records import SmallAdapters
from report.comparison import ComparedCell, Comparison
from report.kinds import KINDS, bars
from report.looks import REHEARSAL_NOTICE, STATUS_WORDS, caption, markdown_table, title_in
from report.statistics import summarize, twins_too_far_apart, why_no_verdicts
from variants import AGAIN, BASELINE, SUITES, Settings, title_of

# As tables show it: the A/A twin beside its baseline.
ASKED_FIRST = (BASELINE, "fused_mlp", "full_unsloth")
EXPERIMENT_VARIANTS = sorted(SUITES["experiment"], key=lambda id: id not in (BASELINE, AGAIN))


def results_section(run: Run) -> str:
    """Every row of the summary, what it was measured on, what went wrong, and settings."""
    blocks = [
        f"**{REHEARSAL_NOTICE}.**" if run.rehearsal else "",
        _summary_table(run),
        f"{caption(run)} {commit_of(run)}",
        _remarks(run),
        _settings_table(run),
    ]
    return "\n\n".join(block for block in blocks if block)


def kinds_section(run: Run) -> str:
    """Write the table of what the GPU does in a step of the shortest and of the longest length:
    the kernels' time by kind of work, then its wait for the host."""
    lengths = run.experiment.seq_lens
    tables = []
    for seq_len in dict.fromkeys((lengths[-1], lengths[0])):
        shown = [bar for bar in bars(run, seq_len) if bar.variant != AGAIN]
        if not shown:
            continue
        lines = [
            [words, *(f"{bar.kernel_ms.get(kind, 0.0):.1f}" for bar in shown)]
            for kind, words in KINDS.items()
        ]
        lines.append(["waits for the host", *(f"{bar.idle_ms:.1f}" for bar in shown)])
        lines.append(["**step**", *(f"**{bar.step_ms:.1f}**" for bar in shown)])
        least = [f"{shown[0].step_ms - bar.step_ms:.1f}" for bar in shown[1:]]
        lines.append([f"less than {title_of(shown[0].variant)}", "", *least])
        header = [f"ms at {seq_len} tokens", *(title_in(bar.variant, run) for bar in shown)]
        tables.append(markdown_table(header, lines))
    return "\n\n".join(tables) or "No cell has a profile."


def comparison_table(compared: Comparison) -> str:
    """`--compare` in Markdown: every cell in both files."""
    header = ["tokens", "variant", "first, ms", "second, ms", "first / second", "noise", "verdict"]
    return markdown_table(header, [comparison_words(row) for row in compared.rows])


def comparison_words(row: ComparedCell) -> list[str]:
    """One row of a comparison, a string a column."""
    timed = [
        STATUS_WORDS.get(status or "", "") if ms is None else f"{ms:.1f}"
        for status, ms in ((row.old, row.old_ms), (row.new, row.new_ms))
    ]
    speedup = number_or_blank(row.speedup, 2) + _range(row.ci95, 2)
    band = f"{row.band[0]:.2f} to {row.band[1]:.2f}" if row.band else ""
    return [str(row.seq_len), row.name, *timed, speedup, band, row.verdict or ""]


def _summary_table(run: Run) -> str:
    rows = summarize(run)
    header = ["tokens", "variant", "step, ms", "tokens/s", "speedup", "× floor", "peak, GiB"]
    header.append("GPU, ms")
    lines = []
    for row in rows:
        line = [str(row.seq_len), title_in(row.variant, run), STATUS_WORDS.get(row.status, "")]
        if row.status == "ok":
            line[2] = f"{row.median_step_ms:.1f}{_range(row.step_ms_ci95, 1)}"
            line.append(f"{row.tokens_per_s:,.0f}")
            line.append(number_or_blank(row.speedup, 2) + _range(row.speedup_ci95, 2))
            line += [number_or_blank(row.ratio_to_floor, 2), number_or_blank(row.peak_gib, 1)]
            line.append(number_or_blank(row.gpu_ms, 1))
        lines.append(line + [""] * (len(header) - len(line)))
    if any(row.verdict for row in rows):
        header.append("against the A/A noise")
        lines = [[*line, row.verdict or ""] for line, row in zip(lines, rows, strict=True)]
    return markdown_table(header, lines)


def _remarks(run: Run) -> str:
    """List the reasons why cells have no time, and what may have disturbed those that have one."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for cell in run.cells:
        if cell.status != "ok":
            why = STATUS_WORDS[cell.status]
            if cell.error:
                why += f": `{shorten(cell.error.replace('`', ''), 160)}`"
            reasons.setdefault((title_of(cell.variant), why), {})[str(cell.seq_len)] = None
    lines = [f"- {title} at {', '.join(at)} tokens: {why}" for (title, why), at in reasons.items()]
    timed = run.cells_of(status="ok")
    for cell in timed:
        if cell.throttled:
            where = f"{title_of(cell.variant)} at {cell.seq_len} tokens in round {cell.round}"
            held = [reason for reason in cell.clock_reasons if reason != "power cap"]
            lines.append(f"- Throttled: {where} ({', '.join(held)}).")
    if count := sum(bool(cell.other_gpu_processes) for cell in timed):
        lines.append(f"- The GPU was shared in {count} of {len(timed)} timed cells.")
    if run.experiment.lora.dropout:
        lines.append(
            "- Losses were not held against vanilla PEFT's: dropout masks are others in each."
        )
    if lacking := why_no_verdicts(run):
        lines.append(f"- {lacking[0].upper()}{lacking[1:]}.")
    lines += [f"- {said}." for said in twins_too_far_apart(run)]
    return "\n".join(lines)


def _settings_table(run: Run) -> str:
    names = ["checkpointing", "adapter_dtype", "autocast", "attention", "compile"]
    for name in ("graph", "allocator", "cublaslt_workspace"):  # told only where any variant has it
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
    return markdown_table(header, lines) if lines else ""


def _by_length(cells: list[Cell], values: list) -> str:
    """The cells' one value in words; where it was not the same at every length, with lengths."""
    lengths: dict[str, dict[str, None]] = {}
    for cell, value in zip(cells, values, strict=True):
        words = {"None": "none", "True": "on", "False": "off"}.get(str(value), str(value))
        lengths.setdefault(words, {})[str(cell.seq_len)] = None
    if len(lengths) == 1:
        return next(iter(lengths))
    return "; ".join(f"{words} at {', '.join(at)}" for words, at in lengths.items())


def kernels_section(run: Run) -> str:
    """Write how long each Triton kernel takes alone, beside a device copy of as many bytes."""
    kernels = run.kernels
    if kernels is None:
        return "Not measured yet: `python lora_bench.py --kernels`."
    header = ["kernel", "shape", "dtype", "median, µs", "GB/s", "of a copy's GB/s"]
    lines = [
        [row.kernel, " × ".join(map(str, row.shape)), row.dtype, f"{row.median_us:.1f}",
         f"{row.gb_per_s:,.0f}", f"{row.share_of_copy:.0%}"]
        for row in kernels.rows
    ]  # fmt: skip
    copy = f"A device copy of as many bytes; the fastest: {kernels.copy_gb_per_s:,.0f} GB/s."
    return f"{markdown_table(header, lines)}\n\n{copy}"


def commit_of(run: Run | SmallAdapters) -> str:
    """Say which commit was measured, and whether there were changes beside it."""
    git = run.environment.git or Git("unknown", False)
    commit = re.sub(r"[0-9a-f]{40}", lambda found: found[0][:10], git.commit)
    return f"Commit {commit}{' with local changes' if git.dirty else ''}."


def number_or_blank(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _range(bounds: Interval | None, digits: int) -> str:
    return f" ({bounds[0]:.{digits}f} to {bounds[1]:.{digits}f})" if bounds else ""
