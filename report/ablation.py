"""The time that each fused part saves per step, in numbers and as a table, from a run alone.

A part is measured twice. Added first: alone, on vanilla PEFT (vanilla_peft less fused_PART). Added
last: on top of all the others (fused_all_but_PART less fused_all). The interaction is the time that
all of them together save beyond the sum of the parts added first.

We report both the step time and the GPU's own time in it, the sum of its kernels. If a step waits
for the host, the first says what a user gains there, the second what the part saves on any host.
"""

from __future__ import annotations

from itertools import chain
from statistics import median
from typing import NamedTuple

import numpy as np

from bench.records import Run, Verdict
from report.statistics import NOISE, interval95_of_ratios, noise_band, verdict_of
from report.table import markdown_table
from report.wording import why_no_time
from variants import ALL_BUT, ALONE, BASELINE, FUSED_PARTS, counterpart, variant_of

STEP, GPU = "step_ms", "gpu_busy_ms"
BLOCKS = {True: "With gradient checkpointing", False: "Without checkpointing"}
INTERACTION = "interaction"


class Gain(NamedTuple):
    """Time saved per step (negative: added), as medians over the rounds that have it.

    percent: of vanilla's step in the same round; None where vanilla has no time.
    verdict: as in the summary; None where there is no A/A twin or no interval to judge by.
    """

    ms: float
    percent: float | None
    verdict: Verdict | None


class PartGains(NamedTuple):
    """One part, or the interaction (which has no `last`). A word says why there is no gain."""

    part: str
    first: Gain | str
    last: Gain | str | None

    def known(self) -> list[Gain]:
        return [gain for gain in (self.first, self.last) if isinstance(gain, Gain)]


class AblationBlock(NamedTuple):
    """The variants with or without checkpointing at one length, by a step's time or the GPU's."""

    run: Run
    seq_len: int
    checkpoints: bool = True
    time: str = STEP

    def id(self, variant: str) -> str:
        return counterpart(variant, self.checkpoints).id

    def gains(self) -> list[PartGains]:
        """Return a row for each part, then the interaction."""
        vanilla, fused_all = self.id(BASELINE), self.id("fused_all")
        alone = {part: self.id(ALONE[part]) for part in parts_of_block(self.checkpoints)}
        rows = [
            PartGains(part, self._gain({id: -1, vanilla: 1}),
                      self._gain({self.id(ALL_BUT[part]): 1, fused_all: -1}))
            for part, id in alone.items()
        ]  # fmt: skip
        # vanilla - fused_all - the sum of (vanilla - alone)
        signs = {fused_all: -1, vanilla: 1 - len(alone), **dict.fromkeys(alone.values(), 1)}
        missing = any(isinstance(row.first, str) for row in rows)
        rest = "parts missing" if missing else self._gain(signs)
        return [*rows, PartGains(INTERACTION, rest, None)]

    def together(self) -> Gain | str:
        """Return the gain of all parts."""
        return self._gain({self.id("fused_all"): -1, self.id(BASELINE): 1})

    def _gain(self, signs: dict[str, int]) -> Gain | str:
        """Sum the variants' times with these signs, in every round that has them all. The GPU's own
        time gets no verdict: the A/A twins measure the noise of whole steps."""
        vanilla = self.id(BASELINE)
        times = {id: self._by_round(id) for id in (*signs, vanilla)}
        for id in signs:
            if not times[id]:
                is_end = id in (vanilla, self.id("fused_all"))
                why = why_no_time(self.run, id, self.seq_len)
                return f"no {variant_of(id).plain_title}" if is_end else why
        common = sorted(set.intersection(*(set(times[id]) for id in signs)))
        if not common:
            return "no common round"
        weights = np.array([*signs.values()])
        by_round = np.array([[times[id][n] for n in common] for id in signs])
        more, less = weights.clip(min=0) @ by_round, -weights.clip(max=0) @ by_round
        ms, ratios = (more - less).tolist(), (more / less).tolist()
        whole = times[vanilla]
        percent = [100 * x / whole[n] for x, n in zip(ms, common, strict=True) if n in whole]
        verdict = None
        if self.time == STEP:
            ci95, band = interval95_of_ratios(ratios), noise_band(self.run, self.seq_len, vanilla)
            verdict = verdict_of(median(ratios), ci95, band)
        middle = median(percent) if percent else None
        return Gain(median(ms), middle, verdict)

    def _by_round(self, id: str) -> dict[int, float]:
        if self.time == STEP:
            return self.run.round_ms(id, self.seq_len)
        cells = self.run.cells_of(id, self.seq_len, "ok")
        return {cell.round: cell.gpu_busy_ms for cell in cells if cell.gpu_busy_ms is not None}


