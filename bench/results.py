"""results.json: how we save, load, continue and merge runs.

`cells` holds the raw measurements, one cell for each (variant, seq_len, round). `summary` is
computed from them at every save and never edited. A save writes the whole file or leaves the old
one. A killed process loses at most its current cell, and the same command goes on from there:

    run = continue_from(path, new_run(argv, environment, experiment, rehearsal=False))
    for variant, seq_len, round in plan:
        if not run.is_done(variant, seq_len, round):
            run.add(measure(variant, seq_len, round))
            save(path, run)
"""

from __future__ import annotations

import copy
import gzip
import os
import re
import zlib
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.experiment_records import COMPARED_PACKAGES, Environment, Experiment
from bench.folders import unfinished_beside
from bench.records import Floor, Run

UNREADABLE = (
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
    OSError,
    EOFError,
    zlib.error,
)
GROWING_PARTS = (
    "variants",
    "seq_lens",
    "rounds",
    "steps",
    "tokens",
)  # a later run may ask for more


def new_run(
    argv: list[str], environment: Environment, experiment: Experiment, rehearsal: bool
) -> Run:
    """Make a run without cells. A rehearsal runs without a GPU and is no performance result."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Run(2, rehearsal, argv, now, None, environment, experiment)


# --- the file -------------------------------------------------------------------------------------


def save(path: str | Path, run: Run) -> None:
    """Write the whole file. On any error the old one stays. NaN and infinity become null.

    Raises ValueError, with the place, if the run could not be loaded again.
    """
    data = msgspec.json.encode(run)
    try:
        decode(data)
    except ValueError as error:
        raise ValueError(f"{path} is not written: {error}") from None
    # A list of plain values goes on one line: a cell is then a screenful and a diff shows what
    # changed. JSON escapes line breaks in strings, so every real one is layout.
    text = msgspec.json.format(data, indent=1)
    text = re.sub(rb"\[\n[^\[\]{}]*\]", lambda found: re.sub(rb"\n *", b"", found[0]), text)
    write_atomically(path, text + b"\n")


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file whole or not at all: beside it, flushed to disk, then renamed over it."""
    path = Path(path).resolve()  # replace a link's target, not the link
    with unfinished_beside(path) as unfinished, open(unfinished, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def load(path: str | Path) -> Run:
    """Load a run from a file, which may be compressed (.json.gz), or raise ValueError."""
    path = Path(path)
    data = path.read_bytes()
    try:
        return decode(gzip.decompress(data) if path.suffix == ".gz" else data)
    except UNREADABLE as error:
        problem = f"{path} is not whole JSON ({error})"
        raise ValueError(f"{problem}: restore it, or delete it and measure again") from None
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}: give another path, or restore it, or delete it and measure again"
        ) from None


def decode(data: bytes) -> Run:
    """Decode a file's bytes, or raise ValueError with the place and what is wrong there."""
    try:
        return msgspec.json.decode(data, type=Run)
    except (msgspec.ValidationError, RecursionError) as error:
        what, _, place = str(error).partition(" - at `$")
        where = place.strip(".`") or "the document"
        raise ValueError(f"{where}: {what[0].lower()}{what[1:]}") from None


# --- continuing and merging -----------------------------------------------------------------------


def continue_from(path: str | Path, fresh: Run) -> Run:
    """Return the run in this file, widened to what `fresh` asks for, or `fresh` without a file.

    Only the same experiment on the same machine may continue. Variants, lengths and rounds may
    grow, but not the steps of a round. A package that one of the runs lacks measured nothing there
    and is no difference. Any other difference is a ValueError.
    """
    path = Path(path)
    if not path.exists():
        return fresh
    earlier = load(path)
    if differences := _differences(earlier, fresh):
        differing = f"{path} holds another run: {first_few(differences)}"
        raise ValueError(f"{differing}; give another --out")
    _widen(earlier, fresh)
    return earlier


def merge(runs: list[Run]) -> Run:
    """Merge runs of one experiment. The rounds of each become rounds of the merged run.

    So the GPUs of a node can measure in parallel, each its own rounds or some variants with their
    baselines. A speedup stays within a round and therefore on one GPU. So does a step's ratio to
    the floor: each run's floor is kept for its rounds. The merged floor is the median of all
    samples.

    Raises:
        ValueError: the runs differ in experiment or kind of GPU, or two of them hold the same
            measurement, which would count twice.
    """
    merged, *others = (copy.deepcopy(run) for run in runs)
    for number, run in enumerate(others, start=2):
        found = _differences(merged, run)
        if differences := [one for one in found if not one.startswith("interleave ")]:
            raise ValueError(
                f"run {number} of these is not of the first one's experiment: "
                f"{first_few(differences)}; give runs of one command"
            )
        if (shared := _measured(merged) & _measured(run)) or run in runs[: number - 1]:
            raise ValueError(
                f"run {number} of these overlaps an earlier one (measurements in both: "
                f"{len(shared)}): give each run once"
            )
        before, steps = merged.experiment.rounds, merged.experiment.steps
        finished = [merged.finished_utc, run.finished_utc]
        for cell in run.cells:
            cell.round += before
        cells = merged.cells + run.cells
        floor = _merged_floor(merged, run, merged.experiment.base)
        other_floors = {
            precision: _merged_floor(merged, run, precision)
            for precision in {**merged.other_floors, **run.other_floors}
        }
        _widen(merged, run)
        merged.cells, merged.floor, merged.other_floors = cells, floor, other_floors
        merged.experiment.rounds = before + run.experiment.rounds
        merged.experiment.steps = steps + run.experiment.steps
        merged.started_utc = min(merged.started_utc, run.started_utc)
        merged.finished_utc = max(filter(None, finished)) if all(finished) else None
        merged.kernels = merged.kernels or run.kernels
        merged.stages_s = None  # the runs overlapped in time
    return merged


