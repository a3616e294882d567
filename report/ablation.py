"""What each fused part takes off a step, in numbers and as a table, from a results document alone.

A part is measured twice. Added first: alone, on vanilla PEFT (vanilla_peft less fused_PART). Added
last: on top of all the others (fused_all_but_PART less fused_all). What all of them together take
off and the parts added first do not add up to is the interaction.

Both of the step and of the GPU's own time in it, the sum of its kernels: where a step waits for the
host, the first says what a user gains there, the second what the part saves, whatever the host.
"""

from __future__ import annotations

from itertools import chain
from statistics import median
from typing import NamedTuple

from report import statistics as summary
from report.looks import STATUS_WORDS, markdown_table
from report.names import name_of
from report.statistics import BASELINE, NO_CHECKPOINTING, round_ms
from variants import PARTS

STEP, GPU = "step_ms", "gpu_busy_ms"
BLOCKS = {"": "With gradient checkpointing", NO_CHECKPOINTING: "Without checkpointing"}
INTERACTION = "interaction"
NOISE = "not distinguishable"  # a verdict of summary.py


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


def gains(results: dict, seq_len: int, block: str = "", time: str = STEP) -> list[Row]:
    """One row a part, then the interaction; `block` is the ending of its variants' names."""
    vanilla, fused_all = BASELINE + block, "fused_all" + block
    alone = {part: f"fused_{part}{block}" for part in parts_of(block)}
    rows = [
        Row(
            part,
            _gain(results, seq_len, block, {variant: -1, vanilla: 1}, time),
            _gain(
                results, seq_len, block, {f"fused_all_but_{part}{block}": 1, fused_all: -1}, time
            ),
        )
        for part, variant in alone.items()
    ]
    # vanilla - fused_all - the sum of (vanilla - alone)
    terms = {variant: 1 for variant in alone.values()}
    together = {fused_all: -1, vanilla: 1 - len(alone), **terms}
    missing = any(isinstance(row.first, str) for row in rows)
    what = "parts missing" if missing else _gain(results, seq_len, block, together, time)
    return [*rows, Row(INTERACTION, what, None)]


def _gain(
    results: dict, seq_len: int, block: str, signs: dict[str, int], time: str = STEP
) -> Gain | str:
    """The sum of the variants' times with these signs, in every round that has them all. Of the
    GPU's own time there are no verdicts: the A/A twins say how much a step's is noise."""
    times = {variant: _by_round(results, variant, seq_len, time) for variant in signs}
    vanilla = _by_round(results, BASELINE + block, seq_len, time)
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
    verdict = None
    if time == STEP:
        band = summary.noise_band(results, seq_len, BASELINE + block)
        verdict = summary.verdict_of(median(ratios), summary.interval95_of_ratios(ratios), band)
    return Gain(
        median(ms),
        summary.interval95(ms),
        median(percent) if percent else None,
        summary.interval95(percent),
        verdict,
    )


def _by_round(results: dict, variant: str, seq_len: int, time: str) -> dict[int, float]:
    if time == STEP:
        return round_ms(results, variant, seq_len)
    return {
        cell["round"]: cell[time]
        for cell in results["cells"]
        if summary.key_of(cell)[:2] == (variant, seq_len)
        and cell["status"] == "ok"
        and cell.get(time) is not None
    }


def why_no_time(results: dict, variant: str, seq_len: int) -> str:
    cells = [cell for cell in results["cells"] if summary.key_of(cell)[:2] == (variant, seq_len)]
    if not cells:
        return "not measured"
    status = min((cell["status"] for cell in cells), key=summary.STATUSES.index)
    return STATUS_WORDS.get(status, "not measured")  # "ok", but the GPU's own time is not there


def blocks_of(results: dict) -> list[str]:
    """The blocks that have two variants to hold against each other."""
    timed = {cell["variant"] for cell in results["cells"] if cell["status"] == "ok"}
    ends = ("all", *PARTS, *(f"all_but_{part}" for part in PARTS))
    needed = [BASELINE, *(f"fused_{end}" for end in ends)]
    return [block for block in BLOCKS if len(timed & {name + block for name in needed}) >= 2]


def together(results: dict, seq_len: int, block: str, time: str = STEP) -> Gain | str:
    return _gain(results, seq_len, block, {"fused_all" + block: -1, BASELINE + block: 1}, time)


def name_of_part(part: str) -> str:
    return part if part == INTERACTION else name_of(f"fused_{part}")


def number(value: float, digits: int) -> str:
    """With a true minus, and none before a zero."""
    words = f"{value:.{digits}f}"
    return words.lstrip("-") if float(words) == 0 else words.replace("-", "−")


# --- the table ------------------------------------------------------------------------------------


def table(results: dict) -> str:
    """In Markdown, two tables a block: each part's gains at each length, and all of them together,
    of the step and of the GPU's own time. Gains that are not distinguishable from noise are in
    italics."""
    tables = []
    for block in blocks_of(results):
        tables.append(f"{BLOCKS[block]}:\n\n{_table(results, block, STEP)}")
        if not isinstance(together(results, results["experiment"]["seq_lens"][0], block, GPU), str):
            what = f"{BLOCKS[block]}, of the GPU's own time, whatever the host did:"
            tables.append(f"{what}\n\n{_table(results, block, GPU)}")
    return "\n\n".join(tables)


def _table(results: dict, block: str, time: str) -> str:
    lengths = results["experiment"]["seq_lens"]
    header = ["takes off a step" if time == STEP else "takes off the GPU's time"]
    header += [f"{n}: {when}, ms" for n in lengths for when in ("added first", "added last")]
    lines = []
    for rows in zip(*(gains(results, n, block, time) for n in lengths), strict=True):
        pairs = ((_cell(row.first), _cell(row.last, False)) for row in rows)
        lines.append([name_of_part(rows[0].part), *chain(*pairs)])
    alls = ((_cell(together(results, n, block, time)), "") for n in lengths)
    lines.append([name_of("fused_all"), *chain(*alls)])
    return markdown_table(header, lines)


def _cell(gain: Gain | str | None, with_percent: bool = True) -> str:
    if not isinstance(gain, Gain):
        return gain or ""
    words = number(gain.ms, 1)
    if with_percent and gain.percent is not None:
        words += f" ({number(gain.percent, 1)}%)"
    return f"*{words}*" if gain.verdict == NOISE else words
