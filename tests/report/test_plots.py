"""panels.png: what its four panels draw, say and mark, on made-up results."""

from functools import cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from statistics import median

import pytest
from cases import example_results as example
from cases import picture_case as case
from cases.example_results import rounds
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from bench import results
from report import kernel_time, tables, wording
from report import panels as plots
from report import statistics as summary
from report.benchmark_results import benchmark_figure
from report.headline import headline_table
from report.kernel_time import bars
from report.lines import View, apart_by, looks_of
from variants import LOOKS, SUITES, VARIANTS, title_of, variant_of

FOUR = ("vanilla_peft", "vanilla_peft_again", "fused_mlp", "full_unsloth")
EIGHT = (*FOUR, "liger_peft", "compiled_peft", "fused_all", "fused_layer")
LONG_NAMES = tuple(sorted(VARIANTS, key=lambda id: len(title_of(id)))[-wording.MANY :])
COMMITTED = Path(__file__).parents[2] / "docs" / "runs"
UNAVAILABLE = {("full_unsloth", n): "unavailable" for n in example.SEQ_LENS}
RUNS = {
    "four": example.run(FOUR),
    "one out of memory, one unavailable": example.run(
        FOUR, status={("vanilla_peft", 512): "oom", **UNAVAILABLE}
    ),
    "rehearsal": example.run(seq_lens=(64, 128), rehearsal=True, gpu=False, status=UNAVAILABLE),
    "eight, two without a time": example.run(
        EIGHT, status={("liger_peft", 512): "oom", ("compiled_peft", 64): "parity_failed"}
    ),
    "suite all": example.run(example.ALL),
    "long names": example.run(LONG_NAMES, (64, 512), rounds=2),
    "four long names": example.run(LONG_NAMES[-4:], (64, 512), rounds=2),
    "a graph": example.run(("vanilla_peft", "fused_mlp", "fused_layer_graph")),
    "close together": rounds(
        vanilla_peft=[300], fused_mlp=[126], full_unsloth=[109], a_newer_version=[100]
    ),
    "one length": example.run(("vanilla_peft", "fused_mlp"), (512,)),
    "nothing yet": example.empty(),
    "nothing came out": example.run(
        status={(v, n): "error" for v in example.THREE for n in example.SEQ_LENS}
    ),
}
# measured: labels close to another's point, an interval that leaves the panel, names of five lines,
# steps of 19 s
RUNS |= {
    name: results.load(COMMITTED / f"{name}.json.gz")
    for name in ("h200/beside_unsloth/20_steps", "h100/experiment_2026-11-26", "h100/loss_curve-0",
                 "h100/published-llama3-8b")
}  # fmt: skip


@cache
def picture_of(name):
    return plots.panels_figure(RUNS[name])


@cache
def rows_of(name):
    return {(row.variant, row.seq_len): row for row in summary.summarize(RUNS[name])}


def panels(picture):
    return dict(zip(("speedup", "throughput", "memory", "kinds"), picture.axes, strict=True))


def line(axes, name):
    return next(line for line in axes.lines if line.get_label() == name)


def words(axes):
    return [line for text in axes.texts for line in text.get_text().split("\n")]


def bar_at(axes, place):
    """Return the bars at one place on the x axis, from the lowest up."""
    found = [b for b in axes.patches if abs(b.get_x() + b.get_width() / 2 - place) < 1e-6]
    return sorted(found, key=lambda bar: bar.get_y())


# --- the values -----------------------------------------------------------------------------------


def test_throughput_is_drawn_from_zero():
    axes = panels(picture_of("four"))["throughput"]
    for variant in example.THREE:
        wanted = [rows_of("four")[variant, n].tokens_per_s for n in example.SEQ_LENS]
        drawn = line(axes, title_of(variant))
        assert (list(drawn.get_xdata()), list(drawn.get_ydata())) == ([0, 1, 2, 3], wanted)
        assert f"{wanted[-1] / 1000:.1f}k" in words(axes)
        low, high = axes.get_ylim()
        assert low == 0 and high > max(wanted)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "128", "256", "512"]


