"""A rehearsal of each program in dev/measure/."""

import pytest
from cases.rehearsal_case import ROOT, WITHOUT_GPU, InThread
from cases.table_case import rows_in

from bench import processes
from dev.measure import families, trainers

pytestmark = WITHOUT_GPU
TINY = str(ROOT / "configs" / "tiny.json")


def test_a_family_has_a_row_for_each_run_and_one_that_fails_its_error(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(processes, "_Process", InThread)
    monkeypatch.setattr(families, "WARM_UP", 2)
    monkeypatch.setattr(families, "PROFILED", 1)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2}  # fmt: skip
    sizes = ["--tokens", "4", "--batch-size", "1", *(f"--set={k}={v}" for k, v in small.items())]
    asked = ["olmo3", "--layers", "2", "--cache", str(tmp_path), *sizes]
    assert families.main(asked) == 1
    printed = capsys.readouterr().out
    assert "layer: 2 of 2 layers fused" in printed
    rows = rows_in(printed[printed.rindex("| family") :])
    assert [row["run"] for row in rows] == [*families.RUNS]
    plain, unsloth, fused = rows
    assert "No module named 'unsloth'" in unsloth["GPU ms"]
    assert float(fused["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-4)
    assert fused["adapters, M"] == plain["adapters, M"]


@pytest.mark.slow
def test_a_trainer_has_a_row_for_each_run(capsys, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="wants trl, of dev/requirements/dev.txt")
    monkeypatch.setattr(processes, "_Process", InThread)
    data_of = trainers.data_of
    monkeypatch.setattr(trainers, "data_of", lambda kind: data_of(kind)[:4])
    runs = [trainers.PLAIN, trainers.GRAPHED]
    sizes = ["--tokens", "16", "--steps", "1", "--warm-up", "1", "--batch-size", "1"]
    asked = ["--model", TINY, "--cache", str(tmp_path), *sizes, "--kinds", "SFT", "--runs", *runs]
    assert trainers.main(asked) == 0
    printed = capsys.readouterr().out
    assert "all steps run eagerly: the model is on cpu" in printed
    rows = rows_in(printed[printed.rindex("| trainer") :])
    assert [row["run"] for row in rows] == runs and rows[0]["speedup"] == "1.00"
    plain, graphed = (float(row["loss"]) for row in rows)
    assert graphed == pytest.approx(plain, rel=1e-4) and plain > 1
    assert {row["ms without generation"] for row in rows} == {"-"}


@pytest.mark.parametrize(
    ("program", "asked", "words"),
    [
        (families, ["olmo3", "--layers", "0"], "argument --layers: it is 0: give 1 or more"),
        (families, ["nobody"], "nobody: transformers has no such causal language model"),
        (families, ["olmo3", "--set", "hidden=5"], "the configuration of olmo3 has no such value"),
        (trainers, ["--kinds", "DPO", "--runs", trainers.UNSLOTH], "Unsloth is timed in SFT"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(program, asked, words, capsys):
    try:
        assert program.main(asked) == 2
    except SystemExit as end:
        assert end.code == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
