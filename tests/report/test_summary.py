"""The summary by hand: medians, paired speedups, intervals and verdicts."""

import warnings

import pytest
from cases import example_results as example
from cases.example_results import cells, rounds

from bench.experiment_records import Tokens
from bench.records import Floor, SummaryRow
from report.commands import kernels_table, summary_table
from report.statistics import (
    NOISE,
    by_gpu_time,
    interval95,
    interval95_of_ratios,
    summarize,
    twins_too_far_apart,
    verdict_of,
)
from variants import WITHOUT


def rows_of(table):
    """Return a terminal table's rows, by heading."""
    cells = zip(*(column.cells for column in table.columns), strict=True)
    return [dict(zip((column.header for column in table.columns), row, strict=True))
            for row in cells]  # fmt: skip


def row_of(document, variant="fused_mlp"):
    return next(row for row in summarize(document) if row.variant == variant)


def test_the_terminals_table_shows_what_was_measured_and_a_rehearsals_only_times():
    document = rounds(
        vanilla_peft=[200, 202], vanilla_peft_again=[201, 201], fused_mlp=[100, 101],
        full_unsloth=["oom"], liger_peft=[200, 202],
    )  # fmt: skip
    document.floor = {64: Floor(40.0, [40.0], tokens=2048)}
    times = {"tokens": "64", "variant": "fused MLP", "ms a step": "100.5"}
    measured = {"speedup": "2.00", "x floor": "2.51", "GPU ms": "97.5"}  # no GiB
    _, _, mlp, unsloth, liger = rows_of(summary_table(document))
    assert mlp == times | measured and liger["speedup"] == "1.00 (noise)"
    assert [*unsloth.values()] == ["64", "full Unsloth", "oom", "", "", ""]
    document.experiment.padded = True
    for cell in document.cells:
        cell.peak_allocated_bytes = 3 * 2**29
    padded = rows_of(summary_table(document))[2]
    assert padded == times | measured | {"GiB": "1.5", "tokens/s": "20,378"}
    document.rehearsal = True
    assert rows_of(summary_table(document))[2] == times
    (kernel,) = rows_of(kernels_table(example.KERNELS))
    assert [*kernel.values()] == example.KERNEL_IN_WORDS


def test_a_row_of_the_summary_by_hand():
    document = cells(
        ("vanilla_peft", 1, [190.0, 200.0, 260.0]),
        ("vanilla_peft", 2, [210.0, 205.0, 280.0]),
        ("vanilla_peft", 3, [220.0, 220.0, 220.0]),
        ("fused_mlp", 1, [100.0, 90.0, 300.0]),
        ("fused_mlp", 2, [100.0, 100.0, 100.0]),
        ("fused_mlp", 3, [110.0, 110.0, 90.0]),
    )
    document.floor = {64: Floor(40.0, [40.0])}
    for cell, gib in zip(document.cells, (9, 9, 9, 7, 8.5, 7), strict=True):
        cell.peak_allocated_bytes = int(gib * 2**30)
    row = row_of(document)
    assert row == SummaryRow(
        variant="fused_mlp",
        seq_len=64,
        status="ok",
        rounds=3,
        steps=9,
        median_step_ms=100.0,  # of 100, 100, 110
        # 4.303 sd / sqrt(3) to either side of the mean, of the logarithms: of 100, 100 and 110 ms
        step_ms_ci95=(90.0392, 118.349),
        tokens_per_s=20480.0,  # 32 * 64 / 0.1 s
        speedup=2.0,  # paired: of 2.0, 2.1, 2.0. The ratio of the medians would be 2.1
        speedup_ci95=(1.89541, 2.18013),  # of 2.0, 2.1 and 2.0
        ratio_to_floor=2.5,
        forward_ms=38.0,
        backward_ms=61.0,
        optimizer_ms=1.0,
        peak_gib=8.5,
        gpu_ms=87.3,  # of 97% of the fastest steps, of 90, 100 and 90
        verdict=None,
    )
    baseline = row_of(document, "vanilla_peft")
    assert (baseline.speedup, baseline.speedup_ci95) == (1.0, None)
    assert baseline.ratio_to_floor == 5.25  # 210 ms over 40


def test_every_round_has_the_floor_of_its_own_machine():
    document = rounds(fused_mlp=[100, 150])
    document.floor = {64: Floor(40.0, [40.0], ms_by_round={1: 40.0, 2: 50.0})}
    assert row_of(document).ratio_to_floor == 2.75  # of 2.5 and 3


def test_gpu_time_is_over_that_of_the_same_block():
    document = rounds(**{"vanilla_peft": [200], "vanilla_peft" + WITHOUT: [120],
                         "fused_mlp": [100], "fused_mlp" + WITHOUT: [60]})  # fmt: skip
    for cell, ms in zip(document.cells, (150.0, 90.0, None, 40.0), strict=True):
        cell.gpu_busy_ms = ms
    rows = by_gpu_time(summarize(document))
    assert [row.speedup for row in rows] == [1, 1, None, 2.25]
    assert {(row.speedup_ci95, row.verdict) for row in rows} == {(None, None)}


