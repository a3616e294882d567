"""The timed loop of a step that is one CUDA graph. On the CPU graph_case.py replaces CUDA."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases.graph_case import RecordedStep, captured, graphed
from cases.rehearsal_case import ROOT, measured_cells, plan_of
from test_trainer import FakeClock, Line, make_batches

import models
import trainer as trainer_module
from batches import Batch
from bench import audit, options, preparing
from fused_lora.step.graph import EAGER_CALLS
from models import Graph
from trainer import MAX_WARMUP_STEPS, MIN_WARMUP_STEPS, Trainer
from variants import VARIANTS, Lora, Recipe

TINY = str(ROOT / "configs" / "tiny.json")


@pytest.fixture(autouse=True)
def fused_on_the_cpu(monkeypatch):
    """Use PyTorch's fused AdamW: on the CPU only that one is capturable."""
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *p, **o: adamw(*p, **{**o, "fused": True}))


def make_trainer(intervals=(), clock=None, **options):
    model = Line()
    graph = Graph(partial(RecordedStep, model), EAGER_CALLS)
    clock = clock or FakeClock([*intervals, *[1.0] * 99])
    return Trainer(model, nullcontext, clock, 0.1, graph=graph, **options)


def eager_trainer(**options):
    return Trainer(Line(), nullcontext, FakeClock([1.0] * 99), 0.1, **options)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_trains_bit_by_bit_as_the_eager_loop_after_going_back_to_the_first_weights(accumulate):
    eager, graph = eager_trainer(accumulate=accumulate), make_trainer(accumulate=accumulate)
    wanted, got = (one.run(make_batches(1, 2, 3, 5), steps=5) for one in (eager, graph))
    assert captured(graph.graphed_step) == min(accumulate, 2)  # accumulating: a second graph
    assert got.losses == wanted.losses and len(set(got.losses)) == 5
    assert torch.equal(graph.model.weight, eager.model.weight)
    assert (got.optimizer_steps, got.unmoved_adapters, got.changed_batches) == (5, 0, 0)


def test_a_second_run_replays_what_the_first_has_captured():
    trainer = make_trainer(accumulate=2)
    first = trainer.run(make_batches(1, 2, 3), steps=3)
    with torch.no_grad():
        trainer.model.weight.fill_(0.5)
    trainer.graphed_step._capture = None  # a capture would call it
    assert trainer.run(make_batches(1, 2, 3), steps=3).losses == first.losses


def test_its_parts_are_empty_and_its_time_is_that_between_its_two_marks():
    warmup = [1.0] * (EAGER_CALLS + MIN_WARMUP_STEPS)
    timings = make_trainer([*warmup, 12.0, 14.5]).run(make_batches(1, 2), steps=2)
    assert timings.step_ms == [12.0, 14.5]
    assert timings.forward_ms == timings.backward_ms == timings.optimizer_ms == []
    assert len(timings.wall_ms) == len(timings.losses) == 2
    assert audit.hidden_time(timings) is audit.skipped_updates(timings) is None


@pytest.mark.parametrize(
    ("intervals", "options", "calls"),
    [
        ([], {}, EAGER_CALLS + 1 + 3),  # eager, the capture, and three replays that agree
        ([50.0, 20.0, 1000.0, 4.0, 2.0, 1.0, 1.0, 1.0], {}, 8),
        ([1.0 + step % 2 for step in range(99)], {}, EAGER_CALLS + MAX_WARMUP_STEPS),
        ([], {"max_warmup_steps": 1}, EAGER_CALLS + 1),  # cut short, it ends with the first replay
    ],
)
def test_the_warmup_goes_on_until_three_replays_agree_but_not_for_ever(intervals, options, calls):
    trainer = make_trainer(intervals, **options)
    seen, step = [], trainer.graphed_step
    trainer.graphed_step = lambda **batch: seen.append(batch) or step(**batch)
    assert trainer.run(make_batches(1), steps=1).first_step_s > 0
    assert len(seen) == calls + 1


def test_the_first_step_lasts_until_the_first_replay_has_ended(monkeypatch):
    now = [0.0]

    class Ticks(FakeClock):
        def synchronize(self):
            super().synchronize()
            now[0] += 1.0

    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now[0])
    trainer = make_trainer(clock=Ticks([1.0] * 99))
    assert trainer.run(make_batches(1), steps=1).first_step_s == EAGER_CALLS + 1


def test_a_batch_keeps_its_mask():
    trainer, ones = make_trainer(), torch.ones(1, 1, dtype=torch.int64)
    trainer.run([Batch(b.input_ids, b.labels, ones) for b in make_batches(1)], steps=1)
    assert all(torch.equal(mask, ones) for mask in trainer.model.masks)


@pytest.mark.parametrize("takes_max_labelled", [True, False])
def test_a_loss_on_labelled_tokens_alone_is_told_the_most_that_any_batch_has(takes_max_labelled):
    trainer = make_trainer()
    trainer.graph = trainer.graph._replace(takes_max_labelled=takes_max_labelled)
    seen = []
    trainer.graphed_step = lambda **batch: seen.append(batch) or torch.tensor(1.0)
    trainer._audit = lambda *_: None  # nothing was trained
    ids = torch.ones(2, 4)
    labels = [[1, 2, 3, -100], [1, -100, -100, -100]], [[1, 2, 3, -100], [-100, 2, -100, 3]]
    trainer.run([Batch(ids, torch.tensor(label)) for label in labels], steps=2)
    wanted = 4 if takes_max_labelled else None  # of the second; no token predicts a row's first
    assert {batch.get("max_labelled_tokens") for batch in seen} == {wanted}


