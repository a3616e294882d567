"""documents.png, from runs alone: tokens a second of padded rows and of whole chats in one row, a
panel for each data set and GPU. The numbers are padding.py's."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from textwrap import fill

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import SummaryRow
from report.benchmark_results import write_png
from report.looks import STATUS_WORDS, STYLE, release_of
from report.padding import UNPADDED, ChatGroup, fullest, own_ms
from variants import BASELINE, title_of, variant_of

FUSED = "fused_layer_graph_offload"
PAIRS = (  # in padded rows, as documents; and what a reader has to know of the two
    (BASELINE, UNPADDED, "packed, with\nFlashAttention"),
    ("full_unsloth", "full_unsloth", ""),
    ("fused_all", "fused_all", "drops the padding"),
    (FUSED, FUSED, ""),
)
KINDS = "padded", "packed"  # the two bars of a pair
COLUMNS, HEIGHT = 3, 0.38  # panels beside each other; of a bar
GREY = "#555555"


def draw_documents(found: Sequence[ChatGroup], path: str | Path) -> bool:
    """Write the picture as a PNG, whole or not at all, each data set on one GPU; False where
    nothing has been measured."""
    shown = fullest(found)
    if not any(_ends(group) for group in shown):
        return False
    write_png(documents_figure(shown, over_unsloth(found)), path)
    return True


def documents_figure(found: Sequence[ChatGroup], remark: str) -> Figure:
    """Two bars a variant, padded above documents; on one scale, so that panels can be compared.
    remark: of its caption."""
    with style.context(["default", STYLE]):
        lines = ceil(len(found) / COLUMNS)
        columns = ceil(len(found) / lines)
        height = 2.35 + 3.7 * lines
        picture = Figure(figsize=(12, height), dpi=150)
        panels = picture.subplots(lines, columns, squeeze=False, sharex=True)
        picture.subplots_adjust(0.195, 1.4 / height, 0.985, 1 - 1.5 / height, 0.06, 0.3)
        most = max(end for group in found for end in _ends(group))
        for place, axes in enumerate(panels.flat):
            if place >= len(found):
                axes.remove()
                continue
            _panel(axes, found[place], named=place % columns == 0)
            axes.set_xlim(0, (1.16 + 0.06 * columns) * most)
            if place + columns >= len(found):
                axes.tick_params(labelbottom=True)
        _words(picture, found, remark, height)
    return picture


def documents_finding(found: Sequence[ChatGroup]) -> str:
    """The title, which can be read off the bars of these groups: how many times as many tokens a
    second as vanilla PEFT in padded rows it trains without padding, and everything fused."""
    packed, fused = (_over_padded(found, variant) for variant in (UNPADDED, FUSED))
    said = []
    if packed:
        said.append(f"Packing alone makes vanilla PEFT {_from_to(packed)} times as fast")
    if fused:
        said.append(f"{title_of(FUSED)} and packed{':' * bool(packed)} {_from_to(fused)} times")
    if not said:
        return "Tokens a second of padded rows and of whole chats in one row"
    words = ";\n".join(said)
    if not packed:
        words += " as fast as vanilla PEFT in padded rows"
    return words[0].upper() + words[1:]


def _over_padded(found: Sequence[ChatGroup], variant: str) -> list[float]:
    return [
        row.tokens_per_s / padded.tokens_per_s
        for group in found
        if (row := group.documents.get(variant)) and row.tokens_per_s
        and (padded := group.padded.get(BASELINE)) and padded.tokens_per_s
    ]  # fmt: skip


def over_unsloth(found: Sequence[ChatGroup]) -> str:
    """Say how far the fastest of ours is ahead of Unsloth, over all groups that tell, by the GPU's
    own time: how long a step waits for a host depends on what else that does."""
    ratios = [
        theirs_ms / ours_ms
        for group in found
        if (theirs_ms := own_ms(group.fastest_of_unsloth()))
        and (ours_ms := own_ms(group.fastest_of_ours()))
    ]
    if not ratios:
        return ""
    releases = " and ".join(sorted({release_of("unsloth", group.runs[-1]) for group in found}))
    how = f"{_from_to(ratios, 2)} times as fast as Unsloth {releases}".rstrip()
    where = ", counting those on other GPUs, too" * (len(found) > len(fullest(found)))
    return f"By the GPU's own time the fastest of ours is {how}{where}."


def _panel(axes: Axes, group: ChatGroup, named: bool) -> None:
    said = f"{group.data_in_words}, {group.gpu}\n{group.padding_in_words}"
    axes.set_title(said, size=11.5, linespacing=1.3)
    axes.set_ylim(len(PAIRS) - 0.45, -0.55)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.tick_params(length=0)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.locator_params(axis="x", nbins=4)
    names = [
        f"{title_of(padded)}\n({remark})" if remark else title_of(padded)
        for padded, _, remark in PAIRS
    ]
    axes.set_yticks(range(len(PAIRS)), names if named else [""] * len(PAIRS), size=11)
    for place, (padded, documents, _) in enumerate(PAIRS):
        colour = variant_of(padded).look.colour
        kinds = ("", "") if place else KINDS
        _bar(axes, place - HEIGHT / 2, group.padded.get(padded), kinds[0], facecolor="white",
             edgecolor=colour, hatch="////", linewidth=1.3)  # fmt: skip
        _bar(axes, place + HEIGHT / 2, group.documents.get(documents), kinds[1], facecolor=colour,
             edgecolor=colour, linewidth=1.3)  # fmt: skip


def _bar(axes: Axes, y: float, row: SummaryRow | None, kind: str, **look) -> None:
    """A bar with its number and, of the first two, what it is of; or words in its place."""
    if row is None or row.tokens_per_s is None:
        words = STATUS_WORDS.get(row.status, "") if row else "not measured"
        axes.annotate(words, (0, y), (4, 0), textcoords="offset points", va="center", size=10.5,
                      style="italic", color=GREY)  # fmt: skip
        return
    axes.barh(y, row.tokens_per_s, HEIGHT - 0.03, **look)
    weight = "normal" if look.get("hatch") else "bold"
    words = f"{row.tokens_per_s:,.0f}" + f" {kind}" * bool(kind)
    axes.annotate(words, (row.tokens_per_s, y), (5, 0), va="center", size=11,
                  textcoords="offset points", weight=weight)  # fmt: skip


def _words(picture: Figure, found: Sequence[ChatGroup], remark: str, height: float) -> None:
    finding = documents_finding(found)
    size = min(17, 1190 / max(map(len, finding.split("\n"))))
    picture.text(
        0.02, 1 - 0.2 / height, finding, size=size, weight="bold", va="top", linespacing=1.4
    )
    words = "tokens a second, no padding counted (more is better)"
    picture.text(0.59, 0.86 / height, words, size=11.5, ha="center")
    shapes = dict.fromkeys(f"{group.rows} × {group.seq_len:,}" for group in found)
    runs = [run for group in found for run in group.runs]
    steps = sorted({len(cell.step_ms) for run in runs for cell in run.cells_of(status="ok")})
    steps = [count for count in steps if count]
    words = (
        f"{', '.join(dict.fromkeys(run.experiment.model for run in runs))}, "
        f"{' or '.join(shapes)} tokens a step, LoRA rank {runs[0].experiment.lora.rank}, gradient "
        f"checkpointing. Medians of {_range(steps)} steps, then over {_rounds(found)}; a panel's "
        f"padded rows and its packed ones are two runs. Packed: whole chats in one row. {remark}"
    )
    picture.text(0.02, 0.14 / height, fill(words, 150), size=10.5, color=GREY, linespacing=1.5)


def _ends(group: ChatGroup) -> list[float]:
    rows = [rows.get(id) for padded, documents, _ in PAIRS
            for rows, id in ((group.padded, padded), (group.documents, documents))]  # fmt: skip
    return [row.tokens_per_s for row in rows if row and row.tokens_per_s]


def _rounds(found: Sequence[ChatGroup]) -> str:
    counts = sorted({row.rounds for group in found for rows in (group.padded, group.documents)
                     for row in rows.values() if row.rounds})  # fmt: skip
    return f"{_range(counts)} round{'s' if counts[-1] > 1 else ''}"


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def _from_to(ratios: Sequence[float], digits: int = 1) -> str:
    low, high = f"{min(ratios):.{digits}f}", f"{max(ratios):.{digits}f}"
    return low if low == high else f"{low} to {high}"
