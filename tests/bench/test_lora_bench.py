"""The command as a user meets it: the rehearsal end to end, going on after a stop, bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import example_results as example
import pytest
import torch

import lora_bench
from bench import options
from bench import processes as isolated
from bench import results as store

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "sft_train.jsonl"
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the rehearsal is for the CPU")


def command(out, *arguments):
    return ["--device", "cpu", "--out", str(out), *arguments]


def run(out, *arguments):
    return lora_bench.main(command(out, *arguments))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory, cache):
    """A finished rehearsal, as the command leaves it without a GPU."""
    out = tmp_path_factory.mktemp("rehearsal")
    assert run(out, "--cache", str(cache)) == 0
    return out


def saved(out):
    return json.loads((out / "results.json").read_text())


# --- the rehearsal --------------------------------------------------------------------------------


@CPU_ONLY
def test_the_rehearsal_measures_what_it_can_and_says_what_it_cannot(rehearsal):
    results = saved(rehearsal)
    assert results.rehearsal is True
    assert results.finished_utc is not None
    assert results.environment.gpu is None
    statuses = {(c.variant, c.seq_len): c.status for c in results.cells}
    assert statuses == {
        ("vanilla_peft", 16): "ok",
        ("vanilla_peft", 32): "ok",
        ("fused_mlp", 16): "ok",
        ("fused_mlp", 32): "ok",
        ("full_unsloth", 16): "unavailable",
        ("full_unsloth", 32): "unavailable",
        ("vanilla_peft_again", 16): "ok",
        ("vanilla_peft_again", 32): "ok",
    }
    assert (rehearsal / "benchmark_results.png").read_bytes().startswith(b"\x89PNG")


@CPU_ONLY
def test_one_round_is_said_to_have_no_verdicts(rehearsal, cache, capsys):
    assert run(rehearsal, "--cache", str(cache)) == 0
    assert "One round gives numbers without verdicts" in capsys.readouterr().out
    assert {row.verdict for row in saved(rehearsal).summary} == {None}


@CPU_ONLY
def test_a_cell_holds_its_raw_steps_and_what_ran(rehearsal):
    steps = options.REHEARSAL.steps
    for cell in saved(rehearsal).cells:
        if cell.status != "ok":
            assert cell.step_ms == []
            continue
        for part in ("step_ms", "forward_ms", "backward_ms", "optimizer_ms", "losses"):
            assert len(cell[part]) == steps and all(value > 0 for value in cell[part])
        parts = zip(cell.forward_ms, cell.backward_ms, cell.optimizer_ms, strict=True)
        assert [sum(three) for three in parts] == pytest.approx(cell.step_ms)
        assert cell.parity.passed
        assert bool(cell.fused_modules) == (cell.variant == "fused_mlp")


@CPU_ONLY
def test_variants_train_alike(rehearsal):
    """Same weights, adapters and batches: the losses lie on each other to bf16's precision."""
    losses = {(c.variant, c.seq_len): c.losses for c in saved(rehearsal).cells}
    for seq_len in (16, 32):
        fused, vanilla = losses["fused_mlp", seq_len], losses["vanilla_peft", seq_len]
        assert fused == pytest.approx(vanilla, rel=2e-3)
        assert len(set(vanilla)) == len(vanilla)  # it does train


