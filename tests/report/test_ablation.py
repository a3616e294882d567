"""The time that every fused part saves per step, by hand and as a table."""

import pytest
from cases.ablation_case import HAND_MADE, RUNS, WITHOUT, gains, row
from cases.example_results import rounds
from cases.table_case import rows_in

from bench.records import Cell
from report import ablation
from report import statistics as summary
from report.ablation import ablation_table

# --- the gains ------------------------------------------------------------------------------------


def test_gains_are_judged_as_speedups_are():
    run = rounds(**HAND_MADE)
    rows = gains(run, 64)
    assert row(rows, "mlp").first.verdict == row(rows, "mlp").last.verdict == "faster"
    assert row(rows, "checkpoint").first.verdict == "slower"
    assert row(rows, "rope").last.verdict == summary.NOISE  # 0, 1 and 0 ms
    run = rounds(**HAND_MADE | {"vanilla_peft_again": ()})
    assert row(gains(run, 64), "mlp").first.verdict is None
    vanilla = [220, 300, 500]  # 2.2, 3 and 5: only the logarithms' interval leaves out 1
    run = rounds(vanilla_peft=vanilla, vanilla_peft_again=vanilla, fused_mlp=[100] * 3)
    assert row(gains(run, 64), "mlp").first.verdict == "faster"


def test_rounds_are_paired_and_one_that_lacks_a_side_is_left_out():
    run = rounds(vanilla_peft=[200, 400, 600], fused_mlp=["oom", 390, 580])
    gain = row(gains(run, 64), "mlp").first
    assert gain.ms == 15  # of 10 and 20; unpaired: -85
    run = rounds(vanilla_peft=["error", 200], fused_mlp=[150, "error"])
    assert row(gains(run, 64), "mlp").first == "no common round"


def test_each_block_has_its_own_baseline_noise_and_parts():
    pair = {"vanilla_peft": [300, 300], "fused_mlp": [290, 290]}
    pair |= {"vanilla_peft" + WITHOUT: [200, 200], "fused_mlp" + WITHOUT: [190, 190]}
    run = rounds(**pair, vanilla_peft_again=[301, 300],
                 vanilla_peft_again_no_checkpointing=[220, 200])  # fmt: skip
    with_it, without = (gains(run, 64, block) for block in (True, False))
    mlp = row(with_it, "mlp").first
    assert (mlp.ms, mlp.percent, mlp.verdict) == (10, pytest.approx(100 / 30), "faster")
    mlp = row(without, "mlp").first
    assert (mlp.ms, mlp.percent, mlp.verdict) == (10, pytest.approx(5), summary.NOISE)
    assert {row.part for row in with_it} - {row.part for row in without} == {"checkpoint"}


def test_what_has_no_gain_says_why():
    rows = gains(RUNS["with gaps"], 512)
    assert row(rows, "attention").first == "out of memory"
    assert row(rows, "rope").last == "error"
    assert row(rows, "interaction").first == "parts missing"
    assert row(rows, "attention").last.percent > 0
    rows = gains(RUNS["with gaps"], 128)
    assert {row.last for row in rows[:-1]} == {"no all parts"}
    assert row(rows, "interaction").first == "no all parts"
    rows = gains(RUNS["with gaps"], 256)
    assert {row.first for row in rows[:-1]} == {"no vanilla PEFT"}
    assert row(rows, "mlp").last.ms > 0 and row(rows, "mlp").last.percent is None
    rows = gains(RUNS["two variants"], 512)
    assert {row.first for row in rows[1:-1]} == {row.last for row in rows[:-1]} == {"not measured"}


# --- the table ------------------------------------------------------------------------------------


def test_the_table_by_hand():
    run = rounds(**HAND_MADE)
    run.experiment.seq_lens = [64, 128]
    run.add(Cell("fused_mlp", 128, 1, "oom"))
    rows = {row.pop("saved per step"): [*row.values()] for row in rows_in(ablation_table(run))
            if "saved per step" in row}  # fmt: skip
    assert rows["fused MLP"] == ["20.0 (10.0%)", "30.0", "out of memory", "not measured"]
    assert rows["fused RoPE"][:2] == ["*1.0 (0.5%)*", "*0.0*"]
    assert rows["fused checkpointing"][:2] == ["−4.0 (−1.9%)", "not measured"]
    assert rows["interaction"][:2] == ["46.0 (22.4%)", ""]
    assert rows["all parts"] == ["80.0 (38.1%)", "", "no all parts", ""] and len(rows) == 8


def test_lengths_where_all_is_noise_are_left_out_of_the_steps_table(monkeypatch):
    run = rounds(**HAND_MADE)
    run.experiment.seq_lens = [64, 128]
    assert "left out" not in ablation_table(run)
    gain = ablation.Gain(1.0, 1.0, ablation.NOISE)
    told = gain._replace(verdict="faster")
    for judged, stands_out, is_left_out in ((4, 1, True), (4, 2, False), (2, 0, False)):
        found = [gain] * (judged - stands_out) + [told] * stands_out
        found += ["not measured"] * (4 - judged)
        rows = [ablation.PartGains("mlp", *found[:2]), ablation.PartGains("rope", *found[2:])]
        clear = [ablation.PartGains("mlp", told, told), ablation.PartGains("rope", told, told)]
        of = {64: rows, 128: clear}
        monkeypatch.setattr(ablation.AblationBlock, "gains", lambda self, of=of: of[self.seq_len])
        said = ablation_table(run)
        assert ("(64 tokens, where gains are noise, are left out)" in said) is is_left_out


def test_the_gpus_own_time_by_hand():
    """Check that it differs from the step's, has no verdicts, and appears only where it was
    measured."""
    run = rounds(**HAND_MADE)
    busy_ms = {"vanilla_peft": 100, "fused_mlp": 88, "fused_all_but_mlp": 61, "fused_all": 50}
    for cell in run.cells:
        cell.gpu_busy_ms = busy_ms.get(cell.variant)
    mlp, attention, *_ = gains(run, 64, time=ablation.GPU)
    assert (mlp.first.ms, mlp.first.percent, mlp.last.ms) == pytest.approx((12, 12, 11))
    assert mlp.first.verdict is mlp.last.verdict is None
    assert isinstance(attention.first, str)
    assert ablation.AblationBlock(run, 64, True, ablation.GPU).together().ms == 50
    assert "| fused MLP | 12.0 (12.0%) | 11.0 |" in ablation_table(run)
    for cell in run.cells:
        cell.gpu_busy_ms = None
    assert "GPU" not in ablation_table(run)
