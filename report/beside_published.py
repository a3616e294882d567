"""The table of what others publish, beside what ours, vanilla PEFT and Unsloth do in the same
setting (`bench/published.py`), in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.published import SETTINGS, PublishedSetting
from bench.records import Run, SummaryRow
from report.looks import STATUS_WORDS, markdown_table, title_in
from report.statistics import summarize
from variants import BASELINE, SUITES, Variant, variant_of

HEADER = ["model", "a step: batches × rows × tokens", "they publish, tokens/s",
          "ours, tokens/s", "ours / theirs", "the fastest Unsloth here, tokens/s",
          "vanilla PEFT here, with checkpointing", "measured here on"]  # fmt: skip
EXPLAINED = (
    "Theirs is as published, on {gpus}. All other numbers were measured here, with LoRA rank 16 on "
    "all seven projections and random weights: the fastest of our variants, the fastest of "
    'Unsloth\'s, and vanilla PEFT, which runs with checkpointing alone. "Ours / theirs" is of two '
    "machines and two days, so no speedup. FP8 is another precision than bf16, in which NeMo's, "
    "Unsloth's and PEFT's numbers are."
)
# What a run's file does not tell: it was cut off, and its last cells are of another GPU of the same
# kind. By model and start, from which variant of the suite on.
SECOND_MACHINE = {
    ("llama3-8b", "2026-11-24T21:40:29+00:00"): "full_unsloth_no_checkpointing",
    ("qwen2.5-7b", "2026-11-24T21:40:29+00:00"): "fused_all_no_checkpointing",
    ("qwen3-0.6b", "2026-11-24T22:03:28+00:00"): "full_unsloth_no_checkpointing",
}
MARK = "ᵃ"
MARKED = f"{MARK}: measured on a second H100, on which a run that was cut off was finished."


def published_section(runs: Sequence[Run]) -> str:
    """Write the heading, the table and its sources; nothing where no run is of such a setting."""
    settings = [setting for run in runs if (setting := setting_that_ran(run))]
    if not settings:
        return ""
    gpus = " and ".join(dict.fromkeys(f"one {setting.gpu}" for setting in settings))
    pages = dict.fromkeys(setting.page for setting in settings)
    sources = [f"- [{page.name}]({page.url}), {page.date}" for page in pages]
    sources += [f"- {one.model}: {one.differs}." for one in dict.fromkeys(settings) if one.differs]
    rows, by_variant = published_rows(runs), speeds_by_variant(runs)
    blocks = ["## Beside what others publish", rows]
    blocks += [MARKED] if MARK in rows + by_variant else []
    blocks += [EXPLAINED.format(gpus=gpus), "\n".join(sources), by_variant]
    return "\n\n".join(blocks)


def speeds_by_variant(runs: Sequence[Run]) -> str:
    """Write the tokens a second of every variant of such runs of the suite, a column a run."""
    runs = [run for run in runs if setting_that_ran(run) and BASELINE in run.experiment.variants]
    rows = [(run, {row.variant: row for row in summarize(run)}) for run in runs]
    lines = [
        [title_in(id, *runs), *(_in_words(run, row.get(id)) or "not measured" for run, row in rows)]
        for id in SUITES["published"]
    ]
    return markdown_table(["tokens/s", *(run.experiment.model for run in runs)], lines)


def published_rows(runs: Iterable[Run]) -> str:
    """Write a row for each number that others publish in the setting of each run."""
    lines = []
    for run in runs:
        if (setting := setting_that_ran(run)) is None:
            continue
        rows = {row.variant: row for row in summarize(run)}
        of_ours = [r for r in rows.values() if r.tokens_per_s and variant_of(r.variant).is_ours]
        ours = max(of_ours, key=_speed, default=None)
        unsloth = max((r for r in rows.values() if _is_unsloth(variant_of(r.variant))),
                      key=_speed, default=None)  # fmt: skip
        step = f"{setting.accumulate} × {setting.batch_size} × {setting.seq_len:,}"
        day = run.started_utc[:10]
        claims = setting.claims
        if ours is not None and _is_in_fp8(variant_of(ours.variant)):
            claims = tuple(one for one in claims if "FP8" in one.by) or claims
        for claim in claims:
            ratio = f"{_speed(ours) / claim.tokens_per_s:.2f}" if ours else ""
            theirs = f"{claim.by}: {claim.tokens_per_s:,}"
            here = [_in_words(run, ours, with_title=True), ratio]
            here += [_in_words(run, unsloth, with_title=True), _in_words(run, rows.get(BASELINE))]
            here.append(f"{run.environment.device}, {day}")
            lines.append([setting.model, step, theirs, *here])
    return markdown_table(HEADER, lines) if lines else ""


def setting_that_ran(run: Run) -> PublishedSetting | None:
    """Return the setting of others that a run has, None where it has another."""
    setting, ran = SETTINGS.get(run.experiment.model), run.experiment
    if setting is None or run.rehearsal:
        return None
    found = {
        "batch_size": ran.batch_size,
        "seq_lens": ran.seq_lens,
        "accumulate": ran.accumulate,
        "rank": ran.lora.rank,
        "targets": list(ran.lora.targets),
        "lora_dropout": ran.lora.dropout,
        "padded": ran.padded,
        "documents": ran.documents,
        "checkpointing": ran.checkpointing,
    }
    return setting if found == setting.is_that() else None


def _speed(row: SummaryRow) -> float:
    return row.tokens_per_s or 0.0


def _is_unsloth(variant: Variant) -> bool:
    return variant.recipe is not None and variant.recipe.library == "unsloth"


def _is_in_fp8(variant: Variant) -> bool:
    return variant.recipe is not None and variant.recipe.fp8


def _in_words(run: Run, row: SummaryRow | None, with_title: bool = False) -> str:
    if row is None:
        return ""
    if row.tokens_per_s is None:
        return STATUS_WORDS.get(row.status, "")
    title = f" ({title_in(row.variant, run)})" if with_title else ""
    return f"{row.tokens_per_s:,.0f}{_mark(run, row.variant)}{title}"


def _mark(run: Run, id: str) -> str:
    suite = SUITES["published"]
    since = SECOND_MACHINE.get((run.experiment.model, run.started_utc))
    later = since and id in suite and suite.index(id) >= suite.index(since)
    return MARK if later else ""
