"""The command as a user meets it, without a GPU: the rehearsal end to end, and going on after a
stop. Where processes are not what a test is about, it does without."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rehearsal_case import WITHOUT_GPU, in_this_process

import lora_bench
from bench import experiment, options
from bench import processes as isolated
from bench import results as store
from bench.records import Cell

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [WITHOUT_GPU, pytest.mark.usefixtures("warm_processes")]


def command(out, *arguments):
    return ["--out", str(out), *arguments]


def run(out, *arguments):
    return lora_bench.main(command(out, *arguments))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory, cache):
    """A finished rehearsal, as the command leaves it."""
    out = tmp_path_factory.mktemp("rehearsal")
    assert run(out, "--cache", str(cache)) == 0
    return out


def saved(out):
    return store.load(out / "results.json")


# --- the rehearsal --------------------------------------------------------------------------------


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


def test_one_round_is_said_to_have_no_verdicts(rehearsal, cache, capsys):
    assert run(rehearsal, "--cache", str(cache)) == 0
    assert "One round gives numbers without verdicts" in capsys.readouterr().out
    assert {row.verdict for row in saved(rehearsal).summary} == {None}


def test_a_cell_holds_its_raw_steps_and_what_ran(rehearsal):
    steps = options.REHEARSAL["steps"]
    for cell in saved(rehearsal).cells:
        if cell.status != "ok":
            assert cell.step_ms == []
            continue
        for part in ("step_ms", "forward_ms", "backward_ms", "optimizer_ms", "losses"):
            values = getattr(cell, part)
            assert len(values) == steps and all(value > 0 for value in values)
        parts = zip(cell.forward_ms, cell.backward_ms, cell.optimizer_ms, strict=True)
        assert [sum(three) for three in parts] == pytest.approx(cell.step_ms)
        assert cell.parity.passed
        assert bool(cell.fused_modules) == (cell.variant == "fused_mlp")


def test_variants_train_alike(rehearsal):
    """Same weights, adapters and batches: the losses lie on each other to bf16's precision."""
    losses = {(c.variant, c.seq_len): c.losses for c in saved(rehearsal).cells}
    for seq_len in (16, 32):
        fused, vanilla = losses["fused_mlp", seq_len], losses["vanilla_peft", seq_len]
        assert fused == pytest.approx(vanilla, rel=2e-3)
        assert len(set(vanilla)) == len(vanilla)  # it does train


def test_a_finished_run_measures_nothing_again(rehearsal, cache, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a finished run started a process")

    before = saved(rehearsal).cells
    monkeypatch.setattr(isolated, "run", refuse)
    assert run(rehearsal, "--cache", str(cache)) == 0
    assert saved(rehearsal).cells == before


def test_only_the_variants_that_are_asked_for_are_measured(rehearsal, cache, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("vanilla is done, and nothing else was asked for")

    results = saved(rehearsal)
    results.cells = [c for c in results.cells if c.variant == "vanilla_peft"]
    store.save(tmp_path / "results.json", results)
    monkeypatch.setattr(isolated, "run", refuse)
    assert run(tmp_path, "--cache", str(cache), "--variants", "vanilla_peft") == 0


def test_only_what_is_missing_or_failed_is_measured_again(rehearsal, cache, tmp_path, monkeypatch):
    results = saved(rehearsal)
    kept = [c for c in results.cells if (c.variant, c.seq_len) != ("fused_mlp", 32)]
    for cell in kept:
        if (cell.variant, cell.seq_len) == ("vanilla_peft", 16):
            cell.status, cell.error = "error", "it had crashed"
    results.cells = kept
    store.save(tmp_path / "results.json", results)
    before = {(c.variant, c.seq_len): c.step_ms for c in kept}

    monkeypatch.setattr(isolated, "run", in_this_process)
    assert run(tmp_path, "--cache", str(cache)) == 0
    after = {(c.variant, c.seq_len): c for c in saved(tmp_path).cells}
    assert len(after) == 8
    assert after["vanilla_peft", 16].status == "ok"
    assert after["vanilla_peft", 16].step_ms != before["vanilla_peft", 16]
    assert after["vanilla_peft", 32].step_ms == before["vanilla_peft", 32]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "benchmark_results.png",
        "results.json",
    ]


# --- stops ----------------------------------------------------------------------------------------


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "lora_bench.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a shell's background jobs ignore SIGINT, and so would all that they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for_cells(process, path, count):
    deadline = time.monotonic() + 300
    while not (path.exists() and len(store.load(path).cells) == count):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.02)


