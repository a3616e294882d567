"""ablation.png: what it draws, says and leaves out, with made-up results."""

from functools import cache
from itertools import accumulate, pairwise
from statistics import median

import pytest
from cases import example_results as example
from cases import picture_case as case
from cases.ablation_case import RUNS, WITHOUT, gains, row
from cases.example_results import rounds
from matplotlib.colors import to_hex

from report import ablation_picture as plot
from report import statistics as summary
from report import wording
from report.ablation import signed_number
from variants import LOOKS, counterpart


@cache
def picture_of(name):
    return plot.ablation_figure(RUNS[name])


def bars(axes):
    """Return (left, right) of the bars, by row."""
    found = {round(bar.get_y() + bar.get_height() / 2): bar for bar in axes.patches}
    ends = {y: (bar.get_x(), bar.get_x() + bar.get_width()) for y, bar in found.items()}
    assert len(found) == len(axes.patches)  # one a row
    return {y: tuple(sorted(ends[y])) for y in sorted(ends)}


@pytest.mark.parametrize("block", [True, False])
def test_a_panel_is_a_waterfall_from_vanilla_to_all_fused(block):
    run, axes = RUNS["all"], picture_of("all").axes[not block]
    rows = gains(run, 512, block)
    vanilla, fused = (
        median(run.round_ms(counterpart(name, block).id, 512).values())
        for name in ("vanilla_peft", "fused_all")
    )
    drawn = [*bars(axes).values()]
    assert (drawn.pop(0), drawn.pop()) == ((0, pytest.approx(vanilla)), (0, pytest.approx(fused)))
    begins = [vanilla, *(vanilla - taken for taken in accumulate(r.first.ms for r in rows))]
    ends = begins.pop()
    assert ends == pytest.approx(fused, rel=0.02)  # medians add up nearly
    for (left, right), begin, one in zip(drawn, begins, rows, strict=True):
        assert [left, right] == pytest.approx(sorted((begin, begin - one.first.ms)))
    floor = example.FLOOR_MS[512]
    assert [floor, floor] in [list(line.get_xdata()) for line in axes.lines]
    assert f"floor {floor:.0f} ms" in words(axes)
    assert axes.get_xlim()[0] == 0


def words(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def in_numbers(gain):
    return f"{signed_number(gain.ms, 0)} ms, {signed_number(gain.percent, 0)}%"


def test_the_numbers_stand_beside_the_bars_and_only_what_is_told_from_noise_is_bold():
    axes = picture_of("all").axes[0]
    rows = gains(RUNS["all"], 512)
    mlp = in_numbers(row(rows, "mlp").first)
    assert {in_numbers(one.first) for one in rows} < set(words(axes))
    assert any(text.endswith(" ms, 1.86×") for text in words(axes))
    within_noise = [one.first for one in rows if one.first.verdict == summary.NOISE]
    colours = {text.get_text(): to_hex(text.get_color()) for text in axes.texts}
    weights = {text.get_text(): text.get_weight() for text in axes.texts}
    assert weights[mlp] == "bold" and within_noise
    for gain in within_noise:
        said = in_numbers(gain)
        assert (colours[said], weights[said]) == (plot.NOISY, "normal")
    filled = [bar for bar in axes.patches if to_hex(bar.get_facecolor()) == LOOKS["fused"].colour]
    judged = [one.first.verdict for one in rows[:-1]]  # the interaction is hatched
    assert len(filled) == 1 + sum(verdict != summary.NOISE for verdict in judged)
    (one_round,) = gains(RUNS["one block, one round"], 512)[:1]
    (panel,) = picture_of("one block, one round").axes
    (alone,) = [text for text in panel.texts if text.get_text() == in_numbers(one_round.first)]
    assert (to_hex(alone.get_color()), alone.get_weight()) == ("#000000", "normal")


def test_gaps_are_labelled():
    checkpoints, without = picture_of("with gaps").axes
    assert words(checkpoints).count("out of memory") == 1
    drawn = [*bars(checkpoints).values()]
    assert len(drawn) == 2 + 5  # of 7: attention and the interaction have none
    for (left, _), (_, right) in pairwise(drawn[1:-1]):
        assert left == pytest.approx(right, rel=0.02)  # the next begins where the last ended
    assert words(without).count("out of memory") == 7  # 5 parts, and both ends
    assert not without.patches and "does not apply" in words(without)
    (empty,) = picture_of("a length without any time").axes
    assert empty.get_xlabel().startswith("ms per step, 256 tokens per row")


@pytest.mark.slow("with gaps")
@pytest.mark.parametrize("name", RUNS)
def test_every_text_can_be_read(name):
    case.assert_readable(picture_of(name))


def test_the_title_states_the_finding():
    together = 100 * (1 - 1 / median(summary.speedups(RUNS["all"], "fused_all", 512)))
    titles = {
        "all": f"All parts cut a 32 × 512-token step by {together:.0f}% "
        "with checkpointing;\nalone: MLP 17%, attention 11%, cross entropy 8%",
        "two variants": "What each fused part saves of a step",
        "rehearsal": wording.REHEARSAL_NOTICE,
    }
    for name, title in titles.items():
        assert plot.ablation_finding(RUNS[name]) == title
        assert picture_of(name).texts[0].get_text() == title
    with_gaps = plot.ablation_finding(RUNS["with gaps"])
    assert " with checkpointing;\nalone: MLP 17%, cross entropy" in with_gaps
    slower = rounds(vanilla_peft=[100], fused_all=[110])
    assert plot.ablation_finding(slower) == (
        "All parts add 10% to a 32 × 64-token step with checkpointing"
    )


def test_there_is_no_picture_without_two_variants_to_compare():
    without_time = {("fused_mlp", 64): "oom"}
    for run in (
        example.empty(),
        example.run(("vanilla_peft", "full_unsloth", "vanilla_peft_again"), (64,)),
        example.run(("vanilla_peft", "fused_mlp"), (64,), status=without_time),
        example.run(("vanilla_peft", "fused_mlp" + WITHOUT), (64,)),  # one of each block
    ):
        assert plot.ablation_figure(run) is None
