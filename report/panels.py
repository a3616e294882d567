"""panels.png, from a run alone: speedup, tokens per second, memory, and where the time goes."""

from __future__ import annotations

from itertools import chain, groupby
from math import ceil
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from bench.records import Run, SummaryRow
from report.kernel_time import COPIES_WORDS, draw_kinds, longest_profiled, name_kinds
from report.lines import FEW, Lines, View, line_of, mark_untimed, named_in_title
from report.picture import GREY, annotate, fitting_legend, framed, stamp, write_caption, write_title
from report.statistics import NOISE, noise_band
from report.wording import REHEARSAL_NOTICE, caption, floor_words, on_base
from variants import BASELINE, LOOKS, title_of

RESULTS_LEGEND = (
    "Medians over steps, then over rounds; whiskers: 95% intervals over rounds; italic: within "
    f"noise. {COPIES_WORDS}"
)
RATIOS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)  # ticks for widely spread speedups
WIDTH, HEIGHT = 14, 12  # of the picture, in inches
RIGHT = 0.975  # where the panels end, of the picture's width
TITLE_PAD = 20  # points between a panel and its title, with room for a note


def panels_figure(run: Run) -> Figure:
    """Draw four panels: speedup, tokens per second, peak memory, and the GPU's time at the longest
    length."""
    with framed(WIDTH, HEIGHT, axes_titlepad=TITLE_PAD) as picture:
        view = View(run)
        panels = picture.subplots(2, 2, gridspec_kw={"hspace": 0.34, "wspace": 0.14})
        legend_rows = _name_variants(picture, view)
        picture.subplots_adjust(0.06, 0.12, RIGHT, 0.86 - 0.026 * legend_rows)
        for panel, axes in zip((_speedup, _throughput, _memory), panels.flat, strict=False):
            axes.set_xlim(-0.5, len(view.seq_lens) - 0.5)
            axes.set_xticks(range(len(view.seq_lens)), view.seq_lens)
            axes.set_xlabel("tokens in a sequence")
            axes.tick_params(length=0)
            panel(axes, view)
            mark_untimed(axes, view)
        _kinds(picture, panels[1, 1], view)
        write_title(picture, panels_finding(view), 0.985, 22, 1500, va="top", linespacing=1.3)
        write_caption(picture, f"{caption(run)} {RESULTS_LEGEND} {floor_words(run)}", 0.022, 165)
        if run.rehearsal:
            stamp(picture, REHEARSAL_NOTICE, 58)
    return picture


# --- the four panels ------------------------------------------------------------------------------


def _speedup(axes: Axes, view: View) -> None:
    axes.set_title("Speedup by the wall clock (higher is better)")
    axes.set_yscale("log")  # a 2x speedup is as far from 1 as a 2x slowdown
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}×" if value > 0 else "")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.axhline(1.0, color=LOOKS["peft"].colour, linestyle=(0, (5, 3)))
    rows = [row for row in view.timed if row.speedup and row.variant != BASELINE]
    bands = {n: band for n in view.seq_lens if (band := noise_band(view.run, n))}
    for seq_len, (low, high) in bands.items():
        axes.bar(view.seq_lens.index(seq_len), high - low, 0.9, low, color="#cfcfcf")
    if bands:
        _remark(axes, "log scale; grey band: vanilla PEFT measured twice (A/A)")
    reach = [1.0, *(row.speedup for row in rows if row.speedup), *chain(*bands.values())]
    low, high = min(reach), max(reach)
    # The interval of two rounds may be huge: we let it leave the panel.
    ends = [end for row in rows for end in row.speedup_ci95 or ()]
    low, high = max(min([low, *ends]), low / 1.25), min(max([high, *ends]), high * 1.25)
    span = max(1.2, high / low)
    below = 0.9 if view.untimed else 0.14  # room for the words
    axes.set_ylim(low / span**below, high * span**0.2)
    ticks = FixedLocator(RATIOS) if span > 3 else MaxNLocator(7, steps=[1, 2, 5, 10])
    axes.yaxis.set_major_locator(ticks)
    Lines(axes, view, rows, "speedup", lambda x: f"{x:.2f}×", apart=0.06).draw()


def _throughput(axes: Axes, view: View) -> None:
    axes.set_title("Tokens a second (higher is better)")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    speeds = [row.tokens_per_s for row in view.timed if row.tokens_per_s]
    axes.set_ylim(0, 1.15 * max(speeds, default=1.0))
    Lines(axes, view, view.timed, "tokens_per_s", EngFormatter(places=1, sep="")).draw()


