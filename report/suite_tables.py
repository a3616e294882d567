"""What a suite's results say in the README, in Markdown: each part's gains, and all the others."""

from __future__ import annotations

from math import inf
from statistics import median

from report import ablation
from report.looks import STATUS_WORDS, caption, in_turns, markdown_table
from report.names import name_of
from report.statistics import BASELINE, NO_CHECKPOINTING, key_of, round_ms, summarize
from variants import PARTS, VARIANTS

SINGLE_ROUND = "¹"
NOT_MEASURED = "Not measured yet in a run that can be quoted: `python lora_bench.py --suite all`."


def parts_section(suite: dict | None) -> str:
    """What each part takes off a step, and what it was measured on."""
    if suite is None or not (tables := ablation.table(suite)):
        return NOT_MEASURED
    return f"{tables}\n\n{caption(suite)}"


def effects_section(suite: dict | None) -> str:
    """What each part alone does at the longest length: to the two passes, the launches and the
    memory. A table a block; with checkpointing a backward holds the second forward, too."""
    if suite is None:
        return NOT_MEASURED
    tables = []
    for block, title in ablation.BLOCKS.items():
        if rows := _effects(suite, block):
            tables.append(f"{title}:\n\n{rows}")
    return "\n\n".join(tables) or NOT_MEASURED


def _effects(suite: dict, block: str) -> str:
    seq_len = suite["experiment"]["seq_lens"][-1]
    rows = {row["variant"]: row for row in summarize(suite) if row["seq_len"] == seq_len}
    alone = [f"fused_{part}" for part in ablation.parts_of(block)]
    lines = []
    for plain in (BASELINE, *alone, "fused_all", "fused_all_offload"):
        row = rows.get(plain + block)
        if row and row["status"] == "ok":
            newest = _newest(suite, row["variant"], seq_len)
            launches = f"{sum(newest['kernels_seen'].values()):,}"
            times = (f"{row[time]:.1f}" for time in ("forward_ms", "backward_ms"))
            reserved = f"{(newest['peak_reserved_bytes'] or 0) / 2**30:.1f}"
            lines.append([name_of(plain), *times, launches, f"{row['peak_gib']:.1f}", reserved])
    if len(lines) < 2:
        return ""
    header = [f"at {seq_len} tokens", "forward, ms", "backward, ms", "launches a step"]
    header += ["peak allocated, GiB", "reserved, GiB"]
    return markdown_table(header, lines)


def _newest(suite: dict, variant: str, seq_len: int) -> dict:
    """The timed cell of the last round that has one: of the latest code."""
    cells = (
        cell
        for cell in suite["cells"]
        if key_of(cell)[:2] == (variant, seq_len) and cell["status"] == "ok"
    )
    return max(cells, key=lambda cell: cell["round"])


def against_unsloth_section(runs: list[dict]) -> str:
    """How many times Unsloth's speed all fused parts have: a line for each block of each run."""
    lengths = sorted({n for run in runs for n in run["experiment"]["seq_lens"]})
    lines = []
    for block, title in ablation.BLOCKS.items():
        for run in runs:
            ratios = [_over_unsloth(run, n, block) for n in lengths]
            if any(ratios):
                lines.append([f"{title}, {_steps(run)}", *map(_median_and_range, ratios)])
    if not lines:
        return NOT_MEASURED
    header = ["Unsloth's time / all fused", *(f"{n} tokens" for n in lengths)]
    return markdown_table(header, lines)


def _steps(run: dict) -> str:
    experiment = run["experiment"]
    return f"{experiment['steps'] // experiment['rounds']} steps a cell{in_turns(experiment)}"


