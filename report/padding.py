"""Padded rows beside whole chats in one row, by data set and GPU: tables in Markdown, from the runs
`padded-NAME.json.gz` and `documents-NAME.json.gz` in docs/runs/GPU/. NAME is the data set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.records import Run, SummaryRow
from report.looks import STATUS_WORDS, caption, markdown_table, release_of, title_in
from report.statistics import summarize
from report.tables import commit_of, number_or_blank
from variants import BASELINE, Variant, variant_of

# As data/make/chats_of_lengths.py calls the data sets whose lengths it draws.
LENGTHS_OF = {
    "alpaca": "Alpaca", "dolly": "Dolly", "oasst1": "OpenAssistant 1", "sharegpt": "ShareGPT",
}  # fmt: skip
FILES = {"sft_train": "data/sft_train.jsonl"}
UNPADDED = "vanilla_peft_varlen"  # vanilla PEFT, as people have it who do not pad
HEADER = ["variant", "padded: step, ms", "GPU, ms", "tokens/s", "peak, GiB",
          "as documents: step, ms", "GPU, ms", "tokens/s", "peak, GiB"]  # fmt: skip

# Graphs of commits up to this one, of 2026-11-25, attended to padding.
ATTENDED_TO_PADDING = "3c48ee21aa"
MARK = "¹"

Named = tuple[str, Run]  # a run with its data set's name


class ChatGroup(NamedTuple):
    """One data set, on one GPU, in batches of one shape. padding: of its padded rows, on whatever
    GPU those ran; None where they ran on none."""

    data: str
    device: str
    rows: int
    seq_len: int
    padding: float | None
    padded: dict[str, SummaryRow]
    documents: dict[str, SummaryRow]
    runs: tuple[Run, ...]

    @property
    def data_in_words(self) -> str:
        if self.data in FILES:
            return FILES[self.data]
        return f"{LENGTHS_OF[self.data]}'s lengths" if self.data in LENGTHS_OF else self.data

    @property
    def gpu(self) -> str:
        """The GPU's name, short: H100 for NVIDIA H100 80GB HBM3."""
        return re.sub(r"NVIDIA |GeForce |[ -]\d+GB.*", "", self.device)

    @property
    def padding_in_words(self) -> str:
        if self.padding is None:
            return "padding not measured"
        return f"{self.padding:.0%} of padded rows is padding"

    def fastest_of_ours(self) -> SummaryRow | None:
        """The variant of this repository with the most tokens a second as documents, in the
        precision of the others."""
        return _fastest(self.documents.values(), _is_ours)

    def fastest_of_unsloth(self) -> SummaryRow | None:
        return _fastest(self.documents.values(), _is_unsloths)


def groups(padded: Sequence[Named], documents: Sequence[Named]) -> list[ChatGroup]:
    """Return every data set on every GPU, from the least padding to the most; a file of the same
    name with other chats, or batches of another shape, is a group of its own."""
    shares = {_work(*one): _shape(one[1]).padding for one in padded}
    found: dict[tuple, dict[str, Run]] = {}
    for kind, named in (("padded", padded), ("documents", documents)):
        for name, run in named:
            if not run.rehearsal:
                found.setdefault((*_work(name, run), run.environment.device), {})[kind] = run
    made = [_group(key, shares.get(key[:-1]), runs) for key, runs in found.items()]
    return sorted(made, key=lambda one: (one.padding is None, one.padding, one.data, one.device))


def padding_section(found: Sequence[ChatGroup]) -> str:
    """Write a table of each group, with what it was measured on below it."""
    blocks: list[str] = []
    for group in found:
        shape = f"{group.rows} × {group.seq_len:,}"
        said = f"{group.data_in_words}, {shape} tokens a step, {group.device}"
        table = _table(group)
        blocks += [f"**{said}: {group.padding_in_words}.**", table]
        if MARK in table:
            blocks.append(f"{MARK}: before a graph's attention left padding out.")
        blocks += _captions(group.runs)
    return "\n\n".join(blocks) or "Not measured yet."


def _captions(runs: Iterable[Run]) -> list[str]:
    """Write what each run was measured on; once, where both were on the same."""
    captions = [f"{caption(run)} {commit_of(run)}" for run in runs]
    same = {re.sub(", (padded|whole chats in one row) ·", " ·", words) for words in captions}
    return [*same] if len(same) == 1 < len(captions) else captions


