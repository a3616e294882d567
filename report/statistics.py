"""Results summed up: medians, speedups over vanilla PEFT, and whether they are more than noise."""

from __future__ import annotations

import json
from math import exp, log, sqrt
from statistics import mean, median, stdev

BASELINE = "vanilla_peft"  # every speedup is over this variant
BASELINE_AGAIN = "vanilla_peft_again"  # its A/A twin: the same code measured twice shows the noise
STATUSES = ("ok", "parity_failed", "oom", "error", "unavailable")  # the most telling first
# Variants that train without checkpointing have a baseline, and a twin of it, of their own.
NO_CHECKPOINTING = "_no_checkpointing"
TIMES = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")


def key_of(cell: dict) -> tuple[str, int, int]:
    return cell["variant"], cell["seq_len"], cell["round"]


def baseline_of(variant: str) -> str:
    """What a variant's speedup is over: vanilla PEFT with or without checkpointing, as it is."""
    return BASELINE + (NO_CHECKPOINTING if variant.endswith(NO_CHECKPOINTING) else "")


def twin_of(variant: str) -> str:
    """The A/A twin of a variant's baseline."""
    return baseline_of(variant).replace(BASELINE, BASELINE_AGAIN)


def is_baseline(variant: str) -> bool:
    """Whether a variant is a baseline or the A/A twin of one."""
    return variant in (baseline_of(variant), twin_of(variant))


def summarize(results: dict) -> list[dict]:
    """One row for each length and variant that has a cell: median over steps, then over rounds.

    A speedup is the median over rounds of baseline time / variant time within one round, so that a
    drift of the clocks from round to round cancels. Its verdict needs the A/A twin: inside the
    noise band, or with an interval that reaches 1, it is not distinguishable.
    """
    return [
        _summary_row(results, variant, seq_len)
        for seq_len in results["experiment"]["seq_lens"]
        for variant in results["experiment"]["variants"]
        if any(key_of(cell)[:2] == (variant, seq_len) for cell in results["cells"])
    ]


def _summary_row(results: dict, variant: str, seq_len: int) -> dict:
    cells = [cell for cell in results["cells"] if key_of(cell)[:2] == (variant, seq_len)]
    timed = [cell for cell in cells if cell["status"] == "ok"]
    rounds_ms = {part: list(round_ms(results, variant, seq_len, part).values()) for part in TIMES}
    median_ms = {part: median(values) if values else None for part, values in rounds_ms.items()}
    step_ms = median_ms["step_ms"]
    ratios = speedups(results, variant, seq_len)
    is_over_itself = variant == baseline_of(variant)
    over_floor = ratios_to_floor(results, variant, seq_len)
    peaks = [cell["peak_allocated_bytes"] for cell in timed if cell["peak_allocated_bytes"]]
    tokens = results["experiment"]["batch_size"] * seq_len
    row = {
        "variant": variant,
        "seq_len": seq_len,
        "status": min((cell["status"] for cell in cells), key=STATUSES.index),
        "rounds": len(timed),
        "steps": sum(len(cell["step_ms"]) for cell in timed),
        "median_step_ms": step_ms,
        "step_ms_ci95": interval95_of_ratios(rounds_ms["step_ms"]),
        "tokens_per_s": tokens / step_ms * 1000 if step_ms else None,
        "speedup": median(ratios) if ratios else None,
        "speedup_ci95": None if is_over_itself else interval95_of_ratios(ratios),
        "ratio_to_floor": median(over_floor) if over_floor else None,
        "forward_ms": median_ms["forward_ms"],
        "backward_ms": median_ms["backward_ms"],
        "optimizer_ms": median_ms["optimizer_ms"],
        "peak_gib": max(peaks) / 2**30 if peaks else None,
    }
    row["verdict"] = _verdict(row, noise_band(results, seq_len, variant))
    # Six digits: far below any noise, and short in a diff.
    return json.loads(json.dumps(row), parse_float=lambda digits: float(f"{float(digits):.6g}"))


