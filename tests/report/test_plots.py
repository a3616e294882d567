import os
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import ablation_case
import example_results as example
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from bench.records import Cell
from report import benchmark_results as plots
from report import looks, tables
from report import statistics as summary
from variants import LOOKS, SUITES, VARIANTS, title_of

ROOT = Path(__file__).resolve().parents[2]
FOUR = ("vanilla_peft", "vanilla_peft_again", "fused_mlp", "full_unsloth")
EIGHT = tuple(example.STEP_MS)[:8]
FASTEST = [v for v in SUITES["fastest"] if v in example.STEP_MS]
LONG_NAMES = tuple(sorted(VARIANTS, key=lambda id: len(title_of(id)))[-plots.MANY :])
UNAVAILABLE = {("full_unsloth", n): "unavailable" for n in example.SEQ_LENS}
RUNS = {
    "three": example.run(),
    "with an A/A band": example.run(FOUR),
    "one out of memory, one unavailable": example.run(
        FOUR, status={("vanilla_peft", 512): "oom", **UNAVAILABLE}
    ),
    "rehearsal": example.run(seq_lens=(64, 128), rehearsal=True, gpu=False, status=UNAVAILABLE),
    "eight": example.run(EIGHT),
    "eight, two without a time": example.run(
        EIGHT, status={("liger", 512): "oom", ("compiled_layers", 64): "parity_failed"}
    ),
    "fastest": example.run(FASTEST),
    "suite peers": ablation_case.run(tuple(SUITES["peers"])),
    "suite all": ablation_case.run(),
    "long names": ablation_case.run(LONG_NAMES, (64, 512)),
    "a graph": example.run(("vanilla_peft", "fused_mlp", "fused_layer_graph")),
    "one length": example.run(("vanilla_peft", "fused_mlp"), (512,)),
    "nothing yet": example.empty(),
    "nothing came out": example.run(
        status={(v, n): "error" for v in example.THREE for n in example.SEQ_LENS}
    ),
}
SPARE = 10  # pixels to the edge: another machine's letters may be a little wider


@pytest.fixture(scope="module")
def pictures():
    drawn = {name: plots.benchmark_figure(run) for name, run in RUNS.items()}
    for picture in drawn.values():
        FigureCanvasAgg(picture).draw()  # places every text
    return drawn


def panels(picture):
    return dict(zip(("throughput", "speedup", "memory", "step"), picture.axes, strict=True))


def row(run, variant, seq_len):
    key = (variant, seq_len)
    return next(r for r in summary.summarize(run) if (r.variant, r.seq_len) == key)


def line(axes, name):
    return next(line for line in axes.lines if line.get_label() == name)


def words(axes):
    return [text.get_text() for text in axes.texts]


def bar_at(axes, place):
    """The bars that stand on one place of the x axis, from the lowest up."""
    found = [b for b in axes.patches if abs(b.get_x() + b.get_width() / 2 - place) < 1e-6]
    return sorted(found, key=lambda bar: bar.get_y())


# --- the values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("vanilla_peft", "vanilla PEFT"),
        ("fused_mlp", "fused MLP"),
        ("full_unsloth", "full Unsloth"),
    ],
)
def test_throughput_is_drawn_from_zero(variant, name, pictures):
    axes = panels(pictures["three"])["throughput"]
    wanted = [row(RUNS["three"], variant, n).tokens_per_s for n in example.SEQ_LENS]
    assert list(line(axes, name).get_ydata()) == wanted
    assert list(line(axes, name).get_xdata()) == [0, 1, 2, 3]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "128", "256", "512"]
    low, high = axes.get_ylim()
    assert low == 0 and high > max(wanted)
    assert f"{wanted[-1] / 1000:.1f}k" in words(axes)


def test_speedups_come_with_intervals_the_line_at_one_and_the_band(pictures):
    run, axes = RUNS["with an A/A band"], panels(pictures["with an A/A band"])["speedup"]
    rows = [row(run, "fused_mlp", n) for n in example.SEQ_LENS]
    assert list(line(axes, "fused MLP").get_ydata()) == [r.speedup for r in rows]
    drawn = [tuple(line.get_ydata()) for line in axes.lines]
    for each in rows:
        assert tuple(each.speedup_ci95) in drawn
        assert f"{each.speedup:.2f}×" in words(axes)
    assert (1.0, 1.0) in drawn
    assert "vanilla PEFT" not in [line.get_label() for line in axes.lines]
    bands = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in axes.patches]
    assert bands == [pytest.approx(summary.noise_band(run, n)) for n in example.SEQ_LENS]
    assert any("A/A" in text for text in words(axes))
    assert not panels(pictures["three"])["speedup"].patches