def _measured(run: Run) -> set[tuple]:
    """Return the raw times of timed cells. No two measurements agree in every digit."""
    cells = [cell for cell in run.cells if cell.step_ms]
    return {(cell.variant, cell.seq_len, *cell.step_ms, *cell.wall_ms) for cell in cells}


def _merged_floor(one: Run, other: Run, precision: str) -> dict[int, Floor]:
    """Merge the floors of two runs. The rounds of `other` come after those of `one`."""
    merged = {}
    ours, theirs = one.floors_in(precision), other.floors_in(precision)
    for seq_len in {**ours, **theirs}:
        floors = [found[seq_len] for found in (ours, theirs) if seq_len in found]
        samples_ms = [ms for floor in floors for ms in floor.samples_ms]
        again_ms = [ms for floor in floors for ms in floor.recomputation_samples_ms]
        first = floors[0]
        merged[seq_len] = Floor(
            floor_ms=median(samples_ms) if samples_ms else first.floor_ms,
            samples_ms=samples_ms,
            recomputation_ms=median(again_ms) if again_ms else first.recomputation_ms,
            recomputation_samples_ms=again_ms,
            labelled_tokens=next(filter(None, (floor.labelled_tokens for floor in floors)), None),
            tokens=next(filter(None, (floor.tokens for floor in floors)), None),
            ms_by_round={
                number + before: floor_ms
                for run, found, before in ((one, ours, 0), (other, theirs, one.experiment.rounds))
                for number, floor_ms in run.ms_by_round(found.get(seq_len)).items()
            },
        )
    return merged


def _differences(earlier: Run, fresh: Run) -> list[str]:
    there, here = _identity(earlier, fresh), _identity(fresh, earlier)
    return [
        f"{name} {in_words(there.get(name))} there, {in_words(here.get(name))} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]


def _identity(run: Run, other: Run) -> dict[str, Any]:
    """Return the values two runs must share to be in one file, by flat name."""
    experiment, environment = run.experiment, run.environment
    flat = dict(flat_items(experiment))
    flat = {name: flat[name] for name in flat if name.split(".")[0] not in GROWING_PARTS}
    flat["steps a round"] = experiment.steps // experiment.rounds
    flat["rehearsal"] = run.rehearsal
    flat["gpu"] = environment.gpu and environment.gpu.name
    flat["power_limit_w"] = environment.gpu and environment.gpu.power_limit_w
    for seq_len, tokens in experiment.tokens.items():
        if seq_len in other.experiment.tokens:
            flat[f"share padding at {seq_len}"] = tokens.padding
            flat[f"share labelled at {seq_len}"] = tokens.labelled
    for name in COMPARED_PACKAGES:
        if environment.packages.get(name) and other.environment.packages.get(name):
            flat[name] = environment.packages[name]
    return flat


def _widen(earlier: Run, fresh: Run) -> None:
    """Add the new command's variants, lengths, rounds and steps to the earlier run."""
    there, here = earlier.experiment, fresh.experiment
    before = copy.deepcopy(there)
    there.variants += [name for name in here.variants if name not in there.variants]
    there.seq_lens = sorted({*there.seq_lens, *here.seq_lens})
    there.rounds = max(there.rounds, here.rounds)
    there.steps = max(there.steps, here.steps)
    there.tokens.update(here.tokens)
    earlier.argv = fresh.argv
    if there != before:
        earlier.finished_utc = None

    old, new = earlier.environment, fresh.environment
    for name, version in new.packages.items():
        if version and not old.packages.get(name):
            old.packages[name] = version
            # cells that lacked the package are tried again
            earlier.cells = [cell for cell in earlier.cells if cell.status != "unavailable"]
    if old.git and new.git:  # a file names all commits of its cells
        if new.git.commit not in old.git.commit:
            old.git.commit += f" then {new.git.commit}"
        old.git.dirty = old.git.dirty or new.git.dirty


# --- a run in words -------------------------------------------------------------------------------


def flat_items(part: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return all values of a record and of the records in it, by name: ("lora.rank", 32)."""
    values = part if isinstance(part, dict) else msgspec.to_builtins(part)
    found = []
    for name, value in values.items():
        inside = isinstance(value, dict)
        found += flat_items(value, f"{prefix}{name}.") if inside else [(f"{prefix}{name}", value)]
    return found


def in_words(value: Any) -> str:
    """Return a value of results.json as people write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(in_words, value))
    return str(value)


def first_few(items: list[str], separator: str = "; ") -> str:
    """Return the first three items, and how many more there are."""
    more = [f"and {len(items) - 3} more"] if len(items) > 3 else []
    return separator.join(items[:3] + more)
