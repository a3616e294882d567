"""results.json: what it holds, how it is saved, continued and summed up.

`cells` holds the raw measurements, one cell for each (variant, seq_len, round); `summary` is worked
out from them at every save and never edited. A save lands whole or leaves the file as it was, so a
run that is killed loses at most the cell it was in, and the same command goes on from there:

    results = continue_from(path, new_results(argv, environment, experiment, rehearsal=False))
    for variant, seq_len, round in plan:
        if not done(results, variant, seq_len, round):
            add_cell(results, measure(variant, seq_len, round))
            save(path, results)
"""

from __future__ import annotations

import json
import os
import re
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy import stats

SCHEMA_VERSION = 1
BASELINE = "vanilla_peft"  # every speedup is over this variant
BASELINE_AGAIN = "vanilla_peft_again"  # its A/A twin: the same code measured twice shows the noise

STATUSES = ("ok", "parity_failed", "oom", "error", "unavailable")  # the most telling first
# fmt: off
PARTS = ("schema_version", "rehearsal", "argv", "started_utc", "finished_utc", "environment",
         "experiment", "cells", "kernels", "summary")
ENVIRONMENT_PARTS = ("gpu", "cpu", "platform", "python", "packages", "cuda", "git")
EXPERIMENT_PARTS = ("model", "weights", "dtype", "batch_size", "seq_lens", "variants", "rounds",
                    "steps", "checkpointing", "padded", "lora", "optimizer", "seed", "data_sha256",
                    "tokens")
TIMES = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
GROWING_PARTS = ("variants", "seq_lens", "rounds", "steps", "tokens")  # a later run may want more
COMPARED_PACKAGES = ("torch", "triton", "transformers", "peft", "unsloth", "liger_kernel")
CELL_LISTS = (*TIMES, "losses", "fused_modules")
CELL_VALUES = ("error", "parity", "first_step_s", "peak_allocated_bytes", "peak_reserved_bytes",
               "sm_clock_mhz", "temperature_c", "power_w", "throttled", "other_gpu_processes")
# fmt: on


def new_results(argv: list, environment: dict, experiment: dict, rehearsal: bool) -> dict:
    """A document without cells. A rehearsal is made without a GPU: never a performance result."""
    results = {
        "schema_version": SCHEMA_VERSION,
        "rehearsal": rehearsal,
        "argv": argv,
        "started_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "finished_utc": None,  # set by the caller once every planned cell is in
        "environment": environment,
        "experiment": experiment,
        "floor": {},
        "cells": [],
        "kernels": None,
        "summary": [],
    }
    if missing := _missing(results):
        raise ValueError(f"new results lack {_first_few(missing)}: give every part of the schema")
    steps, rounds = experiment["steps"], experiment["rounds"]
    if steps % rounds:
        raise ValueError(f"{steps} steps do not spread over {rounds} rounds: give a multiple")
    return json.loads(json.dumps(results))  # as the file gives it back: lists and string keys


def new_cell(variant: str, seq_len: int, round: int, status: str, **measured: Any) -> dict:
    """A whole cell from what is known of it; what was not measured is null or empty."""
    if status not in STATUSES:
        raise ValueError(f"status {status!r} of {variant}: give one of {', '.join(STATUSES)}")
    if status == "ok" and not measured.get("step_ms"):
        raise ValueError(f"{variant} at {seq_len} is ok but has no step_ms: give them or a status")
    cell = {"variant": variant, "seq_len": seq_len, "round": round, "status": status}
    cell |= {"settings": {}, "kernels_seen": {}, **dict.fromkeys(CELL_VALUES)}
    return {**cell, **{part: [] for part in CELL_LISTS}, **measured}


def add_cell(results: dict, cell: dict) -> None:
    """Put a cell in, in the place of an earlier one of the same (variant, seq_len, round)."""
    cell = new_cell(**cell)
    others = [earlier for earlier in results["cells"] if _key(earlier) != _key(cell)]
    results["cells"] = [*others, cell]


def done(results: dict, variant: str, seq_len: int, round: int) -> bool:
    """Whether this cell has its answer. Out of memory, a failed parity check and a missing package
    are answers: the same run would give them again. An error is not: it is retried at the next
    start, so that a crash can be repaired."""
    key = (variant, seq_len, round)
    return any(_key(cell) == key and cell["status"] != "error" for cell in results["cells"])


def _key(cell: dict) -> tuple[str, int, int]:
    return cell["variant"], cell["seq_len"], cell["round"]


# --- the file -------------------------------------------------------------------------------------


