"""Comparisons of two results files, with times whose verdict we know by hand."""

import copy
import math
from statistics import mean

import numpy as np
import pytest
from cases import example_results as example
from cases.example_results import rounds
from msgspec.structs import replace

import lora_bench
from bench import results
from bench.records import Floor
from report.comparison import compare
from report.statistics import NOISE, summarize
from variants import WITHOUT


def visit(floor_ms=40.0, host_us=4.0, busy_ms=math.inf, **step_ms):
    """Make a run at 64 tokens with one step per round. By default the GPU is never idle."""
    document = rounds(**step_ms)
    if floor_ms:
        document.floor = {64: Floor(floor_ms, [floor_ms])}
    for cell in document.cells:
        cell.host_launch_us, cell.gpu_busy_ms = host_us, busy_ms
    document.summary = summarize(document)
    return document


def fused(*step_ms, **machine):
    return visit(fused_mlp=list(step_ms), **machine)


# --- verdicts -------------------------------------------------------------------------------------


def test_a_row_by_hand():
    (row,) = compare(fused(200, 200), fused(100, 110, floor_ms=32.0)).rows
    assert (row.variant, row.seq_len, row.old, row.new) == ("fused_mlp", 64, "ok", "ok")
    assert (row.old_ms, row.new_ms) == (200.0, 105.0)
    assert row.speedup == pytest.approx(200 / 105)
    # log(1.1) apart: a standard error of half of it, 12.706 of them to either side
    middle, times = 200 / (100 * 110) ** 0.5, 1.1 ** (12.7062 / 2)
    assert row.ci95 == pytest.approx([middle / times, middle * times], rel=1e-4)
    assert row.band == pytest.approx((1 / 1.03, 1.25 * 1.03))  # the floor went from 40 to 32 ms
    assert row.verdict == "faster"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((100, 100), (102.9, 102.9), NOISE),  # two visits may differ by 3%
        ((100, 100), (103.2, 103.2), "slower"),
        ((100, 100), (97.2, 97.2), NOISE),
        ((100, 100), (96.9, 96.9), "faster"),
        ((100, 100), (100, 120), NOISE),  # the interval over rounds reaches 1
        ((100,), (200, 200), None),  # a single round gives a ratio and no verdict
        ((200, 200), (100,), None),
    ],
)
def test_a_cell_is_slower_or_faster_beyond_what_two_visits_differ_by(old, new, verdict):
    compared = compare(fused(*old), fused(*new))
    (row,) = compared.rows
    assert (row.speedup, row.verdict) == (pytest.approx(mean(old) / mean(new)), verdict)
    assert (row.ci95 is None) is (verdict is None)
    assert compared.is_slower is (verdict == "slower")


@pytest.mark.parametrize(
    ("old", "new"), [([200, 210, 230], [100, 110]), ([100, 110], [200, 210, 230])]
)
def test_the_interval_of_unlike_numbers_of_rounds(old, new):
    (row,) = compare(fused(*old), fused(*new)).rows
    error = sum(np.var(np.log(ms), ddof=1) / len(ms) for ms in (old, new)) ** 0.5
    middle = np.log(old).mean() - np.log(new).mean()
    ends = np.exp([middle - 12.7062 * error, middle + 12.7062 * error])  # 1 degree of freedom
    assert row.ci95 == pytest.approx(ends, rel=1e-4)


@pytest.mark.parametrize(("noisy", "block"), [("old", ""), ("new", ""), ("new", WITHOUT)])
def test_the_twins_of_either_run_widen_the_noise(noisy, block):
    def run(name, fused_ms):
        again = [100, 105] if noisy == name else [100, 100]
        times = {
            "vanilla_peft": [100, 100],
            "vanilla_peft_again": again,
            "fused_mlp": [fused_ms] * 2,
        }
        return visit(**{id + block: ms for id, ms in times.items()})

    row = compare(run("old", 80), run("new", 84.8)).rows[-1]  # 6% slower
    assert row.band == pytest.approx((1 / 1.05 / 1.03, 1.05 * 1.03))
    assert (row.variant, row.verdict) == ("fused_mlp" + block, NOISE)


SLOWER_GPU, FASTER_GPU, SLOWER_HOST = {"floor_ms": 44.0}, {"floor_ms": 36.0}, {"host_us": 8.0}
BUSY, IDLE = {"busy_ms": 100.0}, {"busy_ms": 20.0}  # of 100 ms
UNKNOWN = {"floor_ms": None, "host_us": None, "busy_ms": None}


@pytest.mark.parametrize(
    ("old", "new_ms", "new", "low", "verdict"),
    [
        # a GPU that much slower explains a busy cell, and a faster GPU is no gain of ours
        (BUSY, 110, SLOWER_GPU, 1 / 1.1, NOISE),
        (BUSY, 115.5, SLOWER_GPU, 1 / 1.1, "slower"),
        (BUSY, 90, FASTER_GPU, 1, NOISE),
        (BUSY, 85, FASTER_GPU, 1, "faster"),
        # it explains no more of a cell than the GPU was busy: of a whole step at most, though the
        # profiled step may take longer than the timed ones
        (IDLE, 110, SLOWER_GPU, 1 / (0.2 * 1.1 + 0.8), "slower"),
        ({"busy_ms": 130.0}, 114, SLOWER_GPU, 1 / 1.1, "slower"),
        # a host half as fast explains the idle share
        (IDLE, 180, SLOWER_HOST, 1 / 1.8, NOISE),
        (BUSY, 180, SLOWER_HOST, 1, "slower"),
        # we assume an unmeasured machine is the same
        (UNKNOWN, 110, SLOWER_GPU | SLOWER_HOST, 1, "slower"),
    ],
)
def test_the_machines_difference_is_no_verdict_on_the_code(old, new_ms, new, low, verdict):
    (row,) = compare(fused(100, 100, **old), fused(new_ms, new_ms, **new)).rows
    assert row.band[0] == pytest.approx(low / 1.03)
    assert row.verdict == verdict


