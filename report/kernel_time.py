"""kernel_time.png, from a run alone: what the GPU did during a step, by kind of work.

No torch. One panel a length, one bar a variant: the kernels of a profiled step, then the time in
which the GPU waited for the host, which is the timed step less the time that kernels ran.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from matplotlib import style
from matplotlib.figure import Figure

from bench.records import Run
from report.benchmark_results import write_png
from report.kind_bars import COPIES_WORDS, draw_kinds
from report.kinds import Bar, bars
from report.looks import FLOOR_WORDS, REHEARSAL_NOTICE, STYLE, caption, shown_variants
from report.view import FEW
from variants import BASELINE, title_of

AROUND = ("copy", "adapter", "norm")  # what the finding is about
ROW_INCHES, GAP_INCHES = 0.47, 0.6


def draw_kernel_time(run: Run, path: str | Path, lengths: list[int] | None = None) -> bool:
    """Write the picture of these lengths (of all) as a PNG, whole or not at all; False where no
    cell has a profile."""
    lengths = [n for n in lengths or run.experiment.seq_lens if bars(run, n)]
    if not lengths:
        return False
    write_png(kernel_time_figure(run, lengths), path)
    return True


def kernel_time_figure(run: Run, lengths: list[int]) -> Figure:
    """The picture, the longest length first; its x axes are in ms and begin at 0, each length has
    its own."""
    with style.context(["default", STYLE]):
        picture = Figure(figsize=(12, 9), dpi=150)
        panels = picture.subplots(len(lengths), 1, squeeze=False)[:, 0]
        picture.subplots_adjust(left=0.16, right=0.97)
        names_inches = 0.0
        for axes, seq_len in zip(panels, sorted(lengths, reverse=True), strict=True):
            names_inches += draw_kinds(axes, run, seq_len, named=axes is panels[0])
            if len(lengths) > 1:
                axes.set_title(f"{seq_len} tokens", x=-0.165, size=13)
        title = fill(kernel_time_finding(run, lengths), 76)
        title_inches = 0.3 * (1 + title.count("\n"))
        rows = ROW_INCHES * (len(shown_variants(run)) + 0.5)
        height = (
            1.5
            + title_inches
            + names_inches
            + len(lengths) * rows
            + (len(lengths) - 1) * GAP_INCHES
        )
        picture.set_figheight(height)
        top = 1 - (0.25 + title_inches + names_inches) / height
        picture.subplots_adjust(bottom=1.25 / height, top=top, hspace=GAP_INCHES / rows)
        where = f" at {lengths[0]} tokens" if len(lengths) == 1 else ""
        panels[-1].set_xlabel(f"ms a step{where}, medians over rounds")
        picture.text(0.025, 1 - 0.2 / height, title, size=16, weight="bold", va="top")
        words = fill(f"{caption(run)} {COPIES_WORDS} {FLOOR_WORDS}", 150)
        picture.text(0.025, 0.15 / height, words, size=9.5, color="#444444", linespacing=1.5)
    return picture


def kernel_time_finding(run: Run, lengths: list[int]) -> str:
    """The title: what the kinds around the products take of vanilla PEFT's step at the longest
    length, and what is left of them in others, in all if they are few, or else in the one that has
    the least; and for how much of the shortest step the GPU waits."""
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
        f"vanilla PEFT's step at {seq_len} tokens{said}"
    )


def _around_ms(bar: Bar) -> float:
    return sum(bar.kernel_ms.get(kind, 0.0) for kind in AROUND)
