"""Tables of others' published speeds and of ours in the same settings (`bench/published.py`), in
Markdown. They come from other machines, so each number has its own row. Unsloth has rows only
from runs with the newest release that any of ours had."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.published import SETTINGS, PublishedSetting, setting_name
from bench.records import Run
from report.statistics import summarize
from report.table import markdown_table, thousands
from report.wording import STATUS_WORDS, on_base, release_of, title_in
from variants import variant_of

HEADER = ["variant", "tokens/s", "where, when"]


def published_section(runs: Iterable[Run]) -> str:
    """Write a table for each setting, then the sources. Nothing if no run has such a setting."""
    found: dict[PublishedSetting, list[Run]] = {}
    runs = [*runs]
    newest = max(map(_unsloth_in, runs), default=())
    for run in runs:
        if setting := setting_that_ran(run):
            found.setdefault(setting, []).append(run)
    pages = dict.fromkeys(setting.page for setting in found)
    sources = [f"- [{page.name}]({page.url}), {page.date}" for page in pages]
    sources += [f"- {setting.model}: {setting.differs}." for setting in found if setting.differs]
    return "\n\n".join(
        [*(_speeds(*one, newest) for one in found.items()), "\n".join(sources)]
    ).strip()


def _speeds(setting: PublishedSetting, runs: list[Run], newest: tuple[int, ...]) -> str:
    """Write what others publish and what we measured in a setting, the fastest first."""
    there = f"one {setting.gpu}, published {setting.page.date}"
    speeds: list[tuple[float, list[str]]] = [
        (claim.tokens_per_s, [claim.by, f"{claim.tokens_per_s:,}", there])
        for claim in setting.claims
    ]
    for run in runs:
        here = f"{run.environment.device.removeprefix('NVIDIA ')}, measured {run.started_utc[:10]}"
        for row in summarize(run):
            recipe = variant_of(row.variant).recipe
            if recipe and recipe.library == "unsloth" and _unsloth_in(run) != newest:
                continue
            words = thousands(row.tokens_per_s) or STATUS_WORDS.get(row.status, "")
            title = title_in(row.variant, run)
            speeds.append((row.tokens_per_s or 0, [title, words, here]))
    lines = [line for _, line in sorted(speeds, key=lambda one: -one[0])]
    step = f"{setting.accumulate} × {setting.batch_size} × {setting.seq_len:,}"
    return f"**{setting.model}{on_base(runs[0])}, {step} tokens a step:**\n\n" + markdown_table(
        HEADER, lines
    )


def _unsloth_in(run: Run) -> tuple[int, ...]:
    """Return the release that a run had, comparable with others: (2026, 10, 9)."""
    return tuple(map(int, re.findall(r"\d+", release_of("unsloth", run))))


def setting_that_ran(run: Run) -> PublishedSetting | None:
    """Return the published setting that a run has, or None."""
    ran = run.experiment
    setting = SETTINGS.get(setting_name(ran.model, ran.base))
    if setting is None or run.rehearsal:
        return None
    options = {"rank": ran.lora.rank, "targets": list(ran.lora.targets)}
    options["lora_dropout"] = ran.lora.dropout
    options["dora"] = ran.lora.dora
    found = {name: options.get(name, getattr(ran, name, None)) for name in setting.is_that()}
    return setting if found == setting.is_that() else None
