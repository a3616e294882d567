"""ablation.png, from a run alone: from vanilla PEFT down to all parts, part by part, at the longest
length; ablation_all_lengths.png has all. The numbers are ablation.py's."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.records import Run
from report.ablation import (
    BLOCKS,
    GPU,
    INTERACTION,
    Gain,
    blocks_of,
    gains,
    name_of_part,
    parts_of_block,
    signed_number,
    together,
)
from report.benchmark_results import write_png
from report.looks import FLOOR_WORDS, REHEARSAL_NOTICE, STYLE, caption, why_no_time
from report.statistics import NOISE, speedups
from variants import BASELINE, LOOKS, counterpart, title_of

FIRST, LAST = LOOKS["fused"].colour, "#4d2200"
COLUMNS = (52, 92, 142, 177)  # where the numbers beside a panel end, in points from its right side
ROW_INCHES = 0.31
OF_GPU: dict[str, Any] = {"marker": "D", "color": "#f0e442", "markersize": 4.5,
                          "markeredgecolor": "black", "linestyle": ""}  # fmt: skip
NOISY = "#6e6e6e"  # what is within noise: its bar is hollow
ASIDE: dict[str, Any] = {"color": "#777777", "style": "italic", "size": 9.5}
BETWEEN: dict[str, Any] = {"facecolor": "#f7cfb2", "edgecolor": FIRST, "hatch": "////"}


def draw_ablation(run: Run, path: str | Path, all_lengths: bool = False) -> bool:
    """Write the picture of the longest length with a time, or of all, as a PNG, whole or not at
    all; False where fewer than two of its variants have a time: there is no gain to show."""
    if not blocks_of(run):
        return False
    lengths = run.experiment.seq_lens
    longest = max(cell.seq_len for cell in run.cells_of(status="ok"))
    write_png(ablation_figure(run, lengths if all_lengths else [longest]), path)
    return True


def ablation_figure(run: Run, lengths: list[int]) -> Figure:
    """One row of panels a length, one column a block; bars are in ms from 0, on one scale a row."""
    with style.context(["default", STYLE]):
        blocks = blocks_of(run)
        names = [name_of_part(part) for part in (*parts_of_block(blocks[0]), INTERACTION)]
        names = [title_of(BASELINE), *names, title_of("fused_all")]
        height = 3.1 + len(lengths) * (0.5 + ROW_INCHES * len(names))
        picture = Figure(figsize=(14, height), dpi=150)
        panels = picture.subplots(len(lengths), len(blocks), squeeze=False, sharex="row")
        picture.subplots_adjust(0.145, 1.3 / height, 0.81, 1 - 2.5 / height, 0.82, 0.24)
        for line, seq_len in zip(panels, lengths, strict=True):
            for axes, block in zip(line, blocks, strict=True):
                _panel(axes, run, seq_len, block, names)
                axes.set_yticks(range(len(names)), names if axes is line[0] else [""] * len(names))
            # By the bars, shared by the line: an interval of two rounds may go far beyond them.
            ends = [bar.get_x() + bar.get_width() for axes in line for bar in axes.patches]
            line[0].set_xlim(0, 1.04 * max([1.0, *ends, *_floor_ms(run, seq_len)]))
        for axes, block in zip(panels[0], blocks, strict=True):
            axes.annotate(BLOCKS[block], (0, 1), (0, 30), xycoords="axes fraction",
                          textcoords="offset points", size=16, weight="bold")  # fmt: skip
        for axes in panels[-1]:
            axes.set_xlabel("ms a step")
        _words(picture, run, lengths, height)
    return picture


def _panel(axes: Axes, run: Run, seq_len: int, block: bool, names: list[str]) -> None:
    axes.set_title(f"{seq_len} tokens", size=13)
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.tick_params(length=0)
    _beside(axes, 1, -0.95, "added first", color=FIRST, size=10)
    _beside(axes, 3, -0.95, "added last", color=LAST, size=10)
    place, all_ms = (
        _total(axes, run, seq_len, counterpart(variant, block).id, y, colour)
        for variant, y, colour in ((BASELINE, 0, LOOKS["peft"].colour),
                                   ("fused_all", len(names) - 1, FIRST))
    )  # fmt: skip
    if ratios := speedups(run, counterpart("fused_all", block).id, seq_len):
        _beside(axes, 1, len(names) - 1, f"{median(ratios):.2f}×", weight="bold")
    above, rows = 0, {name_of_part(row.part): row for row in gains(run, seq_len, block)}
    of_gpu = {name_of_part(row.part): row for row in gains(run, seq_len, block, GPU)}
    for y, name in enumerate(names[1:-1], start=1):
        if name not in rows:
            _beside(axes, 1, y, "does not apply", **ASIDE)
            continue
        begin, (_, first, last) = place, rows[name]
        look = BETWEEN if name == INTERACTION else {"color": FIRST}
        if isinstance(first, Gain) and begin is not None:
            place = _bar(axes, y - 0.13, 0.44, begin, first, **look)
            _diamond(axes, y - 0.13, begin, of_gpu[name].first)
        if isinstance(last, Gain):
            without_ms = (all_ms or 0.0) + last.ms  # where there is no waterfall to hang it from
            begin_last = without_ms if begin is None else begin
            _bar(axes, y + 0.27, 0.16, begin_last, last, color=LAST)
            _diamond(axes, y + 0.27, begin_last, of_gpu[name].last)
        if begin is not None:
            axes.plot([begin, begin], [above, y], color="#8a8a8a", linewidth=0.8, zorder=0.9)
        _numbers(axes, 0, y, first, FIRST)
        _numbers(axes, 2, y, last, LAST)
        above = y
    if place is not None and isinstance(rows[INTERACTION].first, Gain):
        axes.plot([place, place], [above, above + 1], color="#8a8a8a", linewidth=0.8, zorder=0.9)
    for floor_ms in _floor_ms(run, seq_len):
        axes.axvline(floor_ms, color="black", linewidth=1.8)


def _floor_ms(run: Run, seq_len: int) -> list[float]:
    """The floor at a length, where there is one."""
    return [run.floor[seq_len].floor_ms] if seq_len in run.floor else []


def _total(axes: Axes, run: Run, seq_len: int, variant: str, y: int,
           colour: str) -> float | None:  # fmt: skip
    """Draw the bar of a whole step, or say why there is none."""
    own = run.round_ms(variant, seq_len)
    if not own:
        _beside(axes, 1, y, why_no_time(run, variant, seq_len), **ASIDE)
        return None
    step_ms = median(own.values())
    axes.barh(y, step_ms, 0.66, color=colour)
    _beside(axes, 0, y, f"{step_ms:.0f} ms", weight="bold")
    return step_ms


def _bar(axes: Axes, y: float, height: float, begin: float, gain: Gain, **look: Any) -> float:
    """A gain, to the left of where it begins, with its interval; gives where it ends."""
    if gain.verdict == NOISE:
        look = {"facecolor": "white", "edgecolor": look.get("color", FIRST)}
    axes.barh(y, gain.ms, height, begin - gain.ms, linewidth=0.8, **look)
    if gain.ci95_ms:
        ends = [begin - bound for bound in gain.ci95_ms]
        colour = NOISY if gain.verdict == NOISE else "black"
        axes.plot(ends, [y, y], color=colour, linewidth=1.1, marker="|", markersize=5)
    return begin - gain.ms


def _diamond(axes: Axes, y: float, begin: float, gain: Gain | str | None) -> None:
    """Mark the place at which a bar would end if the host took no time."""
    if isinstance(gain, Gain):
        axes.plot([begin - gain.ms], [y], **OF_GPU)


def _numbers(axes: Axes, column: int, y: int, gain: Gain | str | None, colour: str) -> None:
    """A gain's ms and percent in two of the columns beside the panel, or why there is none."""
    if not isinstance(gain, Gain):
        _beside(axes, column + 1, y, gain or "", **ASIDE)
        return
    text: dict[str, Any] = {"color": colour, "weight": "bold" if gain.verdict else "normal"}
    if gain.verdict == NOISE:
        text = {"color": NOISY}
    _beside(axes, column, y, f"{signed_number(gain.ms, 0)} ms", **text)
    if gain.percent is not None:
        _beside(axes, column + 1, y, f"{signed_number(gain.percent, 0)}%", **text)


