"""The README's answer, and docs/gpus.md: the experiment's speedups on each GPU that ran it, and
estimates for others."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bench.records import Run, SummaryRow
from report.statistics import NOISE, by_gpu_time, rows_by_variant_and_length, summarize
from report.table import markdown_table, number
from report.wording import (
    REHEARSAL_NOTICE,
    STATUS_WORDS,
    from_to,
    release_of,
    roughly,
)
from variants import AGAIN, BASELINE, SUITES, title_of

ANSWERS = [id for id in SUITES["experiment"] if id not in (BASELINE, AGAIN)]
SHOWN = (BASELINE, *ANSWERS)
# If the GPU is busy for a smaller share of a step than this, the step waits for the host.
HOST_BOUND = 0.95
# An H200's times and speedups at 512 tokens differ from our estimates by at most this share.
MARGIN = 0.08
# On a phone: "everything" is too wide for one of five columns.
SHORT_TITLES = [title_of(id).replace("everything", "all") for id in SHOWN]
SHARES = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}


class Card(msgspec.Struct, frozen=True):
    """A GPU's data sheet: dense bf16 matmuls with fp32 sums, and memory bandwidth."""

    name: str
    tflops: float
    tb_per_s: float


def speedup_in_words(row: SummaryRow | None) -> str:
    """Return a speedup, "1.21×", in italics if within noise, or the reason why there is none."""
    if row is None:
        return ""
    if row.speedup is None:
        return STATUS_WORDS.get(row.status, "")
    return f"*{row.speedup:.2f}×*" if row.verdict == NOISE else f"{row.speedup:.2f}×"


def answer(run: Run) -> str:
    """Say what each variant buys, over all lengths."""
    found = {(row.variant, row.seq_len): row for row in by_gpu_time(summarize(run))}
    lengths = run.experiment.seq_lens
    speedups: dict[str, list[float]] = {}
    for variant in ANSWERS:
        rows = [found.get((variant, seq_len)) for seq_len in lengths]
        speedups[variant] = [row.speedup for row in rows if row and row.speedup]
        if len(speedups[variant]) < len(rows):
            raise ValueError(f"the published run lacks the GPU time of {variant} at some length")
    mlp, unsloth, everything = (roughly(speedups[variant]) for variant in ANSWERS)
    longest = lengths[-1]
    at_longest = [found[variant, longest] for variant in SHOWN]
    vanilla_ms, mlp_ms, unsloth_ms, _ = (row.gpu_ms or 0 for row in at_longest)
    saved, they_save = vanilla_ms - mlp_ms, vanilla_ms - unsloth_ms
    part = "about half" if 0.4 < saved / they_save < 0.6 else f"{saved / they_save:.0%}"
    needed, _, *left = (row.peak_gib or 0 for row in at_longest)
    shares = dict.fromkeys(SHARES.get(round(needed / gib), f"{gib / needed:.0%}") for gib in left)
    return (
        "We trained the same Qwen2.5-3B LoRA four ways and timed every step. **Our fused MLP alone "
        f"saves {part} of the GPU time that Unsloth saves: {saved:.0f} of {they_save:.0f} ms at "
        f"{longest} tokens per row. That is {mlp} speedup. All of Unsloth gives {unsloth}, "
        f"everything fused {everything}; these two need {' and '.join(shares)} of vanilla PEFT's "
        f"memory.** ({run.environment.device}, {run.experiment.batch_size} rows a step, Unsloth "
        f"{release_of('unsloth', run)})"
    )


def headline_table(run: Run) -> str:
    """Write each length's GPU time and speedups, then peak memory at the longest, narrow enough for
    a phone."""
    found = {(row.variant, row.seq_len): row for row in by_gpu_time(summarize(run))}
    lines = []
    for seq_len in run.experiment.seq_lens:
        base, *others = (found.get((variant, seq_len)) for variant in SHOWN)
        speedups = [speedup_in_words(row).replace("×", "") for row in others]
        lines.append([f"**{seq_len}**", number(base.gpu_ms, 0) if base else "", *speedups])
    longest = max(run.experiment.seq_lens)
    peaks = [row.peak_gib if (row := found.get((v, longest))) else None for v in SHOWN]
    lines.append([f"peak GiB at {longest}", *(number(gib, 1) for gib in peaks)])
    table = markdown_table(["tokens per row", "PEFT, ms", "MLP", "Unsloth", "all"], lines)
    return f"**{REHEARSAL_NOTICE}.**\n\n{table}" if run.rehearsal else table


