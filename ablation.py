"""ablation.png and its table, from a results document alone: what each fused part takes off a step.

A part is measured twice. Added first: alone, on vanilla PEFT (vanilla_peft less fused_PART). Added
last: on top of all the others (fused_all_but_PART less fused_all). What all of them together take
off and the parts added first do not add up to is the interaction.
"""

from __future__ import annotations

import io
from itertools import chain
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import summary
from names import name_of
from plots import LOOKS, REHEARSAL, STATUS_WORDS, STYLE, caption
from results import write_atomically
from summary import BASELINE, NO_CHECKPOINTING, round_ms
from variants import PARTS

BLOCKS = {"": "With gradient checkpointing", NO_CHECKPOINTING: "Without checkpointing"}
INTERACTION = "interaction"
NOISE = "not distinguishable"  # a verdict of summary.py
FIRST, LAST = "#c81e2b", "#3d0a0e"
COLUMNS = (52, 81, 133, 162)  # where the numbers beside a panel end, in points from its right side
ROW_INCHES = 0.31
ASIDE: dict[str, Any] = {"color": "#777777", "style": "italic", "size": 9.5}
BETWEEN: dict[str, Any] = {"facecolor": "#f4c4c7", "edgecolor": FIRST, "hatch": "////"}


class Gain(NamedTuple):
    """What something takes off a step (negative: adds), medians over the rounds that have it.

    percent: of vanilla's step in the same round; None where vanilla has no time.
    ci95_ms, ci95_percent: 95% intervals over rounds; None from a single round.
    verdict: as in the summary; None where there is no A/A twin or no interval to judge by.
    """

    ms: float
    ci95_ms: list[float] | None
    percent: float | None
    ci95_percent: list[float] | None
    verdict: str | None


class Row(NamedTuple):
    """One part, or the interaction (which has no `last`). A word says why there is no gain."""

    part: str
    first: Gain | str
    last: Gain | str | None


def parts_of(block: str) -> tuple[str, ...]:
    """The parts of a block: without checkpointing there is none to fuse."""
    return tuple(part for part in PARTS if not (block and part == "checkpoint"))


def gains(results: dict, seq_len: int, block: str = "") -> list[Row]:
    """One row a part, then the interaction; `block` is the ending of its variants' names."""
    vanilla, fused_all = BASELINE + block, "fused_all" + block
    alone = {part: f"fused_{part}{block}" for part in parts_of(block)}
    rows = [
        Row(
            part,
            _gain(results, seq_len, block, {variant: -1, vanilla: 1}),
            _gain(results, seq_len, block, {f"fused_all_but_{part}{block}": 1, fused_all: -1}),
        )
        for part, variant in alone.items()
    ]
    # vanilla - fused_all - the sum of (vanilla - alone)
    terms = {variant: 1 for variant in alone.values()}
    together = {fused_all: -1, vanilla: 1 - len(alone), **terms}
    missing = any(isinstance(row.first, str) for row in rows)
    what = "parts missing" if missing else _gain(results, seq_len, block, together)
    return [*rows, Row(INTERACTION, what, None)]


def _gain(results: dict, seq_len: int, block: str, signs: dict[str, int]) -> Gain | str:
    """The sum of the variants' times with these signs, in every round that has them all."""
    times = {variant: round_ms(results, variant, seq_len) for variant in signs}
    vanilla = round_ms(results, BASELINE + block, seq_len)
    for variant, own in times.items():
        if not own:
            ends = variant in (BASELINE + block, "fused_all" + block)
            plain = name_of(variant.removesuffix(NO_CHECKPOINTING))
            return f"no {plain}" if ends else why_no_time(results, variant, seq_len)
    common = sorted(set.intersection(*(set(own) for own in times.values())))
    if not common:
        return "no common round"
    faster, slower = (
        [sum(max(0, side * n) * times[v][round] for v, n in signs.items()) for round in common]
        for side in (1, -1)
    )
    ms = [a - b for a, b in zip(faster, slower, strict=True)]
    percent = [100 * x / vanilla[n] for x, n in zip(ms, common, strict=True) if n in vanilla]
    ratios = [a / b for a, b in zip(faster, slower, strict=True)]
    band = summary.noise_band(results, seq_len, BASELINE + block)
    return Gain(
        median(ms),
        summary.interval95(ms),
        median(percent) if percent else None,
        summary.interval95(percent),
        summary.verdict_of(median(ratios), summary.interval95(ratios), band),
    )