def _beside(axes: Axes, column: int, y: float, words: str, **text: Any) -> None:
    text = {"size": 10.5, "ha": "right", "va": "center", **text}
    side = axes.get_yaxis_transform()
    axes.annotate(words, (1, y), (COLUMNS[column], 0), side, "offset points", **text)


def _words(picture: Figure, run: Run, lengths: list[int], height: float) -> None:
    title = (len(lengths) > 1 and lengths_finding(run, lengths)) or ablation_finding(run)
    picture.text(0.025, 1 - 0.5 / height, title, size=min(21, 1400 / len(title)), weight="bold")
    said = (
        "From vanilla PEFT down to all parts: a bar begins where the one above it ended, and "
        "is as long as what the part, alone,\ntakes off a step. The interaction is what all "
        "together take off beyond that sum. Each is a median over rounds, which need not add up.\n"
        "Negative: adds time. Bold: more than noise; grey and hollow: within noise; neither: one "
        "round cannot tell. Diamond: by the GPU's own time."
    )
    picture.text(0.025, 1 - 1.3 / height, said, size=11.5, linespacing=1.45)
    keys: list[Any] = [
        Patch(color=FIRST, label="added first: alone, on vanilla PEFT"),
        Patch(color=LAST, label="added last: on top of all the others"),
        Patch(**BETWEEN, label=INTERACTION),
        Line2D([], [], color="black", linewidth=1.1, marker="|", label="95% interval"),
        Line2D([], [], **OF_GPU, label="the GPU's own time"),
        Line2D([], [], color="black", linewidth=1.8, label="floor"),
    ]
    picture.legend(handles=keys, loc="upper left", bbox_to_anchor=(0.017, 1 - 1.35 / height),
                   ncols=6, fontsize=11, handlelength=1.2, columnspacing=1.1)  # fmt: skip
    how = (
        "Medians over steps, then over rounds; percent: of vanilla's step in the same round. "
        f"{FLOOR_WORDS}"
    )
    words = fill(f"{caption(run)} {how}", 165)
    picture.text(0.025, 0.25 / height, words, size=10.5, color="#444444", linespacing=1.5)


