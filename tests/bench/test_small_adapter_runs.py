"""A rehearsal of bench.small_adapters without starting processes."""

import json
from pathlib import Path

import pytest
from cases.rehearsal_case import WITHOUT_GPU, few_chats

from bench import processes, small_adapters
from bench.small_adapter_records import load_small_adapters
from variants import IN_FP32

pytestmark = WITHOUT_GPU
BF16 = small_adapters.TRAINER


@pytest.fixture
def command(tmp_path, monkeypatch):
    started = []

    def run(function, *arguments, on_message, silence_limit_s=None):
        started.append((function.__name__, *arguments[1:]))
        function(on_message, *arguments)
        return processes.Ended(None, "")

    monkeypatch.setattr(processes, "run", run)
    sizes = {"batches": 1, "pairs": 4, "steps": (1,), "rates": (1e-3,)}
    monkeypatch.setattr(small_adapters, "REHEARSED", small_adapters.REHEARSED | sizes)
    folders = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    chats = Path(few_chats(tmp_path))
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    chats.write_text(json.dumps(rows))  # a form that only `gather` reads
    (tmp_path / "other.json").write_text(json.dumps(rows[::-1]))
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]))
    (tmp_path / "bert.json").write_text('{"model_type": "bert", "vocab_size": 99}')
    (tmp_path / "torn.jsonl").write_text(f"{json.dumps(rows[0])}\n{json.dumps(rows[1])[:-9]}")
    folders += ["--data", str(chats)]
    monkeypatch.chdir(tmp_path)
    return folders, started, tmp_path / "out" / "small_adapters.json"


@pytest.mark.slow
def test_each_variant_is_held_against_fp32_and_what_is_there_is_not_measured_again(command, capsys):
    folders, started, path = command
    assert small_adapters.main([*folders, "--variants", BF16]) == 0
    assert started == [("train_adapters",), ("run_variant", IN_FP32), ("run_variant", BF16)]
    found = load_small_adapters(path)
    exact, seen = (
        {one.adapter.is_dpo: one for one in found.seen if one.variant == variant}
        for variant in (IN_FP32, BF16)
    )
    assert len(found.seen) == 4 and exact.keys() == seen.keys() == {False, True}
    # a step of 1e-3 is large enough for bf16 to show it
    assert seen[False].along[0] == pytest.approx(exact[False].along[0], rel=0.1)
    assert sum(exact[True].chosen) > sum(exact[True].rejected)
    assert small_adapters.main([*folders, "--variants", BF16]) == 0
    assert len(started) == 3
    assert small_adapters.main([*folders, "--variants", BF16, "--data", "other.json"]) == 2
    assert "small_adapters.json is of another model, --data, GPU" in capsys.readouterr().err


def test_each_data_set_has_a_cache_folder_that_one_run_at_a_time_writes(
    command, monkeypatch, capsys
):
    folders, caches = command[0], []

    def run(_, asked, **options):
        caches.append(asked.folder)
        assert small_adapters.main([*folders, "--out", "beside", "--data", data]) == 2
        return processes.Ended("stopped", "")

    monkeypatch.setattr(processes, "run", run)
    for data in ("chats.jsonl", "other.json"):
        assert small_adapters.main([*folders, "--data", data]) == 1
    assert len(set(caches)) == 2
    said = capsys.readouterr().err
    assert all(f"--cache {folder}: another run is writing there" in said for folder in caches)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "no-such.json"], "--model no-such.json: no such file"),
        (["--model", "bert.json"], "--model bert: cannot be trained here (none of q_proj "),
        (["--variants", "fused_everything"], "--variants fused_everything: unknown"),
        (["--data", "no-such.jsonl"], "--data no-such.jsonl: no file to read"),
        (["--data", "torn.jsonl"], "--data torn.jsonl, line 2: not JSON ("),
        (["--data", "one.jsonl"], "--data one.jsonl: too few chats (1); wanted 11 or more; add"),
        ([], "out/small_adapters.json"),
    ],
)
def test_bad_arguments_are_one_line(command, capsys, arguments, said):
    folders, started, path = command
    path.parent.mkdir()
    path.write_text("{}")
    assert small_adapters.main([*folders, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("small_adapters: ") and said in error and error.count("\n") == 1
    assert not started


def test_help_lists_the_variants(capsys):
    with pytest.raises(SystemExit):
        small_adapters.main(["--help"])
    assert "fused_layer" in capsys.readouterr().out.split("variants:")[1]
