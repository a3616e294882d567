"""A panel of stacked bars, one a variant: the GPU's time in a step by kind of work. No torch.

kernel_time.png has one a length, and benchmark_results.png one at the longest.
"""

from __future__ import annotations

from itertools import accumulate
from statistics import median
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bench.records import Run
from report.kinds import KINDS, Bar, bars
from report.looks import shown_variants, why_no_time
from variants import title_of

REST = ("activation", "rope", "loss", "optimizer", "other")
# In this order along a bar. What PEFT adds around its products is in those of Okabe and Ito's
# colours that no variant of the experiment has; what has to be done, and what is small, is grey.
COLOURS = {
    **{"matmul": "#6e6e6e", "attention": "#929292"},
    **{"copy": "#f0e442", "adapter": "#56b4e9", "norm": "#009e73"},
    "rest": "#c8c8c8",
}
NAMES = KINDS | {"rest": "SwiGLU, RoPE, loss, other"}
DARK = ("matmul", "attention")  # with white numbers
IDLE = "GPU waits"
LINE_POINTS, DIGIT_POINTS = 13.5, 6.8  # of the words: a line's height, a digit's width
COPIES_WORDS = "Copies that run beside other kernels are not counted."


def ms_of(bar: Bar) -> dict[str, float]:
    """A bar's kinds as they are drawn, the small ones as one."""
    ms = {kind: bar.kernel_ms.get(kind, 0.0) for kind in COLOURS}
    return ms | {"rest": sum(bar.kernel_ms.get(kind, 0.0) for kind in REST)}


def longest_profiled(run: Run) -> int:
    """The longest length at which any variant has a profile, or else the longest."""
    lengths = run.experiment.seq_lens
    return next((n for n in reversed(lengths) if bars(run, n)), lengths[-1])


def draw_kinds(axes: Axes, run: Run, seq_len: int, named: bool) -> float:
    """Draw a bar for every variant, grey where it has a time and no profile, and words where it has
    no time; above the first bar, if `named`, what each colour stands for. Gives the height that
    the names take above the panel, in inches. How wide the panel is has to stand before."""
    shown, found = shown_variants(run), {bar.variant: bar for bar in bars(run, seq_len)}
    steps = {v: median(own.values()) for v in shown if (own := run.round_ms(v, seq_len))}
    ends = {v: max(ms, sum(found[v].kernel_ms.values()) if v in found else 0)
            for v, ms in steps.items()}  # fmt: skip
    floor_ms = run.floor[seq_len].floor_ms if seq_len in run.floor else 0.0
    longest = max([floor_ms, *ends.values()]) or 1.0
    totals = {v: f"{ms:.{0 if longest > 50 else 1}f} ms" for v, ms in steps.items()}
    floor_words = f"floor {floor_ms:.0f}"
    beside = [(ends[v], words) for v, words in totals.items()] + [(floor_ms, floor_words)]
    points = _points_wide(axes)  # of which words take 8 a letter, and 10 for the space before
    reach = [ms / (1 - (10 + 8 * len(words)) / points) for ms, words in beside]
    axes.set_yticks(range(len(shown)), [fill(title_of(variant), 22) for variant in shown], size=11)
    below = 0.25 + 0.045 * len(shown)  # the last bar, room for the floor's name
    axes.set_ylim(len(shown) - 0.5 + below, -0.5)
    axes.set_xlim(0, max([1.05 * longest, *reach]))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.tick_params(length=0)
    for row, variant in enumerate(shown):
        if variant not in steps:
            words = why_no_time(run, variant, seq_len)
            axes.text(0.01 * longest, row, words, va="center", style="italic", color="#555555")
            continue
        if variant in found:
            _stack(axes, found[variant], row, longest, floor_ms)
        else:
            axes.barh(row, steps[variant], 0.78, color="#e4e4e4")
            axes.text(0.01 * longest, row, "no profile", va="center", style="italic", size=10.5)
        axes.annotate(totals[variant], (ends[variant], row), (5, 0), textcoords="offset points",
                      va="center", size=11.5, weight="bold")  # fmt: skip
    if floor_ms:
        for colour, width in (("white", 4), ("black", 2)):
            axes.vlines(floor_ms, -0.43, len(shown) - 0.5 + below, colour, linewidth=width)
        place = (floor_ms, len(shown) - 0.55 + below / 2)
        axes.annotate(floor_words, place, (5, 0), textcoords="offset points", va="center",
                      size=10.5)  # fmt: skip
    if named and found:
        first = next(row for row, variant in enumerate(shown) if variant in found)
        return _name(axes, list(found.values()), first)
    return 0.0


def _points_wide(axes: Axes) -> float:
    return axes.bbox.width * 72 / axes.get_figure().dpi  # type: ignore[union-attr]


def _stack(axes: Axes, bar: Bar, row: int, longest: float, floor_ms: float) -> None:
    """The kinds one after another, each with its number where there is room beside the floor."""
    left, (from_ms, to_ms) = 0.0, axes.get_xlim()
    points_a_ms = _points_wide(axes) / (to_ms - from_ms)
    edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.8}
    for kind, width in ms_of(bar).items():
        axes.barh(row, width, 0.78, left, color=COLOURS[kind], **edge)
        begin, end = left, left + width
        if abs((begin + end) / 2 - floor_ms) < 0.03 * longest:
            begin, end = max((begin, floor_ms), (floor_ms, end), key=lambda side: side[1] - side[0])
        words = f"{width:.0f}"
        room = max(0.04 * longest, (DIGIT_POINTS * len(words) + 2) / points_a_ms)
        if end - begin > room:
            axes.text((begin + end) / 2, row, words, ha="center", va="center", size=10.5,
                      color="white" if kind in DARK else "black")  # fmt: skip
        left += width
    axes.barh(row, bar.idle_ms, 0.78, left, color="white", edgecolor="#8a8a8a", hatch="////",
              linewidth=0.8)  # fmt: skip


def _name(axes: Axes, found: list[Bar], row: int) -> float:
    """Every kind that any bar has, in words above its place in the first: as flags, so low that no
    pole of another, further left, stands in the way. Gives their height in inches."""
    widths = ms_of(found[0])
    ends = list(accumulate(widths.values()))
    anywhere = {kind for bar in found for kind, ms in ms_of(bar).items() if ms}
    names = {  # and the middle of what each stands for
        NAMES[kind]: end - width / 2
        for (kind, width), end in zip(widths.items(), ends, strict=True)
        if kind in anywhere
    }
    if any(bar.idle_ms for bar in found):
        names[IDLE] = ends[-1] + found[0].idle_ms / 2
    flags: list[tuple[float, int]] = []  # poles of those further left, and their levels
    to_points = 72 / axes.get_figure().dpi  # type: ignore[union-attr]
    for words, x in names.items():
        pole = axes.transData.transform((x, row))[0] * to_points
        text: dict[str, Any] = {"xy": (x, row - 0.39), "textcoords": "offset points", "size": 10.5}
        flag = axes.annotate(words, xytext=(0, 0), ha="right", **text)
        begin = pole - flag.get_window_extent().width * to_points - 6
        level = 1 + max((each for at, each in flags if at > begin), default=-1)
        flags.append((pole, level))
        up = 6 + LINE_POINTS * level
        flag.set_position((-2, up))
        line: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.8, "color": "#555555"}
        line |= {"shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xytext=(0, up + LINE_POINTS - 4), arrowprops=line, **text)
    return (6 + LINE_POINTS * (1 + max(level for _, level in flags))) / 72
