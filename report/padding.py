"""Tables of padded rows beside whole chats in one row, by data set and GPU, in Markdown. The runs
are `padded-NAME.json.gz` and `documents-NAME.json.gz` in docs/runs/GPU/. NAME is the data set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bench.records import Run, SummaryRow
from report import wording
from report.statistics import summarize
from report.table import markdown_table, number, thousands
from report.wording import STATUS_WORDS, Footnote, caption_with_commit, title_in
from variants import BASELINE, Variant, variant_of

# As data/make/chats_of_lengths.py calls the data sets whose lengths it draws.
DATA_IN_WORDS = {
    "sft_train": "data/sft_train.jsonl", "alpaca": "Alpaca's lengths", "dolly": "Dolly's lengths",
    "oasst1": "OpenAssistant 1's lengths", "sharegpt": "ShareGPT's lengths",
}  # fmt: skip
HEADER = ["step, ms", "GPU, ms", "tokens/s", "peak allocated, GiB"]
UNPADDED = "vanilla_peft_varlen"  # vanilla PEFT for people who do not pad


class ChatGroup(NamedTuple):
    """One data set on one GPU, in batches of one shape. padding: the share in its padded rows, on
    whatever GPU those ran; None if they ran on none. footnote: of its padded run."""

    data: str
    device: str
    rows: int
    seq_len: int
    padding: float | None
    padded: dict[str, SummaryRow]
    documents: dict[str, SummaryRow]
    runs: tuple[Run, ...]
    footnote: Footnote | None = None

    @property
    def data_in_words(self) -> str:
        return DATA_IN_WORDS.get(self.data, self.data)

    @property
    def gpu(self) -> str:
        """The GPU's name, short: H100 for NVIDIA H100 80GB HBM3."""
        return re.sub(r"NVIDIA |GeForce |[ -]\d+GB.*", "", self.device)

    @property
    def padding_in_words(self) -> str:
        if self.padding is None:
            return "padding not measured"
        return f"{self.padding:.0%} of padded rows is padding"

    def fastest(self, wanted: Callable[[Variant], bool]) -> SummaryRow | None:
        """Return the row of documents with the most tokens a second among these variants."""
        rows = [
            r for r in self.documents.values() if r.tokens_per_s and wanted(variant_of(r.variant))
        ]
        return max(rows, key=lambda row: row.tokens_per_s or 0.0, default=None)

    def unsloth_over_ours(self) -> float | None:
        """Return how many times longer Unsloth's fastest takes than ours, in the same precision, by
        the GPU's own time."""
        ours = own_ms(self.fastest(lambda one: one.is_ours and not wording.is_in_fp8(one)))
        theirs = own_ms(self.fastest(wording.is_unsloth))
        return theirs / ours if ours and theirs else None


def groups(
    padded: Mapping[str, Run], documents: Mapping[str, Run], footnotes: Iterable[Footnote] = ()
) -> list[ChatGroup]:
    """Return every data set on every GPU, from the least padding to the most. The arguments are by
    file. The same file name with other chats or another batch shape makes a separate group."""
    shares = {_work(file, run): run.experiment.tokens[run.experiment.seq_lens[-1]].padding
              for file, run in padded.items()}  # fmt: skip
    notes = {note.file: note for note in footnotes}
    found: dict[tuple, ChatGroup] = {}
    for is_padded, runs in ((True, padded), (False, documents)):
        for file, run in runs.items():
            if run.rehearsal:
                continue
            work, device = _work(file, run), run.environment.device
            empty = ChatGroup(work[0], device, *work[2:], shares.get(work), {}, {}, ())
            group = found.get((*work, device), empty)
            rows = {row.variant: row for row in summarize(run)}
            group = group._replace(runs=(*group.runs, run))
            found[*work, device] = (
                group._replace(padded=rows, footnote=notes.get(file)) if is_padded
                else group._replace(documents=rows)
            )  # fmt: skip
    return sorted(
        found.values(), key=lambda one: (one.padding is None, one.padding, one.data, one.device)
    )


def _work(file: str, run: Run) -> tuple[str, str, int, int]:
    """Return the data set's name, its chats, and the shape of a batch."""
    asked, name = run.experiment, Path(file).name.removesuffix(".json.gz").partition("-")[2]
    return name, asked.data_sha256, asked.batch_size * asked.accumulate, asked.seq_lens[-1]


def fullest(found: Sequence[ChatGroup]) -> list[ChatGroup]:
    """Return one group of each data set: that with the most times, the newest of those."""

    def times(group: ChatGroup) -> tuple[int, str]:
        rows = (*group.padded.values(), *group.documents.values())
        return sum(row.tokens_per_s is not None for row in rows), group.runs[-1].started_utc

    best: dict[str, ChatGroup] = {}
    for group in found:
        best[group.data] = max(best.get(group.data, group), group, key=times)
    return [group for group in found if best[group.data] is group]


def padding_section(found: Sequence[ChatGroup]) -> str:
    """Write a table of each group, with its caption below."""
    blocks: list[str] = []
    for group in found:
        shape = f"{group.rows} × {group.seq_len:,}"
        said = f"{group.data_in_words}, {shape} tokens a step, {group.device}"
        blocks += [f"**{said}: {group.padding_in_words}.**", _table(group)]
        if group.footnote:
            blocks.append(f"{group.footnote.mark}: {group.footnote.words}")
        blocks += _captions(group.runs)
    return "\n\n".join(blocks) or "Not measured yet."


def _captions(runs: Iterable[Run]) -> list[str]:
    """Write a caption for each run, or a single one if they agree."""
    captions = [caption_with_commit(run) for run in runs]
    same = {re.sub(", (padded|whole chats in one row) ·", " ·", words) for words in captions}
    return [*same] if len(same) == 1 < len(captions) else captions


def _table(group: ChatGroup) -> str:
    variants = dict.fromkeys((*group.padded, *group.documents))
    first = [variant for variant in (BASELINE, UNPADDED) if variant in variants]
    ways = (("padded", group.padded, group.footnote), ("as documents", group.documents, None))
    measured = [way for way in ways if way[1]]
    lines = [
        [title_in(id, *group.runs), *(cell for _, rows, note in measured
                                      for cell in _cells(rows.get(id), note))]
        for id in dict.fromkeys((*first, *variants))
    ]  # fmt: skip
    headings = [[f"{way}: {HEADER[0]}", *HEADER[1:]] for way, *_ in measured]
    return markdown_table(["variant", *chain.from_iterable(headings)], lines)


def _cells(row: SummaryRow | None, footnote: Footnote | None) -> list[str]:
    if row is None or row.tokens_per_s is None:
        return [STATUS_WORDS.get(row.status, "") if row else "", "", "", ""]
    mark = footnote.mark_of(row.variant) if footnote else ""
    return [number(row.median_step_ms, 1) + mark, number(row.gpu_ms, 1),
            thousands(row.tokens_per_s), number(row.peak_gib, 1)]  # fmt: skip


def own_ms(row: SummaryRow | None) -> float | None:
    """Return a step's time without any wait for the host. That is the GPU's own time in the
    profiled step, or the median step if that is shorter: a single Unsloth step may take longer than
    most, because its activations go to host memory."""
    if row is None or row.gpu_ms is None or row.median_step_ms is None:
        return None
    return min(row.gpu_ms, row.median_step_ms)