def why_no_time(results: dict, variant: str, seq_len: int) -> str:
    cells = [cell for cell in results["cells"] if summary.key_of(cell)[:2] == (variant, seq_len)]
    if not cells:
        return "not measured"
    return STATUS_WORDS[min((cell["status"] for cell in cells), key=summary.STATUSES.index)]


# --- the picture ----------------------------------------------------------------------------------


def draw(results: dict, path: str | Path) -> bool:
    """Write the picture as a PNG, whole or not at all; False where fewer than two of its variants
    have a time, so that there is no gain to show."""
    if not blocks_of(results):
        return False
    png = io.BytesIO()
    with style.context(["default", STYLE]):
        figure(results).savefig(png, format="png", metadata={"Software": None})
    write_atomically(path, png.getvalue())
    return True


def blocks_of(results: dict) -> list[str]:
    """The blocks that have two variants to hold against each other."""
    timed = {cell["variant"] for cell in results["cells"] if cell["status"] == "ok"}
    ends = ("all", *PARTS, *(f"all_but_{part}" for part in PARTS))
    needed = [BASELINE, *(f"fused_{end}" for end in ends)]
    return [block for block in BLOCKS if len(timed & {name + block for name in needed}) >= 2]


def figure(results: dict) -> Figure:
    """One row of panels a length, one column a block; bars are in ms from 0, on one scale a row."""
    with style.context(["default", STYLE]):
        blocks, lengths = blocks_of(results), results["experiment"]["seq_lens"]
        names = [_name(part) for part in (*parts_of(blocks[0]), INTERACTION)]
        names = [name_of(BASELINE), *names, name_of("fused_all")]
        height = 2.75 + len(lengths) * (0.5 + ROW_INCHES * len(names))
        picture = Figure(figsize=(14, height), dpi=150)
        panels = picture.subplots(len(lengths), len(blocks), squeeze=False, sharex="row")
        picture.subplots_adjust(0.145, 1.15 / height, 0.81, 1 - 2.3 / height, 0.82, 0.24)
        for line, seq_len in zip(panels, lengths, strict=True):
            for axes, block in zip(line, blocks, strict=True):
                _panel(axes, results, seq_len, block, names)
                axes.set_yticks(range(len(names)), names if axes is line[0] else [""] * len(names))
            line[0].set_xlim(left=0)
        for axes, block in zip(panels[0], blocks, strict=True):
            axes.annotate(BLOCKS[block], (0, 1), (0, 30), xycoords="axes fraction",
                          textcoords="offset points", size=16, weight="bold")  # fmt: skip
        for axes in panels[-1]:
            axes.set_xlabel("ms a step")
        _words(picture, results, height)
    return picture


def _name(part: str) -> str:
    return part if part == INTERACTION else name_of(f"fused_{part}")


