"""benchmark_results.png, from a run alone: speedups of all variants at each length, in GPU time."""

from __future__ import annotations

from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.records import Run, SummaryRow
from report.lines import Lines, View, line_of, mark_untimed, named_in_title
from report.picture import GREY, annotate, fitting_legend, framed, stamp, write_caption
from report.statistics import by_gpu_time
from report.wording import REHEARSAL_NOTICE, on_base, release_of, roughly
from variants import LOOKS, title_of, variant_of

# Letters of 14 points are 12 pixels high where a phone shows the picture 390 pixels wide.
# In inches: the picture's width, the panel's height, and the height of the caption below it.
WIDTH, PANEL, BELOW = 6.5, 3.5, 1.2
TITLE, LETTERS, SMALL = 16, 14, 11.5
TITLE_LINE = 0.29  # inches
LINE_LETTERS = 40  # of the title
KEPT = "\N{NO-BREAK SPACE}"


def benchmark_figure(run: Run) -> Figure:
    """Draw speedups over vanilla PEFT in GPU time. Without a GPU no step has a profile, so we use
    the clock."""
    with framed(WIDTH, PANEL, dpi=180, font_size=LETTERS) as picture:
        view = View(run)
        rows, clock = shown_rows(view)
        title = fill(benchmark_finding(run, rows, clock), LINE_LETTERS)
        title_inches = TITLE_LINE * (1 + title.count("\n")) + 0.25
        legend_inches = 0.0
        if not view.is_named:
            keys = [line_of(look, title_of(variant)) for variant, look in view.looks.items()]
            legend, _ = fitting_legend(picture, 2, 0.96, handles=keys, loc="lower left",
                                       fontsize=SMALL, columnspacing=1)  # fmt: skip
            legend_inches = legend.get_window_extent().height / picture.dpi
        height = title_inches + legend_inches + PANEL + BELOW
        picture.set_figheight(height)
        axes = picture.subplots()
        picture.subplots_adjust(0.115, BELOW / height, 0.985, (BELOW + PANEL) / height)
        for legend in picture.legends:
            legend.set_bbox_to_anchor((0.02, (BELOW + PANEL + 0.05) / height))
        picture.text(0.03, 1 - 0.09 / height, title, size=TITLE, weight="bold", va="top",
                     linespacing=1.25)  # fmt: skip
        _speedups(axes, view, rows)
        mark_untimed(axes, view)
        axes.set_xlabel("tokens per row")
        write_caption(picture, _caption(run, clock), 0.12 / height, 68, x=0.03, size=SMALL)
        if run.rehearsal:
            stamp(picture, REHEARSAL_NOTICE, 30)
    return picture


def shown_rows(view: View) -> tuple[list[SummaryRow], str]:
    """Return the rows with a speedup, except the baseline, and the kind of time: "GPU time", or
    "time by the clock" if no step has a profile."""
    in_gpu_time, by_clock = (
        [row for row in rows if row.speedup and not variant_of(row.variant).is_baseline]
        for rows in (by_gpu_time(view.timed), view.timed)
    )
    return (in_gpu_time, "GPU time") if in_gpu_time else (by_clock, "time by the clock")


def _speedups(axes: Axes, view: View, rows: list[SummaryRow]) -> None:
    values_room = 0.0 if view.is_named else 0.15  # right of the last length, of all
    axes.set_xlim(-0.5, (1 + values_room) * len(view.seq_lens) - 0.5)
    axes.set_xticks(range(len(view.seq_lens)), map(str, view.seq_lens))
    axes.tick_params(length=0)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}×")
    reach = [1.0, *(row.speedup for row in rows if row.speedup)]
    span = max(0.2, max(reach) - min(reach))
    axes.set_ylim(min(reach) - (0.5 if view.untimed else 0.16) * span, max(reach) + 0.16 * span)
    axes.axhline(1.0, color=LOOKS["peft"].colour, linestyle=(0, (5, 3)))
    Lines(axes, view, rows, "speedup", lambda x: f"{x:.2f}×", size=LETTERS).draw(at_points=True)
    if not view.untimed:  # their words stand there
        annotate(axes, "vanilla PEFT = 1×", (0, 1), (4, -5), axes.get_yaxis_transform(), va="top",
                 size=SMALL, color=GREY)  # fmt: skip


def benchmark_finding(run: Run, rows: list[SummaryRow], clock: str) -> str:
    """Say every variant's speedups over all lengths. If there are many variants, say just the
    subject's and those of the two fastest at the longest length."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    if not rows:
        return f"No speedup measured on {run.environment.device}"
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.variant, []).append(row.speedup or 0)
    shown = named_in_title(sorted(found, key=lambda variant: found[variant][-1]))
    said = [f"{title_of(variant)} {roughly(found[variant])}" for variant in shown]
    whole = [words.replace(" ", KEPT) if len(words) < LINE_LETTERS else words for words in said]
    return f"Speedup in {clock}{on_base(run)}: {', '.join(whole)}"


def _caption(run: Run, clock: str) -> str:
    asked, release = run.experiment, release_of("unsloth", run)
    unsloth = f", Unsloth {release}" if "full_unsloth" in asked.variants and release else ""
    waiting = "; waiting for Python left out" if clock == "GPU time" else ""
    return (
        f"{run.environment.device}, {asked.model}{on_base(run)}, batch {asked.batch_size}"
        f"{unsloth}. Medians over rounds{waiting}."
    )
