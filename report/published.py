"""The tables of others' published numbers, beside ours, vanilla PEFT's and Unsloth's in the same
setting (`bench/published.py`), in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bench.published import SETTINGS, Claim, PublishedSetting
from bench.records import Run, SummaryRow
from report.statistics import summarize
from report.table import Column, markdown_table, table, thousands
from report.wording import STATUS_WORDS, Footnote, is_in_fp8, is_unsloth, title_in
from variants import BASELINE, SUITES, variant_of

EXPLAINED = (
    "Theirs is as published, on {gpus}. All other numbers were measured here, with LoRA rank 16 on "
    "all seven projections and random weights: the fastest of our variants, the fastest of "
    'Unsloth\'s, and vanilla PEFT, which runs with checkpointing alone. "Ours / theirs" is of two '
    "machines and two days, so no speedup. FP8 is another precision than bf16, in which NeMo's, "
    "Unsloth's and PEFT's numbers are."
)


class Measured(NamedTuple):
    """A run of a setting, its summary by variant, and its footnote if it has one."""

    run: Run
    setting: PublishedSetting
    rows: dict[str, SummaryRow]
    footnote: Footnote | None

    def fastest(self, rows: Iterable[SummaryRow]) -> SummaryRow | None:
        return max(rows, key=lambda row: row.tokens_per_s or 0.0, default=None)

    @property
    def ours(self) -> SummaryRow | None:
        rows = [row for row in self.rows.values() if row.tokens_per_s]
        return self.fastest(row for row in rows if variant_of(row.variant).is_ours)

    @property
    def unsloth(self) -> SummaryRow | None:
        rows = self.rows.values()
        return self.fastest(row for row in rows if is_unsloth(variant_of(row.variant)))

    @property
    def claims(self) -> list[Claim]:
        """Their numbers; where ours is in FP8, theirs in FP8 if there are any."""
        claims = list(self.setting.claims)
        if self.ours and is_in_fp8(variant_of(self.ours.variant)):
            claims = [one for one in claims if "FP8" in one.by] or claims
        return claims

    def speed(self, row: SummaryRow | None, titled: bool = False) -> str:
        if row is None or row.tokens_per_s is None:
            return STATUS_WORDS.get(row.status, "") if row else ""
        mark = self.footnote.mark_of(row.variant) if self.footnote else ""
        title = f" ({title_in(row.variant, self.run)})" if titled else ""
        return f"{thousands(row.tokens_per_s)}{mark}{title}"

    def over(self, claim: Claim) -> str:
        speed = self.ours and self.ours.tokens_per_s
        return f"{speed / claim.tokens_per_s:.2f}" if speed else ""


Row = tuple[Measured, Claim]
COLUMNS = (
    Column[Row]("model", lambda row: row[0].setting.model),
    Column[Row]("a step: batches × rows × tokens", lambda row: (
        "{0.accumulate} × {0.batch_size} × {0.seq_len:,}".format(row[0].setting))),
    Column[Row]("they publish, tokens/s", lambda row: f"{row[1].by}: {row[1].tokens_per_s:,}"),
    Column[Row]("ours, tokens/s", lambda row: row[0].speed(row[0].ours, titled=True)),
    Column[Row]("ours / theirs", lambda row: row[0].over(row[1])),
    Column[Row]("the fastest Unsloth here, tokens/s",
                lambda row: row[0].speed(row[0].unsloth, titled=True)),
    Column[Row]("vanilla PEFT here, with checkpointing",
                lambda row: row[0].speed(row[0].rows.get(BASELINE))),
    Column[Row]("measured here on", lambda row: (
        f"{row[0].run.environment.device}, {row[0].run.started_utc[:10]}")),
)  # fmt: skip


def published_section(runs: Mapping[str, Run], footnotes: Iterable[Footnote]) -> str:
    """Write the heading, the tables and their sources; nothing where no run is of such a setting.
    runs, footnotes: by file."""
    found = {note.file: note for note in footnotes}
    measured = _measured(runs, found)
    if not measured:
        return ""
    settings = dict.fromkeys(one.setting for one in measured)
    gpus = " and ".join(dict.fromkeys(f"one {setting.gpu}" for setting in settings))
    pages = dict.fromkeys(setting.page for setting in settings)
    sources = [f"- [{page.name}]({page.url}), {page.date}" for page in pages]
    sources += [f"- {one.model}: {one.differs}." for one in settings if one.differs]
    notes = dict.fromkeys(
        f"{one.footnote.mark}: {one.footnote.words}" for one in measured if one.footnote
    )
    tables = _claims_table(measured), _speeds_table(measured)
    explained = [*notes, EXPLAINED.format(gpus=gpus), "\n".join(sources)]
    return "\n\n".join(["## Beside what others publish", tables[0], *explained, tables[1]])


def claims_table(runs: Iterable[Run]) -> str:
    """Write a row for each number that others publish in the setting of each run."""
    return _claims_table(_measured({str(n): run for n, run in enumerate(runs)}, {}))


def _claims_table(measured: list[Measured]) -> str:
    rows = [(one, claim) for one in measured for claim in one.claims]
    return table(COLUMNS, rows) if rows else ""


def _speeds_table(measured: list[Measured]) -> str:
    """Write the tokens a second of every variant of whole runs of the suite, a column a run."""
    measured = [one for one in measured if BASELINE in one.run.experiment.variants]
    runs = [one.run for one in measured]
    lines = [
        [title_in(id, *runs), *(one.speed(one.rows.get(id)) or "not measured" for one in measured)]
        for id in SUITES["published"]
    ]
    return markdown_table(["tokens/s", *(one.setting.model for one in measured)], lines)


def _measured(runs: Mapping[str, Run], footnotes: Mapping[str, Footnote]) -> list[Measured]:
    return [
        Measured(run, setting, {row.variant: row for row in summarize(run)}, footnotes.get(file))
        for file, run in runs.items()
        if (setting := setting_that_ran(run))
    ]


def setting_that_ran(run: Run) -> PublishedSetting | None:
    """Return the setting of others that a run has, None where it has another."""
    setting, ran = SETTINGS.get(run.experiment.model), run.experiment
    if setting is None or run.rehearsal:
        return None
    options = {"rank": ran.lora.rank, "targets": list(ran.lora.targets)}
    options["lora_dropout"] = ran.lora.dropout
    found = {name: options.get(name, getattr(ran, name, None)) for name in setting.is_that()}
    return setting if found == setting.is_that() else None
