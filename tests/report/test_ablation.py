"""What every fused part takes off a step: by hand, in ablation.png, and as a table."""

from functools import cache
from itertools import accumulate, pairwise
from statistics import median

import example_results as example
import picture_case as case
import pytest
from example_results import rounds
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from bench.records import Cell
from report import ablation, looks
from report import ablation_picture as plot
from report import statistics as summary
from report.ablation import Gain
from variants import FUSED_PARTS, LOOKS, SUITES, VARIANTS, counterpart

WITHOUT = "_no_checkpointing"
STATUS = {
    ("fused_attention", 512): "oom",
    ("fused_all_but_rope", 512): "error",
    ("fused_all", 128): "parity_failed",
    ("vanilla_peft", 256): "oom",
    ("vanilla_peft" + WITHOUT, 256): "oom",
    **{(id, 512): "oom" for id, variant in VARIANTS.items() if not variant.checkpoints},
}
WITH_CHECKPOINTING = [id for id in SUITES["all"] if VARIANTS[id].checkpoints]
RUNS = {
    "all": example.run(example.ALL),
    "with gaps": example.run(example.ALL, seq_lens=(128, 256, 512), status=STATUS),
    "one block, one round": example.run(WITH_CHECKPOINTING, (512,), rounds=1),
    "two variants": example.run(("vanilla_peft", "fused_mlp"), (512,)),
    "a length without any time": example.run(
        ("vanilla_peft", "fused_mlp", "fused_all"),
        (256, 512),
        status={(v, 512): "oom" for v in ("vanilla_peft", "fused_mlp", "fused_all")},
    ),
    "rehearsal": example.run(example.ALL, seq_lens=(64,), rehearsal=True, gpu=False),
}


@cache
def picture_of(name):
    return plot.ablation_figure(RUNS[name], RUNS[name].experiment.seq_lens)


def row(rows, part):
    return next(row for row in rows if row.part == part)


# --- the gains ------------------------------------------------------------------------------------

HAND_MADE = {
    "vanilla_peft": (200, 210, 220),
    "vanilla_peft_again": (201, 210, 221),
    "fused_mlp": (180, 190, 190),
    "fused_attention": (190, 200, 220),
    "fused_rope": (199, 211, 219),
    "fused_rms_norm": (195, 205, 215),
    "fused_cross_entropy": (198, 207, 216),
    "fused_checkpoint": (204, 214, 224),
    "fused_all": (120, 130, 140),
    "fused_all_but_mlp": (150, 160, 160),
    "fused_all_but_rope": (120, 131, 140),
}


@pytest.mark.parametrize(
    ("part", "which", "ms"),
    [
        ("mlp", "first", [20, 20, 30]),
        ("mlp", "last", [30, 30, 20]),
        ("checkpoint", "first", [-4, -4, -4]),  # adds time
        # 200 - 120 - (20 + 10 + 1 + 5 + 2 - 4), and of the other two rounds
        ("interaction", "first", [46, 47, 44]),
    ],
)
def test_gains_by_hand(part, which, ms):
    gain = getattr(row(ablation.gains(rounds(**HAND_MADE), 64), part), which)
    of_vanilla = [100 * a / b for a, b in zip(ms, HAND_MADE["vanilla_peft"], strict=True)]
    assert (gain.ms, gain.percent) == pytest.approx((median(ms), median(of_vanilla)))
    assert gain.ci95_ms == pytest.approx(summary.interval95(ms), rel=1e-5)
    assert gain.ci95_percent == pytest.approx(summary.interval95(of_vanilla), rel=1e-5)


def test_gains_are_judged_as_speedups_are():
    run = rounds(**HAND_MADE)
    rows = ablation.gains(run, 64)
    judged = {r.variant: r.verdict for r in summary.summarize(run)}
    for part in FUSED_PARTS:
        assert row(rows, part).first.verdict == judged[f"fused_{part}"]
    assert row(rows, "mlp").first.verdict == row(rows, "mlp").last.verdict == "faster"
    assert row(rows, "checkpoint").first.verdict == "slower"
    assert row(rows, "rope").last.verdict == summary.NOISE  # 0, 1 and 0 ms
    run = rounds(**HAND_MADE | {"vanilla_peft_again": ()})
    assert row(ablation.gains(run, 64), "mlp").first.verdict is None


def test_one_round_has_no_interval():
    run = rounds(vanilla_peft=[200], vanilla_peft_again=[201], fused_mlp=[150])
    assert row(ablation.gains(run, 64), "mlp").first == Gain(50, None, 25, None, None)


def test_rounds_are_paired_and_one_that_lacks_a_side_is_left_out():
    run = rounds(vanilla_peft=[200, 400, 600], fused_mlp=["oom", 390, 580])
    gain = row(ablation.gains(run, 64), "mlp").first
    assert gain.ms == 15  # of 10 and 20; unpaired: -85
    assert gain.ci95_ms == pytest.approx([15 - 12.7062 * 5, 15 + 12.7062 * 5], rel=1e-5)
    run = rounds(vanilla_peft=["error", 200], fused_mlp=[150, "error"])
    assert row(ablation.gains(run, 64), "mlp").first == "no common round"


