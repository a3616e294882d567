"""kernel_time.png, from a run alone: the GPU's time in a step by kind of work.

It has a panel of stacked bars for the longest and one for the shortest length, with one bar per
variant. A bar stacks the kernels of a profiled step, then the GPU's wait for the host: the timed
step minus the time with kernels running.
"""

from __future__ import annotations

from statistics import median
from textwrap import fill
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.records import Run
from report.picture import annotate, framed, lay_bars, write_caption, write_title
from report.wording import (
    FEW,
    REHEARSAL_NOTICE,
    caption,
    floor_words,
    on_base,
    shown_variants,
    why_no_time,
)
from variants import BASELINE, BF16, title_of

KINDS = {  # of kernels, in words
    "matmul": "matmuls",
    "attention": "attention",
    "dequantising": "dequantising",
    "adapter": "LoRA scale and add",
    "copy": "casts and copies",
    "activation": "SwiGLU",
    "norm": "RMSNorm",
    "rope": "rotary embedding",
    "loss": "cross entropy",
    "optimizer": "AdamW",
    "other": "other",
}
# In this order along a bar. The work that PEFT adds around its matmuls gets the Okabe-Ito colours
# that no variant of the experiment uses. Necessary work and small kinds are grey.
COLOURS = {
    **{"matmul": "#6e6e6e", "attention": "#929292"},
    "dequantising": "#e69f00",
    **{"copy": "#f0e442", "adapter": "#56b4e9", "norm": "#009e73"},
    "rest": "#c8c8c8",
}
NAMES = KINDS | {"rest": "SwiGLU, RoPE, loss, other"}
DARK = ("matmul", "attention")  # with white numbers
AROUND = ("copy", "adapter", "norm")  # the kinds that the finding is about
IDLE = "GPU waits"
IDLE_LOOK: dict[str, Any] = {"facecolor": "white", "edgecolor": "#8a8a8a", "hatch": "////",
                             "linewidth": 0.8}  # fmt: skip
DIGIT_POINTS = 6.8  # wide
COPIES_WORDS = "Copies that run beside other kernels are not counted."
ROW_INCHES, GAP_INCHES = 0.47, 0.6


class Bar(NamedTuple):
    """One variant at one length, medians over rounds, in ms. kernel_ms leaves out copies that
    overlap other kernels, as in an offloading checkpoint."""

    variant: str
    kernel_ms: dict[str, float]
    idle_ms: float
    step_ms: float


def bars(run: Run, seq_len: int) -> list[Bar]:
    """Return the variants with a time and a profile at this length, in the experiment's order."""
    found = []
    for variant in shown_variants(run):
        cells = run.cells_of(variant, seq_len, "ok")
        profiled = [(cell, cell.gpu_busy_ms) for cell in cells if cell.gpu_busy_ms]
        if not profiled:
            continue
        kinds = {kind for cell, _ in profiled for kind in cell.kernel_ms}
        kernel_ms = {k: median(cell.kernel_ms.get(k, 0.0) for cell, _ in profiled) for k in kinds}
        hidden = median(sum(cell.kernel_ms.values()) - busy_ms for cell, busy_ms in profiled)
        kernel_ms["copy"] = max(0.0, kernel_ms.get("copy", 0.0) - max(0.0, hidden))
        step_ms = median(run.round_ms(variant, seq_len).values())
        idle_ms = median(max(0.0, median(cell.step_ms) - busy_ms) for cell, busy_ms in profiled)
        found.append(Bar(variant, kernel_ms, idle_ms, step_ms))
    return found


def kernel_time_figure(run: Run) -> Figure | None:
    """Draw the longest and the shortest length, each with its own x axis in ms from 0. None if no
    cell has a profile."""
    profiled = [n for n in run.experiment.seq_lens if bars(run, n)]
    if not profiled:
        return None
    lengths = sorted({max(profiled), min(profiled)}, reverse=True)
    title = fill(kernel_time_finding(run, lengths), 76)
    rows = ROW_INCHES * (len(shown_variants(run)) + 0.5)
    above = 0.95 + 0.27 * (1 + title.count("\n"))  # inches
    height = 1.25 + above + len(lengths) * rows + (len(lengths) - 1) * GAP_INCHES
    with framed(12, height) as picture:
        panels = picture.subplots(len(lengths), 1, squeeze=False)[:, 0]
        picture.subplots_adjust(0.16, 1.25 / height, 0.97, 1 - above / height,
                                hspace=GAP_INCHES / rows)  # fmt: skip
        for axes, seq_len in zip(panels, lengths, strict=True):
            draw_kinds(axes, run, seq_len)
            axes.set_title(f"{seq_len} tokens", x=-0.165, size=13)
        name_kinds(picture, run, (0.017, 1 - (above - 0.63) / height), 8)
        panels[-1].set_xlabel("ms a step, medians over rounds")
        write_title(picture, title, 1 - 0.2 / height, 16, 1216, va="top")
        words = f"{caption(run)} {COPIES_WORDS} {floor_words(run)}"
        write_caption(picture, words, 0.15 / height, 150, size=9.5)
    return picture


