"""A run as the panels of benchmark_results.png want it. No torch, no matplotlib."""

from __future__ import annotations

from bench.records import Run, SummaryRow
from report.looks import shown_variants
from report.statistics import summarize
from variants import LOOKS, SUITES, Look, title_of, variant_of

SPARE_LOOKS = [  # for variants whose family's look another one has
    Look("", "#000000", "*", "OO"),
    Look("", "#8a7a00", "X", "|||"),
    Look("", "#7a4900", ">", "ooo"),
]
FEW = 4  # up to this many variants every point is labelled; beyond it the table has the values
SHORT = 32  # letters of a name that takes two lines


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
        # few variants with short names have these beside what they name, not in the legend alone
        short = all(len(title_of(variant)) <= SHORT for variant in shown)
        self.is_named = short and len(shown) <= FEW

    def look(self, row: SummaryRow) -> Look:
        return self.looks[row.variant]

    def slot(self, row: SummaryRow) -> float:
        """Return the place of a variant's bar within its length's group: no two share a place."""
        return self.seq_lens.index(row.seq_len) + self.from_middle(row.variant) * self.bar_width

    def from_middle(self, variant: str) -> float:
        """Return a variant's place among all of them, 0 in the middle, a step of 1 from each to the
        next."""
        return list(self.looks).index(variant) - (len(self.looks) - 1) / 2

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
