"""ablation.png: what it draws, says and leaves out, on made-up results."""

from functools import cache
from itertools import accumulate, pairwise
from statistics import median

import pytest
from cases import example_results as example
from cases import picture_case as case
from cases.ablation_case import HAND_MADE, RUNS, WITHOUT, gains, row
from cases.example_results import rounds
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from report import ablation, wording
from report import ablation_picture as plot
from report import statistics as summary
from variants import LOOKS, counterpart


@cache
def picture_of(name):
    return plot.ablation_figure(RUNS[name], all_lengths=True)


def bars(axes, height):
    """(left, right) of the bars of one height, from the top down."""
    found = [p for p in axes.patches if isinstance(p, Rectangle)]
    found = [bar for bar in found if bar.get_height() == pytest.approx(height)]
    found.sort(key=lambda bar: bar.get_y())
    return [tuple(sorted((b.get_x(), b.get_x() + b.get_width()))) for b in found]


@pytest.mark.parametrize(("panel", "seq_len", "block"), [(0, 64, True), (7, 512, False)])
def test_a_panel_is_a_waterfall_from_vanilla_to_all_fused(panel, seq_len, block):
    run, axes = RUNS["all"], picture_of("all").axes[panel]
    rows = gains(run, seq_len, block)
    vanilla, fused = (
        median(run.round_ms(counterpart(name, block).id, seq_len).values())
        for name in ("vanilla_peft", "fused_all")
    )
    totals = bars(axes, 0.66)
    assert totals == [(0, pytest.approx(vanilla)), (0, pytest.approx(fused))]
    begins = [vanilla, *(vanilla - taken for taken in accumulate(r.first.ms for r in rows))]
    ends = begins.pop()
    assert ends == pytest.approx(fused, rel=0.02)  # medians add up nearly
    for (left, right), begin, one in zip(bars(axes, 0.44), begins, rows, strict=True):
        assert [left, right] == pytest.approx(sorted((begin, begin - one.first.ms)))
    for (left, right), begin, one in zip(bars(axes, 0.16), begins, rows[:-1], strict=False):
        assert [left, right] == pytest.approx(sorted((begin, begin - one.last.ms)))
    whiskers = [sorted(line.get_xdata()) for line in axes.lines if line.get_marker() == "|"]
    assert sorted(vanilla - bound for bound in rows[0].first.ci95_ms) in whiskers
    assert len(whiskers) == 2 * len(rows) - 1
    on_gpu = gains(run, seq_len, block, ablation.GPU)
    wanted = [vanilla - on_gpu[0].first.ms, vanilla - on_gpu[0].last.ms]
    wanted += [begins[1] - on_gpu[1].first.ms, begins[1] - on_gpu[1].last.ms]
    diamonds = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"]
    assert diamonds[:4] == pytest.approx(wanted) and len(diamonds) == len(whiskers)
    floor = example.FLOOR_MS[seq_len]
    assert [floor, floor] in [list(line.get_xdata()) for line in axes.lines]
    assert axes.get_xlim()[0] == 0


def test_a_panel_without_bars_begins_at_0_too():
    low, high = picture_of("a length without any time").axes[1].get_xlim()
    assert low == 0 and high > example.FLOOR_MS[512]