def test_a_stop_keeps_what_was_measured_and_the_same_command_goes_on(
    cache, tmp_path, monkeypatch, capsys
):
    """Killed in its second round, interrupted in its third, and then left to finish. A round has a
    process of its own, which takes longer to start than a signal to arrive."""
    path = tmp_path / "results.json"
    asked = command(tmp_path, "--cache", str(cache), "--variants", "vanilla_peft", "--rounds", "3",
                    "--steps", "3", "--seq-lens", "16")  # fmt: skip
    killed = start(*asked)
    wait_for_cells(killed, path, 1)
    assert lora_bench.main(asked) == 2
    line = f"lora_bench.py: --out {tmp_path}: another run is writing there; wait for it, or"
    assert capsys.readouterr().err.startswith(line)
    killed.kill()
    killed.wait()

    stopped = start(*asked)
    wait_for_cells(stopped, path, 2)
    os.kill(stopped.pid, signal.SIGINT)
    output = stopped.communicate(timeout=120)[0]
    assert stopped.returncode == 130
    assert "the same command goes on" in output and "Traceback" not in output
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    before = saved(tmp_path)
    assert before.finished_utc is None

    monkeypatch.setattr(isolated, "run", in_this_process)
    assert lora_bench.main(asked) == 0
    results = saved(tmp_path)
    assert results.cells[:2] == before.cells
    assert [cell.round for cell in results.cells] == [1, 2, 3]
    assert results.finished_utc is not None


def test_a_process_that_dies_is_an_error_cell_and_the_rest_goes_on(cache, tmp_path, monkeypatch):
    """The first process dies; its first length is an error, its second is measured."""
    deaths = []

    def dies_once(function, plan, *rest, **how):
        if function is experiment.measure_cells and not deaths:
            deaths.append(rest)
            return isolated.Ended("killed by SIGKILL", "the last words")
        return in_this_process(function, plan, *rest, **how)

    monkeypatch.setattr(isolated, "run", dies_once)
    assert run(tmp_path, "--cache", str(cache), "--variants", "vanilla_peft", "--steps", "1") == 1
    first, second = saved(tmp_path).cells
    assert (first.seq_len, first.status) == (16, "error")
    assert first.error == "killed by SIGKILL\nthe last words"
    assert (second.seq_len, second.status) == (32, "ok")


def test_a_run_without_a_time_has_failed(cache, tmp_path, monkeypatch, capsys):
    def fails_parity(function, plan, *rest, on_message, **how):
        if function is not experiment.measure_cells:
            return in_this_process(function, plan, *rest, on_message=on_message)
        variant, round_number, seq_lens = rest
        for seq_len in seq_lens:
            cell = Cell(variant, seq_len, round_number, "parity_failed", error="wrong")
            on_message({"cell": cell})
        return isolated.Ended(None, "")

    monkeypatch.setattr(isolated, "run", fails_parity)
    assert run(tmp_path, "--cache", str(cache), "--variants", "vanilla_peft") == 1
    assert "no cell has a time" in capsys.readouterr().err


def test_the_shortest_length_that_is_not_refused_is_measured(cache, tmp_path, monkeypatch):
    least, _ = options.LIMITS["seq_lens"]
    monkeypatch.setattr(isolated, "run", in_this_process)
    arguments = ("--variants", "vanilla_peft", "--seq-lens", str(least), "--steps", "1")
    assert run(tmp_path, "--cache", str(cache), *arguments) == 0
