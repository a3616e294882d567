"""Variants side by side: interleaved if all fit on the GPU, otherwise a cell at a time."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import example_results as example
from cases.rehearsal_case import WITHOUT_GPU, InThread, small
from msgspec.structs import replace

import lora_bench
import trainer
from bench import cells, experiment, machine, runner
from bench import processes as isolated
from bench import results as store
from bench.profiler import Profile
from bench.records import Cell, Parity
from bench.stages import Stopwatch
from variants import Lora, Settings

pytestmark = [WITHOUT_GPU, pytest.mark.usefixtures("no_pictures")]
VARIANTS = ["vanilla_peft", "fused_mlp"]


def command(out):
    return small(
        out, "--variants", *VARIANTS, "--seq-lens", "16", "--steps", "4", "--interleave", "2"
    )


def test_steps_of_two_variants_alternate_and_a_finished_run_starts_nothing(tmp_path, monkeypatch):
    real, steps = isolated.run_in_turns, []

    def listen_in(function, each, on_message, **limits):
        def note(index, message):
            if "step" in message:
                steps.append((each[index][1], message["step"]))
            on_message(index, message)

        return real(function, each, note, **limits)

    monkeypatch.setattr(isolated, "run_in_turns", listen_in)
    monkeypatch.setattr(isolated, "_Process", InThread)
    assert lora_bench.main(command(tmp_path)) == 0
    first, second = VARIANTS
    assert steps == [(first, 1), (first, 2), (second, 1), (second, 2),
                     (first, 3), (first, 4), (second, 3), (second, 4)]  # fmt: skip
    results = store.load(tmp_path / "results.json")
    found = [(cell.status, cell.turn_steps, len(cell.step_ms)) for cell in results.cells]
    assert found == [("ok", 2, 4)] * 2
    assert lora_bench.main(command(tmp_path)) == 0
    assert len(steps) == 8


GIB = 2**30


def plan(**changed):
    usual = {"variants": VARIANTS, "seq_lens": (16, 32), "rounds": 1, "steps": 2, "interleave": 2,
             "quick": False, "device": "cpu", "allow_shared_gpu": False, "cell_timeout_s": 60.0,
             "base": "bf16", "source": SimpleNamespace(size_bytes=lambda: 6 * GIB),
             "gpus": 1, "lora": Lora()}  # fmt: skip
    return SimpleNamespace(**usual | changed)


def test_a_length_that_lacks_a_cell_is_run_again_with_all_its_variants():
    results = example.run((*VARIANTS, "full_unsloth"), rounds=2)
    lacking = (2, "fused_mlp", 64)
    results.cells = [c for c in results.cells if (c.round, c.variant, c.seq_len) != lacking]

    def to_do(**changed):
        asked = plan(seq_lens=results.experiment.seq_lens, rounds=2, **changed)
        return experiment.cells_to_do(asked, results)

    assert to_do(interleave=0) == [lacking]
    # including variants not asked for this time that a new baseline would judge
    together = [lacking, (2, "vanilla_peft", 64), (2, "full_unsloth", 64)]
    assert to_do() == to_do(quick=True) == together


@pytest.mark.parametrize(
    ("changed", "beside", "interleaved"),
    [
        ({}, True, [64, 128, 256, 512]),
        ({"interleave": 0}, False, None),
        ({"quick": True}, True, [64, 128]),  # the others a cell at a time
        ({"variants": VARIANTS * 12}, False, None),  # their weights exceed the GPU's memory
    ],
)
def test_variants_are_interleaved_where_they_may_fit(changed, beside, interleaved):
    asked, results = plan(**changed), example.run(VARIANTS)
    results.cells = []
    assert runner.side_by_side(asked, results) == beside
    if beside:
        found = [n for n in example.SEQ_LENS if runner.interleaves(asked, results, n)]
        assert found == interleaved
        # they did not fit
        results.cells = [example.timed_cell("fused_mlp", 256, 1, [1.0])]
        found = [n for n in example.SEQ_LENS if runner.interleaves(asked, results, n)]
        assert found == [n for n in interleaved if asked.quick or n < 256]


@pytest.fixture
def make_runner(tmp_path):
    """Return a function that makes a runner and the run that it saves."""

    def make(names=VARIANTS, **changed):
        results = example.empty(rehearsal=True, gpu=False, variants=names, seq_lens=[16, 32],
                                rounds=1, steps=2, tokens={})  # fmt: skip
        save = partial(store.save, tmp_path / "results.json", results)
        how = save, lambda _: None, lambda _: None, Stopwatch(results)
        return runner.Runner(plan(variants=names, **changed), results, *how), results

    return make


def test_one_that_dies_or_is_unavailable_is_told_and_the_others_are_kept(make_runner, monkeypatch):
    def run_in_turns(function, each, on_message, silence_limit_s):
        assert {cell.status for cell in results.cells} == {"unavailable"}
        (_, variant, blocks, interleaved), (_, dead, *_) = each
        assert (variant, dead, silence_limit_s) == ("vanilla_peft", "fused_mlp", 60.0)
        assert (blocks, interleaved) == ([(1, 16), (1, 32)], (16, 32))
        for round_number, seq_len in blocks:
            cell = example.timed_cell(variant, seq_len, round_number, [2.0, 2.1])
            on_message(0, {"cell": cell})
        return [isolated.Ended(None, ""), isolated.Ended("killed by SIGKILL", "the last words")]

    monkeypatch.setattr(isolated, "run_in_turns", run_in_turns)
    names = [*VARIANTS, "full_unsloth"]
    runs, results = make_runner(names)
    results.add(example.timed_cell("fused_mlp", 16, 1, [1.0], turn_steps=2))  # of an earlier go
    left = [(2, "vanilla_peft", 16)]
    assert runs.go_on([(1, name, n) for name in names for n in (16, 32)] + left) == left
    for seq_len in (16, 32):
        found = {cell.variant: cell for cell in results.cells_of(seq_len=seq_len)}
        assert [found[name].status for name in names] == ["ok", "error", "unavailable"]
        assert found["fused_mlp"].error == "killed by SIGKILL\nthe last words"


@pytest.mark.parametrize(
    ("quick", "wanted"),
    [(True, [(1, 16), (2, 16), (1, 32), (2, 32)]), (False, [(1, 16), (1, 32)])],
)
def test_processes_of_a_quick_run_have_all_rounds_a_length_at_a_time(
    quick, wanted, make_runner, monkeypatch
):
    tried = []
    monkeypatch.setattr(runner.Runner, "together", lambda self, todo, blocks: tried.append(blocks))
    runs, _ = make_runner(quick=quick, rounds=2)
    runs.go_on([(r, v, n) for r in (1, 2) for v in VARIANTS for n in (16, 32)])
    assert tried == [wanted]


@pytest.mark.parametrize("beside_weights", [True, False])
@pytest.mark.parametrize("quick", [False, True])  # which at 32 tokens interleaves nothing
def test_a_length_at_which_they_do_not_fit_together_is_run_one_after_the_other(
    quick, beside_weights, make_runner, monkeypatch
):
    """Run a cell at a time beside the others' weights or, if these are too large, alone."""
    monkeypatch.setattr(runner, "SHORT", 16)
    tried = []

    def run_in_turns(function, each, on_message, silence_limit_s):
        (_, _, blocks, interleaved), *_ = each
        tried.append((blocks, interleaved))
        for round_number, seq_len in blocks:
            turn_steps = 2 if seq_len in interleaved else None
            for index, (_, variant, *_) in enumerate(each):
                if seq_len == 32 and index == 1 and (turn_steps or not beside_weights):
                    on_message(index, {"does_not_fit": seq_len})
                    raise AssertionError("it goes on")
                cell = example.timed_cell(variant, seq_len, round_number, [2.0, 2.1])
                cell.turn_steps = turn_steps
                on_message(index, {"cell": cell})
        return [isolated.Ended(None, "")] * len(each)

    alone = []

    def run(function, plan, variant, todo, on_message, silence_limit_s):
        alone.append((variant, todo))
        for round_number, seq_len in todo:
            on_message({"cell": example.timed_cell(variant, seq_len, round_number, [2.0, 2.1])})
        return isolated.Ended(None, "")

    monkeypatch.setattr(isolated, "run_in_turns", run_in_turns)
    monkeypatch.setattr(isolated, "run", run)
    runs, results = make_runner(quick=quick)
    todo = experiment.cells_to_do(runs.plan, results)
    while todo:
        todo = runs.go_on(todo)
    first = ([(1, 16), (1, 32)], (16,) if quick else (16, 32))
    assert tried == [first, *([] if quick else [([(1, 32)], ())])]
    assert alone == ([] if beside_weights else [(variant, [(1, 32)]) for variant in VARIANTS])
    kept = [(cell.seq_len, cell.turn_steps) for cell in results.cells]
    assert kept == [(16, 2), (16, 2), (32, None), (32, None)]


