"""Two results files held against each other, with times for which the verdict is known by hand."""

import copy

import example_results as example
import pytest
from example_results import rounds
from msgspec.structs import replace

import lora_bench
from bench import results
from bench.records import Floor
from report.comparison import compare
from report.statistics import summarize


def visit(floor_ms=40.0, host_us=4.0, busy_ms=None, **step_ms):
    """A run at 64 tokens, one step a round; by default the GPU is never idle."""
    document = rounds(**step_ms)
    document.floor = {64: Floor(floor_ms, [floor_ms])}
    for cell in document.cells:
        cell.host_launch_us = host_us
        cell.gpu_busy_ms = busy_ms or cell.step_ms[0]
    document.summary = summarize(document)
    return document


def fused(*step_ms, **machine):
    return visit(fused_mlp=list(step_ms), **machine)


def only_row(old, new):
    (row,) = compare(old, new).rows
    return row


# --- verdicts -------------------------------------------------------------------------------------


def test_a_run_is_not_distinguishable_from_itself():
    run = example.run()
    compared = compare(run, copy.deepcopy(run))
    assert len(compared.rows) == 12
    assert {row.verdict for row in compared.rows} == {"not distinguishable"}
    assert {row.speedup for row in compared.rows} == {1.0}
    assert (compared.is_slower, compared.differences) == (False, [])


@pytest.mark.parametrize(
    ("new_ms", "verdict"),
    [
        (110.0, "slower"),
        (90.0, "faster"),
        (101.0, "not distinguishable"),
        (102.9, "not distinguishable"),  # 3% is what two visits may differ by
        (103.2, "slower"),
        (97.2, "not distinguishable"),
        (96.9, "faster"),
    ],
)
def test_a_cell_is_slower_or_faster_beyond_what_two_visits_differ_by(new_ms, verdict):
    compared = compare(fused(100.0, 100.0), fused(new_ms, new_ms))
    assert [row.verdict for row in compared.rows] == [verdict]
    assert compared.is_slower is (verdict == "slower")


def test_one_slower_cell_among_others_makes_the_run_slower():
    old = visit(vanilla_peft=[200.0, 200.0], fused_mlp=[100.0, 100.0])
    new = visit(vanilla_peft=[150.0, 150.0], fused_mlp=[110.0, 110.0])
    compared = compare(old, new)
    assert [(row.variant, row.verdict) for row in compared.rows] == [
        ("vanilla_peft", "faster"),
        ("fused_mlp", "slower"),
    ]
    assert compared.is_slower


def test_a_row_by_hand():
    row = only_row(fused(200.0, 200.0), fused(100.0, 110.0, floor_ms=32.0))
    assert (row.variant, row.seq_len, row.old, row.new) == ("fused_mlp", 64, "ok", "ok")
    assert (row.old_ms, row.new_ms) == (200.0, 105.0)
    assert row.speedup == pytest.approx(200 / 105)
    # log(1.1) apart: a standard error of half of it, 12.706 of them to either side
    middle, times = 200 / (100 * 110) ** 0.5, 1.1 ** (12.7062 / 2)
    assert row.ci95 == pytest.approx([middle / times, middle * times], rel=1e-4)
    assert row.band == pytest.approx((1 / 1.03, 1.25 * 1.03))  # the floor went from 40 to 32 ms
    assert row.verdict == "faster"


def test_a_spread_between_rounds_that_reaches_1_is_not_distinguishable():
    row = only_row(fused(100.0, 100.0), fused(100.0, 120.0))
    assert row.speedup == pytest.approx(100 / 110)
    assert row.ci95[0] < 100 / 120 and row.ci95[1] > 1.0
    assert row.verdict == "not distinguishable"


@pytest.mark.parametrize(("old", "new"), [((100.0,), (200.0, 200.0)), ((100.0, 100.0), (200.0,))])
def test_a_single_round_gives_a_ratio_and_no_verdict(old, new):
    compared = compare(fused(*old), fused(*new))
    (row,) = compared.rows
    assert (row.speedup, row.ci95, row.verdict) == (0.5, None, None)
    assert not compared.is_slower


@pytest.mark.parametrize("noisy", ["old", "new"])
def test_the_twins_of_either_run_widen_the_noise(noisy):
    steady = {"vanilla_peft": [100.0, 100.0], "vanilla_peft_again": [100.0, 100.0]}
    apart = {"vanilla_peft": [100.0, 100.0], "vanilla_peft_again": [100.0, 105.0]}
    old = visit(**(apart if noisy == "old" else steady), fused_mlp=[80.0, 80.0])
    new = visit(**(apart if noisy == "new" else steady), fused_mlp=[84.8, 84.8])  # 6% slower
    row = next(row for row in compare(old, new).rows if row.variant == "fused_mlp")
    assert row.band == pytest.approx((1 / 1.05 / 1.03, 1.05 * 1.03))
    assert row.verdict == "not distinguishable"
    calm = compare(fused(80.0, 80.0), fused(84.8, 84.8))
    assert calm.rows[0].verdict == "slower"


