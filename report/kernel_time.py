"""kernel_time.png, from a run alone: what the GPU did during a step, by kind of work.

No torch. One panel a length, one bar a variant: the kernels of a profiled step, then the time in
which the GPU waited for the host, which is the timed step less the time that kernels ran.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.records import Run
from report.benchmark_results import write_png
from report.kinds import KINDS, bars
from report.looks import REHEARSAL_NOTICE, STYLE, caption
from variants import title_of

COLOURS = {
    "matmul": "#4c566a",
    "attention": "#5e81ac",
    "adapter": "#c81e2b",
    "copy": "#e8a0a5",
    "activation": "#d08770",
    "norm": "#ebc068",
    "rope": "#8fae6b",
    "loss": "#8250df",
    "optimizer": "#b48ead",
    "other": "#b5bcc6",
}
IDLE = "GPU waits for the host"


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
        keys = [Patch(facecolor=COLOURS[kind], label=words) for kind, words in KINDS.items()]
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
        for kind, colour in COLOURS.items():
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
