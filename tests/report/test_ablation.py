import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev

import ablation_case as case
import example_results as example
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from bench.records import Cell
from report import ablation, looks
from report import ablation_picture as plot
from report import statistics as summary
from report.ablation import Gain
from variants import FUSED_PARTS, LOOKS, VARIANTS, counterpart

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = "_no_checkpointing"
STATUS = {
    ("fused_attention", 512): "oom",
    ("fused_all_but_rope", 512): "error",
    ("fused_all", 128): "parity_failed",
    ("vanilla_peft", 256): "oom",
    ("vanilla_peft" + WITHOUT, 256): "oom",
    **{(id, 512): "oom" for id, variant in VARIANTS.items() if not variant.checkpoints},
}
WITH_CHECKPOINTING = [id for id, variant in VARIANTS.items() if variant.checkpoints]
RUNS = {
    "all": case.run(),
    "with gaps": case.run(seq_lens=(128, 256, 512), status=STATUS),
    "one block, one round": case.run(WITH_CHECKPOINTING, (512,), rounds=1),
    "two variants": case.run(("vanilla_peft", "fused_mlp"), (512,)),
    "a length without any time": case.run(
        ("vanilla_peft", "fused_mlp", "fused_all"),
        (256, 512),
        status={(v, 512): "oom" for v in ("vanilla_peft", "fused_mlp", "fused_all")},
    ),
    "rehearsal": case.run(seq_lens=(64,), rehearsal=True, gpu=False),
}


@pytest.fixture(scope="module")
def pictures():
    return {name: plot.ablation_figure(run) for name, run in RUNS.items()}


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


def by_t(three):
    """The interval of three rounds, by a textbook's table of Student's t."""
    half = 4.30265 * stdev(three) / 3**0.5
    return [mean(three) - half, mean(three) + half]


def test_gains_by_hand():
    rows = ablation.gains(case.rounds(**HAND_MADE), 64)
    assert [row.part for row in rows] == [*FUSED_PARTS, "interaction"]
    mlp = row(rows, "mlp")
    # 20, 20 and 30 ms in the three rounds: of 200, 210 and 220
    assert mlp.first.ms == 20
    assert mlp.first.ci95_ms == pytest.approx(by_t([20, 20, 30]), rel=1e-5)
    assert mlp.first.percent == pytest.approx(10.0)
    assert mlp.first.ci95_percent == pytest.approx(by_t([10, 2000 / 210, 3000 / 220]), rel=1e-5)
    # 30, 30 and 20 ms, of vanilla's step too
    assert mlp.last.ms == 30
    assert mlp.last.ci95_ms == pytest.approx(by_t([30, 30, 20]), rel=1e-5)
    assert mlp.last.percent == pytest.approx(100 * 30 / 210)
    assert mlp.last.ci95_percent == pytest.approx(by_t([15, 3000 / 210, 2000 / 220]), rel=1e-5)


def test_a_part_that_adds_time_has_a_negative_gain():
    checkpoint = row(ablation.gains(case.rounds(**HAND_MADE), 64), "checkpoint").first
    assert (checkpoint.ms, checkpoint.ci95_ms) == (-4, (-4, -4))
    assert checkpoint.percent == pytest.approx(-100 * 4 / 210)


def test_the_interaction_is_what_the_parts_alone_do_not_add_up_to():
    together = row(ablation.gains(case.rounds(**HAND_MADE), 64), "interaction")
    # round 1: 200 - 120 - (20 + 10 + 1 + 5 + 2 - 4) = 46; round 2: 80 - (20 + 10 - 1 + 5 + 3 - 4)
    # = 47; round 3: 80 - (30 + 0 + 1 + 5 + 4 - 4) = 44
    assert together.first.ms == 46
    assert together.first.ci95_ms == pytest.approx(by_t([46, 47, 44]), rel=1e-5)
    assert together.first.percent == pytest.approx(100 * 47 / 210)  # of 23.0, 22.4 and 20.0
    assert together.last is None


def test_gains_are_judged_as_speedups_are():
    run = case.rounds(**HAND_MADE)
    rows = ablation.gains(run, 64)
    assert row(rows, "mlp").first.verdict == row(rows, "mlp").last.verdict == "faster"
    assert row(rows, "checkpoint").first.verdict == "slower"
    assert row(rows, "rope").first.verdict == summary.NOISE  # 1, -1 and 1 ms
    assert row(rows, "rope").last.verdict == summary.NOISE  # 0, 1 and 0 ms
    judged = {r.variant: r.verdict for r in summary.summarize(run)}
    for part in FUSED_PARTS:
        assert row(rows, part).first.verdict == judged[f"fused_{part}"]
    lone = {name: times for name, times in HAND_MADE.items() if "again" not in name}
    assert row(ablation.gains(case.rounds(**lone), 64), "mlp").first.verdict is None


