"""kernel_time.png, from a run alone: what the GPU did during a step, by kind of work.

No torch. One panel a length, one bar a variant: the kernels of a profiled step, then the time in
which the GPU waited for the host, which is the timed step less the time that kernels ran.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from textwrap import fill
from typing import NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.records import Run
from report.benchmark_results import View, write_png
from report.looks import REHEARSAL_NOTICE, STYLE, caption
from variants import title_of

KIND_LOOKS = {  # kind: (words, colour)
    "matmul": ("matrix products", "#4c566a"),
    "attention": ("attention", "#5e81ac"),
    "adapter": ("LoRA scale and add", "#c81e2b"),
    "copy": ("casts and copies", "#e8a0a5"),
    "activation": ("SwiGLU", "#d08770"),
    "norm": ("RMSNorm", "#ebc068"),
    "rope": ("rotary embedding", "#8fae6b"),
    "loss": ("cross entropy", "#8250df"),
    "optimizer": ("AdamW", "#b48ead"),
    "other": ("other", "#b5bcc6"),
}
IDLE = "GPU waits for the host"


class Bar(NamedTuple):
    """One variant at one length, medians over rounds, in ms. Copies that run while other kernels
    do, as those of an offloading checkpoint, are left out of kernel_ms."""

    variant: str
    kernel_ms: dict[str, float]
    idle_ms: float
    step_ms: float


def bars(run: Run, seq_len: int) -> list[Bar]:
    """The variants with a time and a profile at this length, in the order of the experiment."""
    found = []
    for variant in View(run).looks:
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


def draw_kernel_time(run: Run, path: str | Path) -> bool:
    """Write the picture as a PNG, whole or not at all; False where no cell has a profile."""
    lengths = [n for n in run.experiment.seq_lens if bars(run, n)]
    if not lengths:
        return False
    write_png(kernel_time_figure(run, lengths), path)
    return True


def kernel_time_figure(run: Run, lengths: list[int]) -> Figure:
    """The picture: its x axes are in ms and begin at 0, each length has its own."""
    with style.context(["default", STYLE]):
        most = max(len(bars(run, n)) for n in lengths)
        height = 1.9 + len(lengths) * (0.75 + 0.42 * most)
        picture = Figure(figsize=(14, height), dpi=150)
        panels = picture.subplots(len(lengths), 1, squeeze=False)[:, 0]
        picture.subplots_adjust(0.11, 1.15 / height, 0.975, 1 - 1.35 / height, hspace=0.5)
        for axes, seq_len in zip(panels, lengths, strict=True):
            _panel(axes, run, seq_len)
        panels[-1].set_xlabel("ms a step, medians over rounds")
        title = REHEARSAL_NOTICE if run.rehearsal else "What the GPU does during a step"
        picture.text(0.025, 1 - 0.42 / height, title, size=20, weight="bold")
        keys = [Patch(facecolor=colour, label=words) for words, colour in KIND_LOOKS.values()]
        keys.append(Patch(facecolor="white", edgecolor="#8a8a8a", hatch="////", label=IDLE))
        picture.legend(handles=keys, loc="upper left", bbox_to_anchor=(0.017, 1 - 0.5 / height),
                       ncols=6, fontsize=11, handlelength=1.2)  # fmt: skip
        words = fill(caption(run), 150)
        picture.text(0.025, 0.15 / height, words, size=9.5, color="#444444", linespacing=1.5)
    return picture


def _panel(axes: Axes, run: Run, seq_len: int) -> None:
    shown = bars(run, seq_len)
    longest = max(max(bar.step_ms, sum(bar.kernel_ms.values())) for bar in shown)
    axes.set_title(f"{seq_len} tokens", x=-0.095, size=12)
    axes.set_yticks(range(len(shown)), [title_of(bar.variant) for bar in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, 1.09 * longest)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.tick_params(length=0)
    for row, bar in enumerate(shown):
        left = 0.0
        for kind, (_, colour) in KIND_LOOKS.items():
            width = bar.kernel_ms.get(kind, 0.0)
            axes.barh(row, width, 0.78, left, color=colour)
            if width > 0.025 * longest:
                dark = kind in ("matmul", "attention", "adapter", "loss")
                axes.text(left + width / 2, row, f"{width:.0f}", ha="center", va="center",
                          size=9.5, color="white" if dark else "black")  # fmt: skip
            left += width
        axes.barh(row, bar.idle_ms, 0.78, left, color="white", edgecolor="#8a8a8a", hatch="////",
                  linewidth=0.8)  # fmt: skip
        end = max(left + bar.idle_ms, bar.step_ms)
        axes.annotate(f"{bar.step_ms:.0f} ms", (end, row), (5, 0), textcoords="offset points",
                      va="center", size=11, weight="bold")  # fmt: skip
    if floor := run.floor.get(seq_len):
        axes.axvline(floor.floor_ms, color="black", linewidth=2)
        axes.annotate("floor", (floor.floor_ms, -0.5), (4, 3), textcoords="offset points",
                      size=10)  # fmt: skip
