"""benchmark_results.png: speedups in GPU time, readable on a phone, with made-up results."""

from itertools import chain, pairwise
from pathlib import Path

import pytest
from cases import example_results as example
from cases import picture_case as case
from cases.example_results import rounds
from matplotlib.text import Text

from bench import results
from report import benchmark_results as plot
from report import tables, wording
from report.benchmark_results import View, apart_by, looks_of
from report.headline import headline_table
from report.picture import WIDTH
from report.wording import REHEARSAL_NOTICE, STATUS_WORDS, roughly
from variants import LOOKS, SUITES, VARIANTS, title_of, variant_of

PHONE = 390  # pixels
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
# measured: labels close to another's point, names of five lines, steps of 19 s
RUNS |= {
    name: results.load(COMMITTED / f"{name}.json.gz")
    for name in ("h200/beside_unsloth/30_steps_in_turns", "h100/experiment_2026-11-26",
                 "h100/loss_curve-0", "h100/published-llama3-8b")
}  # fmt: skip


def drawn(run):
    """Return each variant's values as drawn, by title."""
    (axes,) = plot.benchmark_figure(run).axes
    titles = {title_of(variant) for variant in run.experiment.variants}
    return {line.get_label(): [*line.get_ydata()] for line in axes.lines
            if line.get_label() in titles}  # fmt: skip


def gpu_times(run, **by_variant):
    for cell in run.cells:
        if (name := cell.variant.removesuffix("_again")) in by_variant:
            cell.gpu_busy_ms = by_variant[name][cell.seq_len]
    return run


def example_run():
    return gpu_times(
        example.run(("vanilla_peft", "vanilla_peft_again", "fused_mlp", "full_unsloth"), (64, 512)),
        vanilla_peft={64: 120.0, 512: 900.0},
        fused_mlp={64: 100.0, 512: 750.0},
        full_unsloth={64: 80.0, 512: 450.0},
    )


def test_the_speedups_are_those_of_gpu_time():
    run = example_run()
    assert drawn(run) == {"fused MLP": [1.2, 1.2], "full Unsloth": [1.5, 2.0]}
    picture = plot.benchmark_figure(run)
    title = picture.texts[0].get_text().replace(plot.KEPT, " ").replace("\n", " ")
    assert title == "Speedup in GPU time: fused MLP a steady 1.20×, full Unsloth 1.5× to 2.0×"
    (axes,) = picture.axes
    assert axes.get_yscale() == "linear"
    assert [1.0, 1.0] in [list(line.get_ydata()) for line in axes.lines]  # vanilla PEFT
    ends = [text.get_text() for text in axes.texts if text.get_position()[0] > 1][:2]
    assert ends == ["fused MLP\n1.20×", "full Unsloth\n2.00×"]
    assert "NVIDIA H200" in picture.texts[1].get_text()


def test_without_a_profile_the_clock_speaks_and_the_title_says_so():
    run = example.run(("vanilla_peft", "fused_mlp"), (64,))
    for cell in run.cells:
        cell.gpu_busy_ms = None
    rows, clock = plot.shown_rows(View(run))
    assert clock == "time by the clock" and [row.variant for row in rows] == ["fused_mlp"]
    assert plot.benchmark_finding(run, rows, clock).startswith("Speedup in time by the clock: ")


def test_of_many_the_title_names_the_subject_and_the_two_fastest():
    run = rounds(
        vanilla_peft=[300], vanilla_peft_no_checkpointing=[270], fused_mlp=[200],
        full_unsloth=[150], liger_peft=[240], compiled_peft=[160], fused_all=[120],
    )  # fmt: skip
    rows, clock = plot.shown_rows(View(run))
    assert [row.variant for row in rows] == run.experiment.variants[2:]  # no baseline
    said = plot.benchmark_finding(run, rows, clock).replace(plot.KEPT, " ").partition(": ")[2]
    assert said == "fused MLP 1.50×, full Unsloth 2.00×, all parts 2.50×"


def test_a_rehearsal_is_stamped_everywhere_and_nothing_else_is():
    run, picture = RUNS["rehearsal"], plot.benchmark_figure(RUNS["rehearsal"])
    assert REHEARSAL_NOTICE == "REHEARSAL without a GPU: not a performance result"
    (stamp,) = (text for text in picture.texts if text.get_rotation() == 30)
    assert stamp.get_text() == REHEARSAL_NOTICE.replace(": ", "\n")
    box = stamp.get_window_extent()
    assert box.width > 0.7 * picture.bbox.width and box.height > 0.5 * picture.bbox.height
    for said in (picture.texts[0].get_text(), tables.results_section(run), headline_table(run)):
        assert REHEARSAL_NOTICE in said.replace("\n", " ")
    everything = [text.get_text() for text in plot.benchmark_figure(RUNS["four"]).findobj(Text)]
    everything += [tables.results_section(RUNS["four"]), headline_table(RUNS["four"])]
    assert not [text for text in everything if "rehearsal" in text.lower()]
    assert "No speedup" in plot.benchmark_figure(RUNS["nothing came out"]).texts[0].get_text()