def _over_unsloth(run: dict, seq_len: int, block: str) -> list[float]:
    """In every round that has both, against the mode of Unsloth that was fastest in it.

    A mode is what its checkpointing did: where its own does not offload, two variants are one mode,
    and count by the middle of their times, for the smaller of two noisy ones is no mode's.
    """
    times: dict[tuple[int, str], list[float]] = {}
    for cell in run["cells"]:
        recipe = VARIANTS.get(cell["variant"])
        in_block = cell["variant"].endswith(NO_CHECKPOINTING) == bool(block)
        is_here = cell["seq_len"] == seq_len and cell["status"] == "ok" and in_block
        if is_here and recipe and recipe.library == "unsloth":
            mode = cell["round"], (cell["settings"] or {}).get("checkpointing", cell["variant"])
            times.setdefault(mode, []).append(median(cell["step_ms"]))
    best: dict[int, float] = {}
    for (number, _), of_mode in times.items():
        best[number] = min(median(of_mode), best.get(number, inf))
    own = round_ms(run, "fused_all" + block, seq_len)
    return [best[number] / own[number] for number in sorted(own.keys() & best.keys())]


def _median_and_range(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return "".join(f"{ratio:.2f}× (one round)" for ratio in ratios)
    low, high = min(ratios), max(ratios)
    return f"{median(ratios):.2f}× ({low:.2f} to {high:.2f}, {len(ratios)} rounds)"


def peers_section(suite: dict | None) -> str:
    """Every variant that is not a part alone or left out, a table a block, the fastest first."""
    if suite is None:
        return NOT_MEASURED
    tables = []
    for block, title in ablation.BLOCKS.items():
        if rows := _rows(suite, block):
            tables.append(f"{title}:\n\n{rows}")
    return "\n\n".join(tables) or NOT_MEASURED


def _rows(suite: dict, block: str) -> str:
    lengths = suite["experiment"]["seq_lens"]
    found = {(row["variant"], row["seq_len"]): row for row in summarize(suite)}
    variants = [
        variant
        for variant in suite["experiment"]["variants"]
        if variant.endswith(NO_CHECKPOINTING) == bool(block)
        and not _is_of_ablation(variant)
        and any((variant, n) in found for n in lengths)
    ]
    if len(variants) < 2:
        return ""

    def time(variant: str) -> float:
        row = found.get((variant, lengths[-1]))
        return (row and row["median_step_ms"]) or float("inf")

    header = ["variant", *(f"{n} tokens, ms" for n in lengths), f"peak at {lengths[-1]}, GiB"]
    lines = []
    for variant in sorted(variants, key=time):
        rows = [found.get((variant, n)) for n in lengths]
        last = rows[-1]
        peak = f"{last['peak_gib']:.1f}" if last and last["peak_gib"] else ""
        lines.append([name_of(variant.removesuffix(block)), *map(_time, rows), peak])
    floors = [suite["floor"].get(str(n), {}) for n in lengths]
    least = {"floor: the frozen products, attention and lm_head alone": ["floor_ms"]}
    if not block:
        again = ["floor_ms", "recomputation_ms"]
        least["the same and the layers' forward again, without their last product"] = again
    for words, parts in least.items():
        times = [
            f"{sum(floor[part] for part in parts):.1f}" if floor.keys() >= {*parts} else ""
            for floor in floors
        ]
        if any(times):
            lines.append([words, *times, ""])
    return markdown_table(header, lines)


def _is_of_ablation(variant: str) -> bool:
    plain = variant.removesuffix(NO_CHECKPOINTING)
    alone = plain.removeprefix("fused_") in PARTS and plain != "fused_mlp"  # of the experiment
    return alone or plain.startswith("fused_all_but_")


def _time(row: dict | None) -> str:
    """A step's time, and how many times vanilla's speed it is: in italics where that is noise, with
    a mark where it is of a single round and cannot be judged."""
    if row is None:
        return ""
    if row["status"] != "ok":
        return STATUS_WORDS[row["status"]]
    words = f"{row['median_step_ms']:.1f}"
    if row["speedup"] is None:
        return words
    over = f"{row['speedup']:.2f}×"
    mark = SINGLE_ROUND if row["rounds"] == 1 else ""
    return f"{words} ({f'*{over}*' if row['verdict'] == ablation.NOISE else over}){mark}"
