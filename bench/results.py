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

import copy
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from report.names import first_few, in_words
from report.statistics import floor_of_round, key_of, summarize

SCHEMA = json.loads((Path(__file__).parent / "results.schema.json").read_text())
FLOOR_PARTS = (
    ("samples_ms", "floor_ms"),
    ("recomputation_samples_ms", "recomputation_ms"),
)
SCHEMA_VERSION = SCHEMA["properties"]["schema_version"]["const"]
DOCUMENT = Draft202012Validator(SCHEMA)
CELL = Draft202012Validator(SCHEMA["$defs"]["cell"])

GROWING_PARTS = ("variants", "seq_lens", "rounds", "steps", "tokens")  # a later run may want more
COMPARED_PACKAGES = ("torch", "triton", "transformers", "peft", "unsloth", "liger_kernel")


def new_results(argv: list, environment: dict, experiment: dict, rehearsal: bool) -> dict:
    """A document without cells. A rehearsal is made without a GPU: never a performance result."""
    results = {
        "schema_version": SCHEMA_VERSION,
        "rehearsal": rehearsal,
        "argv": argv,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "finished_utc": None,  # set by the caller once every planned cell is in
        "environment": environment,
        "experiment": experiment,
        "floor": {},
        "cells": [],
        "kernels": None,
        "summary": [],
    }
    if wrong := _mismatch(DOCUMENT, results):
        raise ValueError(f"new results: {wrong}")
    steps, rounds = experiment["steps"], experiment["rounds"]
    if steps % rounds:
        raise ValueError(f"{steps} steps do not spread over {rounds} rounds: give a multiple")
    return json.loads(json.dumps(results))  # as the file gives it back: lists and string keys


def new_cell(variant: str, seq_len: int, round: int, status: str, **measured: Any) -> dict:
    """A whole cell from what is known of it; what was not measured is null or empty."""
    empty: dict[str, Any] = {"array": [], "object": {}}
    unknown = {
        name: copy.copy(empty.get(str(part.get("type"))))
        for name, part in SCHEMA["$defs"]["cell"]["properties"].items()
    }
    known = {"variant": variant, "seq_len": seq_len, "round": round, "status": status}
    cell = {**unknown, **known, **measured}
    if wrong := _mismatch(CELL, cell):
        raise ValueError(f"cell of {variant} at {seq_len}: {wrong}")
    return cell


def add_cell(results: dict, cell: dict) -> None:
    """Put a cell in, in the place of an earlier one of the same (variant, seq_len, round)."""
    cell = new_cell(**cell)
    others = [earlier for earlier in results["cells"] if key_of(earlier) != key_of(cell)]
    results["cells"] = [*others, cell]


