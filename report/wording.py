"""Words that pictures and tables share: a status, a peer's release, the caption of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bench.experiment_records import COMPARED_PACKAGES, Environment, Git
from bench.records import Run, SummaryRow
from report.table import number
from variants import AGAIN, BASELINE, BF16, SUITES, TARGETS, Variant, title_of, variant_of

STATUS_WORDS = {
    "oom": "out of memory",
    "error": "error",
    "unavailable": "unavailable",
    "parity_failed": "failed parity",
}
REHEARSAL_NOTICE = "REHEARSAL without a GPU: not a performance result"
# By a recipe's library: a peer's name in titles, and the package whose release a run records.
PEERS = {"unsloth": ("Unsloth", "unsloth"), "liger": ("Liger", "liger_kernel")}
# Shown beside the experiment's variants if a suite has more than fit in a picture.
STRONGEST = (
    *("fused_all", "compiled_peft_bf16_adapters", "liger_peft"),
    *("fused_layer", "fused_layer_graph", "compiled_peft"),
)
MANY, FEW = 8, 4  # with more than FEW, the table has what a picture leaves out


def shown_variants(run: Run) -> list[str]:
    """Return the variants that fit in a picture of all lengths, the baseline first. The A/A twin
    shows as a band, not as a variant."""
    asked = run.experiment.variants
    if len(asked) > MANY:
        known = [v for v in (*SUITES["experiment"], *STRONGEST) if v in asked]
        asked = known[: MANY + 1] or asked[:MANY]
    return sorted((v for v in asked if v != AGAIN), key=lambda v: v != BASELINE)


def why_no_time(run: Run, variant: str, seq_len: int) -> str:
    """Say why a variant has no time. If it has one, say why the GPU's own time is missing."""
    return STATUS_WORDS.get(run.status_of(variant, seq_len) or "", "not measured")


def step_or_status(row: SummaryRow | None) -> str:
    """Return the ms of a step, or the reason why there is no time."""
    return (number(row.median_step_ms, 1) or STATUS_WORDS.get(row.status, "")) if row else ""


def on_base(run: Run) -> str:
    """Return " on NF4" for a base in 4 bits, and nothing for one in bf16."""
    base = run.experiment.base
    return "" if base == BF16 else f" on {base.upper()}"


def floor_words(run: Run) -> str:
    """Say which operations the floor has."""
    first = "frozen matmuls" if run.experiment.base == BF16 else "dequantising, frozen matmuls"
    return f"Floor: {first}, attention and lm_head alone."


def is_in_fp8(variant: Variant) -> bool:
    return variant.recipe is not None and variant.recipe.fp8


def title_in(variant: str, *runs: Run, title: str = "") -> str:
    """Return a variant's title. A peer's has the release that these runs recorded: "full Unsloth
    2026.10.9". If the runs differ, it has one for each, in their order. title: use this instead."""
    title, recipe = title or title_of(variant), variant_of(variant).recipe
    if recipe is None or recipe.library not in PEERS:
        return title
    peer, package = PEERS[recipe.library]
    return title.replace(peer, f"{peer} {release_of(package, *runs)}".rstrip(), 1)


def release_of(package: str, *runs: Run) -> str:
    """Return a package's release in these runs, or "" if none had it."""
    releases = [run.environment.packages.get(package) or "none" for run in runs]
    found = releases[:1] if len(set(releases)) == 1 else releases
    return "" if found == ["none"] else " / ".join(found)


def packages_in(environment: Environment, names: Sequence[str]) -> list[str]:
    """Return the installed packages, each with its release."""
    return [f"{name} {found}" for name in names if (found := environment.packages.get(name))]


def commit_in(environment: Environment) -> str:
    """Say which commit was measured, and whether it had local changes."""
    git = environment.git or Git("unknown", False)
    commit = re.sub(r"[0-9a-f]{40}", lambda found: found[0][:10], git.commit)
    return f"Commit {commit}{' with local changes' if git.dirty else ''}."


def caption_with_commit(run: Run) -> str:
    return f"{caption(run)} {commit_in(run.environment)}"


def caption(run: Run) -> str:
    """Say what a run was measured on, and how."""
    asked, lora = run.experiment, run.experiment.lora
    # a merged or unfinished run has more rounds of some variants than of others
    timed = [cells for key in run.measured() if (cells := run.cells_of(*key, "ok"))]
    steps = from_to(sum(len(cell.step_ms) for cell in cells) for cells in timed)
    cards = f" ({run.cards()} cards, one after the other)" if run.cards() > 1 else ""
    gpus = f"{asked.gpus} × " if asked.gpus > 1 else ""
    rows = ", whole chats in one row" if asked.documents else ", padded" if asked.padded else ""
    where = f" on {', '.join(lora.targets)}" if len(lora.targets) < len(TARGETS) else ""
    dropout = f", dropout {lora.dropout:g}" if lora.dropout else ""
    # a suite may mix variants with and without checkpointing, whatever its option says
    found = {variant_of(variant).checkpoints for variant in asked.variants}
    checkpointing = [asked.checkpointing] * (True in found) + ["off"] * (False in found)
    facts = [
        gpus + run.environment.device + cards, *packages_in(run.environment, COMPARED_PACKAGES),
        asked.model + on_base(run), asked.dtype, f"batch {asked.batch_size}{rows}",
        *([f"{asked.accumulate} micro-batches a step"] if asked.accumulate > 1 else []),
        f"{'DoRA' if lora.dora else 'LoRA'} rank {lora.rank}{where}{dropout}",
        f"gradient checkpointing {' and '.join(checkpointing)}",
        f"{steps} timed steps each{interleaved(run)}", f"rounds: {from_to(map(len, timed))}",
    ]  # fmt: skip
    return " · ".join(facts) + "."


def setting(run: Run) -> str:
    """Say what a run was measured on, in one line."""
    asked, release = run.experiment, release_of("unsloth", run)
    unsloth = f", Unsloth {release}" if "full_unsloth" in asked.variants and release else ""
    base = asked.model + on_base(run)
    return f"{run.environment.device}, {base}, batch {asked.batch_size}{unsloth}"


def interleaved(run: Run) -> str:
    """Say how many steps a variant took at a time, and at which lengths unless at all of them.
    Empty if it took all steps at once."""
    at = sorted({cell.seq_len for cell in run.cells_of(status="ok") if cell.turn_steps})
    if not at:
        return ""
    where = f" at {', '.join(map(str, at))}" if at != run.experiment.seq_lens else ""
    return f", interleaved {run.experiment.interleave} at a time{where}"


def from_to(values: Iterable[float], digits: int = 0) -> str:
    """Return the smallest and the largest in words: "75", "75 to 100" or "no"."""
    found = sorted(values)
    ends = [f"{end:.{digits}f}" for end in found[:1] + found[-1:]] or ["no"]
    return " to ".join(dict.fromkeys(ends))


def roughly(values: Sequence[float]) -> str:
    """Return speedups in words, as precisely as they agree: "a steady 1.22×" (the last one), "about
    1.6×" or "2.3× to 2.6×"."""
    low, high = min(values), max(values)
    if len(values) == 1:
        return f"{high:.2f}×"
    if high / low < 1.01:
        return f"a steady {values[-1]:.2f}×"
    if len(rounded := {f"{value:.1f}×" for value in values}) == 1:
        return f"about {rounded.pop()}"
    return f"{low:.1f}× to {high:.1f}×"
