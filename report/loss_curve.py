"""loss_curve.png, from a run alone: do two variants train to the same losses?

For a run of many steps of one round and length, in which every variant starts from the same
adapters and trains on the same batches. Rounding differs from variant to variant, and training
carries it on: the curves may come apart by rounding, not drift apart.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.records import Run
from report.benchmark_results import write_png
from report.looks import REHEARSAL_NOTICE, STYLE, caption
from variants import LOOKS, title_of, variant_of

OWN, OTHERS = LOOKS["peft"].colour, ("#d55e00", "#0072b2", "#009e73", "#cc79a7")


def curves(run: Run) -> dict[str, list[float]]:
    """The losses of the first round at the longest length, by variant, the baseline first; empty
    unless a baseline and another variant have as many steps."""
    timed = run.cells_of(seq_len=run.experiment.seq_lens[-1], status="ok")
    found = {
        cell.variant: [loss for loss in cell.losses if loss is not None]
        for cell in timed
        if cell.round == 1
    }
    baselines = sorted(id for id in found if variant_of(id).baseline.id == id)
    baseline = next(iter(baselines), None)
    if baseline is None:
        return {}
    steps = len(found[baseline])
    kept = {v: losses for v, losses in found.items() if len(losses) == steps > 1}
    return {baseline: kept.pop(baseline), **kept} if len(kept) > 1 else {}


def draw_loss_curve(run: Run, path: str | Path) -> bool:
    """Write the picture as a PNG, whole or not at all; False where there are no two curves."""
    if not curves(run):
        return False
    write_png(loss_curve_figure(run), path)
    return True


def loss_curve_figure(run: Run) -> Figure:
    """Above the losses, below how far each is from the baseline's, in percent."""
    with style.context(["default", STYLE]):
        (baseline, wanted), *others = curves(run).items()
        picture = Figure(figsize=(12, 7.5), dpi=150)
        above, below = picture.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (2, 1)})
        picture.subplots_adjust(0.075, 0.19, 0.975, 0.86, hspace=0.12)
        steps = range(1, len(wanted) + 1)
        above.plot(steps, wanted, color=OWN, linewidth=5, alpha=0.6, label=title_of(baseline))
        below.axhline(0, color=OWN, linewidth=5, alpha=0.6)
        for colour, (variant, losses) in zip(OTHERS, others, strict=False):
            above.plot(steps, losses, color=colour, linewidth=1.3, label=title_of(variant))
            below.plot(steps, _percent_apart(losses, wanted), color=colour, linewidth=1.3)
        above.legend()
        above.set_ylabel("loss")
        below.set_ylabel("% from vanilla's")
        below.set_xlabel("training step")
        below.set_xlim(0, len(wanted) + 1)
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in (above, below):
            axes.margins(y=0.12)
        title = loss_curve_finding(run)
        picture.text(0.025, 0.93, title, size=min(21, 1250 / len(title)), weight="bold")
        words = fill(f"{caption(run)} The same adapters and batches from the first step on.", 140)
        picture.text(0.025, 0.03, words, size=10.5, color="#444444", linespacing=1.5)
    return picture


def loss_curve_finding(run: Run) -> str:
    """The title: how far the curves come apart at most, and on the average over the steps."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    (_, wanted), *others = curves(run).items()
    apart = [_percent_apart(losses, wanted) for _, losses in others]
    most = max(abs(x) for one in apart for x in one)
    mean = max(abs(sum(one)) / len(one) for one in apart)
    return (
        f"Loss over {len(wanted)} steps: at most {most:.2f}% from vanilla PEFT's, "
        f"{mean:.3f}% on the average"
    )


def _percent_apart(losses: list[float], wanted: list[float]) -> list[float]:
    return [100 * (a - b) / b for a, b in zip(losses, wanted, strict=True)]