# --- the machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("new_ms", "verdict"), [(110.0, "not distinguishable"), (115.5, "slower")])
def test_a_gpu_that_is_slower_by_as_much_explains_a_busy_cell(new_ms, verdict):
    row = only_row(fused(100.0, 100.0), fused(new_ms, new_ms, floor_ms=44.0))
    assert row.band == pytest.approx((1 / 1.1 / 1.03, 1.03))
    assert row.verdict == verdict


def test_a_faster_gpu_is_no_gain_of_ours():
    new = {"floor_ms": 36.0}
    assert only_row(fused(100.0, 100.0), fused(90.0, 90.0, **new)).verdict == "not distinguishable"
    assert only_row(fused(100.0, 100.0), fused(85.0, 85.0, **new)).verdict == "faster"


def test_a_slower_gpu_explains_no_more_of_a_cell_than_the_gpu_was_busy():
    old = fused(100.0, 100.0, busy_ms=20.0)
    row = only_row(old, fused(110.0, 110.0, busy_ms=22.0, floor_ms=44.0))
    assert row.band == pytest.approx((1 / (0.2 * 1.1 + 0.8) / 1.03, 1.03))
    assert row.verdict == "slower"


@pytest.mark.parametrize(("busy_ms", "verdict"), [(20.0, "not distinguishable"), (100.0, "slower")])
def test_a_host_of_half_the_speed_explains_the_idle_share_of_a_cell(busy_ms, verdict):
    old = fused(100.0, 100.0, busy_ms=busy_ms, host_us=4.0)
    new = fused(180.0, 180.0, busy_ms=busy_ms, host_us=8.0)  # 20 of 100 ms busy, 80 ms doubled
    assert only_row(old, new).verdict == verdict


def test_a_gpu_is_busy_for_a_whole_step_at_most():
    """The profiled step may take longer than the timed ones; a floor 10% slower explains 10%."""
    old = fused(100.0, 100.0, busy_ms=130.0)
    row = only_row(old, fused(114.0, 114.0, busy_ms=130.0, floor_ms=44.0))
    assert row.band == pytest.approx((1 / 1.1 / 1.03, 1.03))
    assert row.verdict == "slower"


def test_a_visit_whose_machine_was_not_measured_is_taken_to_be_the_same():
    old, new = fused(100.0, 100.0), fused(110.0, 110.0, floor_ms=44.0, host_us=8.0)
    old.floor = {}
    for cell in old.cells:
        cell.host_launch_us = cell.gpu_busy_ms = None
    row = only_row(old, new)
    assert row.band == pytest.approx((1 / 1.03, 1.03))
    assert row.verdict == "slower"


# --- cells without a time, and cells of one file only ---------------------------------------------


def of_status(status, seq_len=64):
    return example.run(("fused_mlp",), (seq_len,), status={("fused_mlp", seq_len): status})


def test_a_time_that_was_lost_counts_as_slower():
    compared = compare(of_status("ok"), of_status("oom"))
    (row,) = compared.rows
    assert (row.old, row.new, row.verdict) == ("ok", "oom", "no time any more")
    assert row.old_ms == pytest.approx(185.0, rel=0.02) and row.new_ms is None
    assert compared.is_slower


def test_a_time_that_was_found_is_no_loss():
    compared = compare(of_status("oom"), of_status("ok"))
    (row,) = compared.rows
    assert (row.old, row.new, row.verdict) == ("oom", "ok", "has a time now")
    assert row.old_ms is None and row.new_ms == pytest.approx(185.0, rel=0.02)
    assert not compared.is_slower


def test_each_length_has_a_status_of_its_own():
    old = example.run(("fused_mlp",), (64, 128))
    new = example.run(("fused_mlp",), (64, 128), status={("fused_mlp", 128): "parity_failed"})
    assert [(row.seq_len, row.old, row.new, row.verdict) for row in compare(old, new).rows] == [
        (64, "ok", "ok", "not distinguishable"),
        (128, "ok", "parity_failed", "no time any more"),
    ]


def test_a_cell_without_a_time_in_both_has_no_verdict():
    compared = compare(of_status("unavailable"), of_status("oom"))
    assert [(row.old, row.new, row.verdict) for row in compared.rows] == [
        ("unavailable", "oom", None)
    ]
    assert not compared.is_slower


