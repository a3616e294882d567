"""frontier.png, from a run alone: step time over peak memory, and the fastest variant for each
amount of memory."""

from __future__ import annotations

from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from bench.records import Run
from bench.results import first_few
from report.fits import CONTEXT_GIB, Point, pareto, points_of
from report.picture import annotate, framed, write_caption, write_title
from report.wording import REHEARSAL_NOTICE, caption, floor_words, on_base, why_no_time
from variants import LOOKS, Look, title_of, variant_of

CARDS_GIB = (8, 12, 16, 24, 40, 48, 80)
# Variants named in the picture, besides the fastest of all. Each name stands this many points
# right of and above its marker, where suites have room. The other markers are small.
NAMED = {
    **{"vanilla_peft": (11, 0), "fused_mlp": (11, 0), "full_unsloth": (-11, 0)},
    **{"liger_peft": (11, 0), "compiled_peft": (11, 0), "fused_all_offload": (-8, -9)},
    **{"fused_layer_graph_offload": (8, -9), "fused_layer_graph_no_checkpointing": (-22, -30)},
}
TICKS_GIB = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 100, 140)
EDGES: dict[bool, dict[str, Any]] = {  # by whether it checkpoints; hollow if not
    True: {"markeredgecolor": "white", "markeredgewidth": 0.8},
    False: {"markerfacecolor": "white", "markeredgewidth": 1.5},
}
WORDS = "#333333"  # of names: most families' colours are too pale on white
MEMORY = (
    "Medians over steps, then over rounds; memory: the most that torch reserved in any round. A "
    f"card's line stands left of its size by the {CONTEXT_GIB} GiB that CUDA's context takes."
)


def frontier_figure(run: Run) -> Figure | None:
    """Draw step time over peak memory, and a staircase of the fastest for each amount of memory.
    None if fewer than two variants have both a time and a peak at one length."""
    points = _shown(run)
    if not points:
        return None
    with framed(12, 8.4) as picture:
        axes = picture.subplots()
        floor = run.floor.get(points[0].seq_len)
        floor_ms = floor.floor_ms if floor else None
        _ranges(axes, points, floor_ms)
        best, named = pareto(points), named_points(points)
        picture.subplots_adjust(0.075, 0.195, 0.975, 0.795)
        _lines(axes, best, floor_ms)
        for point in sorted(reversed(points), key=lambda point: point in named):  # those on top
            _mark(axes, point, point in named)
        _label(axes, named, best)
        write_title(picture, frontier_finding(run), 0.97, 17, 1190, va="top", linespacing=1.4)
        _legend(picture, points, named)
        said = f"{caption(run)} {MEMORY} {floor_words(run)}{_not_drawn(run, points)}"
        write_caption(picture, said, 0.02, 140)
    return picture


def _shown(run: Run) -> list[Point]:
    """Return the points at the longest length that has two."""
    lengths = reversed(run.experiment.seq_lens)
    return next((found for n in lengths if len(found := points_of(run, n)) >= 2), [])


def named_points(points: list[Point]) -> list[Point]:
    """Return the points with a name beside them."""
    *_, fastest = pareto(points)
    return [point for point in points if point.variant in NAMED or point is fastest]


