"""benchmark_results.png: speedups in GPU time, readable on a phone, with made-up results."""

import pytest
from cases import example_results as example
from cases import picture_case as case
from cases.example_results import rounds
from matplotlib.text import Text
from test_plots import RUNS

from report import benchmark_results as plot
from report.lines import View
from report.wording import REHEARSAL_NOTICE, STATUS_WORDS, roughly
from variants import title_of

PHONE = 390  # pixels


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
    assert "NVIDIA H200" in picture.texts[1].get_text()


def test_without_a_profile_the_clock_speaks_and_the_title_says_so():
    run = example.run(("vanilla_peft", "fused_mlp"), (64,))
    for cell in run.cells:
        cell.gpu_busy_ms = None
    rows, clock = plot.shown_rows(View(run))
    assert clock == "time by the clock" and [row.variant for row in rows] == ["fused_mlp"]
    assert plot.benchmark_finding(run, rows, clock).startswith("Speedup in time by the clock: ")
    assert "waiting" not in plot.benchmark_figure(run).texts[1].get_text()


def test_of_many_the_title_names_the_subject_and_the_two_fastest():
    run = rounds(
        vanilla_peft=[300], vanilla_peft_no_checkpointing=[270], fused_mlp=[200],
        full_unsloth=[150], liger_peft=[240], compiled_peft=[160], fused_all=[120],
    )  # fmt: skip
    rows, clock = plot.shown_rows(View(run))
    assert [row.variant for row in rows] == run.experiment.variants[2:]  # no baseline
    said = plot.benchmark_finding(run, rows, clock).replace(plot.KEPT, " ").partition(": ")[2]
    assert said == "fused MLP 1.50×, full Unsloth 2.00×, all parts 2.50×"


def test_a_variant_without_a_time_is_marked_and_a_rehearsal_is_stamped():
    run = RUNS["rehearsal"]
    picture = plot.benchmark_figure(run)
    words = [text.get_text() for text in picture.findobj(Text)]
    assert words.count(STATUS_WORDS["unavailable"]) == 2
    assert REHEARSAL_NOTICE.replace(": ", "\n") in words
    assert "No speedup" in plot.benchmark_figure(RUNS["nothing came out"]).texts[0].get_text()


@pytest.mark.slow("four", "rehearsal")
@pytest.mark.parametrize("name", RUNS)
def test_no_text_is_cut_off_and_all_can_be_read_on_a_phone(name):
    picture = plot.benchmark_figure(RUNS[name])
    case.assert_readable(picture)
    sizes = [text.get_fontsize() for text in picture.findobj(Text) if text.get_text().strip()]
    assert min(sizes) / 72 * PHONE / plot.WIDTH >= 8


def test_speedups_are_said_as_precisely_as_they_agree():
    assert roughly([1.228, 1.231, 1.2245]) == "a steady 1.22×"  # the last
    assert roughly([1.58, 1.63, 1.64, 1.59]) == "about 1.6×" != roughly([1.64, 1.66])
    assert roughly([2.56, 2.32]) == "2.3× to 2.6×"
    assert roughly([1.5]) == "1.50×"
