"""ablation.png, from a run alone: from vanilla PEFT down to all parts, part by part, at the longest
length; ablation_all_lengths.png has all. The numbers are ablation.py's."""

from __future__ import annotations

from itertools import chain
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.records import Run
from report.ablation import (
    BLOCKS,
    GPU,
    INTERACTION,
    AblationBlock,
    Gain,
    blocks_of,
    name_of_part,
    parts_of_block,
    signed_number,
)  # fmt: skip
from report.picture import annotate, framed, lay_bars, write_caption, write_title
from report.statistics import NOISE, speedups
from report.wording import FLOOR_WORDS, REHEARSAL_NOTICE, caption, why_no_time
from variants import BASELINE, LOOKS, title_of

FIRST, LAST = LOOKS["fused"].colour, "#4d2200"
COLUMNS = (52, 92, 142, 177)  # where the numbers beside a panel end, in points from its right side
ROW_INCHES = 0.31
GPU_MARK: dict[str, Any] = {"marker": "D", "color": "#f0e442", "markersize": 4.5,
                            "markeredgecolor": "black", "linestyle": ""}  # fmt: skip
NOISY = "#6e6e6e"  # a gain within noise: its bar is hollow
ASIDE: dict[str, Any] = {"color": "#777777", "style": "italic", "size": 9.5}
BETWEEN: dict[str, Any] = {"facecolor": "#f7cfb2", "edgecolor": FIRST, "hatch": "////"}
POLE: dict[str, Any] = {"color": "#8a8a8a", "linewidth": 0.8, "zorder": 0.9}
HOW = (
    "From vanilla PEFT down to all parts: a bar begins where the one above it ended, and "
    "is as long as what the part, alone,\ntakes off a step. The interaction is what all "
    "together take off beyond that sum. Each is a median over rounds, which need not add up.\n"
    "Negative: adds time. Bold: more than noise; grey and hollow: within noise; neither: one "
    "round cannot tell. Diamond: by the GPU's own time."
)
MEDIANS = "Medians over steps, then over rounds; percent: of vanilla's step in the same round. "


def ablation_figure(run: Run, all_lengths: bool = False) -> Figure | None:
    """Draw the longest length with a time, or all, a row of panels each; a column a block. Bars are
    in ms from 0, on one scale a row. None where fewer than two variants have a time."""
    blocks = blocks_of(run)
    if not blocks:
        return None
    lengths = run.experiment.seq_lens
    if not all_lengths:
        lengths = [max(cell.seq_len for cell in run.cells_of(status="ok"))]
    names = [name_of_part(part) for part in (*parts_of_block(blocks[0]), INTERACTION)]
    names = [title_of(BASELINE), *names, title_of("fused_all")]
    height = 3.1 + len(lengths) * (0.5 + ROW_INCHES * len(names))
    with framed(14, height) as picture:
        panels = picture.subplots(len(lengths), len(blocks), squeeze=False, sharex="row")
        picture.subplots_adjust(0.145, 1.3 / height, 0.81, 1 - 2.5 / height, 0.82, 0.24)
        for line, seq_len in zip(panels, lengths, strict=True):
            for axes, block in zip(line, blocks, strict=True):
                _panel(axes, AblationBlock(run, seq_len, block), names)
                axes.set_yticks(range(len(names)), names if axes is line[0] else [""] * len(names))
            # By the bars, shared by the line: an interval of two rounds may go far beyond them.
            ends = [bar.get_x() + bar.get_width() for axes in line for bar in axes.patches]
            line[0].set_xlim(0, 1.04 * max([1.0, *ends, *_floor_ms(run, seq_len)]))
        for axes, block in zip(panels[0], blocks, strict=True):
            annotate(axes, BLOCKS[block], (0, 1), (0, 30), "axes fraction", size=16, weight="bold")
        for axes in panels[-1]:
            axes.set_xlabel("ms a step")
        title = (len(lengths) > 1 and lengths_finding(run, lengths)) or ablation_finding(run)
        write_title(picture, title, 1 - 0.5 / height, 21, 1400)
        picture.text(0.025, 1 - 1.3 / height, HOW, size=11.5, linespacing=1.45)
        _legend(picture, 1 - 1.35 / height)
        write_caption(picture, f"{caption(run)} {MEDIANS}{FLOOR_WORDS}", 0.25 / height, 165)
    return picture


def _legend(picture: Figure, y: float) -> None:
    keys: list[Any] = [
        Patch(color=FIRST, label="added first: alone, on vanilla PEFT"),
        Patch(color=LAST, label="added last: on top of all the others"),
        Patch(**BETWEEN, label=INTERACTION),
        Line2D([], [], color="black", linewidth=1.1, marker="|", label="95% interval"),
        Line2D([], [], **GPU_MARK, label="the GPU's own time"),
        Line2D([], [], color="black", linewidth=1.8, label="floor"),
    ]
    picture.legend(handles=keys, loc="upper left", bbox_to_anchor=(0.017, y), ncols=6, fontsize=11,
                   handlelength=1.2, columnspacing=1.1)  # fmt: skip


