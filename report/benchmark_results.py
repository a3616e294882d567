"""benchmark_results.png, from a run alone: no GPU, no torch.

`benchmark_figure` builds the picture and `draw_benchmark_results` writes it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import chain
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from bench.records import Run, SummaryRow
from bench.results import write_atomically
from report.kind_bars import draw_kinds, longest_profiled
from report.looks import REHEARSAL_NOTICE, STATUS_WORDS, STYLE, caption, shown_variants
from report.statistics import NOISE, noise_band, summarize
from variants import BASELINE, LOOKS, SUITES, Look, title_of, variant_of

SPARE_LOOKS = [  # for variants whose family's look another one has
    Look("", "#000000", "*", "OO"),
    Look("", "#8a7a00", "X", "|||"),
    Look("", "#7a4900", ">", "ooo"),
]
RESULTS_LEGEND = "Medians over steps, then over rounds; whiskers: 95% intervals over rounds."
LABEL = 0.085  # the height that a value beside its point takes, of its panel
RATIOS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)  # ticks where speedups are far apart
CLEAR = {"boxstyle": "square,pad=0.05", "color": "white", "alpha": 0.8}  # around words
HEIGHT = 12  # of the picture, in inches
RIGHT = 0.975  # where the panels end, of the picture's width
FEW = 4  # up to this many variants every point is labelled; beyond it the table has the values


class View:
    """A run as the panels want it: looks, rows, and places on the x axis."""

    def __init__(self, run: Run) -> None:
        self.run, self.seq_lens = run, run.experiment.seq_lens
        shown = shown_variants(run)
        self.looks = looks_of(shown)
        rows = [row for row in summarize(run) if row.variant in self.looks]
        self.timed = [row for row in rows if row.status == "ok"]
        self.untimed = [row for row in rows if row.status != "ok"]
        self.bar_width = 0.84 / len(shown)

    def look(self, row: SummaryRow) -> Look:
        return self.looks[row.variant]

    def slot(self, row: SummaryRow) -> float:
        """Return the place of a variant's bar within its length's group: no two share a place."""
        offset = list(self.looks).index(row.variant) - (len(self.looks) - 1) / 2
        return self.seq_lens.index(row.seq_len) + offset * self.bar_width

    def top(self, name: str) -> float:
        return max((value for row in self.timed if (value := getattr(row, name))), default=1.0)


def looks_of(variants: list[str]) -> dict[str, Look]:
    """Each variant in its family's look; where another has it, the experiment's before others, in
    one that nobody has."""
    found: dict[str, Look] = {}
    families = {variant_of(variant).look for variant in variants}
    spare = [*SPARE_LOOKS, *(look for look in LOOKS.values() if look not in families)]
    for variant in sorted(variants, key=lambda v: v not in SUITES["experiment"]):
        look = variant_of(variant).look
        found[variant] = look if look not in found.values() else spare.pop(0)
    return {variant: found[variant] for variant in variants}


def draw_benchmark_results(run: Run, path: str | Path) -> None:
    """Write the picture as a PNG."""
    write_png(benchmark_figure(run), path)


def write_png(picture: Figure, path: str | Path) -> None:
    """Write a picture whole or not at all, and the same bytes for the same picture."""
    png = io.BytesIO()
    with style.context(["default", STYLE]):
        picture.savefig(png, format="png", metadata={"Software": None})
    write_atomically(path, png.getvalue())


def benchmark_figure(run: Run) -> Figure:
    """The 2x2 picture: speedup, tokens a second, peak memory, what the GPU does at the longest
    length."""
    with style.context(["default", STYLE]):
        view = View(run)
        picture = Figure(figsize=(14, HEIGHT), dpi=150)
        panels = picture.subplots(2, 2, gridspec_kw={"hspace": 0.28, "wspace": 0.14})
        rows_of_names = _name_variants(picture, view)
        picture.subplots_adjust(0.06, 0.125, RIGHT, 0.892 - 0.026 * rows_of_names)
        for panel, axes in zip((_speedup, _throughput, _memory), panels.flat, strict=False):
            axes.set_xlim(-0.5, len(view.seq_lens) - 0.5)
            axes.set_xticks(range(len(view.seq_lens)), view.seq_lens)
            axes.set_xlabel("tokens in a sequence")
            axes.tick_params(length=0)
            panel(axes, view)
            _mark_untimed(axes, view)
        _kinds(panels[1, 1], view)
        title = benchmark_finding(view)
        picture.text(0.025, 0.955, title, size=min(23, 1500 / len(title)), weight="bold")
        words = fill(f"{caption(run)} {RESULTS_LEGEND}", 165)
        picture.text(0.025, 0.022, words, size=10.5, color="#444444", linespacing=1.5)
        if run.rehearsal:
            _stamp(picture)
    return picture


# --- the four panels ------------------------------------------------------------------------------


def _speedup(axes: Axes, view: View) -> None:
    axes.set_title("Speedup over vanilla PEFT (higher is better)")
    axes.set_yscale("log")  # twice as fast is as far from 1 as half as fast
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}×" if value > 0 else "")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.axhline(1.0, color=LOOKS["peft"].colour, linestyle=(0, (5, 3)))
    rows = [row for row in view.timed if row.speedup and row.variant != BASELINE]
    bands = {n: band for n in view.seq_lens if (band := noise_band(view.run, n))}
    for seq_len, (low, high) in bands.items():
        axes.bar(view.seq_lens.index(seq_len), high - low, 0.9, low, color="#cfcfcf")
    if bands:
        _note(axes, "log scale; grey band: vanilla PEFT measured twice (A/A)")
    reach = [1.0, *(row.speedup for row in rows if row.speedup), *chain(*bands.values())]
    low, high = min(reach), max(reach)
    # The interval of two rounds may go far beyond, and leaves the panel.
    ends = [end for row in rows for end in row.speedup_ci95 or ()]
    low, high = max(min([low, *ends]), low / 1.25), min(max([high, *ends]), high * 1.25)
    span = max(1.2, high / low)
    below, above = 0.5 if view.untimed else 0.14, 0.3 if bands else 0.2  # room for the words
    axes.set_ylim(low / span**below, high * span**above)
    ticks = FixedLocator(RATIOS) if span > 3 else MaxNLocator(7, steps=[1, 2, 5, 10])
    axes.yaxis.set_major_locator(ticks)
    _lines(axes, view, rows, "speedup", lambda value: f"{value:.2f}×", beside=[1.0])


def _throughput(axes: Axes, view: View) -> None:
    axes.set_title("Tokens a second (higher is better)")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(0, 1.15 * view.top("tokens_per_s"))
    _lines(axes, view, view.timed, "tokens_per_s", EngFormatter(places=1, sep=""))


def _memory(axes: Axes, view: View) -> None:
    axes.set_title("Peak memory, GiB (lower is better)")
    top = view.top("peak_gib")
    for row in view.timed:
        if row.peak_gib:
            _bar(axes, view, row, row.peak_gib)
            _bar_label(axes, view, row, row.peak_gib, f"{row.peak_gib:.1f}")
    gpu = view.run.environment.gpu
    if gpu is None:
        _note(axes, "no GPU, so no GPU memory")
    else:
        capacity_gib = gpu.memory_bytes / 2**30
        note = f"the card holds {capacity_gib:.0f} GiB"
        if capacity_gib < 1.6 * top:
            top = capacity_gib
            axes.axhline(capacity_gib, color="black")
        else:  # the bars would vanish under it
            note += ", far above this axis"
        _note(axes, note)
    axes.set_ylim(0, 1.22 * top)


def _kinds(axes: Axes, view: View) -> None:
    """Leaves room for the names of its bars, beside them, and of its colours, above."""
    seq_len, box = longest_profiled(view.run), axes.get_position()
    few = len(view.looks) <= FEW
    left = 0.055 if few else 0.09
    axes.set_position((box.x0 + left, box.y0, box.width - left, box.height))
    inches = draw_kinds(axes, view.run, seq_len, named=True)
    height = box.height - inches / HEIGHT
    axes.set_position((box.x0 + left, box.y0, box.width - left, height))
    title = f"Where the time goes at {seq_len} tokens (lower is better)"
    axes.set_title(title, x=-left / (box.width - left), pad=6 + 72 * inches)
    axes.set_xlabel("ms a step")
    names = [fill(title_of(variant), 16 if few else 27) for variant in view.looks]
    axes.set_yticks(range(len(names)), names, weight="bold", size=11 if few else 7.5)
    for label, look in zip(axes.get_yticklabels(), view.looks.values(), strict=True):
        label.set_color(look.colour)


# --- what the panels share ------------------------------------------------------------------------


def _lines(axes: Axes, view: View, rows: list, name: str, words: Callable, beside=()) -> None:
    """One line a variant, broken where a length has no value, with intervals; and its values,
    above or below their points, wherever no other point (or height `beside`) is in the way."""
    many, to_panel = len(view.looks) > FEW, axes.transScale + axes.transLimits

    def value_of(row: SummaryRow) -> float:
        return getattr(row, name)

    def ends_of(row: SummaryRow) -> tuple[float, ...]:
        return getattr(row, f"{name}_ci95", None) or (value_of(row),)

    def up(*values: float) -> list[float]:
        """Return how far up the panel the values are, from 0 to 1."""
        return [to_panel.transform((0, value))[1] for value in values]

    for variant, look in view.looks.items():
        own = {row.seq_len: row for row in rows if row.variant == variant}
        values = [value_of(own[n]) if n in own else float("nan") for n in view.seq_lens]
        if own:
            axes.add_line(_line(look, title_of(variant), range(len(values)), values))
        for seq_len, row in own.items():
            if len(ends := ends_of(row)) == 2:
                at = [view.seq_lens.index(seq_len)] * 2
                axes.plot(at, ends, marker="_", color=look.colour, markersize=11, linewidth=1.8)
    for place, seq_len in enumerate(view.seq_lens):
        here = sorted((row for row in rows if row.seq_len == seq_len), key=value_of)
        labels: list[list[float]] = []  # where there are some
        heights = _apart(up(*map(value_of, here)), 0.052, 1.0)
        for row, height in zip(here, heights, strict=True):
            value, ends = value_of(row), ends_of(row)
            text: dict[str, Any] = {"color": view.look(row).colour, "size": 11, "weight": "bold"}
            spans = [up(*ends_of(each)) for each in here if each is not row]
            points = up(*(value_of(each) for each in here if each is not row), *beside)
            spans += [*labels, *([point] for point in points)]
            over, under = up(max(value, *ends), min(value, *ends))
            if many and seq_len == view.seq_lens[-1]:
                text |= {"transform": axes.get_xaxis_transform(), "va": "center"}
                axes.text(place + 0.1, height, words(value), **text)
            elif many:
                continue
            elif _is_free(above := [over, over + LABEL], spans):
                labels.append(above)
                _annotate(axes, words(value), place, max(value, *ends), 9, va="bottom", **text)
            elif _is_free(below := [under - LABEL, under], spans):
                labels.append(below)
                _annotate(axes, words(value), place, min(value, *ends), -9, va="top", **text)
            elif len(ends) > 1:  # beside the point, where no line comes from
                text |= {"va": "center", "ha": "left" if place else "right", "bbox": CLEAR}
                axes.text(place + (0.07 if place else -0.07), value, words(value), **text)


def _is_free(span: list[float], taken: list[list[float]]) -> bool:
    """Return True if a span is in the panel and meets none of these."""
    low, high = span
    return low > 0 and high < 1 and not any(s[0] <= high and s[-1] >= low for s in taken)


def _apart(values: list[float], gap: float, top: float) -> list[float]:
    """Ascending heights, each at least a gap above the last, and all of them under the top."""
    heights: list[float] = []
    for value in values:
        heights.append(max(value, heights[-1] + gap) if heights else value)
    too_high = max(0.0, heights[-1] + gap / 2 - top) if heights else 0.0
    return [height - too_high for height in heights]


def _annotate(axes: Axes, words: str, x: float, y: float, points_up: int, **text) -> None:
    offset = (0, points_up)
    axes.annotate(words, (x, y), offset, textcoords="offset points", ha="center", **text)


def _note(axes: Axes, words: str) -> None:
    clear = {"boxstyle": "square,pad=0.1", "color": "white"}
    axes.text(0.015, 0.975, words, transform=axes.transAxes, va="top", size=11, bbox=clear)


def _line(look: Look, title: str, x=(), y=()) -> Line2D:
    return Line2D(x, y, color=look.colour, marker=look.marker, label=title)


def _bar(axes: Axes, view: View, row: SummaryRow, height: float) -> None:
    look = view.look(row)
    paint: dict[str, Any] = {"color": look.colour, "hatch": look.hatch}
    paint |= {"edgecolor": "white", "linewidth": 0}
    axes.bar(view.slot(row), height, 0.93 * view.bar_width, **paint)


def _bar_label(axes: Axes, view: View, row: SummaryRow, height: float, words: str) -> None:
    text = {"size": 9, "rotation": 90} if len(view.looks) > FEW else {"size": 9}
    _annotate(axes, words, view.slot(row), height, 3, va="bottom", **text)


def _mark_untimed(axes: Axes, view: View) -> None:
    """A cell without a time still shows: its variant's marker, hollow, and the reason in words."""
    for row in view.untimed:
        look, place, across = view.look(row), view.slot(row), axes.get_xaxis_transform()
        mark = _line(look, title_of(row.variant), [place], [0.035])
        mark.set(transform=across, markerfacecolor="white", markeredgewidth=2, zorder=6)
        axes.add_artist(mark)
        text: dict[str, Any] = {"color": look.colour, "size": 10, "weight": "bold", "zorder": 6}
        text |= {"rotation": 90, "ha": "center", "va": "bottom", "transform": across, "bbox": CLEAR}
        axes.text(place, 0.08, STATUS_WORDS[row.status], **text)