def test_speedups_come_with_intervals_the_line_at_one_and_the_band():
    run, axes = RUNS["four"], panels(picture_of("four"))["speedup"]
    whiskers = {(*line.get_xdata(), *line.get_ydata()) for line in axes.lines
                if line.get_marker() == "_"}  # fmt: skip
    texts = [text.get_text() for text in axes.texts]
    for variant, aside in (("fused_mlp", 0), ("full_unsloth", 0.06)):
        rows = [rows_of("four")[variant, n] for n in example.SEQ_LENS]
        assert list(line(axes, title_of(variant)).get_ydata()) == [r.speedup for r in rows]
        for place, each in enumerate(rows):
            assert (place + aside, place + aside, *each.speedup_ci95) in whiskers
        assert f"{title_of(variant)}\n{rows[-1].speedup:.2f}×" in texts
    assert [1.0, 1.0] in [list(line.get_ydata()) for line in axes.lines]
    assert "vanilla PEFT" not in [line.get_label() for line in axes.lines]
    bands = [(bar.get_center()[0], bar.get_y(), bar.get_y() + bar.get_height())
             for bar in axes.patches]  # fmt: skip
    assert bands == [pytest.approx((place, *summary.noise_band(run, n)))
                     for place, n in enumerate(example.SEQ_LENS)]  # fmt: skip
    assert any("A/A" in text for text in words(axes))
    assert not panels(picture_of("a graph"))["speedup"].patches


def test_memory_bars_and_a_capacity_that_does_not_flatten_them():
    axes = panels(picture_of("four"))["memory"]
    heights = sorted(bar.get_height() for bar in axes.patches)
    rows = rows_of("four").values()
    assert heights == pytest.approx(sorted(r.peak_gib for r in rows if "again" not in r.variant))
    assert f"{max(heights):.1f}" in words(axes)
    assert words(axes).count(f"{max(heights):.1f}") == 1  # of two that are equal, side by side
    neighbours = example.run(("vanilla_peft", "fused_mlp"), (64, 512))
    for cell in neighbours.cells:  # the last at 64 and the first at 512 have a number each
        gib = 10 + 10 * (cell.variant == "fused_mlp") + 10 * (cell.seq_len == 512)
        cell.peak_allocated_bytes = gib * 2**30
    assert words(panels(plots.panels_figure(neighbours))["memory"]) == [
        *("10.0", "20.0", "20.0", "30.0")
    ]
    assert not any("card" in word for word in words(axes))
    assert axes.get_ylim()[1] < 50
    small = example.run()
    small.environment.gpu.memory_bytes = 48 * 2**30
    axes = panels(plots.panels_figure(small))["memory"]
    assert "line: the card holds 48 GiB" in words(axes)
    assert [48.0, 48.0] in [list(line.get_ydata()) for line in axes.lines]
    assert axes.get_ylim()[1] > 48


def test_the_last_panel_is_the_gpus_time_at_the_longest_length():
    axes, run = panels(picture_of("four"))["kinds"], RUNS["four"]
    bar = next(bar for bar in bars(run, 512) if bar.variant == "fused_mlp")
    drawn = [each for each in axes.patches if each.get_y() == pytest.approx(1 - 0.78 / 2)]
    begins = [0, *accumulate(each.get_width() for each in drawn)]  # one after another
    assert [each.get_x() for each in drawn] == pytest.approx(begins[:-1])
    idle_ms = [median(cell.step_ms) - cell.gpu_busy_ms for cell in run.cells_of("fused_mlp", 512)]
    assert drawn.pop().get_width() == pytest.approx(median(idle_ms))
    drawn = [(each.get_width(), to_hex(each.get_facecolor())) for each in drawn]
    for kind, ms in kernel_time.drawn_ms(bar).items():
        assert (pytest.approx(ms), kernel_time.COLOURS[kind]) in drawn
    assert f"{bar.step_ms:.0f} ms" in words(axes)
    _, kinds = picture_of("four").legends
    said = [text.get_text() for text in kinds.get_texts()]
    assert (said[2], said[-1]) == ("casts and copies", kernel_time.IDLE)
    lines = [c for c in axes.collections if isinstance(c, LineCollection)]
    floors = {float(segment[0][0]) for c in lines for segment in c.get_segments()}
    assert floors == {example.FLOOR_MS[512]} and "floor 326" in words(axes)
    assert " at 512 tokens" in axes.get_title(loc="left")


