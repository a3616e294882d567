"""loss_curve.png, from runs alone: the losses, and how far they come apart (`report/losses.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.records import Run
from report.benchmark_results import write_png
from report.looks import REHEARSAL_NOTICE, STYLE, caption
from report.losses import curves, held_against, percent_apart
from variants import IN_FP32, LOOKS, title_of, variant_of

BASE = "#cccccc"  # paler than vanilla PEFT's grey


def draw_loss_curve(runs: Sequence[Run], path: str | Path) -> bool:
    """Write the picture as a PNG, whole or not at all; False where there are no two curves. It has
    one baseline: vanilla PEFT in fp32, if a run has that."""
    held: dict[str, list[Run]] = {}
    for run in runs:
        if own := curves(run):
            held.setdefault(next(iter(own)), []).append(run)
    if not held:
        return False
    write_png(loss_curve_figure(held.get(IN_FP32) or next(iter(held.values()))), path)
    return True


def loss_curve_figure(runs: Sequence[Run]) -> Figure:
    """Above the losses of the first run, below a panel for each variant: how far its losses are
    apart, in percent, a line for each run."""
    with style.context(["default", STYLE]):
        (first, wanted), *others = curves(runs[0]).items()
        picture = Figure(figsize=(12, 8), dpi=150)
        grid = picture.add_gridspec(2, len(others), height_ratios=(1.5, 1))
        picture.subplots_adjust(0.075, 0.19, 0.975, 0.87, hspace=0.36, wspace=0.1)
        above = picture.add_subplot(grid[0, :])
        steps = range(1, len(wanted) + 1)
        above.plot(steps, wanted, color=BASE, linewidth=6)
        below: dict[str, Axes] = {}
        for column, (variant, losses) in enumerate(others):
            colour = variant_of(variant).look.colour
            above.plot(steps, losses, color=colour, linewidth=1.3)
            shared = next(iter(below.values()), None)
            axes = picture.add_subplot(grid[1, column], sharey=shared)
            axes.axhline(0, color=BASE, linewidth=6)
            title = fill(title_of(variant), 96 // len(others))
            axes.set_title(title, color=colour, size=12, linespacing=1.1)
            axes.set_xlabel("training step")
            axes.tick_params(labelleft=not below)
            below[variant] = axes
        for run in runs:
            for variant, own in percent_apart(run).items():
                colour = variant_of(variant).look.colour
                below[variant].plot(steps, own, color=colour, linewidth=1.3)
        above.set_ylabel("loss")
        below[others[0][0]].set_ylabel(f"% from {_in_short(first)}")
        for axes in (above, *below.values()):
            axes.margins(y=0.12)
            axes.set_xlim(0, len(wanted) + 1)
            axes.xaxis.set_major_locator(
                MaxNLocator(8 if axes is above else 3, integer=True, steps=[1, 2, 5])
            )
        words = f"pale: {title_of(first)}; on it all of those below"
        above.text(0.99, 0.96, words, transform=above.transAxes, ha="right", va="top", size=11.5)
        title = loss_curve_finding(runs)
        longest = max(map(len, title.split("\n")))
        picture.text(0.025, 0.975, title, size=min(19, 1250 / longest), weight="bold", va="top",
                     linespacing=1.3)  # fmt: skip
        words = f"{caption(runs[0])} {runs[0].experiment.seq_lens[-1]} tokens in a sequence. The "
        words += "same adapters and batches from the first step on."
        if len(runs) > 1:
            words += f" Above the first of {len(runs)} seeds, below a line for each."
        picture.text(0.025, 0.03, fill(words, 140), size=10.5, color="#444444", linespacing=1.5)
    return picture


def loss_curve_finding(runs: Sequence[Run]) -> str:
    """The title: how far the losses of what is fused come apart at most, beside vanilla PEFT's own
    in bf16, where all are held against fp32."""
    if runs[0].rehearsal:
        return REHEARSAL_NOTICE
    apart = [(variant_of(id), own) for run in runs for id, own in percent_apart(run).items()]
    steps = len(apart[0][1])
    ours = _most(own for variant, own in apart if variant.is_ours)
    plain = _most(own for variant, own in apart
                  if variant.look is LOOKS["peft"] and variant.again.id != variant.id)  # fmt: skip
    if ours and plain:
        near = "as near fp32 as" if float(ours) <= float(plain) else "further from fp32 than"
        return (
            f"Fused kernels train {near} vanilla PEFT does in bf16:\n"
            f"losses at most {ours}% apart in {steps} steps, vanilla PEFT's {plain}%"
        )
    most = ours or _most(own for _, own in apart)
    return f"Loss over {steps} steps: at most {most}% from {held_against(runs[0])}'s"


def _most(curves: Iterable[list[float]]) -> str:
    """The furthest of any step, in the title's digits; empty where there is none."""
    return max((f"{max(map(abs, own)):.2f}" for own in curves), key=float, default="")


def _in_short(variant: str) -> str:
    return "fp32" if variant == IN_FP32 else variant_of(variant).plain_title
