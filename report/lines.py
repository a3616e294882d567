"""A run as the pictures of all lengths show it, and a panel of lines, one per variant, with values
beside their points."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import fill
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.records import Run, SummaryRow
from report.picture import annotate
from report.statistics import NOISE, summarize
from report.wording import STATUS_WORDS, shown_variants
from variants import LOOKS, SUITES, Look, title_of, variant_of

SPARE_LOOKS = [  # for variants whose family's look is taken
    Look("", "#000000", "*", "OO"), Look("", "#8a7a00", "X", "|||"), Look("", "#7a4900", ">", "ooo")
]  # fmt: skip
FEW = 4  # up to this many variants we label every point; with more, the table has the values
SHORT = 32  # letters: the longest name that fits on two lines
SIZE = 11  # of letters, unless a picture asks for another
# Heights at that size, as shares of the panel: a value beside its point, and a line of words.
LABEL, LINE = 0.085, 0.052
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
        self.bar_width = 0.84 / len(shown)
        # few variants with short names have these beside their lines, not in the legend alone
        short = all(len(title_of(variant)) <= SHORT for variant in shown)
        self.is_named = short and len(shown) <= FEW

    def slot(self, row: SummaryRow) -> float:
        """Return the place of a variant's bar within its length's group: no two share a place."""
        return self.seq_lens.index(row.seq_len) + self.from_middle(row.variant) * self.bar_width

    def from_middle(self, variant: str) -> float:
        """Return a variant's offset from the middle of all, in steps of 1."""
        return list(self.looks).index(variant) - (len(self.looks) - 1) / 2


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


def named_in_title(variants: list[str]) -> list[str]:
    """Return which of these, the slowest first, a title names: of many, the subject and the two
    fastest."""
    if len(variants) <= FEW:
        return variants
    return [variant for variant in variants[:-2] if variant == "fused_mlp"] + variants[-2:]


def mark_untimed(axes: Axes, view: View) -> None:
    """Show a cell without a time: its variant's marker, hollow, and the reason in words."""
    for row in view.untimed:
        look, place, across = view.looks[row.variant], view.slot(row), axes.get_xaxis_transform()
        mark = line_of(look, title_of(row.variant), [place], [0.035])
        mark.set(transform=across, markerfacecolor="white", markeredgewidth=2, zorder=6)
        axes.add_artist(mark)
        axes.text(place, 0.08, STATUS_WORDS[row.status], color=look.colour, size=10, weight="bold",
                  zorder=6, rotation=90, ha="center", va="bottom", transform=across,
                  bbox=CLEAR)  # fmt: skip


class Lines(NamedTuple):
    """A panel's lines, one per variant, of one field of the rows, with its intervals. name: the
    field. words: those of a value. apart: distance between variants along the x axis, to keep
    intervals from hiding each other. size: of the letters."""

    axes: Axes
    view: View
    rows: list[SummaryRow]
    name: str
    words: Callable[[float], str]
    apart: float = 0.0
    size: float = SIZE

    def draw(self, at_points: bool = False) -> None:
        """Draw the lines, broken where a length has no value.

        Values stand right of the last length, with names if `view` has them. A value within noise
        is italic, not bold. at_points: also write the values at the other lengths, if the variants
        are few."""
        last = len(self.view.seq_lens) - 1
        if self.view.is_named:
            self.axes.set_xlim(-0.5, last + 0.5 + NAMES_ROOM * (last + 1))
        for variant in self.view.looks:
            self.draw_line(variant)
        for place, seq_len in enumerate(self.view.seq_lens):
            here = sorted((row for row in self.rows if row.seq_len == seq_len), key=self.value)
            if place == last:
                self.name_ends(place, here)
            elif at_points and len(self.view.looks) <= FEW:
                self.label_points(place, here)

    def value(self, row: SummaryRow) -> float:
        return getattr(row, self.name)

    def ends(self, row: SummaryRow) -> tuple[float, ...]:
        return getattr(row, f"{self.name}_ci95", None) or (self.value(row),)

    def heights(self, *values: float) -> list[float]:
        """Return how far up the panel the values are, from 0 to 1."""
        to_panel = self.axes.transScale + self.axes.transLimits
        return [to_panel.transform((0, value))[1] for value in values]

    def text_look(self, row: SummaryRow) -> dict[str, Any]:
        within_noise = self.name == "speedup" and row.verdict == NOISE
        look = {"style": "italic"} if within_noise else {"weight": "bold"}
        return {"color": self.view.looks[row.variant].colour, "size": self.size, **look}

    def draw_line(self, variant: str) -> None:
        look = self.view.looks[variant]
        own = {row.seq_len: row for row in self.rows if row.variant == variant}
        values = [self.value(own[n]) if n in own else float("nan") for n in self.view.seq_lens]
        places = [n + self.apart * self.view.from_middle(variant) for n in range(len(values))]
        if own:
            self.axes.add_line(line_of(look, title_of(variant), places, values))
        for place, seq_len in zip(places, self.view.seq_lens, strict=True):
            if seq_len in own and len(ends := self.ends(own[seq_len])) == 2:
                self.axes.plot([place] * 2, ends, marker="_", color=look.colour, markersize=11,
                               linewidth=1.8)  # fmt: skip

    def name_ends(self, place: int, rows: list[SummaryRow]) -> None:
        """Write the values at the last length, right of all, with names."""
        labels = [self.words(self.value(row)) for row in rows]
        if self.view.is_named:
            letters = round(17 * SIZE / self.size)
            titles = [title_of(row.variant) for row in rows]
            names = [fill(title, letters, break_long_words=False) for title in titles]
            labels = ["\n".join(pair) for pair in zip(names, labels, strict=True)]
        tall = max((text.count("\n") + 1 for text in labels), default=1)
        gap = LINE * tall * self.size / SIZE
        heights = apart_by(gap, self.heights(*map(self.value, rows)), 1.0)
        at = place + 0.12 + self.apart * (len(self.view.looks) - 1) / 2
        for row, text, height in zip(rows, labels, heights, strict=True):
            self.axes.text(at, height, text, transform=self.axes.get_xaxis_transform(),
                           va="center", linespacing=1.05, **self.text_look(row))  # fmt: skip

    def label_points(self, place: int, rows: list[SummaryRow]) -> None:
        """Write the values at one length above their points, or below if there is no room. Values
        that fit neither are left to the table. One within noise never goes below: there it would
        look like a loss."""
        taken: list[list[float]] = [self.heights(1.0)] if self.name == "speedup" else []
        for row in rows:
            reach, look = (self.value(row), *self.ends(row)), self.text_look(row)
            spans = [sorted(self.heights(self.value(each), *self.ends(each)))
                     for each in rows if each is not row]  # fmt: skip
            over, under = self.heights(max(reach), min(reach))
            room = LABEL * self.size / SIZE
            above, below = [over, over + room], [under - room, under]
            if is_free(above, spans + taken):
                span, value, points, va = above, max(reach), 9, "bottom"
            elif is_free(below, spans + taken) and "weight" in look:
                span, value, points, va = below, min(reach), -9, "top"
            else:
                continue
            taken.append(span)
            words = self.words(self.value(row))
            annotate(self.axes, words, (place, value), (0, points), ha="center", va=va, **look)


def line_of(look: Look, title: str, x=(), y=()) -> Line2D:
    return Line2D(x, y, color=look.colour, marker=look.marker, label=title)


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
