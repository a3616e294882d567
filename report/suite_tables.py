"""The tables of a suite, in Markdown: each part's gains, and all other variants."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from bench.records import Run, SummaryRow
from report.ablation import BLOCKS, ablation_table
from report.statistics import NOISE, rows_by_variant_and_length
from report.table import markdown_table, number, thousands
from report.wording import STATUS_WORDS, caption, step_or_status, title_in
from variants import ALL_BUT, ALONE, BASELINE, variant_of

SINGLE_ROUND = "¹"
NOT_MEASURED = "Not measured yet in a run that can be quoted: `python lora_bench.py --suite all`."


def parts_section(suite: Run) -> str:
    """Write the time that each part saves per step, with its caption."""
    tables = ablation_table(suite)
    return f"{tables}\n\n{caption(suite)}" if tables else NOT_MEASURED


def _by_block(write: Callable[[Run, bool], str], suite: Run) -> str:
    """Write a table for the variants with checkpointing, and one for those without."""
    tables = [
        f"{title}:\n\n{rows}"
        for checkpoints, title in BLOCKS.items()
        if (rows := write(suite, checkpoints))
    ]
    return "\n\n".join(tables) or NOT_MEASURED


def effects_section(suite: Run) -> str:
    """Write how each part alone changes forward, backward, launches and memory at the longest
    length. With checkpointing, the backward includes the second forward."""
    return _by_block(_effects, suite)


def _effects(suite: Run, checkpoints: bool) -> str:
    seq_len = suite.experiment.seq_lens[-1]
    found = {
        variant.plain_id: row
        for row in rows_by_variant_and_length(suite).values()
        if row.seq_len == seq_len
        and row.status == "ok"
        and (variant := variant_of(row.variant)).checkpoints is checkpoints
    }
    shown = (BASELINE, *ALONE.values(), "fused_all", "fused_all_offload")
    lines = []
    for row in (found[id] for id in shown if id in found):
        # the last round's cell has the latest code, but a process profiles a length only once
        cells = sorted(suite.cells_of(row.variant, seq_len, "ok"), key=lambda cell: -cell.round)
        launches = next((sum(seen.values()) for cell in cells if (seen := cell.kernels_seen)), None)
        reserved = cells[0].peak_reserved_bytes
        lines.append([
            variant_of(row.variant).plain_title, number(row.forward_ms, 1),
            number(row.backward_ms, 1), thousands(launches), number(row.peak_gib, 1),
            number(reserved and reserved / 2**30, 1),
        ])  # fmt: skip
    header = [f"at {seq_len} tokens", "forward, ms", "backward, ms", "kernel launches per step",
              "peak allocated, GiB", "reserved, GiB"]  # fmt: skip
    return markdown_table(header, lines) if len(lines) > 1 else ""


def peers_section(suite: Run) -> str:
    """Write every variant except those with one part alone or one left out, the fastest first. A
    suite's rounds may come from several hosts, so all but the longest length have speedups alone,
    which are paired round by round."""
    return _by_block(_peers, suite)


def _peers(suite: Run, checkpoints: bool) -> str:
    lengths = suite.experiment.seq_lens
    found = rows_by_variant_and_length(suite)
    ablated = {*ALONE.values(), *ALL_BUT.values()} - {"fused_mlp"}  # of the experiment
    variants = [
        variant
        for variant in suite.experiment.variants
        if variant_of(variant).checkpoints is checkpoints
        and variant_of(variant).plain_id not in ablated
        and any((variant, n) in found for n in lengths)
    ]
    if len(variants) < 2:
        return ""

    def last_ms(variant: str) -> float:
        row = found.get((variant, lengths[-1]))
        return (row and row.median_step_ms) or inf

    lines = []
    for variant in sorted(variants, key=last_ms):
        rows = [found.get((variant, n)) for n in lengths]
        name = title_in(variant, suite, title=variant_of(variant).plain_title)
        peak = number(rows[-1].peak_gib, 1) if rows[-1] else ""
        lines.append([name, *map(_speedup, rows), step_or_status(rows[-1]), peak])
    header = [
        "variant",
        *(f"speedup at {n}" for n in lengths),
        f"step at {lengths[-1]}, ms",
        f"peak allocated at {lengths[-1]}, GiB",
    ]
    return markdown_table(header, lines) + _floor(suite, checkpoints)


def _floor(suite: Run, checkpoints: bool) -> str:
    """Write the floor of the longest length, if there is one."""
    seq_len = suite.experiment.seq_lens[-1]
    if (floor := suite.floor.get(seq_len)) is None:
        return ""
    words = f"\n\nFloor at {seq_len}: {floor.floor_ms:.1f} ms"
    if checkpoints and floor.recomputation_ms:
        both = floor.floor_ms + floor.recomputation_ms
        words += f"; floor and recomputation: {both:.1f} ms"
    return words + "."


def _speedup(row: SummaryRow | None) -> str:
    """Return a speedup, in italics if within noise. A mark says that a single round cannot be
    judged. Without a speedup, return the reason."""
    if row is None or row.speedup is None:
        return STATUS_WORDS.get(row.status, "") if row else ""
    over = f"{row.speedup:.2f}"
    mark = SINGLE_ROUND if row.rounds == 1 else ""
    return f"{f'*{over}*' if row.verdict == NOISE else over}{mark}"
