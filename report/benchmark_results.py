"""benchmark_results.png, from a run alone: speedups of all variants at each length, in GPU time."""

from __future__ import annotations

from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.records import Run, SummaryRow
from report.picture import (
    DPI,
    GREY,
    LETTERS,
    LINE_LETTERS,
    SMALL,
    TITLE_LINE,
    WIDTH,
    annotate,
    fitting_legend,
    framed,
    stamp,
    write_caption,
    write_title,
)
from report.statistics import by_gpu_time, summarize
from report.wording import (
    FEW,
    REHEARSAL_NOTICE,
    STATUS_WORDS,
    on_base,
    roughly,
    setting,
    shown_variants,
)
from variants import LOOKS, SUITES, Look, title_of, variant_of

PANEL, BELOW = 3.5, 1.2  # inches: the panel's height, and that of the caption below it
KEPT = "\N{NO-BREAK SPACE}"
SPARE_LOOKS = [  # for variants whose family's look is taken
    Look("#000000", "*"), Look("#8a7a00", "X"), Look("#7a4900", ">")
]  # fmt: skip
NAME_LETTERS, LONGEST_NAME = 13, 32  # of a line of a variant's name, and of a name on two
# Heights as shares of the panel: a value beside its point, and a line of words.
LABEL, LINE = 0.085 * LETTERS / 11, 0.052 * LETTERS / 11
CLEAR = {"boxstyle": "square,pad=0.05", "color": "white", "alpha": 0.8}  # around words
NAMES_ROOM = 0.26  # right of the last length, of the room that all of them take


class View:
    """A run's looks, rows, and places on the x axis."""

    def __init__(self, run: Run) -> None:
        self.run, self.seq_lens = run, run.experiment.seq_lens
        shown = shown_variants(run)
        self.looks = looks_of(shown)
        rows = [row for row in summarize(run) if row.variant in self.looks]
        self.timed = [row for row in rows if row.status == "ok"]
        self.untimed = [row for row in rows if row.status != "ok"]
        # few variants with short names have these beside their lines, not in the legend alone
        short = all(len(title_of(variant)) <= LONGEST_NAME for variant in shown)
        self.is_named = short and len(shown) <= FEW

    def slot(self, row: SummaryRow) -> float:
        """Return a variant's place within its length's group: no two share a place."""
        from_middle = list(self.looks).index(row.variant) - (len(self.looks) - 1) / 2
        return self.seq_lens.index(row.seq_len) + from_middle * (0.84 / len(self.looks))


def looks_of(variants: list[str]) -> dict[str, Look]:
    """Return each variant's look: its family's, or an unused one if another variant has that. The
    experiment's variants choose first."""
    found: dict[str, Look] = {}
    families = {variant_of(variant).look for variant in variants}
    spare = [*SPARE_LOOKS, *(look for look in LOOKS.values() if look not in families)]
    for variant in sorted(variants, key=lambda v: v not in SUITES["experiment"]):
        look = variant_of(variant).look
        found[variant] = look if look not in found.values() else spare.pop(0)
    return {variant: found[variant] for variant in variants}


def benchmark_figure(run: Run) -> Figure:
    """Draw speedups over vanilla PEFT in GPU time. Without a GPU no step has a profile, so we use
    the clock."""
    with framed(WIDTH, PANEL, dpi=DPI, font_size=LETTERS) as picture:
        view = View(run)
        rows, clock = shown_rows(view)
        title = fill(benchmark_finding(run, rows, clock), LINE_LETTERS)
        title_inches = TITLE_LINE * (1 + title.count("\n")) + 0.25
        legend_inches = 0.0
        if not view.is_named:
            keys = [line_of(look, title_of(variant)) for variant, look in view.looks.items()]
            legend = fitting_legend(picture, 2, 0.96, handles=keys, loc="lower left",
                                    fontsize=SMALL, columnspacing=1)  # fmt: skip
            legend_inches = legend.get_window_extent().height / picture.dpi
        height = title_inches + legend_inches + PANEL + BELOW
        picture.set_figheight(height)
        axes = picture.subplots()
        picture.subplots_adjust(0.115, BELOW / height, 0.985, (BELOW + PANEL) / height)
        for legend in picture.legends:
            legend.set_bbox_to_anchor((0.02, (BELOW + PANEL + 0.05) / height))
        write_title(picture, title)
        _speedups(axes, view, rows)
        _mark_untimed(axes, view)
        axes.set_xlabel("tokens per row")
        write_caption(
            picture, f"{setting(run)}. Medians over rounds.", 0.12 / height, 58, x=0.03, size=SMALL
        )
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


# --- the panel ------------------------------------------------------------------------------------


