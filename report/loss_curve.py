"""loss_curve.png and its table: do variants train alike over many steps?

We take runs of one round, each with a different seed. In a run, every variant starts from the same
adapters and sees the same batches. Variants round differently, and training carries that forward.
So losses may differ by rounding, but they must not drift apart. We compare all variants with
vanilla PEFT in fp32 where the run has it, otherwise with vanilla.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from textwrap import fill
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.records import Run
from report.picture import framed, write_caption, write_title
from report.table import Column, table
from report.wording import REHEARSAL_NOTICE, caption, on_base
from variants import IN_FP32, LOOKS, title_of, variant_of

LAST = 25  # steps: enough to see whether a difference still grows
BASE = "#cccccc"  # paler than vanilla PEFT's grey


class Apart(NamedTuple):
    """A variant's distance from its reference's losses, in percent, by step."""

    variant: str
    seed: int
    percent: list[float]


COLUMNS = (
    Column[Apart]("variant", lambda row: variant_of(row.variant).plain_title),
    Column[Apart]("seed", lambda row: str(row.seed)),
    Column[Apart]("loss above its, %: mean", lambda row: f"{fmean(row.percent):+.3f}"),
    Column[Apart](f"mean of the last {LAST} steps",
                  lambda row: f"{fmean(row.percent[-LAST:]):+.3f}"),
    Column[Apart]("furthest away", lambda row: f"{max(row.percent, key=abs):+.3f}"),
    Column[Apart]("steps with a lower loss",
                  lambda row: f"{sum(x < 0 for x in row.percent)} of {len(row.percent)}"),
)  # fmt: skip


def curves(run: Run) -> dict[str, list[float]]:
    """Return the losses of the first round at the longest length, by variant, starting with the
    reference. Empty unless another variant has as many steps."""
    found = {
        cell.variant: [loss for loss in cell.losses if loss is not None]
        for cell in run.cells_of(seq_len=run.experiment.seq_lens[-1], status="ok", round=1)
    }
    baselines = sorted(id for id in found if variant_of(id).baseline.id == id)
    first = IN_FP32 if IN_FP32 in found else next(iter(baselines), None)
    if first is None:
        return {}
    steps = len(found[first])
    kept = {v: losses for v, losses in found.items() if len(losses) == steps > 1}
    return {first: kept.pop(first), **kept} if len(kept) > 1 else {}


def percent_apart(run: Run) -> list[Apart]:
    """Return the distance of each variant but the first."""
    if not (found := curves(run)):
        return []
    (_, wanted), *others = found.items()
    return [
        Apart(variant, run.experiment.seed,
              [100 * (a - b) / b for a, b in zip(losses, wanted, strict=True)])
        for variant, losses in others
    ]  # fmt: skip


def losses_section(runs: Iterable[Run]) -> str:
    """Write a table for each setting and its reference: one row per variant and seed."""
    tables: dict[str, list[Apart]] = {}
    for run in runs:
        if rows := percent_apart(run):
            asked, device = run.experiment, run.environment.device
            shape = f"{asked.batch_size} rows of {asked.seq_lens[-1]} tokens a step"
            setting = f"Compared with {_held_against(run)}{on_base(run)}, {shape}, {device}"
            tables.setdefault(setting, []).extend(rows)
    blocks = [f"**{words}:**\n\n{table(COLUMNS, sorted(rows))}" for words, rows in tables.items()]
    return "\n\n".join(blocks) or "Not measured yet."


def _held_against(run: Run) -> str:
    """Return the title of the reference without its checkpointing."""
    return variant_of(next(iter(curves(run)))).plain_title


# --- the picture ----------------------------------------------------------------------------------


def loss_curve_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw a panel for each variant: its distance from the reference's losses, one line per run.
    All have one reference: vanilla PEFT in fp32, if a run has that. None if there are no two
    curves."""
    held: dict[str, list[Run]] = {}
    for run in runs:
        if own := curves(run):
            held.setdefault(next(iter(own)), []).append(run)
    if not held:
        return None
    runs = held.get(IN_FP32) or next(iter(held.values()))
    (first, wanted), *others = curves(runs[0]).items()
    with framed(12, 5.4) as picture:
        panels = picture.subplots(1, len(others), sharex=True, sharey=True, squeeze=False)[0]
        picture.subplots_adjust(0.075, 0.28, 0.975, 0.73, wspace=0.1)
        shown = {variant: axes for (variant, _), axes in zip(others, panels, strict=True)}
        for variant, axes in shown.items():
            axes.axhline(0, color=BASE, linewidth=6)
            title = fill(title_of(variant), 96 // len(others))
            axes.set_title(title, color=variant_of(variant).look.colour, size=12, linespacing=1.1)
            axes.set_xlabel("training step")
        for apart in (apart for run in runs for apart in percent_apart(run)):
            colour = variant_of(apart.variant).look.colour
            steps = range(1, len(apart.percent) + 1)
            shown[apart.variant].plot(steps, apart.percent, color=colour, linewidth=1.3)
        short = "fp32" if first == IN_FP32 else variant_of(first).plain_title
        panels[0].set_ylabel(f"loss, % from {short}'s")
        panels[0].margins(y=0.12)
        panels[0].set_xlim(0, len(wanted) + 1)
        panels[0].xaxis.set_major_locator(MaxNLocator(3, integer=True, steps=[1, 2, 5]))
        finding = loss_curve_finding(runs)
        write_title(picture, finding, 0.96, 19, 1250, va="top", linespacing=1.3)
        words = (
            f"A line for each seed. Adapters and batches are the same from the first step on. The "
            f"loss of {title_of(first)} goes from {wanted[0]:.1f} to {wanted[-1]:.1f}. "
            f"{caption(runs[0])} {runs[0].experiment.seq_lens[-1]} tokens in a sequence."
        )
        write_caption(picture, words, 0.03, 140)
    return picture


def loss_curve_finding(runs: Sequence[Run]) -> str:
    """Say how far the losses of our variants differ at most. If the reference is fp32, add vanilla
    PEFT's own difference in bf16."""
    if runs[0].rehearsal:
        return REHEARSAL_NOTICE
    apart = [(variant_of(one.variant), one.percent) for run in runs for one in percent_apart(run)]
    steps = len(apart[0][1])
    ours = _most(own for variant, own in apart if variant.is_ours)
    plain = _most(own for variant, own in apart
                  if variant.look is LOOKS["peft"] and variant.again.id != variant.id)  # fmt: skip
    if ours and plain:
        near = "as close to fp32 as" if float(ours) <= float(plain) else "further from fp32 than"
        return (
            f"Fused kernels train {near} vanilla PEFT in bf16:\n"
            f"over {steps} steps within {ours}% of its loss, vanilla PEFT within {plain}%"
        )
    most = ours or _most(own for _, own in apart)
    return f"Loss over {steps} steps: at most {most}% from {_held_against(runs[0])}'s"


def _most(curves: Iterable[list[float]]) -> str:
    """Return the largest distance of any step, in the title's digits; empty if there is none."""
    return max((f"{max(map(abs, own)):.2f}" for own in curves), key=float, default="")