def _panel(axes: Axes, results: dict, seq_len: int, block: str, names: list[str]) -> None:
    axes.set_title(f"{seq_len} tokens", size=13)
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.tick_params(length=0)
    _beside(axes, 1, -0.95, "added first", color=FIRST, size=10)
    _beside(axes, 3, -0.95, "added last", color=LAST, size=10)
    place, all_ms = (
        _total(axes, results, seq_len, variant + block, y, colour)
        for variant, y, colour in ((BASELINE, 0, LOOKS[BASELINE].colour),
                                   ("fused_all", len(names) - 1, FIRST))
    )  # fmt: skip
    if ratios := summary.speedups(results, "fused_all" + block, seq_len):
        _beside(axes, 3, len(names) - 1, f"{median(ratios):.2f}×", weight="bold")
    above, rows = 0, {_name(row.part): row for row in gains(results, seq_len, block)}
    for y, name in enumerate(names[1:-1], start=1):
        if name not in rows:
            _beside(axes, 1, y, "does not apply", **ASIDE)
            continue
        begin, (_, first, last) = place, rows[name]
        look = BETWEEN if name == INTERACTION else {"color": FIRST}
        if isinstance(first, Gain) and begin is not None:
            place = _bar(axes, y - 0.13, 0.44, begin, first, **look)
        if isinstance(last, Gain):
            without_ms = (all_ms or 0.0) + last.ms  # where there is no waterfall to hang it from
            _bar(axes, y + 0.27, 0.16, without_ms if begin is None else begin, last, color=LAST)
        if begin is not None:
            axes.plot([begin, begin], [above, y], color="#8a8a8a", linewidth=0.8, zorder=0.9)
        _numbers(axes, 0, y, first, FIRST)
        _numbers(axes, 2, y, last, LAST)
        above = y
    if place is not None and isinstance(rows[INTERACTION].first, Gain):
        axes.plot([place, place], [above, above + 1], color="#8a8a8a", linewidth=0.8, zorder=0.9)
    if floor := (results.get("floor") or {}).get(str(seq_len)):
        axes.axvline(floor["floor_ms"], color="black", linewidth=1.8)


def _total(axes: Axes, results: dict, seq_len: int, variant: str, y: int,
           colour: str) -> float | None:  # fmt: skip
    """The bar of a whole step, or why there is none."""
    own = round_ms(results, variant, seq_len)
    if not own:
        _beside(axes, 1, y, why_no_time(results, variant, seq_len), **ASIDE)
        return None
    step_ms = median(own.values())
    axes.barh(y, step_ms, 0.66, color=colour)
    _beside(axes, 0, y, f"{step_ms:.0f} ms", weight="bold")
    return step_ms


def _bar(axes: Axes, y: float, height: float, begin: float, gain: Gain, **look: Any) -> float:
    """A gain, to the left of where it begins, with its interval; gives where it ends."""
    axes.barh(y, gain.ms, height, begin - gain.ms, linewidth=0.6, **look)
    if gain.ci95_ms:
        ends = [begin - bound for bound in gain.ci95_ms]
        axes.plot(ends, [y, y], color="black", linewidth=1.1, marker="|", markersize=5)
    return begin - gain.ms


def _numbers(axes: Axes, column: int, y: int, gain: Gain | str | None, colour: str) -> None:
    """A gain's ms and percent in two of the columns beside the panel, or why there is none."""
    if not isinstance(gain, Gain):
        _beside(axes, column + 1, y, gain or "", **ASIDE)
        return
    text: dict[str, Any] = {"color": colour, "weight": "bold"}
    if gain.verdict == NOISE:
        text = {"color": "#999999"}
    _beside(axes, column, y, f"{number(gain.ms, 0)} ms", **text)
    if gain.percent is not None:
        _beside(axes, column + 1, y, f"{number(gain.percent, 0)}%", **text)


def number(value: float, digits: int) -> str:
    """With a true minus, and none before a zero."""
    words = f"{value:.{digits}f}"
    return words.lstrip("-") if float(words) == 0 else words.replace("-", "−")


def _beside(axes: Axes, column: int, y: float, words: str, **text: Any) -> None:
    text = {"size": 10.5, "ha": "right", "va": "center", **text}
    side = axes.get_yaxis_transform()
    axes.annotate(words, (1, y), (COLUMNS[column], 0), side, "offset points", **text)


