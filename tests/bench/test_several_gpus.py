"""The command on several GPUs, rehearsed by processes on the CPU that average through gloo.

One test starts the command's own processes. The others do not.
"""

import multiprocessing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import example_results as example
from cases.graph_case import RecordedStep
from cases.ranks import on_ranks
from cases.rehearsal_case import WITHOUT_GPU, plan_of, small
from test_trainer import FakeClock, Line, make_batches

import lora_bench
from batches import token_shares
from bench import cells, planning
from bench import processes as isolated
from bench import results as store
from bench.cells import Block
from bench.experiment import run_experiment
from bench.ranks import Ranks
from bench.records import Cell, GpuTimes, Parity
from fused_lora.step.graph import EAGER_CALLS
from models import Graph
from trainer import MAX_WARMUP_STEPS, MIN_WARMUP_STEPS, Timings, Trainer
from variants import Settings

pytestmark = [WITHOUT_GPU, pytest.mark.usefixtures("no_pictures")]


def in_this_process(function, *arguments, on_message):
    function(on_message, *arguments)
    return isolated.Ended(None, "")


@pytest.mark.slow
def test_a_rehearsal_on_two_is_timed_every_way_and_is_not_repeated(tmp_path, monkeypatch, capsys):
    asked = small(tmp_path, "--gpus", "2", "--variants", "vanilla_peft", "--seq-lens", "16",
                  "--steps", "2", "--accumulate", "2")  # fmt: skip
    monkeypatch.setattr(isolated, "run", in_this_process)  # what is prepared
    # a fork has imported everything
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    assert lora_bench.main(asked) == 0
    run = store.load(tmp_path / "results.json")
    (cell,), (row,) = run.cells, run.summary
    assert run.experiment.gpus == len(cell.gpus) == 2 and run.floor[16].tokens == 2 * 4 * 16
    assert (cell.status, cell.step_ms) == ("ok", cell.gpus[0].step_ms)
    assert [len(gpu.unsynchronised_ms) for gpu in cell.gpus] == [2, 2]
    assert [len(gpu.alone_ms) for gpu in cell.gpus] == [2, 0]
    assert row.tokens_per_s == pytest.approx(2 * 2 * 4 * 16 / row.median_step_ms * 1000, 1e-4)
    said = capsys.readouterr().out
    assert f"efficiency {cell.efficiency:.1%}" in said and "verdicts" not in said
    monkeypatch.setattr(isolated, "run_at_once", None)
    assert lora_bench.main(asked) == 0
    assert lora_bench.main([*asked, "--gpus", "3"]) == 2
    assert "gpus 2 there, 3 here" in capsys.readouterr().err


def test_each_gpu_has_rows_of_its_own(tmp_path):
    plan = plan_of(tmp_path, "--gpus", "2", "--steps", "3", "--accumulate", "2")
    every = plan.batches(16, plan.batch_size, 2 * 3 * 2)  # steps, micro-batches, GPUs
    for gpu in (0, 1):
        own = replace(plan, gpu=gpu).timed_batches(16)
        assert [batch.input_ids.tolist() for batch in own] == [
            batch.input_ids.tolist() for batch in every[gpu::2]
        ]
    tokens = planning.planned_experiment(plan).tokens[16]
    assert tokens.labelled == token_shares(every).labelled


def met(rank, device):
    return Ranks(dist.group.WORLD, None).meet()


def test_each_process_is_the_one_of_ours_on_its_gpu():
    assert on_ranks(2, met) == [1, 1]


# --- the trainer on two ---------------------------------------------------------------------------