def save(path: str | Path, results: dict) -> None:
    """Bring the summary up to date and write the file whole; on any error the earlier file stays.
    NaN and infinity, which JSON does not have, are written as null."""
    results["summary"] = summarize(results)
    finite = json.loads(json.dumps(results), parse_constant=lambda _: None)
    # A list of plain values goes on one line, so that a cell is a screenful and a diff shows what
    # changed. Inside a JSON string a line break is escaped, so every real one here is layout.
    text = json.dumps(finite, indent=1)
    text = re.sub(r"\[\n[^\[\]{}]*\]", lambda found: re.sub(r"\n *", "", found[0]), text)
    write_atomically(path, text.encode() + b"\n")


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file whole or not at all: beside it, flushed to disk, then renamed over it."""
    path = Path(path).resolve()  # where it is a link, the file it names is replaced, not the link
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # an interrupt too
        temporary.unlink(missing_ok=True)
        raise


def load(path: str | Path) -> dict:
    """The document in a file, or a ValueError that says in one line why it is none."""
    path = Path(path)
    try:
        results = json.loads(path.read_bytes())
    except ValueError as error:
        problem = f"{path} is not whole JSON ({error})"
        raise ValueError(f"{problem}: restore it, or delete it and measure again") from None
    if not isinstance(results, dict) or "schema_version" not in results:
        raise ValueError(f"{path} has no schema_version, so it is not ours: give another path")
    if (schema := results["schema_version"]) != SCHEMA_VERSION:
        problem = f"{path} has schema {schema}, this version writes {SCHEMA_VERSION}"
        raise ValueError(f"{problem}: give another --out, or delete that file")
    if missing := _missing(results):
        raise ValueError(f"{path} lacks {_first_few(missing)}: restore it, or delete it")
    return results


def _missing(results: dict) -> list[str]:
    environment, experiment = results.get("environment") or {}, results.get("experiment") or {}
    missing = [part for part in PARTS if part not in results]
    missing += [f"environment.{part}" for part in ENVIRONMENT_PARTS if part not in environment]
    missing += [f"experiment.{part}" for part in EXPERIMENT_PARTS if part not in experiment]
    for index, cell in enumerate(results.get("cells") or []):
        missing += [f"cells[{index}].{part}" for part in new_cell("", 0, 0, "oom").keys() - cell]
    return missing


def _first_few(items: list[str]) -> str:
    return "; ".join(items[:3]) + (f"; and {len(items) - 3} more" if len(items) > 3 else "")


# --- going on with an earlier run -----------------------------------------------------------------


def continue_from(path: str | Path, fresh: dict) -> dict:
    """The run in this file, widened to what is asked for now; `fresh` where there is no file yet.

    Only the same experiment on the same machine may go on. Variants, lengths and rounds may grow
    (the steps of one round may not change); anything else that differs is a ValueError naming it.
    A package that one of the two runs lacked measured nothing there, so it is no difference.
    """
    path = Path(path)
    if not path.exists():
        return fresh
    earlier = load(path)
    there, here = _identity(earlier, fresh), _identity(fresh, earlier)
    differences = [
        f"{name} {there.get(name)} there, {here.get(name)} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    if differences:
        differing = f"{path} holds another run: {_first_few(differences)}"
        raise ValueError(f"{differing}. Give another --out, or delete that file.")
    _widen(earlier, fresh)
    return earlier


def _identity(run: dict, other: dict) -> dict:
    """What two runs must share for their cells to stand in one file, as flat name -> value."""
    experiment, environment = run["experiment"], run["environment"]
    flat = {name: value for name, value in experiment.items() if name not in GROWING_PARTS}
    for name in ("lora", "optimizer"):
        flat.update({f"{name}.{part}": value for part, value in flat.pop(name).items()})
    flat["steps a round"] = experiment["steps"] // experiment["rounds"]
    flat["rehearsal"] = run["rehearsal"]
    gpu = environment["gpu"] or {}
    flat.update({"gpu": gpu.get("name"), "power_limit_w": gpu.get("power_limit_w")})
    for seq_len, tokens in experiment["tokens"].items():
        if seq_len in other["experiment"]["tokens"]:
            flat[f"tokens at {seq_len}"] = tokens
    for name in COMPARED_PACKAGES:
        if environment["packages"].get(name) and other["environment"]["packages"].get(name):
            flat[name] = environment["packages"][name]
    return flat


def _widen(earlier: dict, fresh: dict) -> None:
    """Unite what the earlier run had with what is asked for now."""
    there, here = earlier["experiment"], fresh["experiment"]
    there["variants"] += [name for name in here["variants"] if name not in there["variants"]]
    there["seq_lens"] = sorted({*there["seq_lens"], *here["seq_lens"]})
    there["rounds"] = max(there["rounds"], here["rounds"])
    there["steps"] = max(there["steps"], here["steps"])
    there["tokens"].update(here["tokens"])
    earlier["argv"], earlier["finished_utc"] = fresh["argv"], None

    old, new = earlier["environment"], fresh["environment"]
    for name, version in new["packages"].items():
        if version and not old["packages"].get(name):
            old["packages"][name] = version
            # what was unavailable for want of a package is tried again
            earlier["cells"] = [c for c in earlier["cells"] if c["status"] != "unavailable"]
    if old["git"] and new["git"]:  # cells of two commits may share a file, but not in silence
        if new["git"]["commit"] not in old["git"]["commit"]:
            old["git"]["commit"] += f" then {new['git']['commit']}"
        old["git"]["dirty"] = old["git"]["dirty"] or new["git"]["dirty"]


# --- summing up -----------------------------------------------------------------------------------


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
        if any(_key(cell)[:2] == (variant, seq_len) for cell in results["cells"])
    ]


def _summary_row(results: dict, variant: str, seq_len: int) -> dict:
    cells = [cell for cell in results["cells"] if _key(cell)[:2] == (variant, seq_len)]
    timed = [cell for cell in cells if cell["status"] == "ok"]
    rounds_ms = {part: list(_round_ms(results, variant, seq_len, part).values()) for part in TIMES}
    median_ms = {part: median(values) if values else None for part, values in rounds_ms.items()}
    step_ms = median_ms["step_ms"]
    ratios = speedups(results, variant, seq_len)
    floor_ms = (results.get("floor") or {}).get(str(seq_len), {}).get("floor_ms")
    peaks = [cell["peak_allocated_bytes"] for cell in timed if cell["peak_allocated_bytes"]]
    tokens = results["experiment"]["batch_size"] * seq_len
    row = {
        "variant": variant,
        "seq_len": seq_len,
        "status": min((cell["status"] for cell in cells), key=STATUSES.index),
        "rounds": len(timed),
        "steps": sum(len(cell["step_ms"]) for cell in timed),
        "median_step_ms": step_ms,
        "step_ms_ci95": interval95(rounds_ms["step_ms"]),
        "tokens_per_s": tokens / step_ms * 1000 if step_ms else None,
        "speedup": median(ratios) if ratios else None,
        "speedup_ci95": None if variant == BASELINE else interval95(ratios),
        "ratio_to_floor": step_ms / floor_ms if step_ms and floor_ms else None,
        "forward_ms": median_ms["forward_ms"],
        "backward_ms": median_ms["backward_ms"],
        "optimizer_ms": median_ms["optimizer_ms"],
        "peak_gib": max(peaks) / 2**30 if peaks else None,
    }
    row["verdict"] = _verdict(row, noise_band(results, seq_len))
    # Six digits: far below any noise, and short in a diff.
    return json.loads(json.dumps(row), parse_float=lambda digits: float(f"{float(digits):.6g}"))


def speedups(results: dict, variant: str, seq_len: int) -> list[float]:
    """Baseline time / variant time, in each round that has both."""
    baseline, own = _round_ms(results, BASELINE, seq_len), _round_ms(results, variant, seq_len)
    return [baseline[round] / own[round] for round in sorted(baseline.keys() & own.keys())]


def noise_band(results: dict, seq_len: int) -> tuple[float, float] | None:
    """How far apart the same code came out, (low, high) about 1; None without its A/A twin."""
    ratios = speedups(results, BASELINE_AGAIN, seq_len)
    both_ways = ratios + [1 / ratio for ratio in ratios]  # which of the two is first is chance
    return (min(both_ways), max(both_ways)) if ratios else None


def interval95(values: list[float]) -> list[float] | None:
    """The 95% bootstrap interval (percentile, seeded) of the median; None with fewer than two."""
    if len(values) < 2:
        return None
    found = stats.bootstrap((values,), np.median, n_resamples=2000, method="percentile", rng=0)
    return [float(bound) for bound in found.confidence_interval]


def _verdict(row: dict, band: tuple[float, float] | None) -> str | None:
    speedup, ci95 = row["speedup"], row["speedup_ci95"]
    if speedup is None or band is None or row["variant"] in (BASELINE, BASELINE_AGAIN):
        return None
    if band[0] <= speedup <= band[1] or (ci95 and ci95[0] <= 1 <= ci95[1]):
        return "not distinguishable"
    return "faster" if speedup > 1 else "slower"


def _round_ms(results: dict, variant: str, seq_len: int, part: str = "step_ms") -> dict:
    """The median of each round that was timed, by round."""
    return {
        cell["round"]: median(cell[part])
        for cell in results["cells"]
        if _key(cell)[:2] == (variant, seq_len) and cell["status"] == "ok" and cell[part]
    }
