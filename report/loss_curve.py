"""loss_curve.png, from runs alone: the losses, and how far they come apart (`report/losses.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.records import Run
from report.benchmark_results import write_png
from report.looks import REHEARSAL_NOTICE, STYLE, caption
from report.losses import curves, held_against, percent_apart
from variants import IN_FP32, LOOKS, title_of, variant_of

OWN, OTHERS = LOOKS["peft"].colour, ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")


def draw_loss_curve(runs: Sequence[Run], path: str | Path) -> bool:
    """Write the picture as a PNG, whole or not at all; False where there are no two curves. It has
    one baseline: plain PEFT in fp32, if a run has that."""
    held: dict[str, list[Run]] = {}
    for run in runs:
        if own := curves(run):
            held.setdefault(next(iter(own)), []).append(run)
    if not held:
        return False
    write_png(loss_curve_figure(held.get(IN_FP32) or next(iter(held.values()))), path)
    return True


def loss_curve_figure(runs: Sequence[Run]) -> Figure:
    """Above the losses of the first run, below how far each variant's are apart, in percent, a line
    for each run."""
    with style.context(["default", STYLE]):
        (first, wanted), *others = curves(runs[0]).items()
        picture = Figure(figsize=(12, 7.5), dpi=150)
        above, below = picture.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (2, 1)})
        picture.subplots_adjust(0.075, 0.19, 0.975, 0.86, hspace=0.12)
        steps = range(1, len(wanted) + 1)
        above.plot(steps, wanted, color=OWN, linewidth=5, alpha=0.6, label=title_of(first))
        below.axhline(0, color=OWN, linewidth=5, alpha=0.6)
        colours = dict(zip((variant for variant, _ in others), OTHERS, strict=False))
        for variant, losses in others:
            above.plot(
                steps, losses, color=colours.get(variant, OWN), linewidth=1.3,
                label=title_of(variant),
            )  # fmt: skip
        for run in runs:
            for variant, own in percent_apart(run).items():
                below.plot(steps, own, color=colours.get(variant, OWN), linewidth=1.3)
        above.legend()
        above.set_ylabel("loss")
        below.set_ylabel("% apart")
        below.set_xlabel("training step")
        below.set_xlim(0, len(wanted) + 1)
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in (above, below):
            axes.margins(y=0.12)
        title = loss_curve_finding(runs)
        picture.text(0.025, 0.93, title, size=min(21, 1250 / len(title)), weight="bold")
        words = f"{caption(runs[0])} The same adapters and batches from the first step on."
        if len(runs) > 1:
            words += f" Above the first of {len(runs)} seeds, below a line for each."
        picture.text(0.025, 0.03, fill(words, 140), size=10.5, color="#444444", linespacing=1.5)
    return picture


def loss_curve_finding(runs: Sequence[Run]) -> str:
    """The title: how far the curves come apart at most, and in the mean of all steps, of the curve
    that is the furthest; a second vanilla is none."""
    if runs[0].rehearsal:
        return REHEARSAL_NOTICE
    apart = [(id, own) for run in runs for id, own in percent_apart(run).items()]
    ours = [own for id, own in apart if variant_of(id).again.id != id] or [own for _, own in apart]
    most = max(abs(x) for one in ours for x in one)
    mean = max(abs(fmean(one)) for one in ours)
    return (
        f"Loss over {len(ours[0])} steps: at most {most:.2f}% from {held_against(runs[0])}'s, "
        f"{mean:.3f}% in the mean"
    )