def _speedups(axes: Axes, view: View, rows: list[SummaryRow]) -> None:
    """Draw a line for each variant, broken where a length has no value, with values at its points
    if the variants are few, and always right of the last length."""
    lengths = len(view.seq_lens)
    room = NAMES_ROOM if view.is_named else 0.15  # right of the last length, of all
    axes.set_xlim(-0.5, (1 + room) * lengths - 0.5)
    axes.set_xticks(range(lengths), map(str, view.seq_lens))
    axes.tick_params(length=0)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}×")
    reach = [1.0, *map(speedup_in, rows)]
    span = max(0.2, max(reach) - min(reach))
    axes.set_ylim(min(reach) - (0.5 if view.untimed else 0.16) * span, max(reach) + 0.16 * span)
    axes.axhline(1.0, color=LOOKS["peft"].colour, linestyle=(0, (5, 3)))
    for variant, look in view.looks.items():
        own = {row.seq_len: speedup_in(row) for row in rows if row.variant == variant}
        if own:
            values = [own.get(seq_len, float("nan")) for seq_len in view.seq_lens]
            axes.add_line(line_of(look, title_of(variant), range(lengths), values))
    for place, seq_len in enumerate(view.seq_lens):
        here = sorted((row for row in rows if row.seq_len == seq_len), key=speedup_in)
        if place == lengths - 1:
            _name_ends(axes, view, place, here)
        elif len(view.looks) <= FEW:
            _label_points(axes, view, place, here)
    if not view.untimed:  # their words stand there
        annotate(axes, "vanilla PEFT = 1×", (0, 1), (4, -5), axes.get_yaxis_transform(), va="top",
                 size=SMALL, color=GREY)  # fmt: skip


def speedup_in(row: SummaryRow) -> float:
    return row.speedup or 0.0


def line_of(look: Look, title: str, x: Any = (), y: Any = ()) -> Line2D:
    return Line2D(x, y, color=look.colour, marker=look.marker, label=title)


def _text_look(view: View, row: SummaryRow) -> dict[str, Any]:
    return {"color": view.looks[row.variant].colour, "size": LETTERS, "weight": "bold"}


def _heights(axes: Axes, *values: float) -> list[float]:
    """Return how far up the panel the values are, from 0 to 1."""
    to_panel = axes.transScale + axes.transLimits
    return [to_panel.transform((0, value))[1] for value in values]


def _name_ends(axes: Axes, view: View, place: int, rows: list[SummaryRow]) -> None:
    """Write the values at the last length right of all, with names if `view` has them."""
    labels = [f"{row.speedup:.2f}×" for row in rows]
    if view.is_named:
        names = [fill(title_of(row.variant), NAME_LETTERS, break_long_words=False) for row in rows]
        labels = ["\n".join(pair) for pair in zip(names, labels, strict=True)]
    tall = max((text.count("\n") + 1 for text in labels), default=1)
    heights = apart_by(LINE * tall, _heights(axes, *map(speedup_in, rows)), 1.0)
    for row, text, height in zip(rows, labels, heights, strict=True):
        axes.text(place + 0.12, height, text, transform=axes.get_xaxis_transform(),
                  va="center", linespacing=1.05, **_text_look(view, row))  # fmt: skip


def _label_points(axes: Axes, view: View, place: int, rows: list[SummaryRow]) -> None:
    """Write the values at one length above their points, or below if there is no room. Values that
    fit neither are left to the table."""
    taken: list[list[float]] = [_heights(axes, 1.0)]
    for row in rows:
        points = [_heights(axes, speedup_in(each)) for each in rows if each is not row]
        (height,) = _heights(axes, speedup_in(row))
        above, below = [height, height + LABEL], [height - LABEL, height]
        if is_free(above, points + taken):
            span, away, va = above, 9, "bottom"
        elif is_free(below, points + taken):
            span, away, va = below, -9, "top"
        else:
            continue
        taken.append(span)
        annotate(axes, f"{row.speedup:.2f}×", (place, speedup_in(row)), (0, away), ha="center",
                 va=va, **_text_look(view, row))  # fmt: skip


def is_free(span: list[float], taken: list[list[float]]) -> bool:
    """Return True if a span is inside the panel and overlaps none of these."""
    low, high = span
    return low > 0 and high < 1 and not any(s[0] <= high and s[-1] >= low for s in taken)


def apart_by(gap: float, values: list[float], top: float) -> list[float]:
    """Return ascending heights at least a gap apart, all under the top."""
    heights: list[float] = []
    for value in values:
        heights.append(max(value, heights[-1] + gap) if heights else value)
    too_high = max(0.0, heights[-1] + gap / 2 - top) if heights else 0.0
    return [height - too_high for height in heights]


def _mark_untimed(axes: Axes, view: View) -> None:
    """Show a cell without a time: its variant's marker, hollow, and the reason in words."""
    for row in view.untimed:
        look, place, across = view.looks[row.variant], view.slot(row), axes.get_xaxis_transform()
        mark = line_of(look, title_of(row.variant), [place], [0.035])
        mark.set(transform=across, markerfacecolor="white", markeredgewidth=2, zorder=6)
        axes.add_artist(mark)
        axes.text(place, 0.08, STATUS_WORDS[row.status], color=look.colour, size=SMALL,
                  weight="bold", zorder=6, rotation=90, ha="center", va="bottom", transform=across,
                  bbox=CLEAR)  # fmt: skip


# --- the words ------------------------------------------------------------------------------------


def benchmark_finding(run: Run, rows: list[SummaryRow], clock: str) -> str:
    """Say every variant's speedups over all lengths. If there are many variants, say just the
    subject's and those of the two fastest at the longest length."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    if not rows:
        return f"No speedup measured on {run.environment.device}"
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.variant, []).append(speedup_in(row))
    shown = sorted(found, key=lambda variant: found[variant][-1])
    if len(shown) > FEW:
        shown = [variant for variant in shown[:-2] if variant == "fused_mlp"] + shown[-2:]
    said = [f"{title_of(variant)} {roughly(found[variant])}" for variant in shown]
    whole = [words.replace(" ", KEPT) if len(words) < LINE_LETTERS else words for words in said]
    return f"Speedup in {clock}{on_base(run)}: {', '.join(whole)}"