def done(results: dict, variant: str, seq_len: int, round: int) -> bool:
    """Whether this cell has its answer. Out of memory, a failed parity check and a missing package
    are answers: the same run would give them again. An error is not: it is retried at the next
    start, so that a crash can be repaired."""
    key = (variant, seq_len, round)
    return any(key_of(cell) == key and cell["status"] != "error" for cell in results["cells"])


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
        results = json.loads(path.read_bytes(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        problem = f"{path} is not whole JSON ({error})"
        raise ValueError(f"{problem}: restore it, or delete it and measure again") from None
    if not isinstance(results, dict) or "schema_version" not in results:
        raise ValueError(f"{path} has no schema_version, so it is not ours: give another path")
    if (schema := results["schema_version"]) != SCHEMA_VERSION:
        problem = f"{path} has schema {schema}, this version writes {SCHEMA_VERSION}"
        raise ValueError(f"{problem}: give another --out, or delete that file")
    if wrong := _mismatch(DOCUMENT, results):
        raise ValueError(f"{path}: {wrong}: restore it, or delete it and measure again")
    return results


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _mismatch(validator: Draft202012Validator, document: dict) -> str | None:
    """Where a document departs from the schema and how, in one line."""
    error = best_match(validator.iter_errors(document))
    if error is None:
        return None
    place = error.json_path.removeprefix("$").removeprefix(".") or "the document"
    words = error.message
    if len(words) > 160:  # a long value hides what it should be
        value, wanted = (shorten(repr(v), 60) for v in (error.instance, error.validator_value))
        words = f"{value} does not fit {error.validator} {wanted}"
    return f"{place}: {words}"


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
    if differences := _differences(earlier, fresh):
        differing = f"{path} holds another run: {first_few(differences)}"
        raise ValueError(f"{differing}. Give another --out, or delete that file.")
    _widen(earlier, fresh)
    return earlier


def merge(runs: list[dict]) -> dict:
    """One document of several of the same experiment: the rounds of each run are rounds of it.

    So a node measures in parallel, every GPU its own rounds, or every GPU some of the variants with
    the baselines that they are held against. A speedup stays within a round, and so on one GPU, and
    so does what a step is over the floor: each run's own is kept for its rounds. What is drawn and
    printed as the floor is the median of all samples.

    Raises:
        ValueError: the runs are not of one experiment on one kind of GPU, or two of them hold the
            same measurement, which would count twice.
    """
    merged, *others = (copy.deepcopy(run) for run in runs)
    for number, run in enumerate(others, start=2):
        if differences := _differences(merged, run):
            raise ValueError(f"these are not of one experiment: {first_few(differences)}")
        if (shared := _measured(merged) & _measured(run)) or run in runs[: number - 1]:
            raise ValueError(
                f"run {number} of these overlaps an earlier one (measurements in both: "
                f"{len(shared)}): give each run once"
            )
        before, steps = merged["experiment"]["rounds"], merged["experiment"]["steps"]
        finished = [merged["finished_utc"], run["finished_utc"]]
        for cell in run["cells"]:
            cell["round"] += before
        cells, floor = merged["cells"] + run["cells"], _merged_floor(merged, run)
        _widen(merged, run)
        merged["cells"], merged["floor"] = cells, floor
        merged["experiment"]["rounds"] = before + run["experiment"]["rounds"]
        merged["experiment"]["steps"] = steps + run["experiment"]["steps"]
        merged["started_utc"] = min(merged["started_utc"], run["started_utc"])
        merged["finished_utc"] = max(finished) if all(finished) else None
        merged["kernels"] = merged["kernels"] or run["kernels"]
    merged["summary"] = summarize(merged)
    return merged


def _measured(run: dict) -> set[tuple]:
    """The cells with a time, by their raw times: no two measurements agree in every digit."""
    cells = [cell for cell in run["cells"] if cell["step_ms"]]
    return {(c["variant"], c["seq_len"], *c["step_ms"], *c["wall_ms"]) for c in cells}


def _merged_floor(one: dict, other: dict) -> dict:
    """The floor at each length of two runs, the rounds of `other` coming after those of `one`."""
    merged = {}
    for seq_len in {**one["floor"], **other["floor"]}:
        floors = [run["floor"].get(seq_len, {}) for run in (one, other)]
        merged[seq_len] = floor = {**floors[1], **floors[0]}
        for samples, middle in FLOOR_PARTS:
            together = [ms for each in floors for ms in each.get(samples, [])]
            if together:
                floor |= {samples: together, middle: median(together)}
        of_round = {
            number + before: floor_ms
            for run, before in ((one, 0), (other, one["experiment"]["rounds"]))
            for number, floor_ms in floor_of_round(run, seq_len).items()
        }
        floor["of_round"] = {str(number): floor_ms for number, floor_ms in of_round.items()}
    return merged


def _differences(earlier: dict, fresh: dict) -> list[str]:
    there, here = _identity(earlier, fresh), _identity(fresh, earlier)
    return [
        f"{name} {in_words(there.get(name))} there, {in_words(here.get(name))} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]


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
            flat |= {f"share {part} at {seq_len}": share for part, share in tokens.items()}
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
