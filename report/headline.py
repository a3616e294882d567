"""The README's answer, and docs/gpus.md: the experiment's speedups on each GPU that has run it, and
estimates for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from bench.records import Run, SummaryRow
from report.padding import ChatGroup, documents_row
from report.statistics import NOISE, rows_by_variant_and_length
from report.table import markdown_table, number
from report.wording import REHEARSAL_NOTICE, STATUS_WORDS, from_to, release_of, title_in
from variants import AGAIN, BASELINE, SUITES, title_of

ANSWERS = [id for id in SUITES["experiment"] if id not in (BASELINE, AGAIN)]
SHOWN = (BASELINE, *ANSWERS)
# Where the GPU computes for less of a step than this, the step waits for the host.
HOST_BOUND = 0.95


class Card(msgspec.Struct, frozen=True):
    """A GPU's data sheet: dense bf16 matmuls with fp32 sums, and memory."""

    name: str
    tflops: float
    tb_per_s: float
    gb: int


def speedup_in_words(row: SummaryRow | None) -> str:
    """Return a speedup, "1.21×", in italics where it is within noise; or the reason why there is
    none."""
    if row is None:
        return ""
    if row.speedup is None:
        return STATUS_WORDS.get(row.status, "")
    return f"*{row.speedup:.2f}×*" if row.verdict == NOISE else f"{row.speedup:.2f}×"


def answer(run: Run) -> str:
    """Say in one sentence what each variant buys at the longest length."""
    seq_len = max(run.experiment.seq_lens)
    found, rows = rows_by_variant_and_length(run), []
    for variant in SHOWN:
        row = found.get((variant, seq_len))
        if row is None or row.speedup is None:
            raise ValueError(f"the published run has no speedup of {variant} at {seq_len} tokens")
        rows.append(row)
    _, mlp, unsloth, everything = (f"{row.speedup:.2f}×" for row in rows)
    vanilla_gib, mlp_gib, unsloth_gib, gib = (f"{row.peak_gib or 0:.1f}" for row in rows)
    where = f"{run.environment.device}, {seq_len} tokens, batch {run.experiment.batch_size}"
    return (
        f"**With the MLP fused, a LoRA training step of Qwen2.5-3B is {mlp} as fast as with "
        f"vanilla PEFT; with full Unsloth {unsloth}, with everything fused {everything}. Vanilla "
        f"PEFT takes {vanilla_gib} GiB, fused MLP {mlp_gib}, Unsloth {unsloth_gib}, everything "
        f"fused {gib}.** ({where}, Unsloth {release_of('unsloth', run)})"
    )


def headline_table(run: Run, groups: Sequence[ChatGroup] = ()) -> str:
    """Write the run's lines, then one of chats in one row."""
    lines = [line for n in run.experiment.seq_lens for line in _speedup_lines(run, n)]
    lines += documents_row(groups, ANSWERS, run)
    table = markdown_table(["tokens", *(title_in(variant, run) for variant in SHOWN)], lines)
    return f"**{REHEARSAL_NOTICE}.**\n\n{table}" if run.rehearsal else table


def measured_section(runs: Mapping[str, Run]) -> str:
    """Write every run's lines of the answer, each with its GPU and a link to the run. runs: by the
    path that docs/gpus.md links to; "" for one that is not committed."""
    lines = [
        [run.environment.device, *line, _origin(run, path, seq_len)]
        for path, run in runs.items()
        for seq_len in run.experiment.seq_lens
        for line in _speedup_lines(run, seq_len)
    ]
    return markdown_table(["GPU", "tokens", *map(title_of, SHOWN), "run"], lines)


def _speedup_lines(run: Run, seq_len: int) -> list[list[str]]:
    """Return a length's line: the tokens, vanilla PEFT, and every other variant of the answer.
    Where the host is the limit, one more has the GPU's own time. Empty where vanilla PEFT has no
    time."""
    rows = rows_by_variant_and_length(run)
    base, *others = (rows.get((variant, seq_len)) for variant in SHOWN)
    if base is None or base.median_step_ms is None or not any(others):
        return []
    cells = [
        speedup_in_words(row) + (f", {row.peak_gib:.1f} GiB" if row and row.peak_gib else "")
        for row in others
    ]
    lines = [[f"**{seq_len}**", f"{base.median_step_ms:.0f} ms, {base.peak_gib or 0:.1f} GiB"]]
    lines[0] += cells
    if base.gpu_ms and base.gpu_ms < HOST_BOUND * base.median_step_ms:
        times = [row.gpu_ms if row else None for row in others]
        alone = [number(base.gpu_ms / ms, 2, "×") if ms else "" for ms in times]
        lines.append([f"{seq_len}, GPU time alone", f"{base.gpu_ms:.0f} ms", *alone])
    return lines


def _origin(run: Run, path: str, seq_len: int) -> str:
    """Say when these rows were measured, in how many steps, on how many cards if on several, and
    beside which release of Unsloth."""
    day = run.started_utc[:10]
    rows = [row for row in rows_by_variant_and_length(run).values() if row.seq_len == seq_len]
    steps = from_to(row.steps for row in rows if row.steps)
    cards = f", {run.cards()} cards" if run.cards() > 1 else ""
    release = release_of("unsloth", run) if "full_unsloth" in run.experiment.variants else ""
    unsloth = f", Unsloth {release}" if release else ""
    return f"{f'[{day}]({path})' if path else day}, {steps} steps{cards}{unsloth}"


def expected_section(run: Run, measured_on: Card, *others: Card) -> str:
    """Write the time that a step at the longest length should need on other cards.

    The time of matmuls and of attention goes with a card's TFLOPS, the rest of the GPU's time with
    its memory's bandwidth. The time that it waits for the host is left out.
    """
    split = {v: _split_ms(run, v, max(run.experiment.seq_lens)) for v in SHOWN}
    lines = []
    for card in others:
        compute = measured_on.tflops / card.tflops
        memory = measured_on.tb_per_s / card.tb_per_s
        ms = {v: products * compute + rest * memory for v, (products, rest) in split.items()}
        over = [f"{ms[BASELINE] / ms[v]:.2f}×" for v in ANSWERS]
        sheet = [card.name, f"{card.tflops:g}", f"{card.tb_per_s:g}", f"{card.gb}"]
        lines.append([*sheet, f"{ms[BASELINE]:.0f} ms", *over])
    header = ["GPU (estimated)", "TFLOPS", "TB/s", "GB"]
    return markdown_table([*header, *(title_in(variant, run) for variant in SHOWN)], lines)


def _split_ms(run: Run, variant: str, seq_len: int) -> tuple[float, float]:
    """Return the GPU's time for matmuls and attention, and for all else, of one step."""
    cells = [c for c in run.cells_of(variant, seq_len, "ok") if c.gpu_busy_ms]
    if not cells:
        raise ValueError(f"the published run has no profile of {variant} at {seq_len} tokens")
    products = median(sum(c.kernel_ms.get(k, 0.0) for k in ("matmul", "attention")) for c in cells)
    return products, median(cell.gpu_busy_ms or 0.0 for cell in cells) - products