@pytest.mark.parametrize("is_graph", [True, False])
def test_the_peak_is_that_of_the_timed_steps_or_counted_from_the_capture_on(is_graph, monkeypatch):
    """Count from the capture on. Replays allocate nothing: their own peak would be almost 0."""
    done = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, partial(done.append, name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 9)
    trainer = make_trainer() if is_graph else eager_trainer()
    trainer.on_gpu = True
    step = trainer.step
    trainer.step = lambda batch: done.append("step") or step(batch)
    timings = trainer.run(make_batches(1), steps=2)
    assert (timings.peak_allocated_bytes, timings.peak_reserved_bytes) == (7, 9)
    if is_graph:
        from_the_capture_on = ["empty_cache", "reset_peak_memory_stats", *["step"] * (1 + 3 + 2)]
        assert done == ["step"] * EAGER_CALLS + from_the_capture_on
    else:
        warmup = ["step"] * MIN_WARMUP_STEPS
        assert done == [*warmup, "reset_peak_memory_stats", "step", "step"]


# --- a variant ------------------------------------------------------------------------------------

GRAPHS = [variant.id for variant in VARIANTS.values() if variant.recipe.graph]


def test_a_graph_is_unavailable_without_a_gpu():
    assert GRAPHS
    for variant in GRAPHS:
        assert "CUDA graph" in options.why_unavailable(variant, "cpu")
        assert options.why_unavailable(variant, "cuda") is None


@pytest.mark.slow
@pytest.mark.alone
def test_a_variant_is_measured_as_a_graph_from_its_recipe_to_its_cell(
    device, tmp_path, monkeypatch
):
    """Use vanilla PEFT: a stand-in cannot replay Triton's interpreter. Padded rows have a mask."""
    if device == "cpu":
        monkeypatch.setattr("fused_lora.step.graph.GraphedStep", RecordedStep)
    recipe = Recipe(checkpointing="none", graph=True)
    record = replace(VARIANTS["vanilla_peft"], id="vanilla_graph", recipe=recipe)
    monkeypatch.setitem(VARIANTS, "vanilla_graph", record)
    plan = plan_of(
        tmp_path, "--device", device, "--model", TINY, "--seq-lens", "24", "32", "--padded",
        "--batch-size", "4", "--steps", "3", "--rounds", "1",
        *(["--allow-shared-gpu"] if device == "cuda" else []),
    )  # fmt: skip
    preparing.prepare_run(lambda message: None, plan)
    losses = []
    for variant, is_graph in (("vanilla_graph", True), ("vanilla_peft_no_checkpointing", False)):
        found = measured_cells(plan, variant, *((1, n) for n in plan.seq_lens))
        assert [cell.status for cell in found] == ["ok", "ok"], found[0].error
        for cell in found:
            parts = (cell.forward_ms, cell.backward_ms, cell.optimizer_ms)
            assert [len(part) for part in parts] == [0 if is_graph else 3] * 3
            assert len(cell.step_ms) == 3
            assert cell.settings.graph is is_graph
        losses.append([loss for cell in found for loss in cell.losses])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.alone
def test_the_peak_of_a_graph_is_about_that_of_its_eager_step(device):
    class Chain(torch.nn.Module):
        """A model that keeps eight activations of 64 MiB."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4096, 4096, device=device) / 64)

        def forward(self, **_):
            x = self.weight
            for _ in range(8):
                x = (x @ self.weight).tanh()
            return SimpleNamespace(loss=x.square().mean())

    peaks = []
    for is_graph in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        model = Chain()
        graph = Graph(partial(graphed, model), EAGER_CALLS) if is_graph else None
        clock = trainer_module.CudaClock()
        trainer = Trainer(model, nullcontext, clock, 1e-4, graph=graph)
        batch = Batch(*(torch.zeros(1, 2, device=device) for _ in range(2)))
        before = torch.cuda.memory_allocated()
        peaks.append(trainer.run([batch], steps=2).peak_allocated_bytes - before)
        del model, graph, trainer
    assert peaks[0] > 8 * 64 * 2**20
    assert 0.8 * peaks[0] < peaks[1] < 1.3 * peaks[0]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("variant", ["fused_layer_graph", "fused_all_graph"])
def test_a_fused_graph_trains_as_the_same_step_eagerly(variant, accumulate, device, tmp_path):
    """Check that the first timed step uses the borders from before the warm-up. A later round of a
    quick run trains again without a capture."""
    from bench.weights import materialize, resolve

    source = resolve(TINY, tmp_path, 0)
    materialize(source, 0, device)
    batch = Batch(*(torch.arange(64, device=device).view(2, 32) for _ in range(2)))
    batch.labels[:, :20] = -100  # the graph computes the loss on fewer rows than there are tokens
    losses = []
    for name in (variant, variant.removesuffix("_graph")):
        built = models.build(name, source.folder, Lora(rank=4), 32, device, 0)
        clock = trainer_module.CudaClock()
        trainer = Trainer(built.model, built.autocast, clock, 1e-3, graph=built.graph,
                          accumulate=accumulate)  # fmt: skip
        first = trainer.run([batch], steps=5)
        losses.append(first.losses)
        models.set_adapters(built.model, 0)
        again = trainer.run([batch], steps=5)
        assert again.losses == pytest.approx(first.losses, rel=1e-3)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert losses[0][0] - losses[0][-1] > 4e-3 * losses[0][0]  # a stale border would show