def test_cells_of_one_file_only_are_left_out():
    old = example.run(("vanilla_peft", "fused_mlp"), (64, 128))
    new = example.run(("vanilla_peft", "full_unsloth"), (128, 256))
    assert [(row.variant, row.seq_len) for row in compare(old, new).rows] == [("vanilla_peft", 128)]


def test_cells_that_an_unfinished_run_still_lacks_are_left_out():
    old, new = example.run(seq_lens=(64,)), example.run(seq_lens=(64,))
    new.cells = [cell for cell in new.cells if cell.variant != "full_unsloth"]
    new.summary = summarize(new)
    assert [row.variant for row in compare(old, new).rows] == ["vanilla_peft", "fused_mlp"]


def test_runs_with_nothing_in_common_are_refused():
    with pytest.raises(ValueError, match="no variant and length in common"):
        compare(of_status("ok", 64), of_status("ok", 128))


def test_a_rehearsal_is_compared_with_nothing_but_a_rehearsal():
    real, rehearsal = example.run(), example.run(rehearsal=True, gpu=False)
    for one, other in ((real, rehearsal), (rehearsal, real)):
        with pytest.raises(ValueError, match="one of the two is a rehearsal"):
            compare(one, other)
    assert not compare(rehearsal, rehearsal).is_slower


# --- what else differs ----------------------------------------------------------------------------


def test_of_long_lists_what_is_in_one_alone_is_listed():
    old, new = example.run(), example.run()
    old.experiment.variants += [f"variant_{n}" for n in range(50)]
    new.experiment.variants += ["one_more"]
    assert compare(old, new).differences == [
        "variants: gone variant_0, variant_1, variant_2, and 47 more; new one_more"
    ]


def test_what_else_is_not_the_same_is_listed():
    old = example.run(("vanilla_peft", "fused_mlp"), (64,))
    new = copy.deepcopy(old)
    new.environment.gpu.name = "NVIDIA H100"
    new.environment.packages |= {"torch": "2.13.0", "liger_kernel": "0.8.5"}
    new.environment.git.commit = "def5678"
    new.experiment.batch_size = 16
    new.experiment.lora = replace(new.experiment.lora, rank=8)
    for cell in new.cells:
        if cell.variant == "fused_mlp":
            cell.settings = replace(cell.settings, checkpointing="off", graph=True)
    assert compare(old, new).differences == [
        "gpu.name: NVIDIA H200 -> NVIDIA H100",
        "packages.torch: 2.11.0+cu130 -> 2.13.0",
        "packages.liger_kernel: none -> 0.8.5",
        "git.commit: abc1234 -> def5678",
        "batch_size: 32 -> 16",
        "lora.rank: 32 -> 8",
        "fused_mlp at 64, checkpointing: on -> off",
        "fused_mlp at 64, graph: none -> yes",
    ]


# --- the command ----------------------------------------------------------------------------------


def run_compare(tmp_path, old, new):
    for name, run in (("old.json", old), ("new.json", new)):
        if isinstance(run, str):
            (tmp_path / name).write_text(run)
        elif run is not None:
            results.save(tmp_path / name, run)
    return lora_bench.main(["--compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")])


def test_the_command_ends_with_0_where_nothing_is_slower(tmp_path, capsys):
    assert run_compare(tmp_path, fused(100.0, 100.0), fused(90.0, 90.0)) == 0
    shown = capsys.readouterr()
    assert "faster" in shown.out and "Slower beyond noise" not in shown.out
    assert shown.err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.json", "old.json"]


def test_the_command_ends_with_1_where_something_is_slower(tmp_path, capsys):
    new = fused(110.0, 110.0)
    new.environment.packages["torch"] = "2.13.0"
    assert run_compare(tmp_path, fused(100.0, 100.0), new) == 1
    shown = capsys.readouterr()
    assert "Slower beyond noise." in shown.out
    assert "packages.torch: 2.11.0+cu130 -> 2.13.0" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (None, fused(1.0), "cannot be read (No such file"),
        (fused(1.0), None, "cannot be read (No such file"),
        ('{"schema_version": 2, "cel', fused(1.0), "is not whole JSON"),
        (fused(1.0), '{"schema_version": 1}', "has schema 1, this version writes 2"),
        (fused(1.0), visit(vanilla_peft=[1.0]), "no variant and length in common"),
    ],
)
def test_the_command_ends_with_2_and_one_line_where_there_is_nothing_to_compare(
    old, new, told, tmp_path, capsys
):
    assert run_compare(tmp_path, old, new) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("lora_bench.py: ") and told in shown.err
    assert shown.err.count("\n") == 1 and shown.out == ""


def test_the_command_wants_two_files(capsys):
    with pytest.raises(SystemExit) as stop:
        lora_bench.main(["--compare", "old.json"])
    assert stop.value.code == 2
    assert "--compare: expected 2 arguments" in capsys.readouterr().err