@CPU_ONLY
def test_a_finished_run_measures_nothing_again(rehearsal, cache, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a finished run started a process")

    before = saved(rehearsal).cells
    monkeypatch.setattr(isolated, "run", refuse)
    assert run(rehearsal, "--cache", str(cache)) == 0
    assert saved(rehearsal).cells == before


@CPU_ONLY
def test_only_the_variants_that_are_asked_for_are_measured(rehearsal, cache, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("vanilla is done, and nothing else was asked for")

    results = saved(rehearsal)
    results.cells = [c for c in results.cells if c.variant == "vanilla_peft"]
    store.save(tmp_path / "results.json", results)
    monkeypatch.setattr(lora_bench.isolated, "run", refuse)
    assert run(tmp_path, "--cache", str(cache), "--variants", "vanilla_peft") == 0


@CPU_ONLY
def test_only_what_is_missing_or_failed_is_measured_again(rehearsal, cache, tmp_path):
    shutil.copy(rehearsal / "results.json", tmp_path)
    results = saved(tmp_path)
    kept = [c for c in results.cells if (c.variant, c.seq_len) != ("fused_mlp", 32)]
    for cell in kept:
        if (cell.variant, cell.seq_len) == ("vanilla_peft", 16):
            cell.status, cell.error = "error", "it had crashed"
    results.cells = kept
    store.save(tmp_path / "results.json", results)
    before = {(c.variant, c.seq_len): c.step_ms for c in kept}

    assert run(tmp_path, "--cache", str(cache)) == 0
    after = {(c.variant, c.seq_len): c for c in saved(tmp_path).cells}
    assert len(after) == 8
    assert after["vanilla_peft", 16].status == "ok"
    assert after["vanilla_peft", 16].step_ms != before["vanilla_peft", 16]
    assert after["vanilla_peft", 32].step_ms == before["vanilla_peft", 32]


@CPU_ONLY
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stop_keeps_what_was_measured_and_the_same_command_goes_on(how, cache, tmp_path):
    # after the first cell there is a second process to start, which takes longer than the signal
    both = ["vanilla_peft", "fused_mlp"]
    arguments = ["--cache", str(cache), "--variants", *both, "--seq-lens", "16", "32"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "lora_bench.py"), *command(tmp_path, *arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a shell's background jobs ignore SIGINT, and so would all that they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    path = tmp_path / "results.json"
    deadline = time.monotonic() + 120
    while not (path.exists() and json.loads(path.read_text()).cells):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.02)
    os.kill(process.pid, how)
    output = process.communicate(timeout=60)[0]
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on" in output and "Traceback" not in output
    results = saved(tmp_path)
    assert results.finished_utc is None
    first = results.cells[0]
    assert (first.seq_len, first.status) == (16, "ok")

    assert run(tmp_path, *arguments) == 0
    results = saved(tmp_path)
    assert results.cells[0] == first
    assert [cell.seq_len for cell in results.cells] == [16, 32] * 2
    assert results.finished_utc is not None


@CPU_ONLY
def test_a_process_that_dies_is_an_error_cell_and_the_rest_goes_on(rehearsal, cache, tmp_path,
                                                                    monkeypatch):  # fmt: skip
    """The first process of fused MLP dies; its first length is an error, its second is measured."""
    real, deaths = isolated.run, []

    def dies_once(function, plan, *rest, on_message, **limits):
        if rest and rest[0] == "fused_mlp" and not deaths:
            deaths.append(rest)
            return isolated.Ended("killed by SIGKILL", "the last words")
        return real(function, plan, *rest, on_message=on_message, **limits)

    monkeypatch.setattr(isolated, "run", dies_once)
    assert run(tmp_path, "--cache", str(cache)) == 1
    cells = {(c.variant, c.seq_len): c for c in saved(tmp_path).cells}
    assert cells["fused_mlp", 16].status == "error"
    assert cells["fused_mlp", 16].error == "killed by SIGKILL\nthe last words"
    assert cells["fused_mlp", 32].status == "ok"


def test_fits_lists_what_trains_in_so_much_memory(tmp_path, capsys):
    store.save(tmp_path / "results.json", example.run())
    assert lora_bench.main(["--fits", "12", "--out", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 512")]
    assert len(lines) == 1 and "full Unsloth" in lines[0]


def test_a_suite_draws_what_every_part_buys(tmp_path):
    store.save(tmp_path / "results.json", example.run(("vanilla_peft", "fused_mlp", "fused_all")))
    assert lora_bench.main(["--plot-only", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "ablation.png").is_file() and (tmp_path / "frontier.png").is_file()


def test_merge_writes_one_run_of_several_and_nothing_over_another(tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        store.save(tmp_path / name / "results.json", example.run(rounds=2, steps=16))
    files = [str(tmp_path / name / "results.json") for name in ("one", "two")]
    out = tmp_path / "both"
    assert lora_bench.main(["--merge", *files, "--out", str(out)]) == 0
    assert {cell.round for cell in saved(out).cells} == {1, 2, 3, 4}
    assert (out / "benchmark_results.png").is_file()
    before = (out / "results.json").read_bytes()
    assert lora_bench.main(["--merge", *files, "--out", str(out)]) == 2
    assert (out / "results.json").read_bytes() == before
    assert lora_bench.main(["--merge", *files]) == 2
    assert "give --out FOLDER" in capsys.readouterr().err


# --- bad input ------------------------------------------------------------------------------------


def bad(capsys, out, *arguments):
    """Run a command that should be refused; returns its one line."""
    before = sorted(out.rglob("*")) if out.is_dir() else None
    try:
        code = lora_bench.main(["--out", str(out), *arguments])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.endswith("\n") and error.count("\n") == 1, error
    assert "Traceback" not in error
    assert before == (sorted(out.rglob("*")) if out.is_dir() else None), "something was written"
    return error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants", "fusd_mlp"], "fusd_mlp: unknown; there are vanilla_peft, fused_mlp"),
        (["--seq-lens", "16", "0"], "--seq-lens 0: give 2 or more"),
        (["--seq-lens", "1"], "--seq-lens 1: give 2 or more"),
        (["--seq-lens", "long"], "invalid int value: 'long'"),
        (["--batch-size", "0"], "--batch-size 0: give 1 or more"),
        (["--batch-size", "-4"], "--batch-size -4: give 1 or more"),
        (["--rank", "0"], "--rank 0: give 1 or more"),
        (["--steps", "0"], "--steps 0: give 1 or more"),
        (["--rounds", "0"], "--rounds 0: give 1 or more"),
        (["--merge", "none.json"], "--merge: none.json cannot be read"),
        (["--fits", "0"], "--fits 0: give more than 0 GiB"),
        (["--fits", "24"], "run the benchmark first"),
        (["--suite", "some"], "invalid choice: 'some'"),
        (["--cell-timeout", "0"], "--cell-timeout 0: give more than 0 seconds"),
        (["--compare", "old.json", "new.json"], "--compare: old.json cannot be read"),
        (["--steps", "5", "--rounds", "2"], "does not spread evenly over --rounds 2"),
        (["--checkpointing", "perhaps"], "invalid choice: 'perhaps'"),
        (["--model", "nowhere/at/all"], "no such folder"),
        (["--model", "configs/none.json"], "no such file"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--fused"], "unrecognized arguments: --fused"),
        (["--plot-only"], "run the benchmark first"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, arguments, words):
    assert words in bad(capsys, tmp_path, *arguments)


@CPU_ONLY
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda"], "no NVIDIA GPU is visible"),
        (["--kernels"], "no NVIDIA GPU to time the kernels on"),
        (["--variants", "vanilla_peft", "full_unsloth"], "Unsloth needs an NVIDIA GPU"),
    ],
)
def test_what_needs_a_gpu_says_so(capsys, tmp_path, arguments, words):
    assert words in bad(capsys, tmp_path, *arguments)


def test_unsloth_asked_for_by_name_but_not_installed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(options, "missing_package", lambda variant: "unsloth")
    monkeypatch.setattr(options.machine, "has_gpu", lambda: True)
    line = bad(capsys, tmp_path, "--variants", "full_unsloth")
    assert "Unsloth is not installed; pip install -r requirements-peers.txt" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ('{"messages": [{"role": "user", "content": "x"}]}\nnot json\n', "line 1"),
        (DATA.read_text().splitlines()[0] + "\nnot json\n", "line 2"),
    ],
)
def test_a_bad_data_file_says_where_and_why(capsys, tmp_path, text, words):
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    assert words in bad(capsys, tmp_path / "out", "--data", str(data))


def test_a_model_folder_without_a_tokenizer(capsys, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert "has no tokenizer.json" in bad(capsys, tmp_path / "out", "--model", str(folder))


def test_a_model_with_fewer_rows_than_tokens(capsys, tmp_path):
    config = json.loads((ROOT / "configs" / "tiny.json").read_text())
    model = tmp_path / "small.json"
    model.write_text(json.dumps(config | {"vocab_size": 100}))
    line = bad(capsys, tmp_path / "out", "--model", str(model))
    assert "its vocab_size is 100, its tokenizer has 4096 tokens" in line


@pytest.mark.skipif(os.name != "posix", reason="POSIX paths")
def test_an_output_folder_that_cannot_be_written(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("a file, not a folder")
    assert "cannot be written" in bad(capsys, file / "out")


@CPU_ONLY
def test_results_of_another_kind_are_left_alone(capsys, rehearsal, tmp_path):
    path = tmp_path / "results.json"
    shutil.copy(rehearsal / "results.json", path)
    assert "batch_size 4 there, 3 here" in bad(capsys, tmp_path, "--batch-size", "3")
    results = saved(tmp_path)
    path.write_text(json.dumps(results | {"schema_version": 99}))
    assert "has schema 99" in bad(capsys, tmp_path)
    results.cells[0].step_ms[1] = "fast"
    path.write_text(json.dumps(results))
    assert "cells[0].step_ms[1]: 'fast' is not of type 'number'" in bad(capsys, tmp_path)
    path.write_text("{torn")
    assert "not whole JSON" in bad(capsys, tmp_path)
    assert path.read_text() == "{torn"


def test_help_names_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        lora_bench.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for default in ("64 128 256 512", "default: 32; without a GPU 4", "default: 100", "qwen2.5-3b"):
        assert default in text


def test_the_command_is_recorded_without_the_folders_it_wrote_to():
    argv = ["/some/where/lora_bench.py", "--out", "/my/own", "--seq-lens", "64", "--cache=/mine"]
    assert options.recorded(argv) == ["lora_bench.py", "--seq-lens", "64"]
