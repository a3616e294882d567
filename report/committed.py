"""The published files in docs/runs/, and the generated parts of README.md and pages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec

from bench import results as store
from bench.options import HERE
from bench.records import Run
from bench.results import write_atomically
from report import suite_tables, tables
from report.headline import (
    Card,
    answer,
    expected_section,
    headline_table,
    measured_section,
)
from report.published import published_section
from report.several_gpus import several_gpus_section

DOCS = HERE / "docs"
# Files in docs/runs/ that programs of dev/measure/ wrote, or one that is gone: no runs.
OF_NO_RUN = "fp8_training", "small_adapters", "weight_statistics"


class Index(msgspec.Struct, frozen=True):
    """docs/runs/index.toml: the files that pages name, and data sheets. cards: the published run's
    comes first."""

    suite: str
    kernels: str
    small_adapters: str
    cards: list[Card]

    def card(self, name: str) -> Card:
        return next(card for card in self.cards if name in card.name)


def index() -> Index:
    return msgspec.toml.decode((DOCS / "runs" / "index.toml").read_bytes(), type=Index)


def suite_path() -> Path:
    """Return the file of the suite, the run that has every part and peer."""
    return DOCS / "runs" / index().suite


def small_adapters() -> dict[str, Any]:
    """Return the file of small adapters, as dev/measure/small_adapters.py wrote it."""
    packed = (DOCS / "runs" / index().small_adapters).read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(packed))
    return found


def loaded(name: str) -> dict[str, Run]:
    """Return the published runs of this name, on every GPU, by the path from docs/runs/."""
    runs = DOCS / "runs"
    paths = sorted(runs.glob(f"{name}.json.gz"))
    return {path.relative_to(runs).as_posix(): store.load(path) for path in paths
            if not path.name.startswith(OF_NO_RUN)}  # fmt: skip


def loaded_several_gpus() -> list[Run]:
    """Return the published runs on several GPUs, those of one kind together, the fewest first."""
    runs = loaded("*/gpus-*").values()
    return sorted(runs, key=lambda run: (run.environment.device, run.experiment.gpus))


def _by_link(run: Run, *names: str) -> dict[str, Run]:
    """Return the experiment and the published runs of these names, by the path from docs/."""
    found = {f"runs/{path}": one for name in names for path, one in loaded(name).items()}
    return {"../results.json": run, **found}


def generated_parts(run: Run) -> dict[str, str]:
    """Write every part, by name. run: the experiment."""
    known = index()
    suite, kernels = (store.load(DOCS / "runs" / path) for path in (known.suite, known.kernels))
    return {
        "answer": answer(run),
        "headline": headline_table(run),
        "results": tables.results_section(run),
        "kernels": tables.kernels_section(kernels),
        "kinds": tables.kinds_section(run),
        "peers": suite_tables.peers_section(suite),
        "parts": suite_tables.parts_section(suite),
        "effects": suite_tables.effects_section(suite),
        "gpus": measured_section(_by_link(run, "*/experiment", "*/quick", "*/suite")),
        "several gpus": several_gpus_section(loaded_several_gpus()),
        "expected": expected_section(run, known.cards[0], known.card("A100"), known.card("L40S")),
        "a100": expected_section(run, known.cards[0], known.card("A100")),
        "published": published_section(loaded("*/published-*").values()),
        "nf4 steps": tables.beside_floor_section(loaded("*/nf4*").values()),
        "dora": "\n\n".join(map(suite_tables.peers_section, loaded("*/dora").values())),
        "fp8 steps": tables.beside_floor_section(loaded("*/fp8_lengths").values()),
    }


def update_pages(root: Path, parts: dict[str, str]) -> list[Path]:
    """Put each part between <!-- name:begin --> and <!-- name:end --> on the page that has those
    markers. Return the pages that changed.

    Raises ValueError if a part has no place or several, or a place has no part.
    """
    folders = (root / "docs", root / "fused_lora" / "docs")
    paths = [
        root / "README.md",
        *(page for folder in folders for page in sorted(folder.glob("*.md"))),
    ]
    texts = {path: path.read_bytes().decode() for path in paths}
    after = dict(texts)
    for name, part in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        places = [path for path in paths if begin in after[path]]
        text = after[places[0]] if len(places) == 1 else ""
        if not (text.count(begin) == text.count(end) == 1 and text.find(begin) < text.find(end)):
            raise ValueError(
                f"README.md and the pages in docs/ and fused_lora/docs/ want {begin} and then "
                f"{end}, once among them: add them"
            )
        head, tail = text.split(begin)[0], text.split(end)[1]
        after[places[0]] = f"{head}{begin}\n\n{part}\n\n{end}{tail}"
    changed = [path for path in paths if after[path] != texts[path]]
    for path in changed:
        write_atomically(path, after[path].encode())
    return changed
