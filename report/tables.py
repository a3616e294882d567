"""The README's tables, in Markdown, from a results document alone: no GPU, no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from bench.results import write_atomically
from report.comparison import Comparison, Row, compare
from report.looks import LOOKS, REHEARSAL, STATUS_WORDS, caption, in_turns, markdown_table
from report.names import name_of
from report.statistics import BASELINE, BASELINE_AGAIN, summarize, why_no_verdicts
from report.suite_tables import (
    against_unsloth_section,
    effects_section,
    parts_section,
    peers_section,
)


def results_section(results: dict) -> str:
    """Every row of the summary, what it was measured on, what went wrong, settings and kernels."""
    git = results["environment"]["git"] or {"commit": "unknown", "dirty": False}
    commit = re.sub(r"[0-9a-f]{40}", lambda found: found[0][:10], git["commit"])
    commit += " with local changes" if git["dirty"] else ""
    blocks = [
        f"**{REHEARSAL}.**" if results["rehearsal"] else "",
        _summary_table(results),
        f"{caption(results)} Commit {commit}.",
        _remarks(results),
        _settings_table(results),
        _kernel_table(results["kernels"]) if results["kernels"] else "",
    ]
    return "\n\n".join(block for block in blocks if block)


def headline_table(results: dict) -> str:
    """The first screen's table: one row a length, and only the variants everyone asks about."""
    rows = {(row["variant"], row["seq_len"]): row for row in summarize(results)}
    asked = [v for v in LOOKS if v in results["experiment"]["variants"] and v != BASELINE_AGAIN]

    def words(row: dict | None) -> str:
        if row is None or row["status"] != "ok":
            return STATUS_WORDS[row["status"]] if row else ""
        over = ""
        if row["speedup"] and row["variant"] != BASELINE:
            noise = row["verdict"] == "not distinguishable"
            over = f", {row['speedup']:.2f}× (noise)" if noise else f", **{row['speedup']:.2f}×**"
        return f"{row['median_step_ms']:.0f} ms{over}"

    lines = [
        [str(seq_len), *(words(rows.get((variant, seq_len))) for variant in asked)]
        for seq_len in results["experiment"]["seq_lens"]
    ]
    header = ["tokens in a sequence", *(name_of(variant) for variant in asked)]
    table = markdown_table(header, lines)
    return f"**{REHEARSAL}.**\n\n{table}" if results["rehearsal"] else table


def in_turns_section(runs: Sequence[dict]) -> str:
    """The experiment's variants in every run that took them in turns, and what it was made on."""
    sections = []
    for run in runs:
        experiment = run["experiment"]
        if in_turns(experiment) and {*LOOKS} <= {*experiment["variants"]}:
            cells = [cell for cell in run["cells"] if cell["variant"] in LOOKS]
            of_these = {**run, "experiment": {**experiment, "variants": [*LOOKS]}, "cells": cells}
            sections.append(f"{_summary_table(of_these)}\n\n{caption(of_these)}")
    return "\n\n".join(sections) or "Not measured yet: `python lora_bench.py --turns 2`."


def update_readme(
    readme_path: str | Path,
    results: dict,
    second_run: dict,
    suite: dict | None = None,
    beside_unsloth: Sequence[dict] = (),
) -> bool:
    """Put the tables between their markers; whether that changed the file."""
    before = after = Path(readme_path).read_bytes().decode()
    for name, block in (
        ("results", results_section(results)),
        ("headline", headline_table(results)),
        ("in turns", in_turns_section(beside_unsloth)),
        ("parts", parts_section(suite)),
        ("effects", effects_section(suite)),
        ("unsloth", against_unsloth_section([*([suite] if suite else []), *beside_unsloth])),
        ("peers", peers_section(suite)),
        ("second run", comparison_table(compare(results, second_run))),
    ):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if [after.count(begin), after.count(end), after.find(begin) < after.find(end)] != [1, 1, 1]:
            raise ValueError(f"{readme_path} wants {begin} and then {end}, once each: add them")
        head, tail = after.split(begin)[0], after.split(end)[1]
        after = f"{head}{begin}\n\n{block}\n\n{end}{tail}"
    if after != before:
        write_atomically(readme_path, after.encode())
    return after != before


def comparison_table(compared: Comparison) -> str:
    """`--compare` in Markdown: every cell in both files."""
    header = ["tokens", "variant", "first, ms", "second, ms", "first / second", "noise", "verdict"]
    return markdown_table(header, [comparison_words(row) for row in compared.rows])


def comparison_words(row: Row) -> list[str]:
    """One row of a comparison, a string a column."""
    timed = [
        STATUS_WORDS.get(status, status) if ms is None else f"{ms:.1f}"
        for status, ms in ((row.old, row.old_ms), (row.new, row.new_ms))
    ]
    speedup = _number(row.speedup, 2) + _range(row.ci95, 2)
    band = f"{row.band[0]:.2f} to {row.band[1]:.2f}" if row.band else ""
    return [str(row.seq_len), name_of(row.variant), *timed, speedup, band, row.verdict or ""]