def test_one_round_has_no_interval():
    run = case.rounds(vanilla_peft=[200], vanilla_peft_again=[201], fused_mlp=[150])
    gain = row(ablation.gains(run, 64), "mlp").first
    assert gain == Gain(50, None, 25, None, None)


def test_rounds_are_paired_and_one_that_lacks_a_side_is_left_out():
    run = case.rounds(vanilla_peft=[200, 400, 600], fused_mlp=["oom", 390, 580])
    gain = row(ablation.gains(run, 64), "mlp").first
    assert gain.ms == 15  # of 10 and 20; unpaired: -85
    assert gain.ci95_ms == pytest.approx([15 - 12.7062 * 5, 15 + 12.7062 * 5], rel=1e-5)
    run = case.rounds(vanilla_peft=["error", 200], fused_mlp=[150, "error"])
    assert row(ablation.gains(run, 64), "mlp").first == "no common round"


def test_the_blocks_are_apart():
    times = {"vanilla_peft": [300], "fused_mlp": [290], "fused_checkpoint": [280]}
    run = case.rounds(**times, **{"vanilla_peft" + WITHOUT: [200], "fused_mlp" + WITHOUT: [150]})
    assert row(ablation.gains(run, 64), "mlp").first.ms == 10
    rows = ablation.gains(run, 64, False)
    assert (row(rows, "mlp").first.ms, row(rows, "mlp").first.percent) == (50, 25)
    assert [row.part for row in rows] == [*FUSED_PARTS[:-1], "interaction"]
    assert FUSED_PARTS[-1] == "checkpoint"


def test_each_block_has_its_own_noise():
    pair = {"vanilla_peft": [300, 300], "fused_mlp": [290, 290]}
    times = {**pair, **{name + WITHOUT: ms for name, ms in pair.items()}}
    times["vanilla_peft_again"], times["vanilla_peft_again" + WITHOUT] = [301, 300], [330, 300]
    run = case.rounds(**times)
    assert row(ablation.gains(run, 64), "mlp").first.verdict == "faster"
    assert row(ablation.gains(run, 64, False), "mlp").first.verdict == summary.NOISE


def test_what_has_no_gain_says_why():
    rows = ablation.gains(RUNS["with gaps"], 512)
    assert row(rows, "attention").first == "out of memory"
    assert row(rows, "rope").last == "error"
    assert row(rows, "interaction").first == "parts missing"
    assert row(rows, "attention").last.percent > 0
    rows = ablation.gains(RUNS["with gaps"], 128)
    assert {row.last for row in rows[:-1]} == {"no all fused"}
    assert row(rows, "interaction").first == "no all fused"
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
def test_a_panel_is_a_waterfall_from_vanilla_to_all_fused(panel, seq_len, block, pictures):
    run, axes = RUNS["all"], pictures["all"].axes[panel]
    rows = ablation.gains(run, seq_len, block)
    vanilla, fused = (
        median(run.round_ms(counterpart(name, block).id, seq_len).values())
        for name in ("vanilla_peft", "fused_all")
    )
    totals = bars(axes, 0.66)
    assert totals == [(0, pytest.approx(vanilla)), (0, pytest.approx(fused))]
    place = vanilla
    for (left, right), row in zip(bars(axes, 0.44), rows, strict=True):
        wanted = sorted((place, place - row.first.ms))
        assert [left, right] == pytest.approx(wanted)
        place -= row.first.ms
    assert place == pytest.approx(fused, rel=0.02)  # medians add up nearly
    begins = [
        vanilla,
        *(vanilla - sum(r.first.ms for r in rows[:n]) for n in range(1, len(rows) - 1)),
    ]
    for (left, right), begin, row in zip(bars(axes, 0.16), begins, rows[:-1], strict=True):
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


def test_a_panel_without_bars_begins_at_0_too(pictures):
    low, high = pictures["a length without any time"].axes[1].get_xlim()
    assert low == 0 and high > example.FLOOR_MS[512]