def _small(words: str) -> str:
    return f"<sub>{words}</sub>"


def measured_section(runs: Mapping[str, Run]) -> str:
    """Write every run's lines of the answer, below its GPU and a link to the run. runs: by the path
    that docs/gpus.md links to; "" for one that is not committed."""
    blocks = []
    for path, run in runs.items():
        lines = [line for n in run.experiment.seq_lens for line in _speedup_lines(run, n)]
        if lines:
            table = markdown_table(["", *SHORT_TITLES], lines)
            blocks.append(f"**{run.environment.device}**, {_origin(run, path)}:\n\n{table}")
    return "\n\n".join(blocks)


def _speedup_lines(run: Run, seq_len: int) -> list[list[str]]:
    """Return a length's lines: vanilla PEFT's step and the others' speedups, then GPU time if the
    host is the limit, and peak memory. Empty if vanilla PEFT has no time."""
    rows = rows_by_variant_and_length(run)
    base, *others = (rows.get((variant, seq_len)) for variant in SHOWN)
    if base is None or base.median_step_ms is None or not any(others):
        return []
    step = f"{base.median_step_ms:.0f} ms"
    lines = [[f"**{seq_len}**", step, *map(speedup_in_words, others)]]
    if base.gpu_ms and base.gpu_ms < HOST_BOUND * base.median_step_ms:
        times = [row.gpu_ms if row else None for row in others]
        alone = [f"{base.gpu_ms / ms:.2f}×" if ms else "" for ms in times]
        lines.append(["GPU time", f"{base.gpu_ms:.0f} ms", *alone])
    if base.peak_gib:
        lines.append(
            ["GiB", *(number(row.peak_gib if row else None, 1) for row in (base, *others))]
        )
    return lines


def _origin(run: Run, path: str) -> str:
    """Say when a run was measured, in how many steps a length, on how many cards if several, and
    beside which release of Unsloth."""
    day = run.started_utc[:10]
    steps = from_to(row.steps for row in rows_by_variant_and_length(run).values() if row.steps)
    cards = f", {run.cards()} cards" if run.cards() > 1 else ""
    release = release_of("unsloth", run) if "full_unsloth" in run.experiment.variants else ""
    unsloth = f", Unsloth {release}" if release else ""
    return f"{f'[{day}]({path})' if path else day}, {steps} steps{cards}{unsloth}"


def expected_section(run: Run, measured_on: Card, *others: Card) -> str:
    """Write what to expect of other cards at the longest length: vanilla PEFT's GPU time, and the
    speedups over it."""
    seq_len = max(run.experiment.seq_lens)
    columns = []
    for card in others:
        ms = expected_ms(run, seq_len, measured_on, card)
        speedups = [f"{_range(ms[BASELINE] / ms[v])}×" for v in ANSWERS]
        columns.append([f"{_range(ms[BASELINE] / 1000)} s", *speedups])
    lines = [[title_of(v), *words] for v, *words in zip(SHOWN, *columns, strict=True)]
    header = [f"{seq_len} tokens, estimated", *(card.name for card in others)]
    return markdown_table(header, lines)


def _range(estimate: float) -> str:
    return f"{(1 - MARGIN) * estimate:.1f}–{(1 + MARGIN) * estimate:.1f}"


def expected_ms(run: Run, seq_len: int, measured_on: Card, card: Card) -> dict[str, float]:
    """Estimate the GPU time of a step on another card, for each variant.

    The floor and its recomputation, the frozen matmuls and attention, scale with a card's TFLOPS.
    Everything else scales with its memory bandwidth: the adapters' own matmuls are bound by memory.
    We leave out the wait for the host.
    """
    compute = measured_on.tflops / card.tflops
    memory = measured_on.tb_per_s / card.tb_per_s
    rows, floor = rows_by_variant_and_length(run), run.floor[seq_len]
    frozen = floor.floor_ms + (floor.recomputation_ms or 0.0)
    gpu_ms = {variant: rows[variant, seq_len].gpu_ms or 0.0 for variant in SHOWN}
    return {v: frozen * compute + (ms - frozen) * memory for v, ms in gpu_ms.items()}