def test_the_last_panel_hides_no_variant():
    axes = panels(picture_of("rehearsal"))["kinds"]
    assert words(axes) == ["no profile", "297 ms", "no profile", "247 ms", "unavailable"]
    axes = panels(picture_of("one out of memory, one unavailable"))["kinds"]
    assert [words(axes).count(why) for why in ("out of memory", "unavailable")] == [1, 1]


def test_of_many_variants_the_strongest_are_shown():
    def shown(suite):
        return list(View(example.run(tuple(SUITES[suite]), (64,), rounds=1)).looks)

    asked = ["vanilla_peft", "full_unsloth", "fused_layer_graph_offload"]  # of the experiment
    others = ["fused_all", "liger_peft", "fused_layer", "fused_layer_graph", "compiled_peft"]
    assert shown("fastest") == [*asked, *others]
    assert shown("all")[-1] == "fused_layer"
    assert len(shown("all")) == wording.MANY


# --- what has no time -----------------------------------------------------------------------------


def test_every_status_is_marked_in_every_panel():
    status = {("fused_mlp", 128): "oom", ("fused_mlp", 512): "error"}
    status |= {("full_unsloth", 128): "unavailable", ("full_unsloth", 256): "parity_failed"}
    picture = plots.panels_figure(example.run(status=status))
    for axes in picture.axes[:3]:
        marks = [mark for mark in axes.lines if mark.get_markerfacecolor() == "white"]
        found = {(float(mark.get_xdata()[0]), mark.get_marker()) for mark in marks}
        for (variant, seq_len), each in status.items():
            place = example.SEQ_LENS.index(seq_len) + 0.28 * (variant == "full_unsloth")
            (text,) = (t for t in axes.texts if t.get_text() == wording.STATUS_WORDS[each])
            assert text.get_position()[0] == pytest.approx(place)
            found.remove((text.get_position()[0], variant_of(variant).look.marker))
        assert not found
    heights = line(panels(picture)["throughput"], "fused MLP").get_ydata()
    assert [height == height for height in heights] == [True, False, True, False]  # gaps
    assert len(panels(picture)["memory"].patches) == 8


# --- the words ------------------------------------------------------------------------------------


def title(picture):
    return picture.texts[0].get_text()


def test_the_title_states_the_finding():
    fused, unsloth = (rows_of("four")[v, 512].speedup for v in ("fused_mlp", "full_unsloth"))
    assert title(picture_of("four")) == (
        "Speedup over vanilla PEFT by the wall clock, at 512 tokens on NVIDIA H200:\n"
        f"fused MLP {fused:.2f}×, full Unsloth {unsloth:.2f}×"
    )
    assert " at 256 tokens " in title(picture_of("one out of memory, one unavailable"))
    fastest = ["fused MLP ", "all parts ", "fused layers "]  # and the subject, of eight
    said = title(picture_of("eight, two without a time"))
    assert [part in said for part in fastest] == [True] * 3
    assert "a_newer_version 3.00×" in title(picture_of("close together"))
    assert title(picture_of("nothing came out")) == "No speedup measured on NVIDIA H200"


def test_the_title_does_not_boast_of_noise():
    run = example.run(FOUR)
    for cell in run.cells:
        if cell.variant == "fused_mlp":
            (vanilla,) = run.cells_of("vanilla_peft", cell.seq_len)[cell.round - 1 : cell.round]
            cell.step_ms = vanilla.step_ms
    said = plots.panels_finding(View(run))
    assert ":\nfused MLP within noise, full Unsloth 1." in said
    axes = panels(plots.panels_figure(run))["speedup"]
    mlp_texts = [text for text in axes.texts if text.get_color() == LOOKS["fused"].colour]
    assert {text.get_style() for text in mlp_texts} == {"italic"}
    assert {text.get_weight() for text in mlp_texts} == {"normal"}


