"""A panel of lines, one a variant, whose values stand beside their points; for
benchmark_results.png. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.records import SummaryRow
from report.statistics import NOISE
from report.view import FEW, View
from variants import Look, title_of

LABEL = 0.085  # the height that a value beside its point takes, of its panel
GAP = 0.03  # of which this much lies between the two
LINE = 0.052  # and that of a line of words
CLEAR = {"boxstyle": "square,pad=0.05", "color": "white", "alpha": 0.8}  # around words
NAMES_ROOM = 0.26  # right of the last length, of the room that all of them take


def draw_lines(
    axes: Axes, view: View, rows: list[SummaryRow], name: str, words: Callable[[float], str],
    beside: Sequence[float] = (), apart: float = 0.0,
) -> None:  # fmt: skip
    """One line a variant, broken where a length has no value, with intervals; and its values,
    above or below their points, wherever no other point (or height `beside`) is in the way. At the
    last length they stand right of all, with names if `view` has them. What is within noise is
    not bold, nor below its point, where it would look like a loss.

    apart: the variants, along the x axis, so that no interval hides another."""
    last = len(view.seq_lens) - 1
    if view.is_named:
        axes.set_xlim(-0.5, last + 0.5 + NAMES_ROOM * (last + 1))
    lines = _Lines(axes, view, name, words, apart)
    for variant in view.looks:
        lines.draw(variant, [row for row in rows if row.variant == variant])
    for place, seq_len in enumerate(view.seq_lens):
        here = sorted((row for row in rows if row.seq_len == seq_len), key=lines.value_of)
        if place == last:
            lines.name_ends(place, here)
        elif len(view.looks) <= FEW:
            lines.label_points(place, here, beside)


class _Lines(NamedTuple):
    """A panel's lines of one value of the rows, `name`, which `words` writes."""

    axes: Axes
    view: View
    name: str
    words: Callable[[float], str]
    apart: float

    def value_of(self, row: SummaryRow) -> float:
        return getattr(row, self.name)

    def ends_of(self, row: SummaryRow) -> tuple[float, ...]:
        return getattr(row, f"{self.name}_ci95", None) or (self.value_of(row),)

    def up(self, *values: float) -> list[float]:
        """Return how far up the panel the values are, from 0 to 1."""
        to_panel = self.axes.transScale + self.axes.transLimits
        return [to_panel.transform((0, value))[1] for value in values]

    def look_of_text(self, row: SummaryRow) -> dict[str, Any]:
        within_noise = self.name == "speedup" and row.verdict == NOISE
        look = {"style": "italic"} if within_noise else {"weight": "bold"}
        return {"color": self.view.look(row).colour, "size": 11, **look}

    def draw(self, variant: str, rows: list[SummaryRow]) -> None:
        """One variant's line and intervals."""
        look, own = self.view.looks[variant], {row.seq_len: row for row in rows}
        values = [self.value_of(own[n]) if n in own else float("nan") for n in self.view.seq_lens]
        places = [n + self.apart * self.view.from_middle(variant) for n in range(len(values))]
        if own:
            self.axes.add_line(line_of(look, title_of(variant), places, values))
        for row in rows:
            if len(ends := self.ends_of(row)) == 2:
                across = [places[self.view.seq_lens.index(row.seq_len)]] * 2
                self.axes.plot(across, ends, marker="_", color=look.colour, markersize=11,
                               linewidth=1.8)  # fmt: skip

    def name_ends(self, place: int, rows: list[SummaryRow]) -> None:
        """The values at the last length, right of all, with names."""
        labels = [
            f"{fill(title_of(row.variant), 17)}\n" * self.view.is_named
            + self.words(self.value_of(row))
            for row in rows
        ]
        tall = max((text.count("\n") + 1 for text in labels), default=1)
        heights = apart_by(LINE * tall, self.up(*map(self.value_of, rows)), 1.0)
        at = place + 0.12 + self.apart * (len(self.view.looks) - 1) / 2
        for row, text, height in zip(rows, labels, heights, strict=True):
            self.axes.text(at, height, text, transform=self.axes.get_xaxis_transform(),
                           va="center", linespacing=1.05, **self.look_of_text(row))  # fmt: skip

    def label_points(self, place: int, rows: list[SummaryRow], beside: Sequence[float]) -> None:
        """The values at one length, above or below their points or, where neither is free, beside
        them, first where no line comes from. A value for which there is no room is in the table."""
        taken: list[list[float]] = []  # by labels above and below points, gaps and all
        written: list[list[float]] = []  # and without the gaps
        sides = [0.07 if place else -0.07, -0.07 if place else 0.07]
        for row in rows:
            value, ends = self.value_of(row), self.ends_of(row)
            at = place + self.apart * self.view.from_middle(row.variant)
            text, look_of_text = self.words(value), self.look_of_text(row)
            others = [each for each in rows if each is not row]
            points = self.up(*map(self.value_of, others), *beside)
            spans = [self.up(*self.ends_of(each)) for each in others]
            spans += [*taken, *([point] for point in points)]
            over, under = self.up(max(value, *ends), min(value, *ends))
            below, above = [under - LABEL, under], [over, over + LABEL]
            (middle,) = self.up(value)
            if is_free(above, spans):
                taken.append(above)
                written.append([over + GAP, over + LABEL])
                _annotate(self.axes, text, at, max(value, *ends), 9, va="bottom", **look_of_text)
            elif is_free(below, spans) and "weight" in look_of_text:
                taken.append(below)
                written.append([under - LABEL, under - GAP])
                _annotate(self.axes, text, at, min(value, *ends), -9, va="top", **look_of_text)
            elif sides and is_free([middle - GAP, middle + GAP], written):
                side = sides.pop(0)
                self.axes.text(at + side, value, text, ha="left" if side > 0 else "right",
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