def speedups(results: dict, variant: str, seq_len: int) -> list[float]:
    """Baseline time / variant time, in each round that has both."""
    baseline = round_ms(results, baseline_of(variant), seq_len)
    own = round_ms(results, variant, seq_len)
    return [baseline[round] / own[round] for round in sorted(baseline.keys() & own.keys())]


def floor_of_round(results: dict, seq_len: int | str) -> dict[int, float]:
    """The floor that was measured on the machine of each round; empty without one."""
    floor = (results.get("floor") or {}).get(str(seq_len))
    if floor is None:
        return {}
    of_round = floor.get("of_round", {})  # of a merged run
    rounds = range(1, results["experiment"]["rounds"] + 1)
    return {number: of_round.get(str(number), floor["floor_ms"]) for number in rounds}


def ratios_to_floor(results: dict, variant: str, seq_len: int) -> list[float]:
    """Variant time / the floor's, in each round that has the variant."""
    floor = floor_of_round(results, seq_len)
    own = round_ms(results, variant, seq_len)
    return [ms / floor[number] for number, ms in sorted(own.items())] if floor else []


def noise_band(results: dict, seq_len: int, variant: str = BASELINE) -> tuple[float, float] | None:
    """How far apart the same code came out, (low, high) about 1; None without its A/A twin.
    `variant` picks the block: the twins with checkpointing, or those without."""
    ratios = speedups(results, twin_of(variant), seq_len)
    both_ways = ratios + [1 / ratio for ratio in ratios]  # which of the two is first is chance
    return (min(both_ways), max(both_ways)) if ratios else None


def interval95(values: list[float]) -> list[float] | None:
    """The 95% interval of the mean over rounds, by Student's t; None with fewer than two.

    Rounds are few, and a bootstrap of two or four of them cannot reach beyond them: of two it holds
    the truth half the time. As in Georges et al., "Statistically Rigorous Java Performance
    Evaluation", OOPSLA 2007.
    """
    if len(values) < 2:
        return None
    half = quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return [mean(values) - half, mean(values) + half]


def quantile(freedom: int) -> float:
    """How many standard errors a 95% interval reaches to either side: 12.7 with two rounds, 3.2
    with four."""
    from scipy import stats  # takes half a second, which the command line need not wait for

    return float(stats.t.ppf(0.975, freedom))


def interval95_of_ratios(values: list[float]) -> list[float] | None:
    """The same of times, or of their ratios: on logarithms, so that it stays above zero and is as
    wide whichever of two times is divided by the other."""
    bounds = interval95([log(value) for value in values])
    return bounds and [exp(bound) for bound in bounds]


def _verdict(row: dict, band: tuple[float, float] | None) -> str | None:
    """None without the A/A twin, or from a single round: one number has no spread to judge by."""
    speedup, ci95 = row["speedup"], row["speedup_ci95"]
    if speedup is None or is_baseline(row["variant"]):
        return None
    return verdict_of(speedup, ci95, band)


def verdict_of(
    speedup: float, ci95: list[float] | None, band: tuple[float, float] | None
) -> str | None:
    """ "faster" or "slower" where a speedup stands outside the noise band and its interval does not
    reach 1; else "not distinguishable". None where there is no band or no interval to judge by."""
    if ci95 is None or band is None:
        return None
    if band[0] <= speedup <= band[1] or ci95[0] <= 1 <= ci95[1]:
        return "not distinguishable"
    return "faster" if speedup > 1 else "slower"


def why_no_verdicts(results: dict) -> str | None:
    """What a run lacks for its speedups to be judged, and what gives it; None if nothing."""
    experiment = results["experiment"]
    if experiment["rounds"] < 2:
        return "one round gives numbers without verdicts: --rounds 4 gives both"
    if BASELINE_AGAIN not in experiment["variants"]:
        return f"no verdicts without {BASELINE_AGAIN} among the variants: it measures the noise"
    return None


def round_ms(results: dict, variant: str, seq_len: int, part: str = "step_ms") -> dict:
    """The median of each round that was timed, by round."""
    return {
        cell["round"]: median(cell[part])
        for cell in results["cells"]
        if key_of(cell)[:2] == (variant, seq_len) and cell["status"] == "ok" and cell[part]
    }