def test_what_has_no_time_is_marked_and_leaves_a_gap():
    status = {("fused_mlp", 128): "oom", ("fused_mlp", 512): "error"}
    status |= {("full_unsloth", 128): "unavailable", ("full_unsloth", 256): "parity_failed"}
    run = example.run(status=status)
    (axes,) = plot.benchmark_figure(run).axes
    marks = [mark for mark in axes.lines if mark.get_markerfacecolor() == "white"]
    found = {(float(mark.get_xdata()[0]), mark.get_marker()) for mark in marks}
    for (variant, seq_len), each in status.items():
        place = example.SEQ_LENS.index(seq_len) + 0.28 * (variant == "full_unsloth")
        (text,) = (t for t in axes.texts if t.get_text() == STATUS_WORDS[each])
        assert text.get_position()[0] == pytest.approx(place)
        found.remove((text.get_position()[0], variant_of(variant).look.marker))
    assert not found
    line = next(line for line in axes.lines if [*line.get_xdata()] == [0, 1, 2, 3])
    assert [height == height for height in line.get_ydata()] == [True, False, True, False]


def test_of_many_variants_the_strongest_are_shown():
    def shown(suite):
        return list(View(example.run(tuple(SUITES[suite]), (64,), rounds=1)).looks)

    asked = ["vanilla_peft", "full_unsloth", "fused_layer_graph_offload"]  # of the experiment
    others = ["fused_all", "liger_peft", "fused_layer", "fused_layer_graph", "compiled_peft"]
    assert shown("fastest") == [*asked, *others]
    assert shown("all")[-1] == "fused_layer"
    assert len(shown("all")) == wording.MANY


@pytest.mark.parametrize("name", ["eight, two without a time", "long names"])
def test_variants_are_told_apart_with_and_without_colour(name):
    """Check variants of one family as well."""
    view = View(RUNS[name])
    for what in ("colour", "marker"):
        found = [getattr(look, what) for look in view.looks.values()]
        assert len(set(found)) == len(found)
    shown = [text.get_text() for text in plot.benchmark_figure(RUNS[name]).legends[0].get_texts()]
    assert shown == list(map(title_of, view.looks))


def test_the_baseline_comes_first_and_the_experiment_has_its_own_looks():
    run = example.empty(variants=["fused_mlp", "vanilla_peft_again", "vanilla_peft"])
    assert list(View(run).looks) == ["vanilla_peft", "fused_mlp"]  # without the A/A twin
    found = looks_of(["fused_rope", "fused_mlp", "vanilla_peft"])
    assert found["vanilla_peft"] == LOOKS["peft"] and found["fused_mlp"] == LOOKS["fused"]


@pytest.mark.slow("four", "rehearsal")
@pytest.mark.parametrize("name", RUNS)
def test_no_text_is_cut_off_and_all_can_be_read_on_a_phone(name):
    picture = plot.benchmark_figure(RUNS[name])
    case.assert_readable(picture)
    (axes,) = picture.axes
    # marks of what has no time stand below, in units of the panel's height
    drawn = [line for line in axes.lines if line.get_markerfacecolor() != "white"]
    case.assert_no_label_on(chain.from_iterable(line.get_xydata() for line in drawn), axes)
    sizes = [text.get_fontsize() for text in picture.findobj(Text) if text.get_text().strip()]
    assert min(sizes) / 72 * PHONE / WIDTH >= 11


def test_a_label_gives_way_to_the_point_of_another_variant():
    run = rounds(vanilla_peft=[200], fused_mlp=[145], full_unsloth=[140])
    run.experiment.seq_lens = [64, 512]
    (axes,) = plot.benchmark_figure(run).axes
    sides = {text.get_text(): text.get_va() for text in axes.texts}
    assert (sides["1.38×"], sides["1.43×"]) == ("top", "bottom")


def test_labels_of_values_that_lie_close_are_not_moved_out():
    heights = apart_by(1.0, [2.0, 9.7, 9.8, 9.9], top=10.0)
    assert min(b - a for a, b in pairwise(heights)) == pytest.approx(1.0)
    assert heights[-1] + 0.5 <= 10.0


def test_speedups_are_said_as_precisely_as_they_agree():
    assert roughly([1.228, 1.231, 1.2245]) == "a steady 1.22×"  # the last
    assert roughly([1.58, 1.63, 1.64, 1.59]) == "about 1.6×" != roughly([1.64, 1.66])
    assert roughly([2.56, 2.32]) == "2.3× to 2.6×"
    assert roughly([1.5]) == "1.50×"
