"""The generated parts of README.md and docs/*.md, from the published runs: no GPU, no torch.

A part stands between <!-- name:begin --> and <!-- name:end -->, in whichever of them has those.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.records import Run
from bench.results import write_atomically
from bench.training_records import Fp8Training
from report import tables
from report.beside_floor import beside_floor_section
from report.beside_published import published_section
from report.comparison import compare
from report.fp8_training import fp8_training_section
from report.gpus import expected_section, measured_section
from report.headline import answer, headline_table
from report.losses import losses_section
from report.padding import ChatGroup, padding_section
from report.recipes import recipes_section
from report.suite_tables import (
    against_unsloth_section,
    effects_section,
    parts_section,
    peers_section,
)


def generated(
    run: Run,
    second_run: Run,
    suite: Run,
    beside_unsloth: Sequence[Run],
    quick: Sequence[Run] = (),
    of_others: Sequence[Run] = (),
    recipes: Sequence[Run] = (),
    losses: Sequence[Run] = (),
    lengths: Sequence[ChatGroup] = (),
    fp8_trainings: Sequence[Fp8Training] = (),
    fp8_steps: Sequence[Run] = (),
    long_rows: Sequence[Run] = (),
) -> dict[str, str]:
    """Write every part, by name.

    run: the experiment. second_run: the same on another day, and the kernels alone. suite: every
    part and peer. beside_unsloth: all parts and Unsloth again, in more steps. quick: what others
    measured, each on a GPU. of_others: runs in the settings that others publish speeds for.
    recipes: runs with adapters on some projections alone, or with dropout. losses: of many steps.
    lengths: of padded rows and of documents. fp8_trainings: in bf16 and FP8, a file a GPU.
    fp8_steps: of layers in FP8. long_rows: of thousands of tokens.
    """
    return {
        "answer": answer(run),
        "headline": headline_table(run, lengths),
        "results": tables.results_section(run),
        "kernels": tables.kernels_section(second_run),
        "kinds": tables.kinds_section(run),
        "second run": tables.comparison_table(compare(run, second_run)),
        "peers": peers_section(suite),
        "unsloth": against_unsloth_section([suite, *beside_unsloth]),
        "parts": parts_section(suite),
        "effects": effects_section(suite),
        "gpus": measured_section([run, second_run, suite, *quick]),
        "expected": expected_section(run),
        "published": published_section(of_others),
        "recipes": recipes_section(recipes),
        "losses": losses_section(losses),
        "padding": padding_section(lengths),
        "fp8 training": fp8_training_section(fp8_trainings),
        "fp8 steps": beside_floor_section(fp8_steps),
        "long rows": beside_floor_section(long_rows),
    }


def update(root: Path, parts: dict[str, str]) -> list[Path]:
    """Put each part between its markers, wherever those are; returns the files that changed.

    Raises:
        ValueError: a part has no place, or several, or a place has no part.
    """
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    texts = {path: path.read_bytes().decode() for path in paths}
    after = dict(texts)
    for name, part in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        places = [path for path in paths if begin in after[path]]
        text = after[places[0]] if len(places) == 1 else ""
        if not (text.count(begin) == text.count(end) == 1 and text.find(begin) < text.find(end)):
            raise ValueError(
                f"README.md and docs/*.md want {begin} and then {end}, once among them: add them"
            )
        head, tail = text.split(begin)[0], text.split(end)[1]
        after[places[0]] = f"{head}{begin}\n\n{part}\n\n{end}{tail}"
    changed = [path for path in paths if after[path] != texts[path]]
    for path in changed:
        write_atomically(path, after[path].encode())
    return changed