def ablation_finding(run: Run) -> str:
    """The title: what all parts take off at the longest length that has it, and the largest few."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    for block in blocks_of(run):
        for seq_len in reversed(run.experiment.seq_lens):
            percent = _clear_percent(together(run, seq_len, block))
            if percent:
                rows = gains(run, seq_len, block)[:-1]
                alone = sorted((-_clear_percent(row.first), name_of_part(row.part)) for row in rows)
                parts = [f"{name} {-minus:.0f}%" for minus, name in alone[:3] if minus < 0]
                words = ", ".join(parts).replace("fused ", "")
                what = f"{abs(percent):.0f}% {'off' if percent > 0 else 'added to'} a step"
                words = f" (alone: {words})" if words else ""
                how = f"{seq_len} tokens {BLOCKS[block].lower().replace('gradient ', '')}"
                return f"All parts: {what} at {how}{words}"
    return "What each fused part takes off a step"


def lengths_finding(run: Run, lengths: list[int]) -> str:
    """The title of many lengths: at which of them single parts stand out from noise. Empty where
    nothing tells, and of a rehearsal."""
    said = []
    for seq_len in lengths:
        rows = [row for block in blocks_of(run) for row in gains(run, seq_len, block)[:-1]]
        found = [gain.verdict for row in rows for gain in row[1:] if isinstance(gain, Gain)]
        if judged := [verdict for verdict in found if verdict]:
            clear = sum(verdict != NOISE for verdict in judged)
            said.append(f"{clear} of {len(judged)} at {seq_len}")
    if not said or run.rehearsal:
        return ""
    return f"Single parts' gains beyond noise: {', '.join(said)} tokens"


def _clear_percent(gain: Gain | str) -> float:
    if not isinstance(gain, Gain) or gain.verdict == NOISE:
        return 0.0
    return gain.percent or 0.0
