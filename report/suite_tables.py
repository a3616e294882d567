"""The tables of a suite, in Markdown: each part's gains, and all other variants."""

from __future__ import annotations

from math import inf
from statistics import median

from bench.records import Run, SummaryRow
from report import ablation
from report.looks import STATUS_WORDS, caption, interleaved, markdown_table, release_of, title_in
from report.statistics import NOISE, summarize
from variants import ALL_BUT, ALONE, BASELINE, counterpart, variant_of

SINGLE_ROUND = "¹"
NOT_MEASURED = "Not measured yet in a run that can be quoted: `python lora_bench.py --suite all`."


def parts_section(suite: Run | None) -> str:
    """Write the table of the time that each part takes off a step, with its caption."""
    if suite is None or not (tables := ablation.ablation_table(suite)):
        return NOT_MEASURED
    return f"{tables}\n\n{caption(suite)}"


def effects_section(suite: Run | None) -> str:
    """Write a table a block of each part alone at the longest length: its effect on the two passes,
    the launches and the memory. With checkpointing a backward holds the second forward, too."""
    if suite is None:
        return NOT_MEASURED
    tables = []
    for checkpoints, title in ablation.BLOCKS.items():
        if rows := _effects(suite, checkpoints):
            tables.append(f"{title}:\n\n{rows}")
    return "\n\n".join(tables) or NOT_MEASURED


def _effects(suite: Run, checkpoints: bool) -> str:
    seq_len = suite.experiment.seq_lens[-1]
    shown = [BASELINE, *ALONE.values(), "fused_all", "fused_all_offload"]
    rows = {
        variant.plain_id: row
        for row in summarize(suite)
        if row.seq_len == seq_len
        and row.status == "ok"
        and (variant := variant_of(row.variant)).checkpoints is checkpoints
    }
    lines = []
    for row in (rows[plain] for plain in shown if plain in rows):
        # the cell of the last round: of the latest code
        newest = max(suite.cells_of(row.variant, seq_len, "ok"), key=lambda cell: cell.round)
        numbers = [f"{row.forward_ms:.1f}", f"{row.backward_ms:.1f}"]
        numbers += [f"{sum(newest.kernels_seen.values()):,}", f"{row.peak_gib:.1f}"]
        numbers.append(f"{(newest.peak_reserved_bytes or 0) / 2**30:.1f}")
        lines.append([variant_of(row.variant).plain_title, *numbers])
    if len(lines) < 2:
        return ""
    header = [f"at {seq_len} tokens", "forward, ms", "backward, ms", "launches a step"]
    header += ["peak allocated, GiB", "reserved, GiB"]
    return markdown_table(header, lines)


def against_unsloth_section(runs: list[Run]) -> str:
    """Write the table of Unsloth's time over that of all parts: a line for each block of each
    run."""
    lengths = sorted({n for run in runs for n in run.experiment.seq_lens})
    lines = []
    for checkpoints, title in ablation.BLOCKS.items():
        for run in runs:
            ratios = [_over_unsloth(run, n, checkpoints) for n in lengths]
            if any(ratios):
                of_row = f"{title}, {_steps(run)}, Unsloth {release_of('unsloth', run)}"
                lines.append([of_row, *map(_median_and_range, ratios)])
    if not lines:
        return NOT_MEASURED
    header = ["Unsloth's time / all parts", *(f"{n} tokens" for n in lengths)]
    return markdown_table(header, lines)


def _steps(run: Run) -> str:
    experiment = run.experiment
    return f"{experiment.steps // experiment.rounds} steps a cell{interleaved(run)}"


def _over_unsloth(run: Run, seq_len: int, checkpoints: bool) -> list[float]:
    """In every round that has both, against the mode of Unsloth that was fastest in it.

    A mode is what its checkpointing did: where its own does not offload, two variants are one mode,
    and count by the middle of their times, for the smaller of two noisy ones is no mode's.
    """
    times: dict[tuple[int, str], list[float]] = {}
    for cell in run.cells_of(seq_len=seq_len, status="ok"):
        variant = variant_of(cell.variant)
        is_unsloth = variant.recipe is not None and variant.recipe.library == "unsloth"
        if is_unsloth and variant.checkpoints is checkpoints:
            mode = cell.round, cell.settings.checkpointing or cell.variant
            times.setdefault(mode, []).append(median(cell.step_ms))
    best: dict[int, float] = {}
    for (number, _), of_mode in times.items():
        best[number] = min(median(of_mode), best.get(number, inf))
    own = run.round_ms(counterpart("fused_all", checkpoints).id, seq_len)
    return [best[number] / own[number] for number in sorted(own.keys() & best.keys())]


def _median_and_range(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return "".join(f"{ratio:.2f}× (one round)" for ratio in ratios)
    low, high = min(ratios), max(ratios)
    return f"{median(ratios):.2f}× ({low:.2f} to {high:.2f}, {len(ratios)} rounds)"


def peers_section(suite: Run | None) -> str:
    """Every variant that is not a part alone or left out, a table a block, the fastest first."""
    if suite is None:
        return NOT_MEASURED
    tables = []
    for checkpoints, title in ablation.BLOCKS.items():
        if rows := _rows(suite, checkpoints):
            tables.append(f"{title}:\n\n{rows}")
    return "\n\n".join(tables) or NOT_MEASURED


def _rows(suite: Run, checkpoints: bool) -> str:
    lengths = suite.experiment.seq_lens
    found = {(row.variant, row.seq_len): row for row in summarize(suite)}
    of_ablation = {*ALONE.values(), *ALL_BUT.values()} - {"fused_mlp"}  # of the experiment
    variants = [
        variant
        for variant in suite.experiment.variants
        if variant_of(variant).checkpoints is checkpoints
        and variant_of(variant).plain_id not in of_ablation
        and any((variant, n) in found for n in lengths)
    ]
    if len(variants) < 2:
        return ""

    def time(variant: str) -> float:
        row = found.get((variant, lengths[-1]))
        return (row and row.median_step_ms) or inf

    header = ["variant", *(f"{n} tokens, ms" for n in lengths), f"peak at {lengths[-1]}, GiB"]
    lines = []
    for variant in sorted(variants, key=time):
        rows = [found.get((variant, n)) for n in lengths]
        last = rows[-1]
        peak = f"{last.peak_gib:.1f}" if last and last.peak_gib else ""
        name = title_in(variant, suite, title=variant_of(variant).plain_title)
        lines.append([name, *map(_time, rows), peak])
    floors = [suite.floor.get(n) for n in lengths]
    least = {"floor: the frozen products, attention and lm_head alone":
             [floor and floor.floor_ms for floor in floors]}  # fmt: skip
    if checkpoints:
        least["the same and the layers' forward again, without their last product"] = [
            floor and floor.recomputation_ms and floor.floor_ms + floor.recomputation_ms
            for floor in floors
        ]
    for words, times in least.items():
        if any(times):
            lines.append([words, *(f"{ms:.1f}" if ms else "" for ms in times), ""])
    return markdown_table(header, lines)


def _time(row: SummaryRow | None) -> str:
    """A step's time, and how many times vanilla's speed it is: in italics where that is noise, with
    a mark where it is of a single round and cannot be judged."""
    if row is None:
        return ""
    if row.status != "ok":
        return STATUS_WORDS[row.status]
    words = f"{row.median_step_ms:.1f}"
    if row.speedup is None:
        return words
    over = f"{row.speedup:.2f}×"
    mark = SINGLE_ROUND if row.rounds == 1 else ""
    return f"{words} ({f'*{over}*' if row.verdict == NOISE else over}){mark}"
