"""The README's answer: one sentence and one table, from the published run."""

from __future__ import annotations

from collections.abc import Sequence

from bench.records import Run, SummaryRow
from report.looks import REHEARSAL_NOTICE, STATUS_WORDS, markdown_table, release_of, title_in
from report.padding import ChatGroup, documents_row
from report.statistics import NOISE, summarize
from variants import AGAIN, BASELINE, SUITES

ANSWERS = [id for id in SUITES["experiment"] if id not in (BASELINE, AGAIN)]
# Where the GPU computes for less of a step than this, the host is what a step waits for.
HOST_BOUND = 0.95


def rows_of(run: Run) -> dict[tuple[str, int], SummaryRow]:
    """The summary's rows, by variant and length."""
    return {(row.variant, row.seq_len): row for row in summarize(run)}


def times(row: SummaryRow | None) -> str:
    """A speedup, "1.21×", in italics where it is within noise; or the reason why there is none."""
    if row is None:
        return ""
    if row.speedup is None:
        return STATUS_WORDS.get(row.status, "")
    return f"*{row.speedup:.2f}×*" if row.verdict == NOISE else f"{row.speedup:.2f}×"


def answer(run: Run) -> str:
    """Say in one sentence what each variant buys at the longest length."""
    seq_len = max(run.experiment.seq_lens)
    found, rows = rows_of(run), {}
    for variant in (BASELINE, *ANSWERS):
        row = found.get((variant, seq_len))
        if row is None or row.speedup is None:
            raise ValueError(f"the published run has no speedup of {variant} at {seq_len} tokens")
        rows[variant] = row
    _, mlp, unsloth, everything = (f"{row.speedup:.2f}×" for row in rows.values())
    vanilla_gib, mlp_gib, unsloth_gib, gib = (f"{row.peak_gib or 0:.1f}" for row in rows.values())
    where = f"{run.environment.device}, {seq_len} tokens, batch {run.experiment.batch_size}"
    where += f", Unsloth {release_of('unsloth', run)}"
    return (
        f"**With the MLP fused, a LoRA training step of Qwen2.5-3B is {mlp} as fast as with "
        f"vanilla PEFT; with full Unsloth {unsloth}, with everything fused {everything}. Vanilla "
        f"PEFT takes {vanilla_gib} GiB, fused MLP {mlp_gib}, Unsloth {unsloth_gib}, everything "
        f"fused {gib}.** ({where})"
    )


def speedup_lines(rows: dict[tuple[str, int], SummaryRow], seq_len: int) -> list[list[str]]:
    """A length's line: the tokens, vanilla PEFT, and every other variant of the answer; where the
    host is the limit, one more with the GPU's own time. Empty where vanilla PEFT has no time."""
    base, *others = (rows.get((variant, seq_len)) for variant in (BASELINE, *ANSWERS))
    if base is None or base.median_step_ms is None or not any(others):
        return []
    cells = [
        times(row) + (f", {row.peak_gib:.1f} GiB" if row and row.peak_gib else "") for row in others
    ]
    vanilla = f"{base.median_step_ms:.0f} ms, {base.peak_gib or 0:.1f} GiB"
    lines = [[f"**{seq_len}**", vanilla, *cells]]
    if base.gpu_ms and base.gpu_ms < HOST_BOUND * base.median_step_ms:
        alone = [f"{base.gpu_ms / row.gpu_ms:.2f}×" if row and row.gpu_ms else ""
                 for row in others]  # fmt: skip
        lines.append([f"{seq_len}, GPU time alone", f"{base.gpu_ms:.0f} ms", *alone])
    return lines


def headline_table(run: Run, lengths: Sequence[ChatGroup] = ()) -> str:
    """The run's lines, then one of chats in one row."""
    rows = rows_of(run)
    lines = [line for n in run.experiment.seq_lens for line in speedup_lines(rows, n)]
    lines += documents_row(lengths, ANSWERS, run)
    header = ["tokens", *(title_in(variant, run) for variant in (BASELINE, *ANSWERS))]
    table = markdown_table(header, lines)
    return f"**{REHEARSAL_NOTICE}.**\n\n{table}" if run.rehearsal else table