def trained(rank, device, is_graph, accumulate):
    """Return losses and the weight after steps of both ranks together, and of each alone."""
    groups = {"together": dist.group.WORLD, "alone": [dist.new_group([n]) for n in (0, 1)][rank]}
    found = {}
    for name, group in groups.items():
        trainer = trainer_of(is_graph, accumulate, group, [5.0 * rank, 1.0, 1.0])
        losses = trainer.run(make_batches(*OWN[rank]), steps=len(OWN[rank]) // accumulate).losses
        found[name] = losses, trainer.model.weight.detach()
    return found


OWN = ([1.0, 2.0, 4.0, 3.0], [3.0, 1.0, 2.0, 5.0])


def trainer_of(is_graph, accumulate, group=None, intervals=()):
    model = Line()
    graph = Graph(partial(RecordedStep, model), EAGER_CALLS) if is_graph else None
    clock = FakeClock([*intervals, *[1.0] * 99])
    return Trainer(model, torch.enable_grad, clock, 0.1, MIN_WARMUP_STEPS, graph, accumulate,
                   group=group)  # fmt: skip


@pytest.mark.parametrize(("is_graph", "accumulate"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_two_train_as_one_that_accumulates_the_batches_of_both(is_graph, accumulate, monkeypatch):
    # on the CPU only the fused AdamW is capturable
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *p, **o: adamw(*p, **{**o, "fused": True}))
    found = on_ranks(2, trained, is_graph, accumulate)
    both = [value for first in range(0, 4, accumulate)
            for rank in (0, 1) for value in OWN[rank][first : first + accumulate]]  # fmt: skip
    wanted = trainer_of(False, 2 * accumulate)
    losses = wanted.run(make_batches(*both), steps=4 // accumulate).losses
    mean = torch.tensor([one["together"][0] for one in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses))
    for rank, one in enumerate(found):
        torch.testing.assert_close(one["together"][1], wanted.model.weight.detach())
        alone = trainer_of(is_graph, accumulate)
        alone.run(make_batches(*OWN[rank]), steps=4 // accumulate)
        assert torch.equal(one["alone"][1], alone.model.weight.detach())


APART = ["adapters", "meet", 0, "meet", 1, "meet", "adapters", 0, 1, "meet"]
TOGETHER = ["adapters", "together"]


@pytest.mark.parametrize(("number", "wanted"), [(1, APART + TOGETHER), (2, TOGETHER + APART)])
def test_all_begin_each_step_together_and_one_alone_waits_for_nobody(number, wanted, monkeypatch):
    """Begin odd rounds apart, even ones together, each with the first adapters."""
    events = []

    class FakeTrainer:
        def run(self, batches, steps, on_step, before_step):
            for done in range(steps):
                before_step(done)
                events.append(done)
            return Timings(None, step_ms=[1.0])

    monkeypatch.setattr(cells, "_trainer_of", lambda *_: FakeTrainer())
    monkeypatch.setattr(cells.models, "set_adapters", lambda *_: events.append("adapters"))
    timed = example.timed_cell("vanilla_peft", 16, number, [9.0])
    monkeypatch.setattr(cells, "_measure", lambda *_: events.append("together") or timed)
    other = example.timed_cell("vanilla_peft", 16, number, [8.0], card="b", other_gpu_processes=2)
    ranks = SimpleNamespace(
        meet=lambda: events.append("meet"), gather=lambda own: [own, (other, [5.0], [])],
        together=None, alone=None,
    )  # fmt: skip
    plan = SimpleNamespace(device="cpu", timed_batches=lambda _: [], steps=2, gpu=0, seed=0)
    built = SimpleNamespace(model=None)
    cell = cells._measure_on_all(plan, timed, built, print, ranks)
    assert events == wanted
    gpus = [GpuTimes(timed.card, [9.0], [1.0], [1.0]), GpuTimes("b", [8.0], [5.0])]
    assert (cell.gpus, cell.step_ms, cell.other_gpu_processes) == (gpus, [9.0], 2)


@pytest.mark.parametrize(
    ("device", "group", "steps"),
    [("cuda", None, MAX_WARMUP_STEPS), ("cuda", "all", MIN_WARMUP_STEPS), ("cpu", None, 1)],
)
def test_all_gpus_warm_up_for_as_many_steps(device, group, steps, monkeypatch):
    monkeypatch.setattr(cells, "Trainer", lambda *arguments: arguments)
    plan = SimpleNamespace(device=device, clock=lambda: None, accumulate=3)
    built = SimpleNamespace(model=None, autocast=None, graph=None, lengths_as=None)
    *_, warmup, _, accumulate, _, together = cells._trainer_of(plan, built, group)
    assert (warmup, accumulate, together) == (steps, 3, group)


def test_the_efficiency_of_several_gpus():
    gpus = [GpuTimes("a", [9.0, 4.0, 3.0], [2.0], [2.0, 9.0, 1.0]), GpuTimes("b", [4.0], [4.0])]
    cell = example.timed_cell("vanilla_peft", 16, 1, [4.0], gpus=gpus)
    assert cell.efficiency == pytest.approx((1 / 4 + 1 / 4) / (1 / 2 + 1 / 4))
    assert cell.efficiency_over_one == pytest.approx((1 / 4 + 1 / 4) / (2 / 2))


# --- what fails on one of them --------------------------------------------------------------------


def test_a_gate_that_fails_on_one_of_them_fails_on_all(monkeypatch):
    built = SimpleNamespace(model=None, settings=Settings(), fused_modules=[])
    monkeypatch.setattr(cells, "_build_and_check", lambda *_: (built, Parity(passed=True)))
    ranks = SimpleNamespace(gather=lambda own: [own, Parity(passed=False, problem="a wrong dA")])
    plan, sent = SimpleNamespace(device="cpu"), []
    cells.measure_cells(sent.append, plan, "vanilla_peft", [Block(1, 16)], ranks=ranks)
    assert (sent[-1]["cell"].status, sent[-1]["cell"].error) == ("parity_failed", "a wrong dA")


def test_a_cell_that_fails_on_one_of_them_ends_all_and_the_rest_starts_anew(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, "--gpus", "2", "--variants", "vanilla_peft", "--steps", "4",
                   "--rounds", "2", "--seq-lens", "16", "32")  # fmt: skip
    run = example.empty(rehearsal=True, gpu=False, variants=["vanilla_peft"], seq_lens=[16, 32],
                        rounds=2, steps=4, gpus=2)  # fmt: skip
    started = []

    def stand_in(function, each, on_message, silence_limit_s):
        blocks = each[0][2]
        started.append(([asked.gpu for asked, *_ in each], blocks))
        if len(started) == 1:  # the second GPU is heard before the first
            failed = Cell("vanilla_peft", blocks[1].seq_len, blocks[1].round, "oom")
            assert on_message(1, {"cell": failed})
            return isolated.Ended(None, "")
        for round_number, seq_len in blocks:
            for gpu in (1, 0):
                cell = example.timed_cell("vanilla_peft", seq_len, round_number, [1.0 + gpu])
                if (round_number, seq_len) == (1, 32):  # on both, which go on
                    cell = Cell("vanilla_peft", seq_len, round_number, "parity_failed")
                assert not on_message(gpu, {"cell": cell})
        return isolated.Ended(None, "")

    monkeypatch.setattr(isolated, "run", lambda *_, **__: isolated.Ended(None, ""))
    monkeypatch.setattr(isolated, "run_at_once", stand_in)
    run_experiment(plan, run, lambda: None)
    blocks = [Block(r, n) for n in (16, 32) for r in (1, 2)]
    assert started == [([0, 1], blocks), ([0, 1], [blocks[0], *blocks[2:]])]
    found = {(cell.seq_len, cell.round): (cell.status, cell.step_ms) for cell in run.cells}
    assert found.pop((16, 2)) == ("oom", [])
    assert found.pop((32, 1)) == ("parity_failed", [])
    assert found == dict.fromkeys([(16, 1), (32, 2)], ("ok", [1.0]))
