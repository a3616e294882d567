"""What all pictures and tables share: how a variant looks, words for what has no time, what a run
was measured on. No torch, no matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bench.results import COMPARED_PACKAGES
from report.names import name_of
from report.statistics import BASELINE, BASELINE_AGAIN, NO_CHECKPOINTING, summarize


class Look(NamedTuple):
    """How a variant shows in every panel; marker and hatch tell it apart without colour."""

    name: str
    colour: str
    marker: str
    hatch: str


LOOKS = {
    BASELINE: Look(name_of(BASELINE), "#8a8a8a", "o", ""),
    BASELINE_AGAIN: Look(name_of(BASELINE_AGAIN), "#8a8a8a", "o", ""),
    "fused_mlp": Look(name_of("fused_mlp"), "#c81e2b", "s", "///"),
    "full_unsloth": Look(name_of("full_unsloth"), "#8250df", "^", "..."),
}
STATUS_WORDS = {
    "oom": "out of memory",
    "error": "error",
    "unavailable": "unavailable",
    "parity_failed": "failed parity",
}
REHEARSAL = "REHEARSAL without a GPU: not a performance result"
STYLE = {
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#e4e4e4"},
    **{"axes.titlesize": 14, "axes.titleweight": "bold", "axes.titlelocation": "left"},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    **{"font.size": 12, "legend.fontsize": 10.5, "lines.linewidth": 2, "lines.markersize": 9},
}


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    ruled = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)


def caption(results: dict) -> str:
    experiment, environment = results["experiment"], results["environment"]
    # a run that was merged, or is not finished, has more rounds of some variants than of others
    timed = [row for row in summarize(results) if row["status"] == "ok"]
    facts = [(environment["gpu"] or {"name": f"no GPU ({environment['cpu']})"})["name"]]
    versions = {name: environment["packages"].get(name) for name in COMPARED_PACKAGES}
    facts += [f"{name} {version}" for name, version in versions.items() if version]
    facts += [
        experiment["model"],
        experiment["dtype"],
        f"batch {experiment['batch_size']}" + (", padded" if experiment["padded"] else ""),
        f"LoRA rank {experiment['lora']['rank']}",
        f"gradient checkpointing {_checkpointing(experiment)}",
        f"{_from_to(row['steps'] for row in timed)} timed steps each{in_turns(experiment)}",
        f"rounds: {_from_to(row['rounds'] for row in timed)}",
    ]
    return " · ".join(facts) + "."


def _checkpointing(experiment: dict) -> str:
    """A suite has variants with it, variants without it, or both, whatever its option says."""
    without = {variant.endswith(NO_CHECKPOINTING) for variant in experiment["variants"]}
    if without == {False}:
        return experiment["checkpointing"]
    return "off" if without == {True} else f"{experiment['checkpointing']} and off"


def in_turns(experiment: dict) -> str:
    """How many steps a variant took at a time, in words; nothing where it took all of them."""
    turn_steps = experiment.get("turn_steps")
    return f" in turns of {turn_steps}" if turn_steps else ""


def _from_to(counts: Iterable[int]) -> str:
    found = sorted(set(counts))
    return "no" if not found else str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