@pytest.mark.parametrize(("ms", "said"), [(160.0, ["22%"]), (250.0, ["22%"]), (192.0, [])])
@pytest.mark.parametrize("block", ["", WITHOUT])
def test_twins_that_disagree_say_how_many_steps_would_do(ms, said, block):
    """1.25 is 4.574 times as far from 1 as 1.05 is, on a logarithmic scale. That takes 20.92 times
    our 60 steps: 1255.03, and 1257 is the next that three rounds can share."""
    twins = ("vanilla_peft", 200.0), ("vanilla_peft_again", ms)
    document = cells(*((id + block, n, [one] * 20) for id, one in twins for n in (1, 2, 3)))
    title = "vanilla PEFT, again" + (" without checkpointing" if block else "")
    assert twins_too_far_apart(document) == [
        f"At 64 tokens {title} came out {apart} away: within 5% takes about --steps 1257"
        for apart in said
    ]


def test_only_rounds_with_both_are_paired():
    row = row_of(rounds(vanilla_peft=[200, "error", 300], fused_mlp=[100, 1, "oom"]))
    assert (row.speedup, row.speedup_ci95, row.rounds) == (2.0, None, 2)


def test_times_of_a_cell_that_failed_a_check_do_not_count():
    document = rounds(vanilla_peft=[200, 200], fused_mlp=[100, 1])
    document.cells[3].status = "parity_failed"
    row = row_of(document)
    assert (row.rounds, row.steps, row.median_step_ms) == (1, 1, 100.0)
    assert (row.status, row.speedup) == ("ok", 2.0)


def test_padding_is_no_token_and_without_floor_peak_or_baseline_the_row_says_null():
    document = rounds(fused_mlp=[100, 100])
    document.experiment.tokens[64] = Tokens(padding=0.25, labelled=0.5)
    row = row_of(document)
    assert row.tokens_per_s == 0.75 * 20480.0
    empty = ("ratio_to_floor", "peak_gib", "speedup", "speedup_ci95", "verdict")
    assert [getattr(row, name) for name in empty] == [None] * 5


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["oom", 100, "error"], "ok"),
        (["error", "oom", "unavailable"], "oom"),
        (["oom", "parity_failed"], "parity_failed"),
        (["unavailable", "error"], "error"),
        (["unavailable"], "unavailable"),
    ],
)
def test_the_most_telling_status_stands(outcomes, status):
    row = row_of(rounds(fused_mlp=outcomes))
    assert row.status == status
    assert (row.median_step_ms is None) == (status != "ok")


def test_rows_come_by_length_and_then_as_the_variants_were_asked_for():
    document = example.empty(variants=["vanilla_peft", "fused_mlp"], seq_lens=[64, 512])
    keys = [("vanilla_peft", 64), ("vanilla_peft", 512), ("fused_mlp", 512)]
    for variant, seq_len in reversed(keys):
        document.add(example.timed_cell(variant, seq_len, 1, [100.0]))
    assert [(row.variant, row.seq_len) for row in summarize(document)] == keys


@pytest.mark.parametrize(
    ("fused_ms", "verdict", "without_the_twin"),
    [
        ([80, 81, 80], "faster", None),
        ([99, 99, 99], NOISE, None),  # 1.010: the A/A twin reached 1.02
        ([60, 80, 101], NOISE, NOISE),  # 1.25, but one round was slower
    ],
)
def test_a_verdict_takes_the_noise_into_account(fused_ms, verdict, without_the_twin):
    vanilla, again = [100, 100, 100], [102, 100, 99]
    document = rounds(vanilla_peft=vanilla, vanilla_peft_again=again, fused_mlp=fused_ms)
    judged = {row.variant: row.verdict for row in summarize(document)}
    assert judged == {"vanilla_peft": None, "vanilla_peft_again": None, "fused_mlp": verdict}
    assert row_of(rounds(vanilla_peft=vanilla, fused_mlp=fused_ms)).verdict == without_the_twin


@pytest.mark.parametrize(
    ("speedup", "ci95", "verdict"),
    [
        (1.04, [1.03, 1.05], "faster"),
        (1.02, [1.01, 1.03], NOISE),  # on the band's edge
        (0.98, [0.97, 0.99], NOISE),
        (0.97, [0.96, 0.98], "slower"),
        (1.20, [1.00, 1.30], NOISE),  # the interval touches 1
        (0.80, [0.70, 1.00], NOISE),
        (1.20, None, None),
    ],
)
def test_verdicts_at_the_edges_of_band_and_interval(speedup, ci95, verdict):
    assert verdict_of(speedup, ci95, (0.98, 1.02)) == verdict
    touches = ci95 is not None and ci95[0] <= 1 <= ci95[1]  # which needs no band to be told
    assert verdict_of(speedup, ci95, None) == (NOISE if touches else None)


@pytest.mark.parametrize("interval", [interval95, interval95_of_ratios])
def test_intervals_of_nothing_of_one_and_of_equal_values(interval):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert interval([]) is None
        assert interval([1.5]) is None
        assert interval([1.5, 1.5, 1.5]) == pytest.approx([1.5, 1.5])