def test_each_block_has_its_own_baseline_noise_and_parts():
    pair = {"vanilla_peft": [300, 300], "fused_mlp": [290, 290]}
    pair |= {"vanilla_peft" + WITHOUT: [200, 200], "fused_mlp" + WITHOUT: [190, 190]}
    run = rounds(**pair, vanilla_peft_again=[301, 300],
                 vanilla_peft_again_no_checkpointing=[220, 200])  # fmt: skip
    with_it, without = (ablation.gains(run, 64, block) for block in (True, False))
    mlp = row(with_it, "mlp").first
    assert (mlp.ms, mlp.percent, mlp.verdict) == (10, pytest.approx(100 / 30), "faster")
    mlp = row(without, "mlp").first
    assert (mlp.ms, mlp.percent, mlp.verdict) == (10, pytest.approx(5), summary.NOISE)
    assert {row.part for row in with_it} - {row.part for row in without} == {"checkpoint"}


def test_what_has_no_gain_says_why():
    rows = ablation.gains(RUNS["with gaps"], 512)
    assert row(rows, "attention").first == "out of memory"
    assert row(rows, "rope").last == "error"
    assert row(rows, "interaction").first == "parts missing"
    assert row(rows, "attention").last.percent > 0
    rows = ablation.gains(RUNS["with gaps"], 128)
    assert {row.last for row in rows[:-1]} == {"no all parts"}
    assert row(rows, "interaction").first == "no all parts"
    rows = ablation.gains(RUNS["with gaps"], 256)
    assert {row.first for row in rows[:-1]} == {"no vanilla PEFT"}
    assert row(rows, "mlp").last.ms > 0 and row(rows, "mlp").last.percent is None
    rows = ablation.gains(RUNS["two variants"], 512)
    assert {row.first for row in rows[1:-1]} == {row.last for row in rows[:-1]} == {"not measured"}


# --- the picture ----------------------------------------------------------------------------------


def bars(axes, height):
    """(left, right) of the bars of one height, from the top down."""
    found = [p for p in axes.patches if isinstance(p, Rectangle)]
    found = [bar for bar in found if bar.get_height() == pytest.approx(height)]
    found.sort(key=lambda bar: bar.get_y())
    return [tuple(sorted((b.get_x(), b.get_x() + b.get_width()))) for b in found]


@pytest.mark.parametrize(("panel", "seq_len", "block"), [(0, 64, True), (7, 512, False)])
def test_a_panel_is_a_waterfall_from_vanilla_to_all_fused(panel, seq_len, block):
    run, axes = RUNS["all"], picture_of("all").axes[panel]
    rows = ablation.gains(run, seq_len, block)
    vanilla, fused = (
        median(run.round_ms(counterpart(name, block).id, seq_len).values())
        for name in ("vanilla_peft", "fused_all")
    )
    totals = bars(axes, 0.66)
    assert totals == [(0, pytest.approx(vanilla)), (0, pytest.approx(fused))]
    begins = [vanilla, *(vanilla - taken for taken in accumulate(r.first.ms for r in rows))]
    ends = begins.pop()
    assert ends == pytest.approx(fused, rel=0.02)  # medians add up nearly
    for (left, right), begin, row in zip(bars(axes, 0.44), begins, rows, strict=True):
        assert [left, right] == pytest.approx(sorted((begin, begin - row.first.ms)))
    for (left, right), begin, row in zip(bars(axes, 0.16), begins, rows[:-1], strict=False):
        assert [left, right] == pytest.approx(sorted((begin, begin - row.last.ms)))
    whiskers = [sorted(line.get_xdata()) for line in axes.lines if line.get_marker() == "|"]
    assert sorted(vanilla - bound for bound in rows[0].first.ci95_ms) in whiskers
    assert len(whiskers) == 2 * len(rows) - 1
    of_gpu = ablation.gains(run, seq_len, block, ablation.GPU)
    wanted = [vanilla - of_gpu[0].first.ms, vanilla - of_gpu[0].last.ms]
    wanted += [begins[1] - of_gpu[1].first.ms, begins[1] - of_gpu[1].last.ms]
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
    mlp = row(ablation.gains(RUNS["all"], 512), "mlp")
    for gain in (mlp.first, mlp.last):
        assert f"{gain.ms:.0f} ms" in words(axes) and f"{gain.percent:.0f}%" in words(axes)
    assert "1.86×" in words(axes)
    colours = {text.get_text(): to_hex(text.get_color()) for text in axes.texts}
    assert colours[f"{mlp.first.ms:.0f} ms"] == plot.FIRST == LOOKS["fused"].colour
    every = [gain for one in ablation.gains(RUNS["all"], 512) for gain in one[1:] if gain]
    within_noise = [gain.ms for gain in every if gain.verdict == summary.NOISE]
    noise = f"{within_noise[0]:.0f} ms".replace("-", "−")
    assert colours[noise] == plot.NOISY
    hollow = [bar for bar in axes.patches if to_hex(bar.get_facecolor()) == "#ffffff"]
    assert len(hollow) == len(within_noise)
    weights = {text.get_text(): text.get_weight() for text in axes.texts}
    assert (weights[f"{mlp.first.ms:.0f} ms"], weights[noise]) == ("bold", "normal")
    (one_round,) = ablation.gains(RUNS["one block, one round"], 512)[:1]
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
    gain = row(ablation.gains(RUNS["with gaps"], 256), "mlp").last
    assert bars(at[256, 0], 0.16)[0] == pytest.approx((fused, fused + gain.ms))


