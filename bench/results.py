"""results.json: how we save, load and continue runs.

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
from typing import Any

import msgspec

from bench.experiment_records import COMPARED_PACKAGES, Environment, Experiment
from bench.folders import unfinished_beside
from bench.records import Run

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


# --- continuing -----------------------------------------------------------------------------------


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
