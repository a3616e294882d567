"""kernel_time.png, from a run alone: the GPU time of a step by kind of work, at the longest length.

It has one bar per variant, and words where a variant has no time or no profile.
"""

from __future__ import annotations

from statistics import median
from textwrap import fill
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.records import Run
from report.picture import (
    DPI,
    GREY,
    LETTERS,
    LINE_LETTERS,
    SMALL,
    TITLE_LINE,
    WIDTH,
    framed,
    write_caption,
    write_title,
)
from report.wording import REHEARSAL_NOTICE, on_base, setting, shown_variants, why_no_time
from variants import BASELINE, title_of

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
# The segments of a bar, in order: each kind's, or that of all other kinds. The colours are Okabe
# and Ito's that no variant of the experiment has; matmuls are grey.
MATMULS, DEQUANTISING = "matmuls", "dequantising"
ADAPTERS = "casts, copies, LoRA scale and add"
OTHERS = "attention, norms, SwiGLU, RoPE, loss, other"
SEGMENT_OF = {
    "matmul": MATMULS, "dequantising": DEQUANTISING, "copy": ADAPTERS, "adapter": ADAPTERS
}  # fmt: skip
COLOURS = {MATMULS: "#6e6e6e", DEQUANTISING: "#56b4e9", ADAPTERS: "#e69f00", OTHERS: "#f0e442"}
DIGIT_POINTS = 9  # wide
ROW, BELOW = 0.72, 0.85  # inches


class Bar(NamedTuple):
    """One variant at one length, medians over rounds, in ms. kernel_ms leaves out copies that
    overlap other kernels, as in an offloading checkpoint."""

    variant: str
    kernel_ms: dict[str, float]
    idle_ms: float
    step_ms: float

    @property
    def gpu_ms(self) -> float:
        return sum(self.kernel_ms.values())


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
    """Draw the longest length with a profile, or return None if no cell has one."""
    profiled = [n for n in run.experiment.seq_lens if bars(run, n)]
    if not profiled:
        return None
    seq_len = max(profiled)
    found = {bar.variant: bar for bar in bars(run, seq_len)}
    used = {segment for bar in found.values() for segment in segments(bar)}
    keys = [Patch(color=COLOURS[name], label=name) for name in COLOURS if name in used]
    title = fill(kernel_time_finding(run, seq_len), LINE_LETTERS)
    shown = shown_variants(run)
    above = 0.27 + TITLE_LINE * (1 + title.count("\n")) + 0.28 * len(keys)
    height = above + ROW * len(shown) + BELOW
    with framed(WIDTH, height, dpi=DPI, font_size=LETTERS) as picture:
        write_title(picture, title)
        picture.legend(handles=keys, loc="lower left", bbox_to_anchor=(0.02, 1 - above / height),
                       borderaxespad=0, handlelength=1, labelspacing=0.3,
                       fontsize=LETTERS)  # fmt: skip
        axes = picture.add_axes((0.03, BELOW / height, 0.94, 1 - (above + BELOW) / height))
        axes.set_axis_off()
        axes.set_ylim(len(shown), 0)
        axes.set_xlim(0, max(bar.gpu_ms for bar in found.values()))
        for row, variant in enumerate(shown):
            if variant in found:
                _stack(axes, found[variant], row)
                _name(axes, row, variant, f"{found[variant].gpu_ms:.0f} ms", weight="bold")
            else:
                timed = run.round_ms(variant, seq_len)
                why = "no profile" if timed else why_no_time(run, variant, seq_len)
                _name(axes, row, variant, why, color=GREY)
        words = f"GPU time of a step at {seq_len} tokens per row. {setting(run)}."
        write_caption(picture, words, 0.15 / height, 60, x=0.03, size=SMALL)
    return picture


def kernel_time_finding(run: Run, seq_len: int) -> str:
    """Say how much of vanilla PEFT's GPU time is not matmuls, and whether a variant is rid of most
    of that."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    (first, *others) = bars(run, seq_len)
    if first.variant != BASELINE:
        return f"The GPU time of a step{on_base(run)} by kind of work"
    share = _beside_matmuls(first) / first.gpu_ms
    said = f"{share:.0%} of vanilla PEFT's GPU time{on_base(run)} is not matmuls"
    is_rid = any(_beside_matmuls(bar) < _beside_matmuls(first) / 2 for bar in others)
    return said + (". Fusing removes most of that" if is_rid else "")


def _beside_matmuls(bar: Bar) -> float:
    return bar.gpu_ms - bar.kernel_ms.get("matmul", 0.0)


# --- a bar ----------------------------------------------------------------------------------------


def segments(bar: Bar) -> dict[str, float]:
    """Return the ms of a bar's segments, in order."""
    found = dict.fromkeys(COLOURS, 0.0)
    for kind, ms in bar.kernel_ms.items():
        found[SEGMENT_OF.get(kind, OTHERS)] += ms
    return {name: ms for name, ms in found.items() if ms}


def _name(axes: Axes, row: int, variant: str, words: str, **text: Any) -> None:
    """Write a variant's name above its bar, and words at the right end."""
    axes.text(0, row + 0.36, title_of(variant))
    axes.text(1, row + 0.36, words, transform=axes.get_yaxis_transform(), ha="right", **text)


def _stack(axes: Axes, bar: Bar, row: int) -> None:
    """Stack the segments, each with its number if there is room."""
    left = 0.0
    points_a_ms = 72 * 0.94 * WIDTH / axes.get_xlim()[1]
    for name, ms in segments(bar).items():
        axes.barh(row + 0.68, ms, 0.5, left, color=COLOURS[name], edgecolor="white")
        words = f"{ms:.0f}"
        if points_a_ms * ms > DIGIT_POINTS * len(words) + 4:
            axes.text(left + ms / 2, row + 0.68, words, ha="center", va="center",
                      color="white" if name == MATMULS else "black")  # fmt: skip
        left += ms