@pytest.mark.parametrize("name", RUNS)
def test_every_text_can_be_read(name):
    case.assert_readable(picture_of(name))


def test_the_title_states_the_finding():
    together = 100 * (1 - 1 / median(summary.speedups(RUNS["all"], "fused_all", 512)))
    titles = {
        "all": f"All parts: {together:.0f}% off a step at 512 tokens "
        "with checkpointing (alone: MLP 17%, attention 11%, cross entropy 8%)",
        "two variants": "What each fused part takes off a step",
        "rehearsal": looks.REHEARSAL_NOTICE,
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
    assert plot.ablation_figure(run, [64, 128]).texts[0].get_text() == said
    assert plot.ablation_figure(run, [64]).texts[0].get_text() == plot.ablation_finding(run)
    assert plot.lengths_finding(RUNS["one block, one round"], [512]) == ""
    assert picture_of("rehearsal").texts[0].get_text() == looks.REHEARSAL_NOTICE


def test_there_is_no_picture_without_two_variants_to_compare(tmp_path):
    without_time = {("fused_mlp", 64): "oom"}
    for run in (
        example.empty(),
        example.run(("vanilla_peft", "full_unsloth", "vanilla_peft_again"), (64,)),
        example.run(("vanilla_peft", "fused_mlp"), (64,), status=without_time),
        example.run(("vanilla_peft", "fused_mlp" + WITHOUT), (64,)),  # one of each block
    ):
        assert plot.draw_ablation(run, tmp_path / "ablation.png") is False
    assert list(tmp_path.iterdir()) == []


# --- the table ------------------------------------------------------------------------------------


def test_the_table_by_hand():
    run = rounds(**HAND_MADE)
    run.experiment.seq_lens = [64, 128]
    run.add(Cell("fused_mlp", 128, 1, "oom"))
    title, blank, *lines = ablation.ablation_table(run).split("\n\nWith")[0].split("\n")
    assert (title, blank) == ("With gradient checkpointing:", "")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert table[0][:3] == ["takes off a step", "64: added first, ms", "64: added last, ms"]
    assert table[2] == ["fused MLP", "20.0 (10.0%)", "30.0", "out of memory", "not measured"]
    assert table[4][:3] == ["fused RoPE", "*1.0 (0.5%)*", "*0.0*"]
    assert table[7][:3] == ["fused checkpointing", "−4.0 (−1.9%)", "not measured"]
    assert table[8][:3] == ["interaction", "46.0 (22.4%)", ""]
    assert table[9] == ["all parts", "80.0 (38.1%)", "", "no all parts", ""]
    assert {len(line) for line in table} == {5} and len(table) == 10


def test_the_gpus_own_time_by_hand():
    """Other than the step's, without verdicts, and only where it was measured."""
    run = rounds(**HAND_MADE)
    busy_ms = {"vanilla_peft": 100, "fused_mlp": 88, "fused_all_but_mlp": 61, "fused_all": 50}
    for cell in run.cells:
        cell.gpu_busy_ms = busy_ms.get(cell.variant)
    mlp, attention, *_ = ablation.gains(run, 64, time=ablation.GPU)
    assert (mlp.first.ms, mlp.first.percent, mlp.last.ms) == pytest.approx((12, 12, 11))
    assert mlp.first.verdict is mlp.last.verdict is None
    assert isinstance(attention.first, str)
    assert ablation.together(run, 64, True, ablation.GPU).ms == 50
    assert "| fused MLP | 12.0 (12.0%) | 11.0 |" in ablation.ablation_table(run)
    for cell in run.cells:
        cell.gpu_busy_ms = None
    assert "GPU" not in ablation.ablation_table(run)


def test_a_table_a_block():
    lines = ablation.ablation_table(RUNS["all"]).split("\n")
    assert [line for line in lines if line.endswith(":")] == [
        f"{block}{of}:"
        for block in ("With gradient checkpointing", "Without checkpointing")
        for of in ("", ", of the GPU's own time, whatever the host did")
    ]
    assert ablation.ablation_table(example.empty()) == ""
