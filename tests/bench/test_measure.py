"""A rehearsal of each program in dev/measure/."""

from argparse import Namespace

import msgspec
import pytest
from cases.rehearsal_case import ROOT, WITHOUT_GPU, InThread, few_chats
from cases.table_case import rows_in

from bench import processes
from dev.measure import families, long_rows, small_adapters, trainers
from dev.measure.small_adapter_records import SmallAdapters
from variants import IN_FP32

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


def test_each_variant_is_held_against_fp32(tmp_path, monkeypatch, capsys):
    started, bf16 = [], small_adapters.TRAINER

    def run(function, *arguments, on_message, silence_limit_s=None):
        started.append((function.__name__, *arguments[1:]))
        function(on_message, *arguments)
        return processes.Ended(None, "")

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(small_adapters, "DATA", few_chats(tmp_path))
    sizes = {"batches": 1, "pairs": 4, "steps": (1,), "rates": (1e-3,)}
    monkeypatch.setattr(small_adapters, "REHEARSED", small_adapters.REHEARSED | sizes)
    asked = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"),
             "--variants", bf16]  # fmt: skip
    assert small_adapters.main(asked) == 0
    assert started == [("train_adapters",), ("run_variant", IN_FP32), ("run_variant", bf16)]
    written = (tmp_path / "out" / "small_adapters.json").read_bytes()
    found = msgspec.json.decode(written, type=SmallAdapters)
    on_chats, on_pairs = found.adapters
    # a step of 1e-3 is large enough for bf16 to show it
    assert found.shares(bf16, on_chats) == [pytest.approx(1.0, abs=0.1)]
    exact = found.seen_by(IN_FP32, on_pairs)
    assert sum(exact.chosen) > sum(exact.rejected)
    assert "| 1e-3 | 1 | 1.0" in (printed := capsys.readouterr().out)
    assert "| updates | fp32 | vanilla PEFT |" in printed


def a_step(tokens, card_gib=1e9):
    """A step of 6 GiB and 0.1 GiB a token, of which torch reserves a tenth more on a large card."""
    allocated = 6 + 0.1 * tokens
    reserved = min(1.1 * allocated, card_gib - long_rows.CONTEXT_GIB)
    seconds = tokens * (0.01 + 0.0001 * tokens)
    return long_rows.Step(tokens, seconds, allocated, reserved, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("limit", "fits", "found"),
    [
        # reserved: (23.4 / 1.1 - 6) / 0.1 = 152 tokens; allocated: 174; then half way between them
        (9, 1.0, [(24, 152, "trained, steps: 2"), (24, 160, "trained, steps: 2")]),
        (4, 1.0, [(24, 152, "trained, steps: 1")]),
        (3, 1.0, [(24, 152, "predicted: 4 s")]),
        (0, 1.0, []),
        # nothing trained: a little shorter
        (9, 0.9, [(24, 152, "out of memory"), (24, 140, "trained, steps: 2")]),
    ],
)
def test_the_longest_row_is_worked_out_from_two_and_then_trained(limit, fits, found):
    asked = Namespace(lengths=[16, 32], cards=[24.0], grid=4, limit=limit, tries=2)

    def train(tokens, card_gib, steps):
        step = a_step(tokens, card_gib)
        room = fits * (card_gib - long_rows.CONTEXT_GIB)
        return step if step.allocated_gib <= room else None

    first, second, *others = long_rows.search(train, asked)
    assert [first[:3], second[:3]] == [(None, 16, "trained"), (None, 32, "trained")]
    assert [one[:3] for one in others] == found


def test_long_rows_are_recorded_as_they_come_and_so_is_why_a_run_ends(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(processes, "_Process", InThread)
    peaks = iter([(1.0, 1.0, 0.0), (2.0, 2.0, 0.0), (3.0, 3.1, 0.0), (2.0, 2.0, 0.5)])
    monkeypatch.setattr(long_rows, "memory_gib", lambda: next(peaks))
    sizes = ["--lengths", "4", "8", "--grid", "4", "--cards", "3.6", "--tries", "2",
             "--host-layers", "2"]  # fmt: skip
    asked = ["--model", TINY, "--cache", str(tmp_path), "--out", str(tmp_path), *sizes]
    assert long_rows.main([*asked, "--runs", "unsloth", "fused"]) == 1
    record = (tmp_path / "long_rows.txt").read_text()
    assert {*record.splitlines()} <= {*capsys.readouterr().out.splitlines()}
    assert "No module named 'unsloth'" in record and "checkpoint: 2 modules fused" in record
    assert "base: 2 of 2 layers in host memory" in record
    rows = rows_in(record[record.index("| model") :])
    found = [(row["card, GiB"], row["tokens"], row["pinned, GiB"]) for row in rows]
    assert found == [
        ("-", "4", "0.00"),
        ("-", "8", "0.00"),
        ("3.6", "12", "-"),
        ("3.6", "8", "0.50"),
    ]
    assert [row["how"].split(",")[0] for row in rows] == [
        *2 * ["trained"],
        "out of memory",
        "trained",
    ]
    assert all(float(row["loss"]) > 1 for row in rows if row["how"] != "out of memory")


@pytest.mark.parametrize(
    ("program", "asked", "words"),
    [
        (families, ["nobody"], "nobody: transformers has no such causal language model"),
        (families, ["olmo3", "--set", "hidden=5"], "the configuration of olmo3 has no such value"),
        (families, ["qwen3_moe", "--quantize", "fp4"], "Unsloth has nf4 alone: leave it out"),
        (trainers, ["--kinds", "DPO", "--runs", trainers.UNSLOTH], "Unsloth is timed in SFT"),
        (long_rows, ["--model", "nowhere.json"], "--model nowhere.json: no such file"),
        (long_rows, ["--runs", "accelerate"], "accelerate: it needs --host-layers and --base bf16"),
        (small_adapters, ["--variants", "fused_everything"], "fused_everything: unknown"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(program, asked, words, capsys):
    try:
        assert program.main(asked) == 2
    except SystemExit as end:
        assert end.code == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