def test_memory_bars_and_a_capacity_that_does_not_flatten_them(pictures):
    axes = panels(pictures["three"])["memory"]
    heights = sorted(bar.get_height() for bar in axes.patches)
    peaks = sorted(r.peak_gib for r in summary.summarize(RUNS["three"]))
    assert heights == pytest.approx(peaks)
    assert "36.7" in words(axes)
    assert "the card holds 140 GiB, far above this axis" in words(axes)
    assert axes.get_ylim()[1] < 50
    small = example.run()
    small.environment.gpu.memory_bytes = 48 * 2**30
    axes = panels(plots.benchmark_figure(small))["memory"]
    assert [48.0, 48.0] in [list(line.get_ydata()) for line in axes.lines]
    assert axes.get_ylim()[1] > 48


def test_a_step_is_stacked_from_its_parts_with_the_floor_across(pictures):
    axes = panels(pictures["three"])["step"]
    each = row(RUNS["three"], "fused_mlp", 512)
    stack = bar_at(axes, 3)  # the middle one of three stands on its length's own place
    parts = [each.forward_ms, each.backward_ms, each.optimizer_ms]
    assert [bar.get_height() for bar in stack] == pytest.approx(parts)
    assert [bar.get_y() for bar in stack] == pytest.approx([0, parts[0], parts[0] + parts[1]])
    assert f"{each.median_step_ms:.0f}\n{each.ratio_to_floor:.1f}×" in words(axes)
    lines = [c for c in axes.collections if isinstance(c, LineCollection)]
    floors = {float(segment[0][1]) for c in lines for segment in c.get_segments()}
    assert floors == set(example.FLOOR_MS.values())
    assert not [c for c in panels(pictures["rehearsal"])["step"].collections if len(c.get_paths())]


def test_a_step_that_is_one_graph_is_one_bar(pictures):
    run, axes = RUNS["a graph"], panels(pictures["a graph"])["step"]
    each, whole = row(run, "fused_layer_graph", 512), example.SEQ_LENS.index(512) + 0.28
    (bar,) = bar_at(axes, whole)
    assert (bar.get_y(), bar.get_height()) == (0, pytest.approx(each.median_step_ms))
    assert f"{each.median_step_ms:.0f}\n{each.ratio_to_floor:.1f}×" in words(axes)
    assert len(bar_at(axes, whole - 0.28)) == 3  # beside it, the parts of a step that has them

    def said(name):
        legend = panels(pictures[name])["step"].get_legend()
        return [text.get_text() for text in legend.get_texts()]

    phases = ["forward", "backward", "optimizer"]
    assert said("a graph") == [*phases, "CUDA graph", "floor (× of it)"]
    assert said("three") == [*phases, "floor (×: multiples of it)"]
    assert said("fastest") == [*phases, "CUDA graph", "floor"]


def test_the_label_of_a_step_stands_on_its_bar_even_where_the_parts_add_up_to_more():
    run = example.empty(variants=["vanilla_peft"], seq_lens=[64])
    parts = {"forward_ms": [50.0], "backward_ms": [70.0], "optimizer_ms": [1.0]}
    cell = Cell("vanilla_peft", 64, 1, "ok", step_ms=[100.0], **parts)
    run.add(cell)
    axes = panels(plots.benchmark_figure(run))["step"]
    label = next(text for text in axes.texts if text.get_text() == "100")
    assert label.xy[1] == 121.0


def test_of_many_variants_the_strongest_are_shown():
    def shown(suite):
        return list(plots.View(ablation_case.run(tuple(SUITES[suite]), (64,), rounds=1)).looks)

    ours = ["vanilla_peft", "full_unsloth", "fused_all", "liger_peft", "fused_layer"]
    assert shown("fastest") == [*ours, "fused_layer_graph", "compiled_peft"]
    assert shown("all")[-2:] == ["fused_layer", "fused_layer_graph"]
    assert len(shown("all")) == plots.MANY


# --- what has no time -----------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "said"), looks.STATUS_WORDS.items())
def test_every_status_is_marked_in_every_panel(status, said):
    picture = plots.benchmark_figure(example.run(status={("fused_mlp", 128): status}))
    for axes in picture.axes:
        assert words(axes).count(said) == 1
        marks = [m for m in axes.lines if m.get_markerfacecolor() == "white"]
        assert [mark.get_marker() for mark in marks] == [LOOKS["fused"].marker]
        assert list(marks[0].get_xdata()) == [1.0]  # fused MLP's place at 128 tokens
    heights = line(panels(picture)["throughput"], "fused MLP").get_ydata()
    assert [height == height for height in heights] == [True, False, True, True]  # a gap
    assert len(panels(picture)["memory"].patches) == 11


