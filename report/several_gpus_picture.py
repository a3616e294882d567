"""several_gpus.png: efficiency over the number of GPUs, a panel for each length."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mode

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from bench.records import Run
from report.lines import line_of, looks_of
from report.picture import framed, stamp, write_caption, write_title
from report.several_gpus import Scaled, finding, scaled
from report.wording import REHEARSAL_NOTICE, caption, title_in
from variants import Look


def several_gpus_figure(runs: Iterable[Run]) -> Figure | None:
    """Draw a panel for each length: efficiency over the number of GPUs, a line for each variant,
    and a thin one for that over one GPU. It shows the kind of GPU with the most runs. None if
    nothing is timed."""
    shown = mode(run.environment.device for run in runs) if (runs := list(runs)) else ""
    runs = [run for run in runs if run.environment.device == shown]
    runs.sort(key=lambda run: run.experiment.gpus)
    timed = [one for run in runs for one in scaled(run) if one.efficiency]
    if not timed:
        return None
    looks = looks_of(list(dict.fromkeys(one.row.variant for one in timed)))
    lengths = sorted({one.row.seq_len for one in timed})
    with framed(6 * max(2, len(lengths)), 6) as picture:
        panels = picture.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        picture.subplots_adjust(0.08, 0.27, 0.98, 0.8, wspace=0.08)
        for axes, seq_len in zip(panels, lengths, strict=True):
            axes.set_title(f"{seq_len} tokens")
            axes.set_xscale("log", base=2)
            _draw_panel(axes, [one for one in timed if one.row.seq_len == seq_len], looks)
        panels[0].set_ylabel("efficiency, %")
        panels[-1].legend(loc="lower left", fontsize=10)
        write_title(picture, finding(runs), 0.92, 19, 1250)
        words = (
            "Thick lines: over the same GPUs at once without averaging gradients. Thin dashed "
            "lines: over one GPU alone. Short steps without a graph wait for the host, and show "
            f"its noise. {caption(runs[-1])}"
        )
        write_caption(picture, words, 0.03, 70 * max(2, len(lengths)))
        if any(run.rehearsal for run in runs):
            stamp(picture, REHEARSAL_NOTICE, 40)
    return picture


def _draw_panel(axes: Axes, here: list[Scaled], looks: dict[str, Look]) -> None:
    counts = sorted({1, *(one.run.experiment.gpus for one in here)})
    axes.axhline(100, color="black", linewidth=1)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("GPUs")
    for variant, look in looks.items():
        own = [(one.run.experiment.gpus, one) for one in here if one.row.variant == variant]
        at = [1, *(gpus for gpus, _ in own)]
        if own:
            percent = [100, *(100 * (one.efficiency or 0) for _, one in own)]
            over_one = [100, *(100 * (one.efficiency_over_one or 0) for _, one in own)]
            axes.add_line(line_of(look, title_in(variant, own[0][1].run), at, percent))
            axes.plot(at, over_one, color=look.colour, linestyle="--", linewidth=1)
