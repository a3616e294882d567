"""--turns: the variants of a round side by side, their timed steps interleaved."""

from functools import partial
from types import SimpleNamespace

import example_results as example
import pytest
import torch
from rehearsal_case import WITHOUT_GPU, in_this_process, small

import lora_bench
import trainer
from bench import cells, experiment, machine
from bench import processes as isolated
from bench import results as store
from bench.profiler import Profile
from bench.records import Cell, Parity
from variants import Settings

pytestmark = [WITHOUT_GPU, pytest.mark.usefixtures("warm_processes")]
VARIANTS = ["vanilla_peft", "fused_mlp"]


def command(out):
    return small(out, "--variants", *VARIANTS, "--seq-lens", "16", "--steps", "4", "--turns", "2")


def test_steps_of_two_variants_alternate_and_a_finished_run_starts_nothing(tmp_path, monkeypatch):
    real, steps = isolated.run_in_turns, []

    def listen_in(function, each, on_message, **limits):
        def note(index, message):
            if "step" in message:
                steps.append((each[index][1], message["step"]))
            on_message(index, message)

        return real(function, each, note, **limits)

    monkeypatch.setattr(isolated, "run_in_turns", listen_in)
    monkeypatch.setattr(isolated, "run", in_this_process)
    assert lora_bench.main(command(tmp_path)) == 0
    first, second = VARIANTS
    assert steps == [(first, 1), (first, 2), (second, 1), (second, 2),
                     (first, 3), (first, 4), (second, 3), (second, 4)]  # fmt: skip
    results = store.load(tmp_path / "results.json")
    assert results.experiment.turn_steps == 2
    assert [(cell.status, len(cell.step_ms)) for cell in results.cells] == [("ok", 4)] * 2
    assert lora_bench.main(command(tmp_path)) == 0
    assert len(steps) == 8


def test_a_length_that_lacks_a_cell_is_run_again_with_all_its_variants():
    results = example.run((*VARIANTS, "full_unsloth"), rounds=2)
    lacking = (2, "fused_mlp", 64)
    results.cells = [c for c in results.cells if (c.round, c.variant, c.seq_len) != lacking]

    def to_do(turn_steps):
        plan = SimpleNamespace(seq_lens=results.experiment.seq_lens, turn_steps=turn_steps,
                               variants=VARIANTS, rounds=2)  # fmt: skip
        return experiment.cells_to_do(plan, results)

    assert to_do(None) == [lacking]
    # with those that were not asked for this time, but would be held against a new baseline
    assert to_do(1) == [lacking, (2, "vanilla_peft", 64), (2, "full_unsloth", 64)]


def test_one_that_dies_or_is_unavailable_is_told_and_the_others_are_kept(tmp_path, monkeypatch):
    def run_in_turns(function, each, on_message, silence_limit_s):
        assert [cell.status for cell in results.cells] == ["unavailable"]
        (_, variant, round_number, (seq_len,)), (_, dead, *_) = each
        assert (variant, dead, silence_limit_s) == ("vanilla_peft", "fused_mlp", 60.0)
        on_message(0, {"cell": example.timed_cell(variant, seq_len, round_number, [2.0, 2.1])})
        return [isolated.Ended(None, ""), isolated.Ended("killed by SIGKILL", "the last words")]

    monkeypatch.setattr(isolated, "run_in_turns", run_in_turns)
    names = [*VARIANTS, "full_unsloth"]
    results = example.empty(rehearsal=True, gpu=False, variants=names, seq_lens=[16], rounds=1,
                            steps=2, tokens={})  # fmt: skip
    results.add(example.timed_cell("fused_mlp", 16, 1, [1.0]))  # of an earlier go
    todo = [(1, name, 16) for name in names] + [(2, "vanilla_peft", 16)]
    plan = SimpleNamespace(steps=2, device="cpu", allow_shared_gpu=False, cell_timeout_s=60.0)
    path, ticks = tmp_path / "results.json", []
    save = partial(store.save, path, results)
    runner = experiment.Runner(plan, results, save, ticks.append, ticks.append)
    assert runner.side_by_side(todo) == [(2, "vanilla_peft", 16)]
    saved = {cell.variant: cell for cell in store.load(path).cells}
    assert [saved[name].status for name in names] == ["ok", "error", "unavailable"]
    assert saved["fused_mlp"].error == "killed by SIGKILL\nthe last words"


def test_a_variant_that_finds_no_memory_beside_the_others_did_not_run_out_of_its_own(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cells, "_build_and_check", no_memory)
    monkeypatch.setattr(cells.audit, "ran_out_of_memory", lambda *_: None)
    sent = []
    for turn_steps in (2, None):
        plan = SimpleNamespace(device="cuda", turn_steps=turn_steps)
        cells.measure_cells(sent.append, plan, "vanilla_peft", 1, (16,))
    beside, alone = (message["cell"] for message in sent)
    assert beside.status == "error"
    assert beside.error.startswith("no GPU memory beside the other variants")
    assert (alone.status, alone.error) == ("oom", "CUDA out of memory")


def test_what_a_variant_does_in_each_of_its_turns_on_a_gpu(monkeypatch):
    events, counted = [], []

    class FakeTrainer:
        def __init__(self, *_):
            pass

        def run(self, batches, steps, on_step, before_step):
            events.append("warm-up")
            for done in range(steps):
                before_step(done)
                events.append(done)
            return trainer.Timings(first_step_s=0.0)

    def wait_for_turn():
        events.append("wait")
        return 3  # of ours still run

    def count(own):
        counted.append(own)
        raise KeyboardInterrupt  # the rest is another test's

    monkeypatch.setattr(cells, "Trainer", FakeTrainer)
    monkeypatch.setattr(cells, "profile_step", lambda *_: events.append("profile") or Profile())
    monkeypatch.setattr(machine, "other_processes", count)
    batch = SimpleNamespace(to=lambda _: batch)
    plan = SimpleNamespace(
        steps=4, turn_steps=3, batch_size=1, device="cuda", clock=lambda: None,
        batches=lambda *_: [batch],
    )  # fmt: skip
    built = SimpleNamespace(
        settings=Settings(), fused_modules=[], model=None, autocast=None, graph=None
    )
    cell = Cell("vanilla_peft", 16, 1, "error", parity=Parity(passed=True))
    with pytest.raises(KeyboardInterrupt):
        cells._measure(plan, cell, built, lambda _: None, wait_for_turn)
    assert events == ["wait", "warm-up", "wait", 0, 1, 2, "wait", 3, "wait", "profile"]
    assert counted == [3]  # others are counted beside those of ours that still run