def _memory(axes: Axes, view: View) -> None:
    axes.set_title("Peak memory allocated, GiB (lower is better)")
    peaks = {view.slot(row): (row, row.peak_gib) for row in view.timed if row.peak_gib}
    top = max((gib for _, gib in peaks.values()), default=1.0)
    for place, (row, gib) in peaks.items():
        look = view.looks[row.variant]
        axes.bar(place, gib, 0.93 * view.bar_width, color=look.colour, hatch=look.hatch,
                 edgecolor="white", linewidth=0)  # fmt: skip
    _memory_numbers(axes, view, peaks)
    gpu = view.run.environment.gpu
    if gpu is None:
        _remark(axes, "no GPU, so no GPU memory")
    elif gpu.memory_bytes / 2**30 < 1.6 * top:  # otherwise its line would dwarf the bars
        top = gpu.memory_bytes / 2**30
        axes.axhline(top, color="black")
        _remark(axes, f"line: the card holds {top:.0f} GiB")
    axes.set_ylim(0, 1.22 * top)


def _memory_numbers(axes: Axes, view: View, peaks: dict[float, tuple[SummaryRow, float]]) -> None:
    """Write numbers over the bars, a single one for equal neighbours. Those of many variants stand
    upright."""
    many = len(view.looks) > FEW
    alike = groupby(sorted(peaks), lambda slot: (peaks[slot][0].seq_len, f"{peaks[slot][1]:.1f}"))
    for (_, words), slots in alike:
        over = list(slots)
        height = max(peaks[slot][1] for slot in over)
        annotate(axes, words, ((over[0] + over[-1]) / 2, height), (0, 3), ha="center", va="bottom",
             size=9 if many else 12, rotation=90 * many)  # fmt: skip


def _kinds(picture: Figure, axes: Axes, view: View) -> None:
    """Draw the GPU's time. Leave room for the bars' names at the side and a colour legend above."""
    seq_len, box = longest_profiled(view.run), axes.get_position()
    left, above = (0.055 if view.is_named else 0.09), 0.055
    axes.set_position((box.x0 + left, box.y0, box.width - left, box.height - above))
    draw_kinds(axes, view.run, seq_len)
    name_kinds(picture, view.run, (box.x0 - 0.008, box.y1 + 0.012), 3)
    title = f"Where the time goes at {seq_len} tokens (lower is better)"
    axes.set_title(title, x=-left / (box.width - left), pad=TITLE_PAD + 72 * above * HEIGHT)
    axes.set_xlabel("ms a step")
    letters, size = (16, 11) if view.is_named else (30, 7.5)
    names = [fill(title_of(variant), letters) for variant in view.looks]
    axes.set_yticks(range(len(names)), names, weight="bold", size=size)
    for label, look in zip(axes.get_yticklabels(), view.looks.values(), strict=True):
        label.set_color(look.colour)


# --- words ----------------------------------------------------------------------------------------


def _remark(axes: Axes, words: str) -> None:
    """Write words under a panel's title, where nothing is drawn."""
    annotate(axes, words, (0, 1), (0, 4), "axes fraction", va="bottom", size=11, color=GREY)


def _name_variants(picture: Figure, view: View) -> int:
    """Draw the legend of all four panels: each variant's bar beside its line. Return the number of
    its rows."""
    keys: list[Any] = []
    names = list(map(title_of, view.looks))
    for look, name in zip(view.looks.values(), names, strict=True):
        bar = Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0)
        keys.append((bar, line_of(look, name)))
    _, columns = fitting_legend(
        picture, 5, RIGHT - 0.025, handles=keys, labels=names, loc="upper left", fontsize=13,
        bbox_to_anchor=(0.017, 0.924), handlelength=3.5,
        handler_map={tuple: HandlerTuple(ndivide=None)},
    )  # fmt: skip
    return ceil(len(names) / columns)


def panels_finding(view: View) -> str:
    """Say the speedups at the longest length that has one."""
    if view.run.rehearsal:
        return REHEARSAL_NOTICE
    gpu = view.run.environment.device
    rows = [row for row in view.timed if row.speedup and row.variant != BASELINE]
    if not rows:
        return f"No speedup measured on {gpu}"
    seq_len = max(row.seq_len for row in rows)
    rows = sorted((r for r in rows if r.seq_len == seq_len), key=lambda row: row.speedup or 0)
    named = named_in_title([row.variant for row in rows])
    said = ", ".join(
        f"{title_of(row.variant)} "
        + ("within noise" if row.verdict == NOISE else f"{row.speedup:.2f}×")
        for row in rows
        if row.variant in named
    )
    over = f"vanilla PEFT{on_base(view.run)}"
    return f"Speedup over {over} by the wall clock, at {seq_len} tokens on {gpu}:\n{said}"