def test_marks_of_several_variants_stand_apart(pictures):
    for axes in pictures["nothing came out"].axes:
        places = [float(m.get_xdata()[0]) for m in axes.lines if m.get_markerfacecolor() == "white"]
        assert len(set(places)) == 12


# --- the words ------------------------------------------------------------------------------------


def title(picture):
    return picture.texts[0].get_text()


def test_the_title_states_the_finding(pictures):
    fused, unsloth = (row(RUNS["three"], v, 512).speedup for v in ("fused_mlp", "full_unsloth"))
    wanted = f"Fused MLP {fused:.2f}×, full Unsloth {unsloth:.2f}× at 512 tokens on NVIDIA H200"
    assert title(pictures["three"]) == wanted
    assert " at 256 tokens " in title(pictures["one out of memory, one unavailable"])
    fastest = ["Fused MLP ", "all fused ", "bordered_step "]  # and the subject, of eight
    assert [part in title(pictures["eight"]) for part in fastest] == [True] * 3
    assert title(pictures["nothing came out"]) == "No speedup measured on NVIDIA H200"


def test_the_title_does_not_boast_of_noise():
    run = example.run(FOUR)
    for cell in run.cells:
        if cell.variant == "fused_mlp":
            vanilla = next(
                c.step_ms for c in run.cells
                if (c.variant, c.seq_len, c.round)
                == ("vanilla_peft", cell.seq_len, cell.round)
            )  # fmt: skip
            cell.step_ms = vanilla
    assert title(plots.benchmark_figure(run)).startswith(
        "Fused MLP not distinguishable, full Unsloth 1."
    )


def test_a_rehearsal_is_stamped_everywhere_and_nothing_else_is(pictures):
    said = "REHEARSAL without a GPU: not a performance result"
    picture = pictures["rehearsal"]
    assert title(picture) == said
    stamps = [text for text in picture.texts if text.get_rotation() == 30]
    assert [text.get_text() for text in stamps] == [said.replace(": ", "\n")]
    box = stamps[0].get_window_extent()
    assert box.width > 0.7 * picture.bbox.width and box.height > 0.5 * picture.bbox.height
    assert said in tables.results_section(RUNS["rehearsal"])
    assert said in tables.headline_table(RUNS["rehearsal"])
    everything = [text.get_text() for text in pictures["three"].findobj(Text)]
    everything += [tables.results_section(RUNS["three"]), tables.headline_table(RUNS["three"])]
    assert not [text for text in everything if "rehearsal" in text.lower()]


def test_the_caption_says_what_was_measured():
    said = looks.caption(RUNS["three"])
    for fact in (
        *("NVIDIA H200", "torch 2.11.0+cu130", "triton 3.6.0", "transformers 5.17.0"),
        *("peft 0.21.0", "unsloth 2026.10.9", "batch 32", "LoRA rank 32", "bfloat16"),
        *("gradient checkpointing on", "24 timed steps", "rounds: 3"),
    ):
        assert fact in said
    assert "liger_kernel" not in said  # not installed
    blocks = {
        ("vanilla_peft_no_checkpointing",): "gradient checkpointing off",
        ("vanilla_peft", "vanilla_peft_no_checkpointing"): "gradient checkpointing on and off",
    }
    for variants, words in blocks.items():
        assert f"{words} ·" in looks.caption(example.empty(variants=list(variants)))
    in_turns = example.empty()
    in_turns.experiment.turn_steps = 2
    assert "timed steps each, interleaved 2 at a time ·" in looks.caption(in_turns)
    assert "batch 32, padded" in looks.caption(example.empty(padded=True))
    assert "no GPU (Intel Xeon)" in looks.caption(RUNS["rehearsal"])


# --- the looks ------------------------------------------------------------------------------------


def test_variants_are_told_apart_with_and_without_colour(pictures):
    view = plots.View(RUNS["eight"])
    for what in ("colour", "marker", "hatch"):
        looks = [getattr(look, what) for look in view.looks.values()]
        assert len(set(looks)) == len(looks) == 7  # the A/A twin is a band
    assert next(iter(view.looks)) == "vanilla_peft"
    shown = [text.get_text() for text in pictures["eight"].legends[0].get_texts()]
    assert shown == list(map(title_of, view.looks))


def test_variants_of_one_family_do_not_look_alike():
    fused = [id for id, variant in VARIANTS.items() if variant.recipe.fused][: plots.MANY]
    found = plots.looks_of([*fused, "vanilla_peft"])
    assert len({look[1:] for look in found.values()}) == plots.MANY + 1
    assert found["vanilla_peft"] == LOOKS["peft"] and found["fused_mlp"] == LOOKS["fused"]


