"""loss_curve.py on made-up losses, the numbers worked out by hand."""

import numpy as np
import pytest
from cases import example_results as example
from cases import picture_case as case
from cases.table_case import rows_in
from matplotlib.text import Text
from msgspec.structs import replace

from report import loss_curve, wording

VANILLA, LAYER = "vanilla_peft_no_checkpointing", "fused_layer_graph_no_checkpointing"


def run(seed=0, **losses):
    """Make one round of two lengths. At the shorter one every loss is 9."""
    document = example.empty(variants=list(losses), seq_lens=[64, 256], rounds=1, seed=seed)
    for variant, own in losses.items():
        for seq_len, values in ((64, [9.0] * len(own)), (256, own)):
            times = [100.0] * len(own)
            document.add(example.timed_cell(variant, seq_len, 1, times, losses=values))
    return document


TWO = run(**{LAYER: [4.0, 2.02, 0.999], VANILLA: [4.0, 2.0, 1.0]})


def test_curves_are_of_the_longest_length_with_the_baseline_first():
    own = [(VANILLA, [4.0, 2.0, 1.0]), (LAYER, [4.0, 2.02, 0.999])]
    assert list(loss_curve.curves(TWO).items()) == own


def test_the_title_says_how_far_they_come_apart():
    # +1% and -0.1% of three steps
    assert loss_curve.loss_curve_finding([TWO]) == (
        "Loss over 3 steps: at most 1.00% from vanilla PEFT's"
    )
    assert loss_curve.loss_curve_finding([replace(TWO, rehearsal=True)]) == wording.REHEARSAL_NOTICE


@pytest.mark.parametrize(
    ("mlp", "near", "percent"),
    [
        (2.02, "as close to fp32 as", "1.00%"),
        (2.04, "further from fp32 than", "2.00%"),
    ],
)
def test_the_title_holds_what_is_fused_beside_plain_pefts_own_rounding(mlp, near, percent):
    """Leave out vanilla PEFT in bf16, which is not ours, and the second vanilla."""
    own = run(vanilla_peft_fp32=[4.0, 2.0], vanilla_peft=[4.04, 2.02], fused_mlp=[4.0, mlp],
              vanilla_peft_no_checkpointing=[4.0, 2.0], vanilla_peft_again=[8.0, 2.0])  # fmt: skip
    finding = loss_curve.loss_curve_finding([own])
    assert finding == (
        f"Fused kernels train {near} vanilla PEFT in bf16:\n"
        f"over 2 steps within {percent} of its loss, vanilla PEFT within 1.00%"
    )


def test_fp32_is_what_the_others_are_held_against_where_it_ran():
    two_seeds = [
        run(
            seed, vanilla_peft=[4.0, 2.0 - seed / 50], vanilla_peft_again=[4.0, 4.0],
            vanilla_peft_fp32=[4.0, 2.0], fused_mlp=[4.04, 2.02],
        )
        for seed in (0, 1)
    ]  # fmt: skip
    said = loss_curve.losses_section(two_seeds)
    rows = [[*row.values()][1:] for row in rows_in(said) if row["variant"] == "vanilla PEFT"]
    assert rows == [["0", "+0.000", "+0.000", "+0.000", "0 of 2"],
                    ["1", "-0.500", "-0.500", "-1.000", "1 of 2"]]  # fmt: skip
    title = "**Compared with vanilla PEFT in fp32, 32 rows of 256 tokens a step, NVIDIA H200:**"
    assert said.count("**") == 2 and title in said
    assert loss_curve.losses_section([TWO, *two_seeds]).count("| variant |") == 2
    assert loss_curve.losses_section([example.empty()]) == loss_curve.losses_section([])
    panels = loss_curve.loss_curve_figure(two_seeds).axes
    assert [len(panel.lines) for panel in panels] == [1 + 2] * 3


def test_a_picture_has_one_baseline():
    """Keep one baseline: distances from vanilla and from fp32 do not compare."""
    in_fp32 = run(vanilla_peft_fp32=[4.0, 2.0], fused_mlp=[4.04, 2.02])
    for given, own in (([TWO, in_fp32], ["fused MLP"]), ([TWO, TWO], ["fused layers, CUDA graph"])):
        panels = loss_curve.loss_curve_figure(given).axes
        titles = [axes.get_title(loc="left").replace("\n", " ") for axes in panels]
        assert [title.removesuffix(" without checkpointing") for title in titles] == own


def test_a_panel_shows_what_was_measured():
    picture = loss_curve.loss_curve_figure([TWO])
    (axes,) = picture.axes
    assert np.allclose(axes.lines[-1].get_ydata(), [0, 1, -0.1])
    words = " ".join(text.get_text() for text in picture.findobj(Text))
    assert (
        "loss of vanilla PEFT without checkpointing goes from 4.0 to 1.0."
        in words.replace("\n", " ")
        and "fused layers, CUDA graph without checkpointing" in words.replace("\n", " ")
        and "NVIDIA H200" in words
    )
    case.assert_readable(picture)


@pytest.mark.parametrize(
    "document",
    [
        example.empty(),
        run(**{VANILLA: [4.0, 2.0]}),
        run(**{LAYER: [4.0, 2.0], "fused_mlp": [4.0, 2.0]}),  # no baseline
        run(**{VANILLA: [4.0, 2.0], LAYER: [4.0, 2.0, 1.0]}),  # one was stopped
        run(**{VANILLA: [4.0], LAYER: [4.0]}),  # a point is no curve
    ],
)
def test_there_is_no_picture_without_two_curves(document):
    assert loss_curve.loss_curve_figure([document]) is None
