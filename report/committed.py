"""The runs that are committed, and the generated parts of README.md and docs/*.md, made of them."""

from __future__ import annotations

from bench import results as store
from bench.options import HERE
from bench.peers import pins
from bench.records import Run
from bench.small_adapter_records import SmallAdapters, load_small_adapters
from bench.training_records import Fp8Training, load_training
from report import tables
from report.beside_floor import beside_floor_section
from report.beside_published import published_section
from report.comparison import compare
from report.fp8_training import fp8_training_section
from report.gpus import expected_section, measured_section
from report.headline import answer, headline_table
from report.losses import losses_section
from report.padding import ChatGroup, groups, padding_section
from report.recipes import recipes_section
from report.releases import releases_section
from report.small_adapters import small_adapters_section
from report.suite_tables import (
    against_unsloth_section,
    effects_section,
    parts_section,
    peers_section,
)

H200 = HERE / "docs" / "runs" / "h200"
# The experiment once more, on other machines: how far to trust the published run.
SECOND_RUN = H200 / "experiment_2026-11-24.json.gz"
KERNELS = H200 / "experiment_2026-11-20.json.gz"  # has the kernels' own times
SUITE = H200 / "suite.json.gz"  # every part and peer, a run of its own
# Of any GPU
BESIDE_UNSLOTH = "beside_unsloth/*"  # all parts and Unsloth again, in more steps
BY_GPU = ("experiment", "quick")  # what is measured on each GPU, whole or with --quick
PUBLISHED = "published-*"  # in the settings that others publish speeds for
RECIPES = "recipe-*"  # adapters on some projections alone, or dropout
LOSSES = "loss_curve*"  # many steps, a run a seed
FP8_STEPS = "fp8_lengths"  # layers in FP8 beside those in bf16
LONG_ROWS = "long_rows"  # of thousands of tokens
FP8_TRAININGS = "fp8_training*"
SMALL_ADAPTERS = "small_adapters*"


def loaded(name: str) -> list[Run]:
    """Return the committed runs of this name, of every GPU."""
    return [store.load(path) for path in sorted(HERE.glob(f"docs/runs/*/{name}.json.gz"))]


def loaded_trainings() -> list[Fp8Training]:
    """Return the committed trainings in bf16 and FP8."""
    paths = sorted(HERE.glob(f"docs/runs/*/{FP8_TRAININGS}.json.gz"))
    return [load_training(path) for path in paths]


def loaded_small_adapters() -> list[SmallAdapters]:
    """Return the committed measurements of small adapters, those of a GPU first."""
    paths = sorted(HERE.glob(f"docs/runs/*/{SMALL_ADAPTERS}.json.gz"))
    return sorted(map(load_small_adapters, paths), key=lambda one: one.environment.gpu is None)


def groups_of_lengths() -> list[ChatGroup]:
    """Return the committed runs `padded-NAME` and `documents-NAME`, by data set and GPU."""

    def named(kind: str) -> list[tuple[str, Run]]:
        paths = sorted(HERE.glob(f"docs/runs/*/{kind}-*.json.gz"))
        ends = [path.name.removesuffix(".json.gz").partition("-")[2] for path in paths]
        return [(name, store.load(path)) for name, path in zip(ends, paths, strict=True)]

    return groups(named("padded"), named("documents"))


def measured_by_gpu(run: Run) -> dict[str, Run]:
    """Return the experiment and what others measured of it, by the path from docs/."""
    found = {"../results.json": run}
    for name in BY_GPU:
        for path in sorted(HERE.glob(f"docs/runs/*/{name}.json.gz")):
            found[path.relative_to(HERE / "docs").as_posix()] = store.load(path)
    return found


def runs_by_link(run: Run) -> dict[str, Run]:
    """Return the experiment and every committed run, by the path from docs/."""
    paths = sorted(HERE.glob("docs/runs/**/*.json.gz"))
    others = tuple(name.rstrip("*") for name in (FP8_TRAININGS, SMALL_ADAPTERS))
    paths = [path for path in paths if not path.name.startswith(others)]
    found = {path.relative_to(HERE / "docs").as_posix(): store.load(path) for path in paths}
    return {"../results.json": run, **found}


def generated_parts(run: Run, suite: Run) -> dict[str, str]:
    """Write every part, by name. run: the experiment."""
    second_run, lengths = store.load(SECOND_RUN), groups_of_lengths()
    return {
        "answer": answer(run),
        "headline": headline_table(run, lengths),
        "results": tables.results_section(run),
        "kernels": tables.kernels_section(store.load(KERNELS)),
        "kinds": tables.kinds_section(run),
        "second run": tables.comparison_table(compare(run, second_run)),
        "peers": peers_section(suite),
        "unsloth": against_unsloth_section([suite, *loaded(BESIDE_UNSLOTH)]),
        "parts": parts_section(suite),
        "effects": effects_section(suite),
        "gpus": measured_section(measured_by_gpu(run)),
        "expected": expected_section(run),
        "published": published_section(loaded(PUBLISHED)),
        "releases": releases_section(pins(), runs_by_link(run)),
        "recipes": recipes_section(loaded(RECIPES)),
        "losses": losses_section(loaded(LOSSES)),
        "padding": padding_section(lengths),
        "fp8 training": fp8_training_section(loaded_trainings()),
        "small adapters": small_adapters_section(loaded_small_adapters()),
        "fp8 steps": beside_floor_section(loaded(FP8_STEPS)),
        "long rows": beside_floor_section(loaded(LONG_ROWS)),
    }
