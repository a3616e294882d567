"""A rehearsal of bench.trainers."""

import pytest
from cases.rehearsal_case import WITHOUT_GPU, InThread
from cases.table_case import rows_in

from bench import processes, trainers

pytestmark = WITHOUT_GPU
SIZES = ("--tokens", "16", "--steps", "1", "--warm-up", "1", "--batch-size", "1")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Arguments for a tiny model, which sees four chats."""
    pytest.importorskip("trl", reason="wants trl, of dev/requirements/dev.txt")
    monkeypatch.setattr(processes, "_Process", InThread)
    data_of = trainers.data_of
    monkeypatch.setattr(trainers, "data_of", lambda kind: data_of(kind)[:4])
    model = str(trainers.HERE / "configs" / "tiny.json")
    return ["--model", model, "--cache", str(tmp_path), *SIZES]


@pytest.mark.slow
def test_each_run_has_a_row_and_one_that_fails_leaves_its_error_there(tiny, capsys):
    runs = [trainers.PLAIN, trainers.UNSLOTH, trainers.GRAPHED]
    assert trainers.main([*tiny, "--kinds", "SFT", "--runs", *runs]) == 1
    printed = capsys.readouterr().out
    assert "layer: 2 of 2 layers fused" in printed
    assert "all steps run eagerly: the model is on cpu" in printed
    rows = rows_in(printed[printed.index("| trainer") :])
    assert [row["run"] for row in rows] == runs
    plain, unsloth, graphed = rows
    assert "No module named 'unsloth'" in unsloth["ms a step"]
    assert float(graphed["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-4)
    assert unsloth["speedup"] == "-" and plain["speedup"] == "1.00"
    assert float(plain["loss"]) > 1 and graphed["labelled tokens/s"] != "-"
    assert plain["ms without generation"] == "-"


@pytest.mark.slow
def test_grpo_is_timed_without_generation_and_plain_peft_may_run_twice(tiny, capsys):
    runs = [trainers.PLAIN] * 2
    given = [*tiny, "--kinds", "GRPO", "--completion", "2", "--batch-size", "2"]
    assert trainers.main([*given, "--runs", *runs]) == 0
    printed = capsys.readouterr().out
    rows = rows_in(printed[printed.rindex("| trainer") :])
    assert [row["run"] for row in rows] == runs
    step_ms, rest_ms = (
        [float(row[one].replace(",", "")) for row in rows]
        for one in ("ms a step", "ms without generation")
    )
    assert all(0 < rest < step for rest, step in zip(rest_ms, step_ms, strict=True))
    assert float(rows[1]["speedup"]) == pytest.approx(step_ms[0] / step_ms[1], abs=0.02)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--warm-up", "0"], "--warm-up is 0: give 1 or more"),
        (["--model", "nowhere.json"], "no such file"),
        (["--kinds", "DPO", "--runs", trainers.UNSLOTH], "Unsloth is timed in SFT"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(asked, words, capsys):
    assert trainers.main(asked) == 2
    assert words in capsys.readouterr().err