def _summary_table(results: dict) -> str:
    rows = summarize(results)
    header = ["tokens", "variant", "step, ms", "tokens/s", "speedup", "× floor", "peak, GiB"]
    lines = []
    for row in rows:
        line = [str(row["seq_len"]), name_of(row["variant"]), STATUS_WORDS.get(row["status"], "")]
        if row["status"] == "ok":
            line[2] = f"{row['median_step_ms']:.1f}{_range(row['step_ms_ci95'], 1)}"
            line.append(f"{row['tokens_per_s']:,.0f}")
            line.append(_number(row["speedup"], 2) + _range(row["speedup_ci95"], 2))
            line += [_number(row["ratio_to_floor"], 2), _number(row["peak_gib"], 1)]
        lines.append(line + [""] * (len(header) - len(line)))
    if any(row["verdict"] for row in rows):
        header.append("against the A/A noise")
        lines = [[*line, row["verdict"] or ""] for line, row in zip(lines, rows, strict=True)]
    return markdown_table(header, lines)


def _remarks(results: dict) -> str:
    """Why cells have no time, and what may have disturbed those that have one."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for cell in results["cells"]:
        if cell["status"] != "ok":
            why = STATUS_WORDS[cell["status"]]
            if cell["error"]:
                why += f": `{shorten(cell['error'].replace('`', ''), 160)}`"
            reasons.setdefault((name_of(cell["variant"]), why), {})[str(cell["seq_len"])] = None
    lines = [f"- {name} at {', '.join(at)} tokens: {why}" for (name, why), at in reasons.items()]
    timed = [cell for cell in results["cells"] if cell["status"] == "ok"]
    lines += [f"- Throttled: {_where(cell)} ({', '.join(_held(cell))})."
              for cell in timed if cell["throttled"]]  # fmt: skip
    if count := sum(bool(cell["other_gpu_processes"]) for cell in timed):
        lines.append(f"- The GPU was shared in {count} of {len(timed)} timed cells.")
    if lacking := why_no_verdicts(results):
        lines.append(f"- {lacking[0].upper()}{lacking[1:]}.")
    return "\n".join(lines)


def _where(cell: dict) -> str:
    return f"{name_of(cell['variant'])} at {cell['seq_len']} tokens in round {cell['round']}"


def _held(cell: dict) -> list[str]:
    return [reason for reason in cell["clock_reasons"] if reason != "power cap"]


def _settings_table(results: dict) -> str:
    names = ["checkpointing", "adapter_dtype", "autocast", "attention", "compile"]
    for name in ("graph", "allocator"):  # which only those settings have that it is true of
        if any(cell["settings"].get(name) for cell in results["cells"]):
            names.append(name)
    lines = []
    for variant in results["experiment"]["variants"]:
        cells = [c for c in results["cells"] if c["variant"] == variant and c["settings"]]
        if cells:
            columns = [[cell["settings"].get(name) for cell in cells] for name in names]
            columns.append([len(cell["fused_modules"]) for cell in cells])
            lines.append([name_of(variant), *(_by_length(cells, values) for values in columns)])
    header = ["variant", *(name.replace("_", " ") for name in names), "fused modules"]
    return markdown_table(header, lines) if lines else ""


def _by_length(cells: list[dict], values: list) -> str:
    """The cells' one value in words; where it was not the same at every length, with lengths."""
    lengths: dict[str, dict[str, None]] = {}
    for cell, value in zip(cells, values, strict=True):
        words = {"None": "none", "True": "on", "False": "off"}.get(str(value), str(value))
        lengths.setdefault(words, {})[str(cell["seq_len"])] = None
    if len(lengths) == 1:
        return next(iter(lengths))
    return "; ".join(f"{words} at {', '.join(at)}" for words, at in lengths.items())


def _kernel_table(kernels: dict) -> str:
    header = ["kernel", "shape", "dtype", "median, µs", "GB/s", "of a copy's GB/s"]
    lines = [
        [row["kernel"], " × ".join(map(str, row["shape"])), row["dtype"], f"{row['median_us']:.1f}",
         f"{row['gb_per_s']:,.0f}", f"{row['share_of_copy']:.0%}"]
        for row in kernels["rows"]
    ]  # fmt: skip
    copy = f"A device copy of as many bytes; the fastest: {kernels['copy_gb_per_s']:,.0f} GB/s."
    return f"{markdown_table(header, lines)}\n\n{copy}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _range(bounds: list[float] | None, digits: int) -> str:
    return f" ({bounds[0]:.{digits}f} to {bounds[1]:.{digits}f})" if bounds else ""
