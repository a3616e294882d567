"""Tables of others' published numbers beside ours, vanilla PEFT's and Unsloth's in the same setting
(`bench/published.py`), in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from bench.published import SETTINGS, PublishedSetting, setting_name
from bench.records import Run, SummaryRow
from report.statistics import summarize
from report.table import markdown_table, thousands
from report.wording import STATUS_WORDS, is_in_fp8, is_unsloth, on_base, title_in
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


class Measured(NamedTuple):
    """A run of a setting, and its summary by variant."""

    run: Run
    setting: PublishedSetting
    rows: dict[str, SummaryRow]

    @property
    def model(self) -> str:
        return self.setting.model + on_base(self.run)

    def fastest(self, wanted: Callable[[Variant], bool]) -> SummaryRow | None:
        rows = [row for row in self.rows.values() if wanted(variant_of(row.variant))]
        return max(rows, key=lambda row: row.tokens_per_s or 0.0, default=None)

    def speed(self, row: SummaryRow | None, is_titled: bool = False) -> str:
        if row is None or row.tokens_per_s is None:
            return STATUS_WORDS.get(row.status, "") if row else ""
        title = f" ({title_in(row.variant, self.run)})" if is_titled else ""
        return f"{thousands(row.tokens_per_s)}{title}"

    def lines(self) -> list[list[str]]:
        """Return a line for each of their numbers. If ours is in FP8, we take their FP8 numbers, if
        they have any."""
        one, ours = self.setting, self.fastest(lambda variant: variant.is_ours)
        speed = ours.tokens_per_s if ours else None
        first = [self.model, f"{one.accumulate} × {one.batch_size} × {one.seq_len:,}"]
        here = [
            self.speed(self.fastest(is_unsloth), is_titled=True),
            self.speed(self.rows.get(BASELINE)),
            f"{self.run.environment.device}, {self.run.started_utc[:10]}",
        ]
        claims = [claim for claim in one.claims if "FP8" in claim.by]
        if not claims or not (ours and is_in_fp8(variant_of(ours.variant))):
            claims = [*one.claims]
        return [
            [*first, f"{claim.by}: {claim.tokens_per_s:,}", self.speed(ours, is_titled=True),
             f"{speed / claim.tokens_per_s:.2f}" if speed else "", *here]
            for claim in claims
        ]  # fmt: skip


def published_section(runs: Iterable[Run]) -> str:
    """Write the tables and their sources. Nothing if no run has such a setting."""
    measured = _measured(runs)
    if not measured:
        return ""
    settings = dict.fromkeys(one.setting for one in measured)
    gpus = " and ".join(dict.fromkeys(f"one {setting.gpu}" for setting in settings))
    pages = dict.fromkeys(setting.page for setting in settings)
    sources = [f"- [{page.name}]({page.url}), {page.date}" for page in pages]
    sources += [f"- {setting.model}: {setting.differs}." for setting in settings if setting.differs]
    return "\n\n".join([
        _claims_table(measured),
        EXPLAINED.format(gpus=gpus), "\n".join(sources), _speeds_table(measured),
    ])  # fmt: skip


def claims_table(run: Run) -> str:
    """Write a line for each number published in this run's setting."""
    return _claims_table(_measured([run]))


def _claims_table(measured: list[Measured]) -> str:
    return markdown_table(HEADER, [line for one in measured for line in one.lines()])


def _speeds_table(measured: list[Measured]) -> str:
    """Write the tokens/s of every variant in whole runs of the suite, one column per run."""
    measured = [one for one in measured if BASELINE in one.run.experiment.variants]
    runs = [one.run for one in measured]
    lines = [
        [title_in(id, *runs), *(one.speed(one.rows.get(id)) or "not measured" for one in measured)]
        for id in SUITES["published"]
    ]
    return markdown_table(["tokens/s", *(one.model for one in measured)], lines)


def _measured(runs: Iterable[Run]) -> list[Measured]:
    return [
        Measured(run, setting, {row.variant: row for row in summarize(run)})
        for run in runs
        if (setting := setting_that_ran(run))
    ]


def setting_that_ran(run: Run) -> PublishedSetting | None:
    """Return the published setting that a run has, or None."""
    ran = run.experiment
    setting = SETTINGS.get(setting_name(ran.model, ran.base))
    if setting is None or run.rehearsal:
        return None
    options = {"rank": ran.lora.rank, "targets": list(ran.lora.targets)}
    options["lora_dropout"] = ran.lora.dropout
    found = {name: options.get(name, getattr(ran, name, None)) for name in setting.is_that()}
    return setting if found == setting.is_that() else None