def kernel_time_finding(run: Run, lengths: list[int]) -> str:
    """Say how much of vanilla PEFT's step the work around the matmuls takes at the longest length.

    Then say how much of it the other variants still have: all of them if they are few, otherwise
    the one with the least. Last comes the share of the shortest step in which the GPU waits."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    seq_len, shortest = max(lengths), min(lengths)
    (first, *others) = bars(run, seq_len)
    if first.variant != BASELINE:
        return f"What the GPU does during a step at {seq_len} tokens"
    if len(others) > FEW:
        others = [min(others, key=_around_ms)]
    said = "".join(f", {_around_ms(bar):.0f} in {title_of(bar.variant)}" for bar in others)
    share = _around_ms(first) / first.step_ms
    short = next((bar for bar in bars(run, shortest) if bar.variant == BASELINE), None)
    if short and shortest < seq_len:
        waits = f"{short.idle_ms / short.step_ms:.0%}"
        said += f"; at {shortest} tokens the GPU waits for {waits} of vanilla's step"
    return (
        f"Casts, copies, LoRA scaling and norms: {_around_ms(first):.0f} ms ({share:.0%}) of "
        f"vanilla PEFT's step{on_base(run)} at {seq_len} tokens{said}"
    )


def _around_ms(bar: Bar) -> float:
    return sum(bar.kernel_ms.get(kind, 0.0) for kind in AROUND)


# --- a panel --------------------------------------------------------------------------------------


def drawn_ms(bar: Bar) -> dict[str, float]:
    """Return a bar's kinds as we draw them, with the small ones merged. Only a base in 4 bits is
    dequantised."""
    kinds = [kind for kind in COLOURS if kind in bar.kernel_ms or kind != "dequantising"]
    ms = {kind: bar.kernel_ms.get(kind, 0.0) for kind in kinds}
    return ms | {"rest": sum(ms for kind, ms in bar.kernel_ms.items() if kind not in COLOURS)}


def name_kinds(picture: Figure, run: Run, place: tuple[float, float], columns: int) -> None:
    """Draw what each colour stands for, in the order of a bar."""
    kinds = [kind for kind in COLOURS if kind != "dequantising" or run.experiment.base != BF16]
    keys = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    gaps = {"handlelength": 1.2, "columnspacing": 1.2}
    if len(keys) == len(COLOURS):  # all of them fill the line
        gaps |= {"columnspacing": 0.6, "handletextpad": 0.5}
    picture.legend(handles=[*keys, Patch(**IDLE_LOOK, label=IDLE)], ncols=columns, loc="upper left",
                   bbox_to_anchor=place, **gaps)  # fmt: skip


def draw_kinds(axes: Axes, run: Run, seq_len: int) -> None:
    """Draw a bar for every variant, grey if it has a time but no profile, and words if it has no
    time. The panel must already have its final width."""
    shown, found = shown_variants(run), {bar.variant: bar for bar in bars(run, seq_len)}
    steps = {v: median(own.values()) for v in shown if (own := run.round_ms(v, seq_len))}
    ends = {v: max(ms, sum(found[v].kernel_ms.values()) if v in found else 0)
            for v, ms in steps.items()}  # fmt: skip
    floor_ms = run.floor[seq_len].floor_ms if seq_len in run.floor else 0.0
    longest = max([floor_ms, *ends.values()]) or 1.0
    totals = {v: f"{ms:.{0 if longest > 50 else 1}f} ms" for v, ms in steps.items()}
    floor_words = f"floor {floor_ms:.0f}"
    beside = [(ends[v], words) for v, words in totals.items()] + [(floor_ms, floor_words)]
    points = _points_wide(axes)  # words take 8 a letter, and 10 for the space before
    reach = [ms / (1 - (10 + 8 * len(words)) / points) for ms, words in beside]
    axes.set_yticks(range(len(shown)), [fill(title_of(variant), 22) for variant in shown], size=11)
    below = 0.25 + 0.045 * len(shown)  # the last bar, room for the floor's name
    axes.set_ylim(len(shown) - 0.5 + below, -0.5)
    axes.set_xlim(0, max([1.05 * longest, *reach]))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    lay_bars(axes)
    aside: dict[str, Any] = {"va": "center", "style": "italic"}
    for row, variant in enumerate(shown):
        if variant not in steps:
            words = why_no_time(run, variant, seq_len)
            axes.text(0.01 * longest, row, words, color="#555555", **aside)
            continue
        if variant in found:
            _stack(axes, found[variant], row, longest, floor_ms)
        else:
            axes.barh(row, steps[variant], 0.78, color="#e4e4e4")
            axes.text(0.01 * longest, row, "no profile", size=10.5, **aside)
        annotate(axes, totals[variant], (ends[variant], row), (5, 0), va="center", size=11.5,
             weight="bold")  # fmt: skip
    if floor_ms:
        for colour, width in (("white", 4), ("black", 2)):
            axes.vlines(floor_ms, -0.43, len(shown) - 0.5 + below, colour, linewidth=width)
        place = (floor_ms, len(shown) - 0.55 + below / 2)
        annotate(axes, floor_words, place, (5, 0), va="center", size=10.5)


def _points_wide(axes: Axes) -> float:
    return axes.bbox.width * 72 / axes.get_figure().dpi  # type: ignore[union-attr]


def _stack(axes: Axes, bar: Bar, row: int, longest: float, floor_ms: float) -> None:
    """Stack the kinds, each with its number if there is room beside the floor."""
    left, (from_ms, to_ms) = 0.0, axes.get_xlim()
    points_a_ms = _points_wide(axes) / (to_ms - from_ms)
    for kind, width in drawn_ms(bar).items():
        axes.barh(row, width, 0.78, left, color=COLOURS[kind], edgecolor="white", linewidth=0.8)
        begin, end = left, left + width
        if abs((begin + end) / 2 - floor_ms) < 0.03 * longest:
            begin, end = max((begin, floor_ms), (floor_ms, end), key=lambda side: side[1] - side[0])
        words = f"{width:.0f}"
        room = max(0.04 * longest, (DIGIT_POINTS * len(words) + 2) / points_a_ms)
        if end - begin > room:
            axes.text((begin + end) / 2, row, words, ha="center", va="center", size=10.5,
                      color="white" if kind in DARK else "black")  # fmt: skip
        left += width
    axes.barh(row, bar.idle_ms, 0.78, left, **IDLE_LOOK)