def test_a_rehearsal_is_stamped_everywhere_and_nothing_else_is():
    picture, said = picture_of("rehearsal"), wording.REHEARSAL_NOTICE
    assert title(picture) == said == "REHEARSAL without a GPU: not a performance result"
    (stamp,) = (text for text in picture.texts if text.get_rotation() == 30)
    assert stamp.get_text() == said.replace(": ", "\n")
    box = stamp.get_window_extent()
    assert box.width > 0.7 * picture.bbox.width and box.height > 0.5 * picture.bbox.height
    assert said in tables.results_section(RUNS["rehearsal"])
    assert said in headline_table(RUNS["rehearsal"])
    everything = [text.get_text() for text in picture_of("four").findobj(Text)]
    everything += [tables.results_section(RUNS["four"]), headline_table(RUNS["four"])]
    assert not [text for text in everything if "rehearsal" in text.lower()]


# --- the looks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eight, two without a time", "long names"])
def test_variants_are_told_apart_with_and_without_colour(name):
    """Check variants of one family as well."""
    view = View(RUNS[name])
    for what in ("colour", "marker", "hatch"):
        found = [getattr(look, what) for look in view.looks.values()]
        assert len(set(found)) == len(found)
    shown = [text.get_text() for text in picture_of(name).legends[0].get_texts()]
    assert shown == list(map(title_of, view.looks))


def test_the_baseline_comes_first_and_the_experiment_has_its_own_looks():
    run = example.empty(variants=["fused_mlp", "vanilla_peft_again", "vanilla_peft"])
    assert list(View(run).looks) == ["vanilla_peft", "fused_mlp"]  # the A/A twin is a band
    found = looks_of(["fused_rope", "fused_mlp", "vanilla_peft"])
    assert found["vanilla_peft"] == LOOKS["peft"] and found["fused_mlp"] == LOOKS["fused"]


def test_a_variant_looks_the_same_in_every_panel():
    look, axes = LOOKS["fused"], panels(picture_of("four"))
    for name in ("throughput", "speedup"):
        drawn = line(axes[name], "fused MLP")
        assert (drawn.get_color(), drawn.get_marker()) == (look.colour, look.marker)
    bar = bar_at(axes["memory"], 3)[0]
    assert (to_hex(bar.get_facecolor()), bar.get_hatch()) == (look.colour, look.hatch)
    names = {label.get_text(): label for label in axes["kinds"].get_yticklabels()}
    assert names["fused MLP"].get_color() == look.colour


@pytest.mark.slow("four", "h100/experiment_2026-11-26", "rehearsal")
@pytest.mark.parametrize("name", RUNS)
def test_no_text_is_cut_off_and_no_label_covers_another(name):
    picture = picture_of(name)
    case.assert_readable(picture)
    for axes in picture.axes:
        # marks of what has no time stand below, in units of the panel's height
        drawn = [line for line in axes.lines if line.get_markerfacecolor() != "white"]
        case.assert_no_label_on(chain.from_iterable(line.get_xydata() for line in drawn), axes)


def test_a_label_gives_way_to_the_whisker_of_another_variant():
    """Overlap the intervals of two variants. The lower one's value goes below its own."""
    run = rounds(vanilla_peft=(200, 200), fused_mlp=(150, 148), full_unsloth=(140, 138))
    run.experiment.seq_lens = [64, 512]
    for cell in run.cells:
        cell.gpu_busy_ms = None  # by the clock, where speedups have intervals
    (axes,) = benchmark_figure(run).axes
    whisker = next(
        line for line in axes.lines
        if line.get_color() == LOOKS["unsloth"].colour and line.get_marker() == "_"
    )  # fmt: skip
    (x, low), (_, high) = axes.transData.transform(whisker.get_xydata())
    labels = [text for text in axes.texts if text.get_color() == LOOKS["fused"].colour]
    for label in labels:
        box = label.get_window_extent()
        assert not (box.x0 <= x <= box.x1 and box.y0 < high and box.y1 > low)
    assert [label.get_text() for label in labels] == ["1.34×"]


def test_labels_of_values_that_lie_close_are_not_moved_out():
    heights = apart_by(1.0, [2.0, 9.7, 9.8, 9.9], top=10.0)
    assert min(b - a for a, b in pairwise(heights)) == pytest.approx(1.0)
    assert heights[-1] + 0.5 <= 10.0