def _panel(axes: Axes, block: AblationBlock, names: list[str]) -> None:
    run, seq_len, fused_all = block.run, block.seq_len, block.id("fused_all")
    axes.set_title(f"{seq_len} tokens", size=13)
    axes.set_ylim(len(names) - 0.5, -0.6)
    lay_bars(axes)
    _beside(axes, 1, -0.95, "added first", color=FIRST, size=10)
    _beside(axes, 3, -0.95, "added last", color=LAST, size=10)
    place = _total(axes, block, block.id(BASELINE), 0, LOOKS["peft"].colour)
    all_ms = _total(axes, block, fused_all, len(names) - 1, FIRST)
    if ratios := speedups(run, fused_all, seq_len):
        _beside(axes, 1, len(names) - 1, f"{median(ratios):.2f}×", weight="bold")
    rows, on_gpu = (
        {name_of_part(row.part): row for row in one.gains()}
        for one in (block, block._replace(time=GPU))
    )
    above = 0
    for y, name in enumerate(names[1:-1], start=1):
        if name not in rows:
            _beside(axes, 1, y, "does not apply", **ASIDE)
            continue
        begin, (_, first, last) = place, rows[name]
        look = BETWEEN if name == INTERACTION else {"color": FIRST}
        if isinstance(first, Gain) and begin is not None:
            place = _bar(axes, y - 0.13, 0.44, begin, first, on_gpu[name].first, **look)
        if isinstance(last, Gain):
            without_ms = (all_ms or 0.0) + last.ms  # where there is no waterfall to hang it from
            begin_last = without_ms if begin is None else begin
            _bar(axes, y + 0.27, 0.16, begin_last, last, on_gpu[name].last, color=LAST)
        if begin is not None:
            axes.plot([begin, begin], [above, y], **POLE)
        _numbers(axes, 0, y, first, FIRST)
        _numbers(axes, 2, y, last, LAST)
        above = y
    if place is not None and isinstance(rows[INTERACTION].first, Gain):
        axes.plot([place, place], [above, above + 1], **POLE)
    for floor_ms in _floor_ms(run, seq_len):
        axes.axvline(floor_ms, color="black", linewidth=1.8)


def _floor_ms(run: Run, seq_len: int) -> list[float]:
    """Return the floor at a length, where there is one."""
    return [run.floor[seq_len].floor_ms] if seq_len in run.floor else []


def _total(axes: Axes, block: AblationBlock, variant: str, y: int, colour: str) -> float | None:
    """Draw the bar of a whole step, or say why there is none."""
    own = block.run.round_ms(variant, block.seq_len)
    if not own:
        _beside(axes, 1, y, why_no_time(block.run, variant, block.seq_len), **ASIDE)
        return None
    step_ms = median(own.values())
    axes.barh(y, step_ms, 0.66, color=colour)
    _beside(axes, 0, y, f"{step_ms:.0f} ms", weight="bold")
    return step_ms


def _bar(
    axes: Axes, y: float, height: float, begin: float, gain: Gain, on_gpu: Gain | str | None,
    **look: Any,
) -> float:  # fmt: skip
    """Draw a gain to the left of where it begins, with its interval, and a diamond where it would
    end if the host took no time; return where it ends."""
    if gain.verdict == NOISE:
        look = {"facecolor": "white", "edgecolor": look.get("color", FIRST)}
    axes.barh(y, gain.ms, height, begin - gain.ms, linewidth=0.8, **look)
    if gain.ci95_ms:
        ends = [begin - bound for bound in gain.ci95_ms]
        colour = NOISY if gain.verdict == NOISE else "black"
        axes.plot(ends, [y, y], color=colour, linewidth=1.1, marker="|", markersize=5)
    if isinstance(on_gpu, Gain):
        axes.plot([begin - on_gpu.ms], [y], **GPU_MARK)
    return begin - gain.ms


def _numbers(axes: Axes, column: int, y: int, gain: Gain | str | None, colour: str) -> None:
    """Write a gain's ms and percent in two of the columns beside the panel, or why it has none."""
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
    annotate(axes, words, (1, y), (COLUMNS[column], 0), axes.get_yaxis_transform(), **text)


def ablation_finding(run: Run) -> str:
    """Say how much all parts take off at the longest length that tells, and the largest few."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    for block in blocks_of(run):
        for seq_len in reversed(run.experiment.seq_lens):
            if percent := _clear_percent(AblationBlock(run, seq_len, block).together()):
                rows = AblationBlock(run, seq_len, block).gains()[:-1]
                alone = sorted((-_clear_percent(row.first), name_of_part(row.part)) for row in rows)
                parts = [f"{name} {-minus:.0f}%" for minus, name in alone[:3] if minus < 0]
                words = f" (alone: {', '.join(parts)})".replace("fused ", "") if parts else ""
                taken = f"{abs(percent):.0f}% {'off' if percent > 0 else 'added to'} a step"
                how = BLOCKS[block].lower().replace("gradient ", "")
                return f"All parts: {taken} at {seq_len} tokens {how}{words}"
    return "What each fused part takes off a step"


def lengths_finding(run: Run, lengths: list[int]) -> str:
    """Say at which lengths single parts stand out from noise. Empty where nothing tells, and for a
    rehearsal."""
    said = []
    for seq_len in lengths:
        rows = [row for block in blocks_of(run)
                for row in AblationBlock(run, seq_len, block).gains()[:-1]]  # fmt: skip
        found = chain.from_iterable(row.known() for row in rows)
        if judged := [gain.verdict for gain in found if gain.verdict]:
            clear = sum(verdict != NOISE for verdict in judged)
            said.append(f"{clear} of {len(judged)} at {seq_len}")
    if not said or run.rehearsal:
        return ""
    return f"Single parts' gains beyond noise: {', '.join(said)} tokens"


def _clear_percent(gain: Gain | str) -> float:
    if not isinstance(gain, Gain) or gain.verdict == NOISE:
        return 0.0
    return gain.percent or 0.0
