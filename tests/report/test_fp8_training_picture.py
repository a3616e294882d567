"""fp8_training.png and its table on made-up losses, the numbers worked out by hand."""

import numpy as np
import pytest
from cases import example_results as example
from cases import picture_case as case
from cases.table_case import rows_in
from matplotlib.text import Text
from msgspec.structs import replace

from bench.experiment_records import Optimizer
from bench.training_records import Fp8Training, TrainingRun, TrainingSettings, load_training
from report import fp8_training as reported
from variants import Lora

BF16, FP8 = "fused_layer_graph_no_checkpointing", "fp8_lm_head_graph_no_checkpointing"
# the last losses of seeds 0, 1, 2; FP8's less bf16's of the same seed are 0.01, 0.02, 0.03
ENDS = {BF16: (2.0, 2.1, 2.2), FP8: (2.01, 2.12, 2.23)}


def training(with_outliers=ENDS):
    settings = TrainingSettings("qwen3-0.6b", "random, seed 0", 200, 300, 8, 512, Lora(),
                                Optimizer("AdamW", 1e-4, True), "0" * 64)  # fmt: skip
    runs = [
        TrainingRun(base, variant, seed, [4.0] * 300, {0: 4.0, 150: 3 + seed / 100, 300: last})
        for base, ends in (("trained", ENDS), ("outliers", with_outliers))
        for variant, losses in ends.items()
        for seed, last in enumerate(losses)
    ]
    return Fp8Training("2026-11-25T10:00:00+00:00", example.environment(), settings, {}, runs)


def test_the_table_pairs_runs_of_one_seed():
    markdown = reported.fp8_training_section(training())
    bf16, fp8, *_ = ([*row.values()] for row in rows_in(markdown))
    titles = "bf16", "fused layers, CUDA graph"
    assert bf16 == ["trained base weights", *titles, "3", "4.0000", "2.1000", "0.1000", "", ""]
    assert fp8[1:7] == ["FP8", "FP8 + lm_head, graph", "3", "4.0000", "2.1200", "0.1100"]
    # t of two degrees of freedom is 4.3027; the deviation of 0.01, 0.02, 0.03 is 0.01
    assert fp8[7:] == ["+0.0200", "-0.0048 to +0.0448"]
    assert "figures/fp8_training.png" in markdown and "trained for 200 steps" in markdown


def test_a_seed_that_one_of_them_lacks_or_lost_is_in_no_pair():
    one = training()
    one.runs = [run for run in one.runs if (run.variant, run.seed) != (FP8, 1)]
    assert reported.ends(one)["trained"][1].apart == pytest.approx([0.01, 0.03])
    one.runs[-1].held_out[300] = None  # a loss that is no number
    assert "nan" in reported.fp8_training_section(one)
    assert "partly outside" in reported.fp8_training_finding(one)


def test_the_title_says_whether_it_ends_where_seeds_do():
    said = reported.fp8_training_finding(training())
    above = "FP8 + lm_head: held-out loss ends 0.020 above bf16's"
    assert said == f"{above}, within its seeds' spread"
    far = {**ENDS, FP8: (2.2, 2.3, 2.4)}
    said = reported.fp8_training_finding(training(far))
    assert said == f"{above}, partly outside its seeds' spread"
    three = training()
    low = [replace(run, variant="fp8_layer_graph_no_checkpointing", held_out={0: 4.0, 300: 1.0})
           for run in three.runs if run.variant == BF16]  # fmt: skip
    first, second = reported.fp8_training_finding(replace(three, runs=three.runs + low)).split("\n")
    assert second == "FP8 layers: 1.100 below, outside it" and first.endswith(";")


def test_the_picture_shows_every_seed_beside_the_first_ones_spread():
    picture = reported.fp8_training_figure(training())
    trained, outliers = picture.axes
    # bf16's mean is 0; then FP8's seeds, and their mean
    ends = [line.get_ydata()[-1] for line in trained.lines]
    assert np.allclose(ends, [0, -0.09, 0.02, 0.13, 0.02])
    band = trained.collections[0].get_paths()[0].vertices[:, 1]
    assert np.isclose([band.min(), band.max()], [-0.1, 0.1]).all()  # one deviation
    words = " ".join(text.get_text() for text in picture.findobj(Text))
    assert outliers.get_title(loc="left") == "with outlier channels" and "NVIDIA H200" in words
    assert {text.get_text() for text in trained.texts} == {"bf16", "FP8 + lm_head"}
    case.assert_readable(picture)


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "fp8_training.json"
    path.write_text('{"runs": []}')
    with pytest.raises(ValueError, match="restore it"):
        load_training(path)
