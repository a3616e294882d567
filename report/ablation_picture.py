"""ablation.png, from a run alone: from vanilla PEFT down to all parts, one bar per part, at the
longest length. ablation.py computes the numbers, and its tables have the rest of them."""

from __future__ import annotations

from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Run
from report.ablation import (
    BLOCKS,
    INTERACTION,
    AblationBlock,
    Gain,
    blocks_of,
    name_of_part,
    parts_of_block,
    signed_number,
)  # fmt: skip
from report.picture import annotate, framed, write_caption
from report.statistics import NOISE, speedups
from report.wording import REHEARSAL_NOTICE, caption, floor_words, why_no_time
from variants import BASELINE, LOOKS, title_of

BAR = LOOKS["fused"].colour
NOISY = "#6e6e6e"  # the words of a gain within noise, whose bar is hollow
HOW = (
    "A part's bar begins where the one above ends. Its length is what this part alone saves of "
    "vanilla PEFT's step. Interaction: what all parts together save beyond that sum. Hollow and "
    "grey: within noise."
)


def ablation_figure(run: Run) -> Figure | None:
    """Draw the longest length with a time: a panel per block, all on one scale in ms from 0. None
    if fewer than two variants have a time."""
    blocks = blocks_of(run)
    if not blocks:
        return None
    seq_len = _drawn_length(run)
    parts = [name_of_part(part) for part in (*parts_of_block(blocks[0]), INTERACTION)]
    names = [title_of(BASELINE), *parts, title_of("fused_all")]
    with framed(12, 6.3) as picture:
        panels = picture.subplots(1, len(blocks), squeeze=False, sharex=True, sharey=True)[0]
        picture.subplots_adjust(0.165, 0.265, 0.975, 0.85, 0.06)
        for axes, block in zip(panels, blocks, strict=True):
            _panel(axes, AblationBlock(run, seq_len, block), names)
            axes.set_xlabel(f"ms per {_step(run)} (less is better)")
        ends = [bar.get_x() + bar.get_width() for axes in panels for bar in axes.patches]
        panels[0].set_xlim(0, 1.35 * max([1.0, *ends, *_floor_ms(run, seq_len)]))
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.5, -0.6)
        picture.text(0.025, 0.97, ablation_finding(run), size=19, weight="bold", va="top")
        write_caption(picture, f"{HOW} {caption(run)} {floor_words(run)}", 0.03, 145)
    return picture


def _drawn_length(run: Run) -> int:
    return max(cell.seq_len for cell in run.cells_of(status="ok"))


def _floor_ms(run: Run, seq_len: int) -> list[float]:
    """Return the floor at a length, if there is one."""
    return [run.floor[seq_len].floor_ms] if seq_len in run.floor else []


def _panel(axes: Axes, block: AblationBlock, names: list[str]) -> None:
    axes.set_title(BLOCKS[block.checkpoints])
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.tick_params(length=0)
    for floor_ms in _floor_ms(block.run, block.seq_len):
        axes.axvline(floor_ms, color="black", linewidth=1.8)
        annotate(axes, f"floor {floor_ms:.0f} ms", (floor_ms, len(names) - 2.5), (-5, 0),
                 ha="right", va="center", size=11)  # fmt: skip
    place = _whole_step(axes, block, block.id(BASELINE), 0, LOOKS["peft"].colour)
    gains = {name_of_part(row.part): row.first for row in block.gains()}
    for y, name in enumerate(names[1:-1], start=1):
        place = _part(axes, y, place, gains.get(name, "does not apply"), name == INTERACTION)
    _whole_step(axes, block, block.id("fused_all"), len(names) - 1, BAR)


def _whole_step(axes: Axes, block: AblationBlock, variant: str, y: int, colour: str) -> float:
    """Draw the bar of a whole step and return its ms. Without a time, say why and return 0."""
    own = block.run.round_ms(variant, block.seq_len)
    if not own:
        _beside(axes, 0.0, y, why_no_time(block.run, variant, block.seq_len), style="italic")
        return 0.0
    step_ms, words = median(own.values()), ""
    if y and (ratios := speedups(block.run, variant, block.seq_len)):
        words = f", {median(ratios):.2f}×"
    axes.barh(y, step_ms, 0.7, color=colour)
    _beside(axes, step_ms, y, f"{step_ms:.0f} ms{words}", weight="bold")
    return step_ms


def _part(axes: Axes, y: int, begin: float, gain: Gain | str, is_hatched: bool) -> float:
    """Draw a gain to the left of its start, with its number, and return its end. Without a gain,
    say why."""
    if not isinstance(gain, Gain):
        _beside(axes, begin, y, gain, style="italic", color=NOISY)
        return begin
    is_noise = gain.verdict == NOISE
    look: dict[str, Any] = {"facecolor": "white" if is_noise or is_hatched else BAR}
    look |= {"hatch": "////"} if is_hatched else {}
    axes.barh(y, gain.ms, 0.7, begin - gain.ms, edgecolor=BAR, linewidth=0.8, **look)
    share = "" if gain.percent is None else f", {signed_number(gain.percent, 0)}%"
    text = {"color": NOISY} if is_noise else {"weight": "bold" if gain.verdict else "normal"}
    _beside(axes, max(begin, begin - gain.ms), y, f"{signed_number(gain.ms, 0)} ms{share}", **text)
    return begin - gain.ms


def _beside(axes: Axes, place: float, y: float, words: str, **text: Any) -> None:
    annotate(axes, words, (place, y), (5, 0), **{"size": 11.5, "va": "center", **text})


def ablation_finding(run: Run) -> str:
    """Say how much of a step all parts save, in the first block with a clear answer."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    for checkpoints in blocks_of(run):
        together = AblationBlock(run, _drawn_length(run), checkpoints).together()
        if isinstance(together, Gain) and together.verdict != NOISE and together.percent:
            how = BLOCKS[checkpoints].lower().replace("gradient ", "")
            verb = "cut" if together.percent > 0 else "lengthen"
            return f"All parts {verb} a {_step(run)} by {abs(together.percent):.0f}% {how}"
    return "How much each fused part saves"


def _step(run: Run) -> str:
    return f"{run.experiment.batch_size} × {_drawn_length(run)}-token step"
