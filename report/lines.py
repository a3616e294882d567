"""A panel of lines, one a variant, whose values stand beside their points; for
benchmark_results.png. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.records import SummaryRow
from report.statistics import NOISE
from report.view import FEW, View
from variants import Look, title_of

LABEL = 0.085  # the height that a value beside its point takes, of its panel
LINE = 0.052  # and that of a line of words
CLEAR = {"boxstyle": "square,pad=0.05", "color": "white", "alpha": 0.8}  # around words
NAMES_ROOM = 0.26  # right of the last length, of the room that all of them take


def draw_lines(
    axes: Axes, view: View, rows: list[SummaryRow], name: str, words: Callable[[float], str],
    beside: Sequence[float] = (), apart: float = 0.0,
) -> None:  # fmt: skip
    """One line a variant, broken where a length has no value, with intervals; and its values,
    above or below their points, wherever no other point (or height `beside`) is in the way. At the
    last length they stand right of all, with the names of few variants. What is within noise is
    not bold, nor below its point, where it would look like a loss.

    apart: the variants, along the x axis, so that no interval hides another."""
    many, to_panel = len(view.looks) > FEW, axes.transScale + axes.transLimits
    last = len(view.seq_lens) - 1
    if not many:
        axes.set_xlim(-0.5, last + 0.5 + NAMES_ROOM * (last + 1))

    def value_of(row: SummaryRow) -> float:
        return getattr(row, name)

    def ends_of(row: SummaryRow) -> tuple[float, ...]:
        return getattr(row, f"{name}_ci95", None) or (value_of(row),)

    def up(*values: float) -> list[float]:
        """Return how far up the panel the values are, from 0 to 1."""
        return [to_panel.transform((0, value))[1] for value in values]

    def label(row: SummaryRow, at_end: bool) -> tuple[str, dict[str, Any]]:
        title = fill(title_of(row.variant), 17) + "\n" if at_end and not many else ""
        within_noise = name == "speedup" and row.verdict == NOISE
        look = {"style": "italic"} if within_noise else {"weight": "bold"}
        return title + words(value_of(row)), {"color": view.look(row).colour, "size": 11, **look}

    for variant, look in view.looks.items():
        own = {row.seq_len: row for row in rows if row.variant == variant}
        values = [value_of(own[n]) if n in own else float("nan") for n in view.seq_lens]
        aside = apart * view.from_middle(variant)
        if own:
            places = [place + aside for place in range(len(values))]
            axes.add_line(line_of(look, title_of(variant), places, values))
        for seq_len, row in own.items():
            if len(ends := ends_of(row)) == 2:
                across = [view.seq_lens.index(seq_len) + aside] * 2
                axes.plot(across, ends, marker="_", color=look.colour, markersize=11, linewidth=1.8)
    for place, seq_len in enumerate(view.seq_lens):
        here = sorted((row for row in rows if row.seq_len == seq_len), key=value_of)
        if place == last:
            labels = [label(row, at_end=True) for row in here]
            tall = max((text.count("\n") + 1 for text, _ in labels), default=1)
            heights = apart_by(LINE * tall, up(*map(value_of, here)), 1.0)
            at = place + 0.12 + apart * (len(view.looks) - 1) / 2
            for (text, look_of_text), height in zip(labels, heights, strict=True):
                axes.text(at, height, text, transform=axes.get_xaxis_transform(),
                          va="center", linespacing=1.05, **look_of_text)  # fmt: skip
        elif not many:
            taken: list[list[float]] = []  # by labels above and below points
            sides = [0.07 if place else -0.07, -0.07 if place else 0.07]
            for row in here:
                value, ends = value_of(row), ends_of(row)
                at = place + apart * view.from_middle(row.variant)
                text, look_of_text = label(row, at_end=False)
                spans = [up(*ends_of(each)) for each in here if each is not row]
                points = up(*(value_of(each) for each in here if each is not row), *beside)
                spans += [*taken, *([point] for point in points)]
                over, under = up(max(value, *ends), min(value, *ends))
                below, above = [under - LABEL, under], [over, over + LABEL]
                if is_free(above, spans):
                    taken.append(above)
                    _annotate(axes, text, at, max(value, *ends), 9, va="bottom", **look_of_text)
                elif is_free(below, spans) and "weight" in look_of_text:
                    taken.append(below)
                    _annotate(axes, text, at, min(value, *ends), -9, va="top", **look_of_text)
                elif sides:  # beside the point, first where no line comes from
                    side = sides.pop(0)
                    axes.text(at + side, value, text, ha="left" if side > 0 else "right",
                              va="center", bbox=CLEAR, **look_of_text)  # fmt: skip


def line_of(look: Look, title: str, x=(), y=()) -> Line2D:
    return Line2D(x, y, color=look.colour, marker=look.marker, label=title)


def is_free(span: list[float], taken: list[list[float]]) -> bool:
    """Return True if a span is in the panel and meets none of these."""
    low, high = span
    return low > 0 and high < 1 and not any(s[0] <= high and s[-1] >= low for s in taken)


def apart_by(gap: float, values: list[float], top: float) -> list[float]:
    """Ascending heights, each at least a gap above the last, and all of them under the top."""
    heights: list[float] = []
    for value in values:
        heights.append(max(value, heights[-1] + gap) if heights else value)
    too_high = max(0.0, heights[-1] + gap / 2 - top) if heights else 0.0
    return [height - too_high for height in heights]


def _annotate(axes: Axes, words: str, x: float, y: float, points_up: int, **text: Any) -> None:
    offset = (0, points_up)
    axes.annotate(words, (x, y), offset, textcoords="offset points", ha="center", **text)