# --- cells without a time, and cells of one file only ---------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("ok", "oom", "no time any more"),  # counts as slower
        ("oom", "ok", "has a time now"),
        ("unavailable", "oom", None),
    ],
)
def test_a_time_that_was_lost_or_found_is_told(old, new, verdict):
    runs = (
        example.run(("fused_mlp",), (64,), status={("fused_mlp", 64): each}) for each in (old, new)
    )
    compared = compare(*runs)
    (row,) = compared.rows
    assert (row.old, row.new, row.verdict) == (old, new, verdict)
    assert (row.old_ms is None, row.new_ms is None) == (old != "ok", new != "ok")
    assert compared.is_slower is (old == "ok")


def test_only_cells_of_both_files_are_compared_and_each_has_its_own_status():
    found, lost = {("vanilla_peft", 128): "oom"}, {("vanilla_peft", 256): "parity_failed"}
    old = example.run(("vanilla_peft", "fused_mlp"), (64, 128, 256), status=found)
    new = example.run(("vanilla_peft", "full_unsloth"), (128, 256, 512), status=lost)
    compared = [(row.variant, row.seq_len, row.old, row.new) for row in compare(old, new).rows]
    assert compared == [("vanilla_peft", 128, "oom", "ok"),
                        ("vanilla_peft", 256, "ok", "parity_failed")]  # fmt: skip
    unfinished = copy.deepcopy(old)
    unfinished.cells = [cell for cell in old.cells if cell.seq_len == 64]
    assert {row.seq_len for row in compare(old, unfinished).rows} == {64}


def test_a_rehearsal_is_compared_with_nothing_but_a_rehearsal():
    real, rehearsal = example.run(), example.run(rehearsal=True, gpu=False)
    for one, other in ((real, rehearsal), (rehearsal, real)):
        with pytest.raises(ValueError, match="one of the two is a rehearsal"):
            compare(one, other)
    assert not compare(rehearsal, rehearsal).is_slower


def test_whatever_else_differs_is_listed():
    old = example.run(("vanilla_peft", "fused_mlp"), (64,))
    new = copy.deepcopy(old)
    new.environment.gpu.name = "NVIDIA H100"
    new.environment.packages |= {"torch": "2.13.0", "liger_kernel": "0.8.5"}
    new.environment.git.commit = "def5678"
    old.experiment.variants += [f"variant_{n}" for n in range(50)]
    new.experiment.variants += ["one_more"]
    new.experiment.lora = replace(new.experiment.lora, rank=8)
    new.experiment.base = "nf4"
    for cell in new.cells_of("fused_mlp"):
        cell.settings = replace(cell.settings, checkpointing="off", graph=True)
    assert compare(old, new).differences == [
        "gpu.name: NVIDIA H200 -> NVIDIA H100",
        "packages.torch: 2.11.0+cu130 -> 2.13.0",
        "packages.liger_kernel: none -> 0.8.5",
        "git.commit: abc1234 -> def5678",
        "variants: gone variant_0, variant_1, variant_2, and 47 more; new one_more",
        "lora.rank: 32 -> 8",
        "base: bf16 -> nf4",
        "fused_mlp at 64, checkpointing: on -> off",
        "fused_mlp at 64, graph: none -> yes",
    ]


# --- the command ----------------------------------------------------------------------------------


def run_compare(tmp_path, old, new):
    results.save(tmp_path / "old.json", old)
    results.save(tmp_path / "new.json", new)
    return lora_bench.main(["--compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")])


@pytest.mark.parametrize(
    ("new_ms", "code", "last"),
    [(90, 0, "packages.torch: 2.11.0+cu130 -> 2.13.0"), (110, 1, "Slower beyond noise.")],
)
def test_the_command_ends_with_1_where_one_of_several_is_slower(
    new_ms, code, last, tmp_path, capsys
):
    old = visit(vanilla_peft=[200, 200], fused_mlp=[100, 100])
    new = visit(vanilla_peft=[150, 150], fused_mlp=[new_ms, new_ms])
    new.environment.packages["torch"] = "2.13.0"
    assert run_compare(tmp_path, old, new) == code
    shown = capsys.readouterr()
    assert "faster" in shown.out and "packages.torch: 2.11.0+cu130 -> 2.13.0" in shown.out
    assert shown.out.rstrip().endswith(last) and shown.err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.json", "old.json"]


def test_the_command_ends_with_2_where_there_is_nothing_to_compare(tmp_path, capsys):
    assert run_compare(tmp_path, fused(1), visit(vanilla_peft=[1])) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "lora_bench.py: --compare: the two have no variant and length in common\n"