def _name_variants(picture: Figure, view: View) -> int:
    """The legend of all four panels: each variant's bar beside its line. In as many columns as end
    where the panels do, by this machine's fonts; returns the number of rows."""
    keys: list[Any] = []
    names = list(map(title_of, view.looks))
    for look, name in zip(view.looks.values(), names, strict=True):
        bar = Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0)
        keys.append((bar, _line(look, name)))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.017, 0.945), "fontsize": 13}
    place |= {"handlelength": 3.5, "handler_map": {tuple: HandlerTuple(ndivide=None)}}
    columns = 5
    legend = picture.legend(keys, names, ncols=columns, **place)
    while columns > 1 and legend.get_window_extent().x1 > RIGHT * picture.bbox.x1:
        legend.remove()
        columns -= 1
        legend = picture.legend(keys, names, ncols=columns, **place)
    return ceil(len(names) / columns)


def _stamp(picture: Figure) -> None:
    text: dict[str, Any] = {"size": 58, "color": "#d1242f", "alpha": 0.22, "weight": "bold"}
    text |= {"ha": "center", "va": "center", "rotation": 30, "zorder": 9}
    picture.text(0.5, 0.48, REHEARSAL_NOTICE.replace(": ", "\n"), **text)


def benchmark_finding(view: View) -> str:
    """The picture's title: the speedups at the longest length that has any."""
    if view.run.rehearsal:
        return REHEARSAL_NOTICE
    gpu = view.run.environment.gpu.name if view.run.environment.gpu else "the CPU"
    rows = [row for row in view.timed if row.speedup and row.variant != BASELINE]
    if not rows:
        return f"No speedup measured on {gpu}"
    seq_len = max(row.seq_len for row in rows)
    rows = sorted((r for r in rows if r.seq_len == seq_len), key=lambda row: row.speedup or 0)
    if len(rows) > FEW:  # the subject and the two fastest
        rows = [row for row in rows[:-2] if row.variant == "fused_mlp"] + rows[-2:]
    said = ", ".join(
        f"{title_of(row.variant)} " + (NOISE if row.verdict == NOISE else f"{row.speedup:.2f}×")
        for row in rows
    )
    return f"{said[0].upper()}{said[1:]} at {seq_len} tokens on {gpu}"