def words(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_the_numbers_stand_beside_the_bars_and_only_what_is_told_from_noise_is_bold(pictures):
    axes = pictures["all"].axes[6]  # 512 tokens, with checkpointing
    mlp = row(ablation.gains(RUNS["all"], 512), "mlp")
    for gain in (mlp.first, mlp.last):
        assert f"{gain.ms:.0f} ms" in words(axes) and f"{gain.percent:.0f}%" in words(axes)
    assert "1.87×" in words(axes)
    colours = {text.get_text(): to_hex(text.get_color()) for text in axes.texts}
    assert colours[f"{mlp.first.ms:.0f} ms"] == plot.FIRST == LOOKS["fused"].colour
    assert colours["−3 ms"] == "#999999"
    weights = {text.get_text(): text.get_weight() for text in axes.texts}
    assert (weights[f"{mlp.first.ms:.0f} ms"], weights["−3 ms"]) == ("bold", "normal")
    (one_round,) = ablation.gains(RUNS["one block, one round"], 512)[:1]
    texts = pictures["one block, one round"].axes[-1].texts
    assert "#999999" not in {to_hex(text.get_color()) for text in texts}
    alone = [text for text in texts if text.get_text() == f"{one_round.first.ms:.0f} ms"]
    assert alone and {text.get_weight() for text in alone} == {"normal"}


def test_gaps_are_labelled(pictures):
    picture = pictures["with gaps"]
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
def test_every_text_can_be_read(name, pictures):
    case.assert_readable(pictures[name])


def test_the_title_states_the_finding(pictures):
    together = 100 * (1 - 1 / median(summary.speedups(RUNS["all"], "fused_all", 512)))
    wanted = f"All fused: {together:.0f}% off a step at 512 tokens (alone: MLP 17%, attention 11%, "
    assert plot.ablation_finding(RUNS["all"]) == wanted + "cross entropy 8%)"
    assert " at 512 tokens (alone: MLP 17%, cross entropy" in plot.ablation_finding(
        RUNS["with gaps"]
    )
    assert plot.ablation_finding(RUNS["two variants"]) == "What each fused part takes off a step"
    assert pictures["rehearsal"].texts[0].get_text() == looks.REHEARSAL_NOTICE
    slower = case.rounds(vanilla_peft=[100], fused_all=[110])
    assert plot.ablation_finding(slower) == "All fused: 10% added to a step at 64 tokens"


def test_there_is_no_picture_without_two_variants_to_compare(tmp_path):
    path = tmp_path / "ablation.png"
    for run in (
        example.empty(),
        case.run(("vanilla_peft", "full_unsloth", "vanilla_peft_again"), (64,)),
        case.run(("vanilla_peft", "fused_mlp"), (64,), status={("fused_mlp", 64): "oom"}),
        case.run(("vanilla_peft", "fused_mlp" + WITHOUT), (64,)),  # one of each block
    ):
        assert plot.draw_ablation(run, path) is False
    assert list(tmp_path.iterdir()) == []


def test_the_same_results_give_the_same_bytes(tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    assert plot.draw_ablation(RUNS["two variants"], one) is plot.draw_ablation(
        RUNS["two variants"], two
    )
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes().startswith(b"\x89PNG") and b"tEXt" not in one.read_bytes()


def test_a_failed_draw_leaves_the_earlier_picture(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "picture.png"
    path.write_bytes(b"earlier")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        plot.draw_ablation(RUNS["two variants"], path)
    assert path.read_bytes() == b"earlier" and list(tmp_path.iterdir()) == [path]


def test_neither_module_imports_torch():
    imports = "import sys; from report import ablation_picture, frontier"
    check = f"{imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=60).returncode == 0


# --- the table and the names ----------------------------------------------------------------------


def test_the_table_by_hand():
    run = case.rounds(**HAND_MADE)
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
    assert table[9] == ["all fused", "80.0 (38.1%)", "", "no all fused", ""]
    assert {len(line) for line in table} == {5} and len(table) == 10


def test_the_gpus_own_time_by_hand():
    """Other than the step's, without verdicts, and only where it was measured."""
    run = case.rounds(**HAND_MADE)
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
    titles = [
        line for line in ablation.ablation_table(RUNS["all"]).split("\n") if line.endswith(":")
    ]
    of_the_gpu = ", of the GPU's own time, whatever the host did:"
    assert titles == [
        "With gradient checkpointing:",
        f"With gradient checkpointing{of_the_gpu}",
        "Without checkpointing:",
        f"Without checkpointing{of_the_gpu}",
    ]
    assert ablation.ablation_table(example.empty()) == ""
