"""frontier.png, from a run alone: step time over peak memory, and the fastest for the memory that
there is."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from matplotlib.transforms import Bbox

from bench.records import Run
from report.benchmark_results import write_png
from report.fits import CONTEXT_GIB, Point, pareto, points_of
from report.looks import REHEARSAL_NOTICE, STYLE, caption
from variants import LOOKS, Look, title_of, variant_of

CARDS_GIB = (8, 12, 16, 24, 40, 48, 80)
# With a name in the picture, as the ends of the frontier are; the others are small.
NAMED = ("vanilla_peft", "fused_mlp", "full_unsloth", "liger_peft", "compiled_peft",
         "fused_layer_graph_offload")  # fmt: skip
TICKS_GIB = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 100, 140)
EDGES: dict[bool, dict[str, Any]] = {  # by whether it checkpoints: hollow without
    True: {"markeredgecolor": "white", "markeredgewidth": 0.8},
    False: {"markerfacecolor": "white", "markeredgewidth": 1.5},
}
DISTANCES = (9, 17, 27, 39, 53, 69, 87, 107)  # in points, where a label is tried
LABEL_SIDES = ((1, 0), (1, 1), (0, 1), (1, -1), (0, -1), (-1, 1), (-1, 0), (-1, -1))


def draw_frontier(run: Run, path: str | Path) -> bool:
    """Write the picture as a PNG, whole or not at all; False where fewer than two variants have
    both a time and a peak at one length."""
    if not _shown(run):
        return False
    write_png(frontier_figure(run), path)
    return True


def _shown(run: Run) -> list[Point]:
    """The points at the longest length that has two."""
    lengths = reversed(run.experiment.seq_lens)
    return next((found for n in lengths if len(found := points_of(run, n)) >= 2), [])


def frontier_figure(run: Run) -> Figure:
    """Step time over peak memory, the frontier as steps: the fastest for the memory there is."""
    with style.context(["default", STYLE]):
        points = _shown(run)
        picture = Figure(figsize=(12, 8.4), dpi=150)
        FigureCanvasAgg(picture)  # which knows how large a text will be
        axes = picture.subplots()
        floor = run.floor.get(points[0].seq_len)
        _ranges(axes, points, floor.floor_ms if floor else None)
        best = pareto(points)
        named = named_points(points)
        picture.subplots_adjust(0.075, 0.175, 0.975, 0.775)
        taken = _lines(axes, best, floor.floor_ms if floor else None)
        taken += [_mark(axes, point, point in named) for point in reversed(points)]
        for point in sorted(named, key=lambda point: point not in best):
            words = f"{variant_of(point.variant).plain_title}\n{point.step_ms:.0f} ms"
            weight = "bold" if point in best else "normal"
            taken.append(_label(axes, point, words, taken, size=11, weight=weight))
        _words(picture, run, points, named)
    return picture


def named_points(points: list[Point]) -> list[Point]:
    """The points that have their name beside them."""
    best = pareto(points)
    return [p for p in points if p.variant in NAMED or p in (best[0], best[-1])]


def _ranges(axes: Axes, points: list[Point], floor_ms: float | None) -> None:
    peaks, times = [p.peak_gib for p in points], [p.step_ms for p in points]
    axes.set_xscale("log")
    low, high = min(peaks) / 1.25, max(peaks) * 1.2
    axes.set_xlim(low, high)
    least, most = min(floor_ms or times[0], *times), max(times)
    axes.set_ylim(least - 0.12 * (most - least), most + 0.08 * (most - least))
    ticks = [gib for gib in TICKS_GIB if low <= gib <= high]
    axes.set_xticks(ticks, map(str, ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(length=0)
    axes.set_xlabel("peak memory, GiB (less is better)")
    axes.set_ylabel("ms a step (less is better)")


def _lines(axes: Axes, best: list[Point], floor_ms: float | None) -> list[Bbox]:
    """The frontier, the cards and the floor; gives the room that lines and words take."""
    low, high = axes.get_xlim()
    ends = [*best, best[-1]._replace(peak_gib=high)]
    corners = [(p.peak_gib, p.step_ms) for p in ends]
    axes.step(*zip(*corners, strict=True), where="post", color="black", linewidth=1.6, zorder=2)
    drawn = [((x, y), (right, y)) for (x, y), (right, _) in pairwise(corners)]
    drawn += [((right, y), (right, below)) for (_, y), (right, below) in pairwise(corners)]
    for gib in CARDS_GIB:
        if low < gib - CONTEXT_GIB < high:
            axes.axvline(gib - CONTEXT_GIB, color="#bcd4ee", linewidth=1.4, zorder=0.5)
            axes.annotate(f"{gib} GiB\ncard", (gib - CONTEXT_GIB, 1), (0, 3),
                          axes.get_xaxis_transform(), "offset points", ha="center", va="bottom",
                          size=9.5, color="#3b6ea5")  # fmt: skip
    taken = []
    if floor_ms:
        axes.axhline(floor_ms, color="black", linewidth=2.5)
        drawn.append(((low, floor_ms), (high, floor_ms)))
        words = axes.annotate(f"floor: {floor_ms:.0f} ms", (1, floor_ms), (-4, -5),
                              axes.get_yaxis_transform(), "offset points", ha="right", va="top",
                              size=10.5)  # fmt: skip
        taken.append(words.get_window_extent())
    return taken + [Bbox(axes.transData.transform(line)).padded(3) for line in drawn]


def _mark(axes: Axes, point: Point, is_named: bool) -> Bbox:
    variant = variant_of(point.variant)
    edges = EDGES[variant.checkpoints]
    look: dict[str, Any] = {"markersize": 12 if is_named else 6.5, "zorder": 3, **edges}
    axes.plot(point.peak_gib, point.step_ms, variant.look.marker, color=variant.look.colour, **look)
    place = axes.transData.transform((point.peak_gib, point.step_ms))
    return Bbox([place, place]).padded(12 if is_named else 4)


def _label(axes: Axes, point: Point, words: str, taken: list[Bbox], **text: Any) -> Bbox:
    """Words at the nearest free place around a point, from further off with a line to it."""
    colour = variant_of(point.variant).look.colour
    note = axes.annotate(words, (point.peak_gib, point.step_ms), (0, 0), color=colour,
                         textcoords="offset points", linespacing=1.1, zorder=4, **text)  # fmt: skip
    inside = axes.bbox
    for far, (across, up) in product(DISTANCES, LABEL_SIDES):
        note.set(ha=("center", "left", "right")[across], va=("center", "bottom", "top")[up])
        note.set_position((across * far, up * far))
        box = note.get_window_extent()
        fits_in = inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0
        if fits_in and box.y1 < inside.y1 and not any(box.overlaps(other) for other in taken):
            break
    if far > DISTANCES[0] or (across and up):
        axes.annotate("", note.xy, (across * far, up * far), textcoords="offset points",
                      arrowprops={"arrowstyle": "-", "linewidth": 0.7, "color": colour,
                                  "shrinkA": 0, "shrinkB": 3})  # fmt: skip
    return box


def _words(picture: Figure, run: Run, points: list[Point], named: list[Point]) -> None:
    title = frontier_finding(run).replace("; ", ";\n")
    size = min(17, 1190 / max(map(len, title.split("\n"))))
    picture.text(0.025, 0.97, title, size=size, weight="bold", va="top", linespacing=1.4)
    shown = [variant_of(point.variant) for point in points]
    families = {variant.look for variant in shown}
    said_beside = " ".join(title_of(point.variant) for point in named)
    families -= {look for look in families if look.family in said_beside}
    looks = [(look, True) for look in LOOKS.values() if look in families]
    if len({variant.checkpoints for variant in shown}) > 1:
        looks.append((Look("with checkpointing", "#555555", "s", ""), True))
        looks.append((Look("without", "#555555", "s", ""), False))
    keys = [
        Line2D([], [], linestyle="", color=look.colour, marker=look.marker, label=look.family,
               **EDGES[checkpoints])
        for look, checkpoints in looks
    ]  # fmt: skip
    keys.append(Line2D([], [], color="black", linewidth=1.6, label="the fastest in this memory"))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.02, 0.905)}
    if small := len(points) - len(named):
        dot: dict[str, Any] = {"linestyle": "", "color": "#595959", "marker": "s", "markersize": 5}
        keys.append(Line2D([], [], **dot, label=f"small: {small} other variants"))
    picture.legend(handles=keys, ncols=len(keys), handletextpad=0.4, columnspacing=1.4, **place)
    said = (
        "Medians over steps, then over rounds; memory: the most that torch reserved in any round. "
        f"A card's line stands left of its size by the {CONTEXT_GIB} GiB that CUDA's context takes."
    )
    words = fill(f"{caption(run)} {said}", 140)
    picture.text(0.025, 0.02, words, size=10.5, color="#444444", linespacing=1.5)


def frontier_finding(run: Run) -> str:
    """The title: both ends of the frontier."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    best = pareto(_shown(run))
    said = [f"{title_of(p.variant)} ({p.step_ms:.0f} ms, {p.peak_gib:.1f} GiB)" for p in best]
    if len(best) == 1:
        return f"Fastest and smallest at {best[0].seq_len} tokens: {said[0]}"
    return f"At {best[0].seq_len} tokens, fastest: {said[-1]}; smallest: {said[0]}"