def _ranges(axes: Axes, points: list[Point], floor_ms: float | None) -> None:
    peaks, times = [p.peak_gib for p in points], [p.step_ms for p in points]
    axes.set_xscale("log")
    low, high = min(peaks) / 1.65, max(peaks) * 1.2
    axes.set_xlim(low, high)
    least, most = min(floor_ms or times[0], *times), max(times)
    axes.set_ylim(least - 0.2 * (most - least), most + 0.08 * (most - least))
    ticks = [gib for gib in TICKS_GIB if low <= gib <= high]
    axes.set_xticks(ticks, map(str, ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(length=0)
    axes.set_xlabel("peak memory that torch reserves, GiB (less is better)")
    axes.set_ylabel("ms a step (less is better)")


def _lines(axes: Axes, best: list[Point], floor_ms: float | None) -> None:
    """Draw the frontier, the cards and the floor."""
    low, high = axes.get_xlim()
    corners = [(p.peak_gib, p.step_ms) for p in [*best, best[-1]._replace(peak_gib=high)]]
    axes.step(*zip(*corners, strict=True), where="post", color="black", linewidth=1.6, zorder=2)
    for gib in CARDS_GIB:
        if low < gib - CONTEXT_GIB < high:
            axes.axvline(gib - CONTEXT_GIB, color="#bcd4ee", linewidth=1.4, zorder=0.5)
            annotate(axes, f"{gib} GiB\ncard", (gib - CONTEXT_GIB, 1), (0, 3),
                 axes.get_xaxis_transform(), ha="center", va="bottom", size=9.5,
                 color="#3b6ea5")  # fmt: skip
    if floor_ms:
        axes.axhline(floor_ms, color="black", linewidth=2.5)
        annotate(axes, f"floor: {floor_ms:.0f} ms", (1, floor_ms), (-4, -5),
                 axes.get_yaxis_transform(), ha="right", va="top", size=10.5)  # fmt: skip


def _mark(axes: Axes, point: Point, is_named: bool) -> None:
    variant = variant_of(point.variant)
    edges = EDGES[variant.checkpoints]
    look: dict[str, Any] = {"markersize": 12 if is_named else 6.5, "zorder": 3, **edges}
    axes.plot(point.peak_gib, point.step_ms, variant.look.marker, color=variant.look.colour, **look)


def _label(axes: Axes, named: list[Point], best: list[Point]) -> None:
    """Write names and times beside the points, with a line to those further off."""
    line = {"arrowstyle": "-", "linewidth": 0.7, "color": WORDS, "shrinkA": 0, "shrinkB": 3}
    for point in named:
        across, up = NAMED.get(point.variant, (11, 0))
        words = f"{fill(title_of(point.variant), 26)}\n{point.step_ms:.0f} ms"
        annotate(
            axes, words, (point.peak_gib, point.step_ms), (across, up), zorder=4, color=WORDS,
            ha="left" if across > 0 else "right", linespacing=1.1, size=11,
            va="center" if not up else "bottom" if up > 0 else "top",
            bbox={"boxstyle": "square,pad=0.05", "color": "white"},
            weight="bold" if point in best else "normal",
            arrowprops=line if abs(up) > 20 else None,
        )  # fmt: skip


def _legend(picture: Figure, points: list[Point], named: list[Point]) -> None:
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
    if small := len(points) - len(named):
        dot: dict[str, Any] = {"linestyle": "", "color": "#595959", "marker": "s", "markersize": 5}
        keys.append(Line2D([], [], **dot, label=f"small: {small} other variants"))
    picture.legend(handles=keys, ncols=len(keys), handletextpad=0.4, columnspacing=1.4,
                   loc="upper left", bbox_to_anchor=(0.02, 0.905))  # fmt: skip


def _not_drawn(run: Run, points: list[Point]) -> str:
    """Say which variants have no point, and why."""
    drawn, seq_len = {point.variant for point in points}, points[0].seq_len
    names: dict[str, list[str]] = {}
    for id in run.experiment.variants:
        if id not in drawn and id != variant_of(id).again.id:
            names.setdefault(why_no_time(run, id, seq_len), []).append(title_of(id))
    said = "".join(f" {why}: {first_few(titles, '; ')}." for why, titles in names.items())
    return f" Without a point,{said}" if said else ""


def frontier_finding(run: Run) -> str:
    """Say which variant is fastest on the smallest card that any fits, and which overall."""
    if run.rehearsal:
        return REHEARSAL_NOTICE
    best = pareto(_shown(run))
    fastest, where = best[-1], f"At {best[0].seq_len} tokens{on_base(run)}"
    sizes = [gib for gib in CARDS_GIB if best[0].peak_gib <= gib - CONTEXT_GIB]
    if not sizes:
        return f"{where} {_in_numbers(fastest)} is the fastest"
    fitting = [point for point in best if point.peak_gib <= sizes[0] - CONTEXT_GIB][-1]
    if fitting is fastest:
        return f"{where} {_in_numbers(fastest)} is the fastest, and fits {sizes[0]} GiB"
    return (
        f"{where} {_in_numbers(fitting)} is the fastest that fits {sizes[0]} GiB;\n"
        f"the fastest of all: {_in_numbers(fastest)}"
    )


def _in_numbers(point: Point) -> str:
    return f"{title_of(point.variant)} ({point.step_ms:.0f} ms, {point.peak_gib:.1f} GiB reserved)"
