"""docs/gpus.md: what was measured on each GPU, and what to expect of one that was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from bench.records import Run, SummaryRow
from report.headline import ANSWERS, rows_of, speedup_lines
from report.looks import from_to, markdown_table, release_of, title_in
from variants import BASELINE, title_of


class Card(NamedTuple):
    """A GPU's data sheet: dense bf16 products with fp32 sums, and memory."""

    name: str
    tflops: float
    tb_per_s: float
    gib: int


# Vendors' data sheets. The first is what the run that others are worked out from was made on.
CARDS = (
    Card("NVIDIA H200", 989, 4.8, 141),
    Card("NVIDIA H100 SXM", 989, 3.35, 80),
    Card("NVIDIA A100 80GB", 312, 2.04, 80),
    Card("NVIDIA L40S", 362, 0.864, 48),
)


def measured_section(runs: Mapping[str, Run]) -> str:
    """Write every run's lines of the answer, each with its GPU and a link to the run. runs: by the
    path that docs/gpus.md links to; "" for one that is not committed."""
    lines = []
    for path, run in runs.items():
        rows = rows_of(run)
        for seq_len in run.experiment.seq_lens:
            made = _made(run, path, [row for row in rows.values() if row.seq_len == seq_len])
            for line in speedup_lines(rows, seq_len):
                lines.append([run.environment.device, *line, made])
    header = ["GPU", "tokens", title_of(BASELINE), *map(title_of, ANSWERS), "run"]
    return markdown_table(header, lines)


def _made(run: Run, path: str, rows: Sequence[SummaryRow]) -> str:
    """The day of a run, of how many steps these rows are, and on how many cards it ran, if on
    several, and the release of Unsloth in them."""
    day = run.started_utc[:10]
    steps = from_to(row.steps for row in rows if row.steps)
    cards = f", {run.cards()} cards" if run.cards() > 1 else ""
    release = release_of("unsloth", run) if "full_unsloth" in run.experiment.variants else ""
    unsloth = f", Unsloth {release}" if release else ""
    return f"{f'[{day}]({path})' if path else day}, {steps} steps{cards}{unsloth}"


def expected_section(run: Run) -> str:
    """Write what the other cards of CARDS should need for a step at the longest length.

    The time of a step's products and of attention goes with a card's TFLOPS, all else that the GPU
    does with its memory's bandwidth; what it waits for the host is left out.
    """
    shown = (BASELINE, *ANSWERS)
    seq_len = max(run.experiment.seq_lens)
    split = {v: _split_ms(run, v, seq_len) for v in shown}
    measured_on, *others = CARDS
    lines = []
    for card in others:
        compute = measured_on.tflops / card.tflops
        memory = measured_on.tb_per_s / card.tb_per_s
        ms = {v: products * compute + rest * memory for v, (products, rest) in split.items()}
        over = [f"{ms[BASELINE] / ms[v]:.2f}×" for v in ANSWERS]
        lines.append([card.name, f"{card.tflops:g}", f"{card.tb_per_s:g}", f"{card.gib}",
                      f"{ms[BASELINE]:.0f} ms", *over])  # fmt: skip
    header = [
        "GPU (estimated)",
        "TFLOPS",
        "TB/s",
        "GB",
        *(title_in(variant, run) for variant in shown),
    ]
    return markdown_table(header, lines)


def _split_ms(run: Run, variant: str, seq_len: int) -> tuple[float, float]:
    """The GPU's time for matrix products and attention, and for all else, of one step."""
    cells = [c for c in run.cells_of(variant, seq_len, "ok") if c.gpu_busy_ms]
    if not cells:
        raise ValueError(f"the published run has no profile of {variant} at {seq_len} tokens")
    products = median(sum(c.kernel_ms.get(k, 0.0) for k in ("matmul", "attention")) for c in cells)
    return products, median(cell.gpu_busy_ms or 0.0 for cell in cells) - products