def words(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_the_numbers_stand_beside_the_bars_and_only_what_is_told_from_noise_is_bold():
    axes = picture_of("all").axes[6]  # 512 tokens, with checkpointing
    mlp = row(gains(RUNS["all"], 512), "mlp")
    for gain in (mlp.first, mlp.last):
        assert f"{gain.ms:.0f} ms" in words(axes) and f"{gain.percent:.0f}%" in words(axes)
    assert "1.86×" in words(axes)
    colours = {text.get_text(): to_hex(text.get_color()) for text in axes.texts}
    assert colours[f"{mlp.first.ms:.0f} ms"] == plot.FIRST == LOOKS["fused"].colour
    every = [gain for one in gains(RUNS["all"], 512) for gain in one[1:] if gain]
    within_noise = [gain.ms for gain in every if gain.verdict == summary.NOISE]
    noise = f"{within_noise[0]:.0f} ms".replace("-", "−")
    assert colours[noise] == plot.NOISY
    hollow = [bar for bar in axes.patches if to_hex(bar.get_facecolor()) == "#ffffff"]
    assert len(hollow) == len(within_noise)
    weights = {text.get_text(): text.get_weight() for text in axes.texts}
    assert (weights[f"{mlp.first.ms:.0f} ms"], weights[noise]) == ("bold", "normal")
    (one_round,) = gains(RUNS["one block, one round"], 512)[:1]
    texts = picture_of("one block, one round").axes[-1].texts
    assert plot.NOISY not in {to_hex(text.get_color()) for text in texts}
    alone = [text for text in texts if text.get_text() == f"{one_round.first.ms:.0f} ms"]
    assert alone and {text.get_weight() for text in alone} == {"normal"}


def test_gaps_are_labelled():
    picture = picture_of("with gaps")
    at = dict(zip([(n, b) for n in (128, 256, 512) for b in (0, 1)], picture.axes, strict=True))
    assert words(at[512, 0]).count("out of memory") == 1
    assert len(bars(at[512, 0], 0.44)) == 5  # of 7: attention and the interaction have none
    assert len(bars(at[512, 0], 0.66)) == 2
    for (_, right), (left, _) in pairwise(bars(at[512, 0], 0.44)[::-1]):
        assert left == pytest.approx(right, rel=0.02)  # the next begins where the last ended
    assert words(at[512, 1]).count("out of memory") == 12  # 5 parts twice, and both ends
    assert not at[512, 1].patches
    assert words(at[128, 0]).count("failed parity") == 1
    assert "does not apply" in words(at[256, 1]) and "does not apply" not in words(at[256, 0])
    fused = median(RUNS["with gaps"].round_ms("fused_all", 256).values())
    gain = row(gains(RUNS["with gaps"], 256), "mlp").last
    assert bars(at[256, 0], 0.16)[0] == pytest.approx((fused, fused + gain.ms))


@pytest.mark.slow("with gaps")
@pytest.mark.parametrize("name", RUNS)
def test_every_text_can_be_read(name):
    case.assert_readable(picture_of(name))


def test_the_title_states_the_finding():
    together = 100 * (1 - 1 / median(summary.speedups(RUNS["all"], "fused_all", 512)))
    titles = {
        "all": f"All parts: {together:.0f}% off a step at 512 tokens "
        "with checkpointing (alone: MLP 17%, attention 11%, cross entropy 8%)",
        "two variants": "What each fused part takes off a step",
        "rehearsal": wording.REHEARSAL_NOTICE,
    }
    for name, title in titles.items():
        assert plot.ablation_finding(RUNS[name]) == title
    with_gaps = plot.ablation_finding(RUNS["with gaps"])
    assert " with checkpointing (alone: MLP 17%, cross entropy" in with_gaps
    slower = rounds(vanilla_peft=[100], fused_all=[110])
    assert plot.ablation_finding(slower) == (
        "All parts: 10% added to a step at 64 tokens with checkpointing"
    )


def test_the_title_of_all_lengths_counts_what_is_beyond_noise():
    run = rounds(**HAND_MADE)
    # first: MLP, RMSNorm, cross entropy, checkpointing, not attention and RoPE; last: MLP, not RoPE
    said = "Single parts' gains beyond noise: 5 of 8 at 64 tokens"
    assert plot.lengths_finding(run, [64, 128]) == said
    assert plot.ablation_figure(run).texts[0].get_text() == plot.ablation_finding(run)
    run.experiment.seq_lens = [64, 128]
    assert plot.ablation_figure(run, all_lengths=True).texts[0].get_text() == said
    assert plot.lengths_finding(RUNS["one block, one round"], [512]) == ""
    assert picture_of("rehearsal").texts[0].get_text() == wording.REHEARSAL_NOTICE


def test_there_is_no_picture_without_two_variants_to_compare():
    without_time = {("fused_mlp", 64): "oom"}
    for run in (
        example.empty(),
        example.run(("vanilla_peft", "full_unsloth", "vanilla_peft_again"), (64,)),
        example.run(("vanilla_peft", "fused_mlp"), (64,), status=without_time),
        example.run(("vanilla_peft", "fused_mlp" + WITHOUT), (64,)),  # one of each block
    ):
        assert plot.ablation_figure(run) is None
