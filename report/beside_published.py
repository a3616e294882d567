"""The table of what others publish, beside what ours, plain PEFT and Unsloth do in the same setting
(`bench/published.py`), in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.published import SETTINGS, PublishedSetting
from bench.records import Run, SummaryRow
from report.looks import STATUS_WORDS, markdown_table
from report.statistics import summarize
from variants import BASELINE, SUITES, Variant, title_of, variant_of

HEADER = ["model", "a step: batches × rows × tokens", "they publish, tokens/s",
          "ours, tokens/s", "ratio", "Unsloth here", "vanilla PEFT here", "GPU here"]  # fmt: skip
EXPLAINED = (
    "Their numbers are as published, on {gpus}; the others were measured in a run on the GPU "
    "that is named: the fastest of ours, full Unsloth and plain PEFT, all with LoRA rank 16 on all "
    "seven projections and random weights. The ratio is ours over theirs: of two machines and two "
    "days, so no speedup. FP8 is another precision than bf16, in which NeMo's, Unsloth's and "
    "PEFT's numbers are."
)


def published_section(runs: Sequence[Run]) -> str:
    """Write the heading, the table and its sources; nothing where no run is of such a setting."""
    settings = [setting for run in runs if (setting := setting_that_ran(run))]
    if not settings:
        return ""
    gpus = " and ".join(dict.fromkeys(f"one {setting.gpu}" for setting in settings))
    pages = dict.fromkeys(setting.page for setting in settings)
    sources = [f"- [{page.name}]({page.url}), {page.date}" for page in pages]
    sources += [f"- {one.model}: {one.differs}." for one in dict.fromkeys(settings) if one.differs]
    blocks = ["## Beside what others publish", published_rows(runs), EXPLAINED.format(gpus=gpus)]
    return "\n\n".join([*blocks, "\n".join(sources), speeds_by_variant(runs)])


def speeds_by_variant(runs: Sequence[Run]) -> str:
    """Write the tokens a second of every variant of such runs of the suite, a column a run."""
    runs = [run for run in runs if setting_that_ran(run) and BASELINE in run.experiment.variants]
    rows = [{row.variant: row for row in summarize(run)} for run in runs]
    lines = [
        [title_of(id), *(_in_words(row.get(id)) or "not measured" for row in rows)]
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
            here = [_in_words(ours, with_title=True), ratio, _in_words(unsloth, with_title=True)]
            here += [_in_words(rows.get(BASELINE)), f"{run.environment.device}, {day}"]
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


def _in_words(row: SummaryRow | None, with_title: bool = False) -> str:
    if row is None:
        return ""
    if row.tokens_per_s is None:
        return STATUS_WORDS.get(row.status, "")
    title = f" ({variant_of(row.variant).title})" if with_title else ""
    return f"{row.tokens_per_s:,.0f}{title}"