def test_a_variant_looks_the_same_in_every_panel(pictures):
    look = LOOKS["fused"]
    axes = panels(pictures["three"])
    for name in ("throughput", "speedup"):
        drawn = line(axes[name], "fused MLP")
        assert (drawn.get_color(), drawn.get_marker()) == (look.colour, look.marker)
    bar = bar_at(axes["memory"], 3)[0]
    assert (to_hex(bar.get_facecolor()), bar.get_hatch()) == (look.colour, look.hatch)
    forward, backward, _ = bar_at(axes["step"], 3)
    assert (to_hex(backward.get_facecolor()), forward.get_hatch()) == (look.colour, look.hatch)


@pytest.mark.parametrize("name", RUNS)
def test_no_text_is_cut_off_and_no_label_covers_another(name, pictures):
    picture = pictures[name]
    for text in picture.findobj(Text):
        if text.get_text().strip() and text.get_visible():
            box = text.get_window_extent()
            inside = box.x0 >= SPARE and box.y0 >= SPARE
            inside &= min(picture.bbox.max - box.max) >= SPARE
            assert inside, f"{text.get_text()!r} is cut off"
    for axes in picture.axes:
        labels = [text for text in axes.texts if text.get_text()]
        for one, other in combinations(labels, 2):
            boxes = (t.get_window_extent().padded(-1) for t in (one, other))
            assert not next(boxes).overlaps(next(boxes)), f"{one.get_text()} on {other.get_text()}"
        points = [axes.transData.transform(p) for line in axes.lines for p in line.get_xydata()]
        for label in labels:
            box = label.get_window_extent().padded(-1)
            if label.get_rotation() == 0:  # marks without a time may stand among the lines
                on = [point for point in points if box.contains(*point)]
                assert not on, f"{label.get_text()} stands on a point"
    head = [picture.texts[0], *picture.legends[0].get_texts(), *(a.title for a in picture.axes)]
    head += [axes._left_title for axes in picture.axes]
    boxes = [text.get_window_extent() for text in head if text.get_text()]
    assert not [1 for one, other in combinations(boxes, 2) if one.overlaps(other)]


def test_a_label_gives_way_to_the_whisker_of_another_variant():
    """Two variants whose intervals overlap: the lower one's value stands beside its point."""
    run = example.empty(variants=["vanilla_peft", "fused_mlp", "full_unsloth"], seq_lens=[64, 512])
    rounds = {"vanilla_peft": (200, 200), "fused_mlp": (230, 160), "full_unsloth": (170, 110)}
    for variant, times in rounds.items():
        for n, ms in enumerate(times, start=1):
            run.add(example.timed_cell(variant, 64, n, [float(ms)]))
    picture = plots.benchmark_figure(run)
    FigureCanvasAgg(picture).draw()
    axes = panels(picture)["speedup"]
    whisker = next(
        line for line in axes.lines
        if line.get_color() == LOOKS["unsloth"].colour and line.get_marker() == "_"
    )  # fmt: skip
    (x, low), (_, high) = axes.transData.transform(whisker.get_xydata())
    labels = [text for text in axes.texts if text.get_color() == LOOKS["fused"].colour]
    for label in labels:
        box = label.get_window_extent()
        assert not (box.x0 <= x <= box.x1 and box.y0 < high and box.y1 > low)
    assert [label.get_text() for label in labels] == ["1.06×"]


def test_labels_of_values_that_lie_close_are_moved_apart_but_not_out():
    heights = plots._apart([2.0, 9.7, 9.8, 9.9], gap=1.0, top=10.0)
    gaps = [b - a for a, b in pairwise(heights)]
    assert min(gaps) == pytest.approx(1.0) and heights[-1] + 0.5 <= 10.0
    assert plots._apart([1.0, 5.0], gap=1.0, top=10.0) == [1.0, 5.0]


# --- the files ------------------------------------------------------------------------------------


def test_the_same_results_give_the_same_bytes(tmp_path):
    for name in ("one.png", "two.png"):
        plots.draw_benchmark_results(RUNS["three"], tmp_path / name)
    one, two = (tmp_path / "one.png").read_bytes(), (tmp_path / "two.png").read_bytes()
    assert one == two
    assert one.startswith(b"\x89PNG") and not [tag for tag in (b"tEXt", b"tIME") if tag in one]


def test_a_failed_draw_leaves_the_earlier_picture(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "picture.png"
    path.write_bytes(b"earlier")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        plots.draw_benchmark_results(RUNS["nothing yet"], path)
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_neither_module_imports_torch():
    check = (
        "import sys; from report import benchmark_results, tables; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=60).returncode == 0