def documents_row(
    found: Sequence[ChatGroup], columns: Sequence[str], beside: Run
) -> list[list[str]]:
    """Return the README's row of documents, if there is one, of the GPU's own time: of the data set
    on which the last of `columns` gains least, on the GPU of `beside`, the run of the other rows,
    or on another where that has none. It names a release of Unsloth that is another than theirs."""
    device = beside.environment.device
    timed = [
        (base_ms / ms, group)
        for group in found
        if (base_ms := own_ms(group.documents.get(UNPADDED)))
        and (ms := own_ms(group.documents.get(columns[-1])))
    ]
    if not timed:
        return []
    _, group = min(timed, key=lambda one: (one[1].device != device, one[0]))
    base = group.documents[UNPADDED]
    first = f"{own_ms(base):.0f} ms, {base.peak_gib or 0:.1f} GiB"
    others = [_over(base, group.documents.get(variant)) for variant in columns]
    where = "" if group.device == device else f", {group.gpu}"
    if (release := release_of("unsloth", group.runs[-1])) != release_of("unsloth", beside):
        where += f", Unsloth {release}"
    return [[f"**chats** of {group.data_in_words}{where}, GPU time alone", first, *others]]


def own_ms(row: SummaryRow | None) -> float | None:
    """Return what a step takes where nothing waits for the host: the GPU's own time in the step
    that was profiled, or the median step where that is shorter, for one step of Unsloth's, whose
    activations go to host memory, may take longer than most."""
    if row is None or row.gpu_ms is None or row.median_step_ms is None:
        return None
    return min(row.gpu_ms, row.median_step_ms)


def fullest(found: Sequence[ChatGroup]) -> list[ChatGroup]:
    """Return one group of each data set: that with the most times, the newest of those."""

    def times(group: ChatGroup) -> tuple[int, str]:
        rows = (*group.padded.values(), *group.documents.values())
        return sum(row.tokens_per_s is not None for row in rows), group.runs[-1].started_utc

    best: dict[str, ChatGroup] = {}
    for group in found:
        best[group.data] = max(best.get(group.data, group), group, key=times)
    return [group for group in found if best[group.data] is group]


def _group(key: tuple, padding: float | None, runs: dict[str, Run]) -> ChatGroup:
    data, _, rows, seq_len, device = key
    by_kind = {kind: {row.variant: row for row in summarize(run)} for kind, run in runs.items()}
    padded, documents = (by_kind.get(kind, {}) for kind in ("padded", "documents"))
    return ChatGroup(data, device, rows, seq_len, padding, padded, documents, tuple(runs.values()))


def _work(name: str, run: Run) -> tuple[str, str, int, int]:
    asked = run.experiment
    return name, asked.data_sha256, asked.batch_size * asked.accumulate, asked.seq_lens[-1]


def _shape(run: Run):
    return run.experiment.tokens[run.experiment.seq_lens[-1]]


def _table(group: ChatGroup) -> str:
    variants = dict.fromkeys((*group.padded, *group.documents))
    first = [variant for variant in (BASELINE, UNPADDED) if variant in variants]
    lines = [
        [title_in(variant, *group.runs), *_cells(group.padded.get(variant), _mark(group, variant)),
         *_cells(group.documents.get(variant))]
        for variant in dict.fromkeys((*first, *variants))
    ]  # fmt: skip
    return markdown_table(HEADER, lines)


def _mark(group: ChatGroup, id: str) -> str:
    """Return the mark of a graph of padded rows that attended to padding."""
    recipe = variant_of(id).recipe
    commits = [run.environment.git for run in group.runs if run.experiment.padded]
    attended = any(one and one.commit.startswith(ATTENDED_TO_PADDING) for one in commits)
    return MARK if attended and recipe and recipe.graph else ""


def _cells(row: SummaryRow | None, mark: str = "") -> list[str]:
    if row is None or row.tokens_per_s is None:
        return [STATUS_WORDS.get(row.status, "") if row else "", "", "", ""]
    numbers = [number_or_blank(row.median_step_ms, 1) + mark, number_or_blank(row.gpu_ms, 1)]
    return [*numbers, f"{row.tokens_per_s:,.0f}", number_or_blank(row.peak_gib, 1)]


def _over(base: SummaryRow, row: SummaryRow | None) -> str:
    if row is None:
        return "–"
    if not (base_ms := own_ms(base)) or not (ms := own_ms(row)):
        return STATUS_WORDS.get(row.status, "")
    return f"{base_ms / ms:.2f}×" + (f", {row.peak_gib:.1f} GiB" if row.peak_gib else "")


def _is_ours(variant: Variant) -> bool:
    return variant.recipe is not None and variant.is_ours and not variant.recipe.fp8


def _is_unsloths(variant: Variant) -> bool:
    return variant.recipe is not None and variant.recipe.library == "unsloth"


def _fastest(rows: Iterable[SummaryRow], wanted) -> SummaryRow | None:
    timed = [row for row in rows if row.tokens_per_s and wanted(variant_of(row.variant))]
    return max(timed, key=lambda row: row.tokens_per_s or 0.0, default=None)
