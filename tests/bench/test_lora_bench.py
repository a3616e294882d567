"""The command without a GPU, as its user meets it: the rehearsal, and continuing after a stop.

One test starts real processes. The others do not.
"""

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from cases import example_results as example
from cases.rehearsal_case import ROOT, WITHOUT_GPU, InThread, small

import lora_bench
from bench import option_checks, options, published
from bench import processes as isolated
from bench import results as store
from bench.stages import stages_line

pytestmark = [WITHOUT_GPU, pytest.mark.usefixtures("no_pictures")]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Return the small command for an output folder. The cache is shared."""
    shared = tmp_path_factory.mktemp("shared")
    return lambda out, *arguments: small(shared, "--out", str(out), *arguments)


@pytest.fixture(scope="module")
def rehearsal(command, tmp_path_factory):
    """Return the folder of a finished rehearsal."""
    out = tmp_path_factory.mktemp("rehearsal")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated, "_Process", InThread)
        assert lora_bench.main(command(out)) == 0
    return out


def saved(out):
    return store.load(out / "results.json")


def statuses(results):
    return {(cell.variant, cell.seq_len): cell.status for cell in results.cells}


# --- the rehearsal --------------------------------------------------------------------------------


def test_the_rehearsal_measures_what_it_can_and_says_what_it_cannot(rehearsal):
    results = saved(rehearsal)
    assert results.rehearsal is True
    assert results.finished_utc is not None
    assert results.environment.gpu is None
    can = {"vanilla_peft": "ok", "fused_mlp": "ok", "vanilla_peft_again": "ok"}
    wanted = can | dict.fromkeys(("full_unsloth", "fused_layer_graph_offload"), "unavailable")
    assert statuses(results) == {(v, n): wanted[v] for v in wanted for n in (16, 32)}
    assert (rehearsal / "benchmark_results.png").read_bytes().startswith(b"\x89PNG")
    for cell in results.cells:
        if cell.status != "ok":
            assert cell.step_ms == []
            continue
        for part in ("step_ms", "forward_ms", "backward_ms", "optimizer_ms", "losses"):
            values = getattr(cell, part)
            assert len(values) == options.REHEARSAL["steps"] and all(ms > 0 for ms in values)
        assert len(set(cell.losses)) == len(cell.losses)  # it does train
        assert cell.loss_gap is None or cell.loss_gap < 2e-3  # and as its baseline does
        assert cell.parity.passed
        assert bool(cell.fused_modules) == (cell.variant == "fused_mlp")
        assert bool(cell.functions_seen.get("LoRA_MLPBackward")) == bool(cell.fused_modules)


def test_a_finished_run_measures_nothing_again(rehearsal, command, monkeypatch, capsys):
    def refuse(*_, **__):
        raise AssertionError("a process was started, and nothing that was asked for is to do")

    before = saved(rehearsal)
    monkeypatch.setattr(isolated, "run", refuse)
    assert lora_bench.main(command(rehearsal)) == 0
    after = saved(rehearsal)
    assert after.cells == before.cells
    said = capsys.readouterr().out
    assert "One round gives numbers without verdicts" in said
    assert re.search(r"tokens +variant +ms a step *\n", said)
    assert {row.verdict for row in after.summary} == {None}


@pytest.mark.slow
def test_a_published_setting_is_run_and_its_weights_are_deleted(
    command, tmp_path, monkeypatch, capsys
):
    setting = replace(published.SETTINGS["qwen3-0.6b"], model="tiny", batch_size=2, seq_len=16,
                      accumulate=3, rank=4)  # fmt: skip
    monkeypatch.setattr(published, "setting_of", lambda model, device, base: setting)
    monkeypatch.setitem(options.SUITES, "published", ["vanilla_peft", "fused_mlp"])
    monkeypatch.setattr(isolated, "_Process", InThread)
    asked = command(tmp_path, "--suite", "published", "--cache", str(tmp_path / "cache"))
    assert lora_bench.main(asked) == 0
    said = capsys.readouterr().out
    assert "2 x 16 tokens, 3 times a step; 2 variants, 3 steps each: five to ten minutes" in said
    assert "Deleted the random weights of tiny (" in said
    assert stages_line(saved(tmp_path)) in said
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    results = saved(tmp_path)
    assert (results.experiment.accumulate, results.experiment.lora.rank) == (3, 4)
    assert set(statuses(results).values()) == {"ok"} and results.floor[16].tokens == 3 * 2 * 16
    for row, cell in zip(results.summary, results.cells, strict=True):
        assert len(cell.step_ms) == 3 and cell.parity.passed
        assert cell.variant == "vanilla_peft" or cell.loss_gap < 2e-3
        assert row.tokens_per_s == pytest.approx(3 * 2 * 16 / row.median_step_ms * 1000, 1e-4)
    assert results.stages_s.start > 0 and results.stages_s.steps > 0
    assert lora_bench.main(asked) == 0  # everything exists: it draws no new weights
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


# --- stops ----------------------------------------------------------------------------------------


def test_a_stop_before_anything_is_measured_says_so(command, tmp_path, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(isolated, "run", stop)
    assert lora_bench.main(command(tmp_path)) == 130
    assert "Stopped; nothing was measured yet." in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_stop_keeps_what_was_measured_and_the_same_command_goes_on(
    command, tmp_path, monkeypatch, capsys, request
):
    """Interrupt the first round, kill the second, then let it finish, at the shortest length
    allowed."""
    least, _ = option_checks.LIMITS["seq_lens"]
    asked = command(tmp_path, "--variants", "vanilla_peft", "--rounds", "2", "--steps", "8",
                    "--seq-lens", str(least))  # fmt: skip
    # a shell starts what runs in its background with Ctrl-C ignored
    for number, handler in ((signal.SIGINT, signal.default_int_handler),
                            (signal.SIGTERM, signal.SIG_DFL)):  # fmt: skip
        request.addfinalizer(partial(signal.signal, number, signal.signal(number, handler)))
    run_process = isolated.run

    def interrupted(stopped_by, *arguments, on_message, **limits):
        def stop_at_a_step(message):
            if "step" in message:
                signal.raise_signal(stopped_by)
            on_message(message)

        return run_process(*arguments, on_message=stop_at_a_step, **limits)

    monkeypatch.setattr(isolated, "_Process", InThread)
    for stopped_by, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with monkeypatch.context() as patch:
            patch.setattr(isolated, "run", partial(interrupted, stopped_by))
            assert lora_bench.main(asked) == code
        assert "the same command continues" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    before = saved(tmp_path)
    assert before.floor and not before.cells and before.finished_utc is None

    # real processes: one takes longer to start than a signal to arrive
    killed = subprocess.Popen(
        [sys.executable, str(ROOT / "lora_bench.py"), *asked],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not saved(tmp_path).cells:
        assert killed.poll() is None and time.monotonic() < deadline, killed.stdout.read()
        time.sleep(0.02)
    assert lora_bench.main(asked) == 2
    line = f"lora_bench.py: --out {tmp_path}: another run is writing there; wait for it, or"
    assert capsys.readouterr().err.startswith(line)
    killed.kill()
    killed.wait()
    (first,) = saved(tmp_path).cells

    assert lora_bench.main(asked) == 0
    results = saved(tmp_path)
    assert results.floor == before.floor and results.cells[0].step_ms == first.step_ms
    assert [(cell.round, cell.status) for cell in results.cells] == [(1, "ok"), (2, "ok")]
    assert results.finished_utc is not None


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(("ok", "oom"), 0), (("ok", "error"), 1), (("parity_failed", "oom"), 1)],
)
def test_a_run_with_an_error_or_without_a_time_has_failed(
    statuses, code, tmp_path, monkeypatch, capsys
):
    both = ("vanilla_peft", "fused_mlp")
    status = {
        (variant, 64): one for variant, one in zip(both, statuses, strict=True) if one != "ok"
    }
    run = example.run(both, (64,), rounds=1, steps=8, status=status)
    monkeypatch.setattr("bench.experiment.run_experiment", lambda *_: None)
    plan = SimpleNamespace(published=None, quick=False, gpus=1, base="bf16")
    assert lora_bench.run_and_draw(plan, run, tmp_path / "results.json") == code
    assert ("no cell has a time" in capsys.readouterr().err) == ("ok" not in statuses)