def _words(picture: Figure, results: dict, height: float) -> None:
    title = finding(results)
    picture.text(0.025, 1 - 0.5 / height, title, size=min(21, 1400 / len(title)), weight="bold")
    said = (
        "From vanilla PEFT down to all fused: a red bar begins where the one above it ended, and "
        "is as long as what the part, alone,\ntakes off a step. The interaction is what all "
        "together take off beyond that sum. Negative: adds time. Grey number: may be noise."
    )
    picture.text(0.025, 1 - 1.08 / height, said, size=11.5, linespacing=1.45)
    keys: list[Any] = [
        Patch(color=FIRST, label="added first: alone, on vanilla PEFT"),
        Patch(color=LAST, label="added last: on top of all the others"),
        Patch(**BETWEEN, label=INTERACTION),
        Line2D([], [], color="black", linewidth=1.1, marker="|", label="95% interval"),
        Line2D([], [], color="black", linewidth=1.8, label="floor"),
    ]
    picture.legend(handles=keys, loc="upper left", bbox_to_anchor=(0.017, 1 - 1.13 / height),
                   ncols=5, fontsize=11, handlelength=1.4, columnspacing=1.4)  # fmt: skip
    how = "Medians over steps, then over rounds; percent: of vanilla's step in the same round."
    words = fill(f"{caption(results)} {how}", 165)
    picture.text(0.025, 0.25 / height, words, size=10.5, color="#444444", linespacing=1.5)


def finding(results: dict) -> str:
    """The title: what all parts take off at the longest length that has it, and the largest few."""
    if results["rehearsal"]:
        return REHEARSAL
    for block in blocks_of(results):
        for seq_len in reversed(results["experiment"]["seq_lens"]):
            percent = _clear_percent(_together(results, seq_len, block))
            if percent:
                rows = gains(results, seq_len, block)[:-1]
                alone = sorted((-_clear_percent(row.first), _name(row.part)) for row in rows)
                parts = [f"{name} {-minus:.0f}%" for minus, name in alone[:3] if minus < 0]
                words = ", ".join(parts).replace("fused ", "")
                what = f"{abs(percent):.0f}% {'off' if percent > 0 else 'added to'} a step"
                words = f" (alone: {words})" if words else ""
                return f"All fused: {what} at {seq_len} tokens{words}"
    return "What each fused part takes off a step"


def _clear_percent(gain: Gain | str) -> float:
    if not isinstance(gain, Gain) or gain.verdict == NOISE:
        return 0.0
    return gain.percent or 0.0


def _together(results: dict, seq_len: int, block: str) -> Gain | str:
    return _gain(results, seq_len, block, {"fused_all" + block: -1, BASELINE + block: 1})


# --- the table ------------------------------------------------------------------------------------


def table(results: dict) -> str:
    """In Markdown, one table a block: each part's gains at each length, and all of them together.
    Gains that are not distinguishable from noise are in italics."""
    lengths = results["experiment"]["seq_lens"]
    header = ["takes off a step"]
    header += [f"{n}: {when}, ms" for n in lengths for when in ("added first", "added last")]
    tables = []
    for block in blocks_of(results):
        lines = [header, ["---"] * len(header)]
        for rows in zip(*(gains(results, n, block) for n in lengths), strict=True):
            pairs = ((_cell(row.first), _cell(row.last, False)) for row in rows)
            lines.append([_name(rows[0].part), *chain(*pairs)])
        alls = ((_cell(_together(results, n, block)), "") for n in lengths)
        lines.append([name_of("fused_all"), *chain(*alls)])
        markdown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        tables.append(f"{BLOCKS[block]}:\n\n{markdown}")
    return "\n\n".join(tables)


def _cell(gain: Gain | str | None, with_percent: bool = True) -> str:
    if not isinstance(gain, Gain):
        return gain or ""
    words = number(gain.ms, 1)
    if with_percent and gain.percent is not None:
        words += f" ({number(gain.percent, 1)}%)"
    return f"*{words}*" if gain.verdict == NOISE else words