def parts_of_block(checkpoints: bool) -> tuple[str, ...]:
    """Return the parts of a block. Without checkpointing, there is no checkpoint to fuse."""
    return tuple(part for part in FUSED_PARTS if checkpoints or part != "checkpoint")


def blocks_of(run: Run) -> list[bool]:
    """Return the blocks that have two variants to compare."""
    shown = {BASELINE, "fused_all", *ALONE.values(), *ALL_BUT.values()}
    timed = {cell.variant for cell in run.cells_of(status="ok")}
    found = [v for v in map(variant_of, timed) if v.plain_id in shown]
    return [block for block in BLOCKS if sum(v.checkpoints is block for v in found) >= 2]


def name_of_part(part: str) -> str:
    return part if part == INTERACTION else variant_of(ALONE[part]).title


def signed_number(value: float, digits: int) -> str:
    """Return a number with a true minus, and none before a zero."""
    words = f"{value:.{digits}f}"
    return words.lstrip("-") if float(words) == 0 else words.replace("-", "−")


# --- the table ------------------------------------------------------------------------------------


def ablation_table(run: Run) -> str:
    """Write two tables per block, one of the step and one of the GPU's own time. Each has every
    part's gains at each length, and all parts together. A gain within noise is in italics. The
    step's table leaves out lengths at which hardly any part stands out."""
    tables = []
    for checkpoints in blocks_of(run):
        every = [AblationBlock(run, n, checkpoints) for n in run.experiment.seq_lens]
        shown = [block for block in every if not _is_noise(block)] or every
        left_out = [str(block.seq_len) for block in every if block not in shown]
        without = f" ({' and '.join(left_out)} tokens, where gains are noise, are left out)"
        title = f"{BLOCKS[checkpoints]}{without if left_out else ''}:"
        tables.append(f"{title}\n\n{_table('saved per step', shown)}")
        on_gpu = [block._replace(time=GPU) for block in every]
        if isinstance(on_gpu[0].together(), Gain):
            title = f"{BLOCKS[checkpoints]}, GPU time:"
            tables.append(f"{title}\n\n" + _table("saved in GPU time", on_gpu))
    return "\n\n".join(tables)


def _is_noise(block: AblationBlock) -> bool:
    """Return True where parts were judged and at most one, as by chance, stands out."""
    found = [gain.verdict for row in block.gains() for gain in row.known()]
    judged = [verdict for verdict in found if verdict is not None]
    return len(judged) > 2 and sum(verdict != NOISE for verdict in judged) <= 1


def _table(first: str, blocks: list[AblationBlock]) -> str:
    header = [first]
    for block in blocks:
        header += [f"{block.seq_len}: {when}, ms" for when in ("added first", "added last")]
    lines = []
    for rows in zip(*(block.gains() for block in blocks), strict=True):
        pairs = ((_cell(row.first), _cell(row.last, False)) for row in rows)
        lines.append([name_of_part(rows[0].part), *chain(*pairs)])
    alls = ((_cell(block.together()), "") for block in blocks)
    lines.append([variant_of("fused_all").title, *chain(*alls)])
    return markdown_table(header, lines)


def _cell(gain: Gain | str | None, with_percent: bool = True) -> str:
    if not isinstance(gain, Gain):
        return gain or ""
    words = signed_number(gain.ms, 1)
    if with_percent and gain.percent is not None:
        words += f" ({signed_number(gain.percent, 1)}%)"
    return f"*{words}*" if gain.verdict == NOISE else words