@pytest.mark.parametrize("said", ["CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_variant_without_memory_beside_others_says_that_they_do_not_fit(said, monkeypatch):
    def no_memory(*_):
        raise (torch.OutOfMemoryError if "CUDA " in said else RuntimeError)(said)

    monkeypatch.setattr(cells, "_build_and_check", no_memory)
    monkeypatch.setattr(cells.audit, "ran_out_of_memory", lambda *_: None)
    sent = []
    for beside in ({"interleaved": (16,), "wait_for_turn": int}, {"wait_for_turn": int}, {}):
        asked = plan(device="cuda")
        cells.measure_cells(sent.append, asked, "vanilla_peft", [(1, 16)], **beside)
    *beside, alone = sent
    assert beside == [{"does_not_fit": 16}] * 2
    wanted = ("oom", said) if "CUDA " in said else ("error", f"RuntimeError: {said}")
    assert (alone["cell"].status, alone["cell"].error) == wanted


@pytest.mark.parametrize(
    ("turn_steps", "is_warm", "wanted"),
    [
        (3, False, ["wait", {"did": "warm_up"}, "wait", 0, 1, 2, "wait", 3, "again", "wait",
                    "profile"]),
        (None, False, ["wait", {"did": "warm_up"}, 0, 1, 2, 3, "again", "profile"]),
        (None, True, ["wait", {"did": "warm_up"}, 0, 1, 2, 3, "again"]),
    ],
)  # fmt: skip
def test_what_a_variant_does_in_each_of_its_turns_on_a_gpu(
    turn_steps, is_warm, wanted, monkeypatch
):
    events, counted = [], []

    class FakeTrainer:
        def __init__(self):
            self.is_warm = is_warm

        def run(self, batches, steps, on_step, before_step):
            self.is_warm = True
            for done in range(steps):
                before_step(done)
                events.append(done)
            return trainer.Timings(first_step_s=0.0)

    def wait_for_turn():
        events.append("wait")
        return 3  # of ours still run

    def count(own):
        counted.append(own)
        raise KeyboardInterrupt  # other tests see the rest

    monkeypatch.setattr(cells.audit, "step_again", lambda *_: events.append("again"))
    monkeypatch.setattr(cells, "profile_step", lambda *_: events.append("profile") or Profile())
    monkeypatch.setattr(machine, "other_processes", count)
    batch = SimpleNamespace(to=lambda _: batch)
    asked = plan(device="cuda", steps=4, timed_batches=lambda _: [batch], accumulate=1)
    cell = Cell("vanilla_peft", 16, 1, "error", parity=Parity(passed=True), turn_steps=turn_steps)
    with pytest.raises(KeyboardInterrupt):
        cells._measure(asked, cell, FakeTrainer(), events.append, wait_for_turn)
    assert events == wanted
    assert counted == [3]  # others are counted beside those of ours that still run


def test_a_process_builds_once_and_each_cell_begins_with_the_first_adapters(monkeypatch):
    events, built = [], SimpleNamespace(model=None, settings=Settings(), fused_modules=[])

    def note(event, result):
        return lambda *_: events.append(event) or result

    def measure(plan, cell, *_):
        events.append(cell.seq_len)
        return replace(cell, status="ok", step_ms=[1.0])

    monkeypatch.setattr(cells, "_build_and_check", note("build", (built, Parity(passed=True))))
    monkeypatch.setattr(cells.models, "set_adapters", note("adapters", None))
    monkeypatch.setattr(cells, "_trainer_of", note("trainer", object()))
    monkeypatch.setattr(cells, "_measure", measure)
    cells.measure_cells(print, plan(seed=0), "vanilla_peft", [(1, 16), (2, 16), (1, 24)])
    assert events == ["build", "trainer", 16, "adapters", 16, "adapters", "trainer", 24]
