"""The words and style that all pictures and tables share: a status in words, the caption of a run.
No torch, no matplotlib."""

from __future__ import annotations

from collections.abc import Iterable

from bench.records import COMPARED_PACKAGES, Experiment, Run
from variants import AGAIN, BASELINE, SUITES, TARGETS, Lora, title_of, variant_of

STATUS_WORDS = {
    "oom": "out of memory",
    "error": "error",
    "unavailable": "unavailable",
    "parity_failed": "failed parity",
}
REHEARSAL_NOTICE = "REHEARSAL without a GPU: not a performance result"
# By a recipe's library: what titles call a peer, and the package whose release a run records.
PEERS = {"unsloth": ("Unsloth", "unsloth"), "liger": ("Liger", "liger_kernel")}
FLOOR_WORDS = "Floor: frozen products, attention and lm_head alone."
STYLE = {
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#e4e4e4"},
    **{"axes.titlesize": 14, "axes.titleweight": "bold", "axes.titlelocation": "left"},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    **{"font.size": 12, "legend.fontsize": 10.5, "lines.linewidth": 2, "lines.markersize": 9},
}

# What stands beside these where a suite has more variants than a picture can hold.
STRONGEST = (
    *("fused_all", "compiled_peft_bf16_adapters", "liger_peft"),
    *("fused_layer", "fused_layer_graph", "compiled_peft"),
)
MANY = 8


def shown_variants(run: Run) -> list[str]:
    """The variants that a picture of all lengths has room for, the baseline first; its A/A twin
    shows as a band and not as a variant."""
    asked = run.experiment.variants
    if len(asked) > MANY:
        known = [v for v in (*SUITES["experiment"], *STRONGEST) if v in asked]
        asked = known[: MANY + 1] or asked[:MANY]
    return sorted((v for v in asked if v != AGAIN), key=lambda v: v != BASELINE)


def why_no_time(run: Run, variant: str, seq_len: int) -> str:
    """Say in words why a variant has no time; where it has, why the GPU's own is not there."""
    return STATUS_WORDS.get(run.status_of(variant, seq_len) or "", "not measured")


def title_in(variant: str, *runs: Run, title: str = "") -> str:
    """Return a variant's title, a peer's with the release that these runs recorded: "full Unsloth
    2026.10.9"; where they differ, with one for each, in the runs' order. title: instead of its own.
    """
    title, recipe = title or title_of(variant), variant_of(variant).recipe
    if recipe is None or recipe.library not in PEERS:
        return title
    peer, package = PEERS[recipe.library]
    return title.replace(peer, f"{peer} {release_of(package, *runs)}".rstrip(), 1)


def release_of(package: str, *runs: Run) -> str:
    """Return a package's release in these runs, "" where none had it."""
    releases = [run.environment.packages.get(package) or "none" for run in runs]
    found = releases[:1] if len(set(releases)) == 1 else releases
    return "" if found == ["none"] else " / ".join(found)


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    ruled = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)


def caption(run: Run) -> str:
    experiment, environment = run.experiment, run.environment
    # a run that was merged, or is not finished, has more rounds of some variants than of others
    timed = [cells for key in run.measured() if (cells := run.cells_of(*key, "ok"))]
    packages = environment.packages
    cards = f" ({run.cards()} cards, one after the other)" if run.cards() > 1 else ""
    facts = [environment.device + cards]
    facts += [f"{name} {packages[name]}" for name in COMPARED_PACKAGES if packages.get(name)]
    facts += [
        experiment.model,
        experiment.dtype,
        f"batch {experiment.batch_size}" + _rows(experiment),
        *([f"{experiment.accumulate} micro-batches a step"] if experiment.accumulate > 1 else []),
        _adapters(experiment.lora),
        f"gradient checkpointing {_checkpointing(experiment)}",
        f"{from_to(sum(len(cell.step_ms) for cell in cells) for cells in timed)} timed steps each"
        f"{interleaved(run)}",
        f"rounds: {from_to(map(len, timed))}",
    ]
    return " · ".join(facts) + "."


def _rows(experiment: Experiment) -> str:
    if experiment.documents:
        return ", whole chats in one row"
    return ", padded" if experiment.padded else ""


def _adapters(lora: Lora) -> str:
    where = f" on {', '.join(lora.targets)}" if len(lora.targets) < len(TARGETS) else ""
    dropout = f", dropout {lora.dropout:g}" if lora.dropout else ""
    return f"LoRA rank {lora.rank}{where}{dropout}"


def _checkpointing(experiment: Experiment) -> str:
    """A suite has variants with it, variants without it, or both, whatever its option says."""
    found = {variant_of(variant).checkpoints for variant in experiment.variants}
    if found == {True}:
        return experiment.checkpointing
    return "off" if found == {False} else f"{experiment.checkpointing} and off"


def interleaved(run: Run) -> str:
    """Say how many steps a variant took at a time, and where that was not so at every length; empty
    where it took all of them."""
    timed = run.cells_of(status="ok")
    at = sorted({cell.seq_len for cell in timed if cell.turn_steps})
    if not at:
        return ""
    where = f" at {', '.join(map(str, at))}" if at != run.experiment.seq_lens else ""
    return f", interleaved {run.experiment.interleave} at a time{where}"


def from_to(counts: Iterable[int]) -> str:
    """The counts in words: "75", "75 to 100" or "no"."""
    found = sorted(set(counts))
    return "no" if not found else str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
