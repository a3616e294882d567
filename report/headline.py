"""The README's answer: one sentence and one table, from the published runs."""

from __future__ import annotations

from collections.abc import Sequence

from bench.records import Run, SummaryRow
from report.looks import REHEARSAL_NOTICE, STATUS_WORDS, markdown_table
from report.statistics import NOISE, summarize
from variants import AGAIN, BASELINE, SUITES, title_of

ANSWERS = [id for id in SUITES["experiment"] if id not in (BASELINE, AGAIN)]
# Where the GPU computes for less of a step than this, the host is what a step waits for.
HOST_BOUND = 0.9


def row_of(run: Run, variant: str, seq_len: int) -> SummaryRow | None:
    """The summary of a variant at a length; None where the run has no cell of it."""
    return next((r for r in summarize(run) if (r.variant, r.seq_len) == (variant, seq_len)), None)


def first_with(runs: Sequence[Run], variant: str, seq_len: int) -> Run | None:
    """The first of the runs that timed this variant at this length."""
    return next((run for run in runs if run.cells_of(variant, seq_len, "ok")), None)


def times(row: SummaryRow | None) -> str:
    """A speedup, "1.21×", in italics where it is within noise; or the reason why there is none."""
    if row is None:
        return ""
    if row.speedup is None:
        return STATUS_WORDS.get(row.status, "")
    return f"*{row.speedup:.2f}×*" if row.verdict == NOISE else f"{row.speedup:.2f}×"


def answer(runs: Sequence[Run]) -> str:
    """Say in one sentence what each variant buys at the longest length."""
    seq_len = max(runs[0].experiment.seq_lens)
    rows = {}
    for variant in ANSWERS:
        run = first_with(runs, variant, seq_len)
        if run is None or (row := row_of(run, variant, seq_len)) is None or row.speedup is None:
            raise ValueError(f"no published run has a speedup of {variant} at {seq_len} tokens")
        rows[variant] = row
    mlp, unsloth, everything = (rows[variant] for variant in ANSWERS)
    where = f"{runs[0].environment.device}, {seq_len} tokens, batch {runs[0].experiment.batch_size}"
    return (
        f"**Fusing the MLP makes a LoRA training step of Qwen2.5-3B {mlp.speedup:.2f}× as fast, "
        f"full Unsloth makes it {unsloth.speedup:.2f}×, and everything in this repository "
        f"{everything.speedup:.2f}×, {_memory_beside(everything, unsloth)}.** ({where})"
    )


def _memory_beside(row: SummaryRow, other: SummaryRow) -> str:
    own, others = (f"{one.peak_gib or 0:.1f}" for one in (row, other))
    if own == others:
        return f"in the same {own} GiB as Unsloth"
    return f"in {own} GiB where Unsloth takes {others}"


def headline_table(runs: Sequence[Run]) -> str:
    """One row a length; where the host is the limit, one more with the GPU's own time.

    A variant is taken from the first run that has it, and held against vanilla PEFT there. Where
    that is another run and no sure speedup, or the host is the limit, its own time stands there.
    """
    lines = []
    for seq_len in runs[0].experiment.seq_lens:
        base = row_of(runs[0], BASELINE, seq_len)
        if base is None or base.median_step_ms is None:
            continue
        base_ms = base.gpu_ms
        waits = base_ms is not None and base_ms < HOST_BOUND * base.median_step_ms
        sources = {variant: first_with(runs, variant, seq_len) for variant in ANSWERS}
        cells = []
        for variant, run in sources.items():
            row = row_of(run or runs[0], variant, seq_len)
            memory = f", {row.peak_gib:.1f} GiB" if row and row.peak_gib and row.speedup else ""
            unsure = run is not runs[0] and row and (waits or row.verdict == NOISE)
            cells.append(
                (f"{row.median_step_ms:.0f} ms" if row and unsure else times(row)) + memory
            )
        vanilla = f"{base.median_step_ms:.0f} ms, {base.peak_gib or 0:.1f} GiB"
        lines.append([f"**{seq_len}**", vanilla, *cells])
        if waits:
            alone = [_gpu_times(run, variant, seq_len) for variant, run in sources.items()]
            lines.append([f"{seq_len}, on the GPU", f"{base_ms:.0f} ms", *alone])
    table = markdown_table(["tokens", title_of(BASELINE), *map(title_of, ANSWERS)], lines)
    return f"**{REHEARSAL_NOTICE}.**\n\n{table}" if runs[0].rehearsal else table


def _gpu_times(run: Run | None, variant: str, seq_len: int) -> str:
    own = row_of(run, variant, seq_len) if run else None
    base = row_of(run, BASELINE, seq_len) if run else None
    return f"{base.gpu_ms / own.gpu_ms:.2f}×" if own and base and own.gpu_ms and base.gpu_ms else ""
