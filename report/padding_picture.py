"""documents.png, from runs alone: tokens per second of padded rows and of whole chats in one row, a
panel for each data set and GPU. padding.py computes the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import SummaryRow
from report.padding import UNPADDED, ChatGroup, fullest
from report.picture import annotate, framed, lay_bars, write_caption, write_title
from report.wording import STATUS_WORDS, from_to, release_of
from variants import BASELINE, title_of, variant_of

FUSED = "fused_layer_graph_offload"
PAIRS = (  # in padded rows, as documents, and a remark on both
    (BASELINE, UNPADDED, "packed, with\nFlashAttention"),
    ("full_unsloth", "full_unsloth", ""),
    ("fused_all", "fused_all", "drops the padding"),
    (FUSED, FUSED, ""),
)
COLUMNS, HEIGHT = 3, 0.38  # panels beside each other; of a bar
GREY = "#555555"


def documents_figure(found: Sequence[ChatGroup]) -> Figure | None:
    """Draw two bars per variant, padded above documents. Each data set is on one GPU, and all share
    one scale. None if nothing was measured."""
    shown = fullest(found)
    most = max((row.tokens_per_s or 0.0 for group in shown for row in _rows(group)), default=0.0)
    if not most:
        return None
    lines = ceil(len(shown) / COLUMNS)
    columns = ceil(len(shown) / lines)
    height = 2.35 + 3.7 * lines
    with framed(12, height) as picture:
        panels = picture.subplots(lines, columns, squeeze=False, sharex=True)
        picture.subplots_adjust(0.195, 1.4 / height, 0.985, 1 - 1.5 / height, 0.06, 0.3)
        for place, axes in enumerate(panels.flat):
            if place >= len(shown):
                axes.remove()
                continue
            _panel(axes, shown[place], named=place % columns == 0)
            axes.set_xlim(0, (1.16 + 0.06 * columns) * most)
            if place + columns >= len(shown):
                axes.tick_params(labelbottom=True)
        finding = documents_finding(shown)
        write_title(picture, finding, 1 - 0.2 / height, 17, 1190, 0.02, va="top", linespacing=1.4)
        words = "tokens a second, no padding counted (more is better)"
        picture.text(0.59, 0.86 / height, words, size=11.5, ha="center")
        words = f"{_remarks(shown)}{_caption(shown)} {over_unsloth(found)}"
        write_caption(picture, words, 0.14 / height, 150, 0.02, color=GREY)
    return picture


def documents_finding(found: Sequence[ChatGroup]) -> str:
    """Say how much faster than in padded rows vanilla PEFT trains without padding, and everything
    fused, in tokens per second. You can read all of it off the bars of these groups."""
    said = {name: f"{from_to(over, 1)}× faster" for name, variant in
            (("Packing alone makes vanilla PEFT", UNPADDED),
             (f"{title_of(FUSED)} and packed is", FUSED))
            if (over := _over_padded(found, variant))}  # fmt: skip
    if not said:
        return "Tokens a second of padded rows and of whole chats in one row"
    words = ";\n".join(f"{name} {words}" for name, words in said.items())
    return f"{words[0].upper()}{words[1:]} than padded rows"


def _over_padded(found: Sequence[ChatGroup], variant: str) -> list[float]:
    return [
        row.tokens_per_s / padded.tokens_per_s
        for group in found
        if (row := group.documents.get(variant)) and row.tokens_per_s
        and (padded := group.padded.get(BASELINE)) and padded.tokens_per_s
    ]  # fmt: skip


def over_unsloth(found: Sequence[ChatGroup]) -> str:
    """Say how far our fastest is ahead of Unsloth, over all groups that have both, by the GPU's own
    time. The wait for the host depends on what else the host does."""
    ratios = [ratio for group in found if (ratio := group.unsloth_over_ours())]
    if not ratios:
        return ""
    releases = " and ".join(sorted({release_of("unsloth", group.runs[-1]) for group in found}))
    how = f"{from_to(ratios, 2)} times as fast as Unsloth {releases}".rstrip()
    where = ", counting those on other GPUs, too" * (len(found) > len(fullest(found)))
    return f"By the GPU's own time the fastest of ours is {how}{where}."


def _panel(axes: Axes, group: ChatGroup, named: bool) -> None:
    said = f"{group.data_in_words}, {group.gpu}\n{group.padding_in_words}"
    axes.set_title(said, size=11.5, linespacing=1.3)
    axes.set_ylim(len(PAIRS) - 0.45, -0.55)
    lay_bars(axes)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.locator_params(axis="x", nbins=4)
    names = [title_of(padded) + f"\n({remark})" * bool(remark) for padded, _, remark in PAIRS]
    axes.set_yticks(range(len(PAIRS)), names if named else [""] * len(PAIRS), size=11)
    for place, (padded, documents, _) in enumerate(PAIRS):
        colour = variant_of(padded).look.colour
        mark = group.footnote.mark_of(padded) if group.footnote else ""
        kinds = (mark, "") if place else (f"{mark} padded", " packed")
        look: dict[str, Any] = {"edgecolor": colour, "linewidth": 1.3}
        _bar(axes, place - HEIGHT / 2, group.padded.get(padded), kinds[0], facecolor="white",
             hatch="////", **look)  # fmt: skip
        _bar(axes, place + HEIGHT / 2, group.documents.get(documents), kinds[1], facecolor=colour,
             **look)  # fmt: skip


def _bar(axes: Axes, y: float, row: SummaryRow | None, kind: str, **look) -> None:
    """Draw a bar with its number and, for the first two, its kind. Without a number, draw words."""
    if row is None or row.tokens_per_s is None:
        words = STATUS_WORDS.get(row.status, "") if row else "not measured"
        annotate(axes, words, (0, y), (4, 0), va="center", size=10.5, style="italic", color=GREY)
        return
    axes.barh(y, row.tokens_per_s, HEIGHT - 0.03, **look)
    weight = "normal" if look.get("hatch") else "bold"
    words = f"{row.tokens_per_s:,.0f}{kind}"
    annotate(axes, words, (row.tokens_per_s, y), (5, 0), va="center", size=11, weight=weight)


def _rows(group: ChatGroup) -> list[SummaryRow]:
    rows = [rows.get(id) for padded, documents, _ in PAIRS
            for rows, id in ((group.padded, padded), (group.documents, documents))]  # fmt: skip
    return [row for row in rows if row]


def _remarks(found: Sequence[ChatGroup]) -> str:
    """Explain the marks behind numbers, which say that a number is from older code."""
    notes = [group.footnote for group in found if group.footnote]
    return "".join(dict.fromkeys(f"{note.mark}: {note.words} " for note in notes))


def _caption(found: Sequence[ChatGroup]) -> str:
    shapes = dict.fromkeys(f"{group.rows} × {group.seq_len:,}" for group in found)
    runs = [run for group in found for run in group.runs]
    steps = {len(cell.step_ms) for run in runs for cell in run.cells_of(status="ok")} - {0}
    rounds = {row.rounds for group in found for rows in (group.padded, group.documents)
              for row in rows.values() if row.rounds}  # fmt: skip
    return (
        f"{', '.join(dict.fromkeys(run.experiment.model for run in runs))}, "
        f"{' or '.join(shapes)} tokens a step, LoRA rank {runs[0].experiment.lora.rank}, gradient "
        f"checkpointing. Medians of {from_to(steps)} steps, then over {from_to(rounds)} "
        f"round{'s' if max(rounds) > 1 else ''}; a panel's padded rows and its packed ones are two "
        "runs. Packed: whole chats in one row."
    )
