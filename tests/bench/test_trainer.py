"""The timed loop's arithmetic, with a fake clock whose times each test sets."""

import gc
import time
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import trainer as trainer_module
from batches import Batch
from trainer import (
    AGAIN_WARMUP_STEPS,
    MAX_WARMUP_STEPS,
    MIN_WARMUP_STEPS,
    Trainer,
    WallClock,
    is_steady,
)


class FakeClock:
    """A clock that starts at 0. Each mark comes the next of `intervals`, in ms, after the last."""

    def __init__(self, intervals):
        self.intervals = iter(intervals)
        self.now = 0.0
        self.fresh = True
        self.synchronised = 0

    def mark(self):
        if not self.fresh:
            self.now += next(self.intervals)
        self.fresh = False
        return self.now

    def elapsed_ms(self, start, end):
        return end - start

    def synchronize(self):
        self.synchronised += 1
        self.fresh = True  # what passes between two steps belongs to neither


class Line(torch.nn.Module):
    """A model with loss = mean((weight * input_ids - labels)^2). It keeps its tokens and masks."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5]))
        self.seen, self.masks = [], []

    def forward(self, input_ids, labels, attention_mask):
        self.seen.append(input_ids)
        self.masks.append(attention_mask)
        return SimpleNamespace(loss=((self.weight * input_ids - labels) ** 2).mean())


def make_batches(*values):
    return [Batch(torch.tensor([[value]]), torch.tensor([[2 * value]])) for value in values]


def make_trainer(intervals=(), model=None, learning_rate=0.1, **options):
    """Make a trainer whose intervals last this long, and then 1 ms each."""
    clock = FakeClock([*intervals, *[1.0] * 99])
    return Trainer(model or Line(), nullcontext, clock, learning_rate, **options)


STEADY_WARMUP = [1.0, 2.0, 1.0] * MIN_WARMUP_STEPS


def test_the_parts_of_a_step_are_told_apart_and_add_up():
    trainer = make_trainer([*STEADY_WARMUP, 3.0, 7.0, 2.0, 4.0, 9.0, 1.5])
    timings = trainer.run(make_batches(1, 2), steps=2)
    assert (timings.forward_ms, timings.backward_ms) == ([3.0, 4.0], [7.0, 9.0])
    assert (timings.optimizer_ms, timings.step_ms) == ([2.0, 1.5], [12.0, 14.5])
    assert trainer.clock.synchronised == MIN_WARMUP_STEPS + 2  # once a step


@pytest.mark.parametrize(
    ("warmup_ms", "steps"),
    [
        ((10, 10, 10, 10, 10), 4),  # at least four
        ((100, 50, 20, 10, 10, 10), 6),  # the last three agree
        ([1 + step % 2 for step in range(99)], MAX_WARMUP_STEPS),  # they never do
    ],
)
def test_the_warmup_goes_on_until_three_steps_agree_but_not_for_ever(warmup_ms, steps):
    trainer = make_trainer([part for ms in warmup_ms for part in (ms, 0.0, 0.0)])
    trainer.run(make_batches(1), steps=1)
    assert len(trainer.model.seen) == steps + 1


def test_steady_means_within_five_percent_of_the_fastest():
    assert is_steady([100.0, 105.0, 102.0]) and not is_steady([100.0, 105.1, 102.0])


def test_the_timed_steps_go_through_the_batches_in_order_whatever_the_warmup_took():
    slow_start = [100.0, 0.0, 0.0, 50.0, 0.0, 0.0, 20.0, 0.0, 0.0]
    for warmup in ([], slow_start):
        trainer = make_trainer(warmup)
        trainer.run(make_batches(1, 2, 3), steps=4)
        assert [ids.item() for ids in trainer.model.seen[-4:]] == [1, 2, 3, 1]


# --- accumulation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_trains_from_the_first_weights_on_the_mean_of_the_losses_of_a_step(accumulate):
    """Compare with AdamW without a warm-up in plain PyTorch, on all rows of a step at once."""
    weight = torch.nn.Parameter(torch.tensor([0.5]))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    values, expected, gradients = [1.0, 2.0, 4.0, 3.0, 1.0, 2.0], [], []
    for inputs in torch.tensor(values).split(accumulate):
        loss = ((weight * inputs - 2 * inputs) ** 2).mean()
        expected.append(loss.item())
        loss.backward()
        gradients.append(weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()

    trainer, found = make_trainer(accumulate=accumulate), []
    update = trainer.optimizer.step  # which alone would not tell a gradient from its multiple
    trainer.optimizer.step = lambda: found.append(trainer.model.weight.grad.item()) or update()
    steps = len(expected)
    timings = trainer.run(make_batches(*values), steps)
    assert timings.losses == pytest.approx(expected, 1e-6)
    assert found[-steps:] == pytest.approx(gradients, 1e-6)
    assert torch.allclose(trainer.model.weight, weight)
    done = (timings.optimizer_steps, timings.unmoved_adapters, timings.changed_batches)
    assert done == (steps, 0, 0)


def test_the_parts_of_a_step_are_sums_over_its_micro_batches():
    parts = [3.0, 7.0, 30.0, 70.0, 300.0, 700.0, 2.0]
    warmup = [1.0] * 5 * MIN_WARMUP_STEPS  # of two micro-batches a step: there are two kinds
    timings = make_trainer([*warmup, *parts], accumulate=3).run(make_batches(1, 2, 3), steps=1)
    assert (timings.forward_ms, timings.backward_ms) == ([333.0], [777.0])
    assert (timings.optimizer_ms, timings.step_ms) == ([2.0], [sum(parts)])


def test_a_second_run_is_warm_and_begins_where_the_first_did():
    trainer = make_trainer(accumulate=2)
    first = trainer.run(make_batches(1, 2, 3, 4), steps=2)
    with torch.no_grad():
        trainer.model.weight.fill_(0.5)
    seen = len(trainer.model.seen)
    second = trainer.run(make_batches(1, 2, 3, 4), steps=2)
    assert len(trainer.model.seen) - seen == 2 * (AGAIN_WARMUP_STEPS + 2)
    assert second.losses == first.losses and second.optimizer_steps == 2
    assert first.first_step_s is not None and second.first_step_s is None


# --- around the steps -----------------------------------------------------------------------------


def test_what_runs_around_a_step_is_told_how_many_are_done_and_is_in_no_time(monkeypatch):
    calls = []
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: float(len(calls)))
    timings = make_trainer().run(
        make_batches(1), 2, on_step=lambda done: calls.append(("after", done)),
        before_step=lambda done: calls.append(("before", done)),
    )  # fmt: skip
    assert calls == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]
    assert timings.wall_ms == [0.0, 0.0]


def test_collections_pass_over_the_model_while_steps_are_timed_and_no_longer():
    frozen = []
    make_trainer().run(make_batches(1), 1, on_step=lambda _: frozen.append(gc.get_freeze_count()))
    assert frozen[0] > 1000 and gc.get_freeze_count() == 0


def test_the_first_step_and_the_wall_are_kept_apart_from_the_marks(monkeypatch):
    readings = iter([10.0, 12.5, 20.0, 20.25, 30.0, 30.5])  # first step, then two timed steps
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: next(readings))
    timings = make_trainer().run(make_batches(1), steps=2)
    assert timings.first_step_s == 2.5
    assert timings.wall_ms == [250.0, 500.0]
    assert timings.step_ms == [3.0, 3.0]


# --- what the timed steps did ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skipped", "counted", "unmoved"),
    [
        ((), 3, 0),  # those of the warm-up do not count
        ((1, 2), 3, 0),  # in the warm-up, which is put back
        ((MIN_WARMUP_STEPS + 2,), 2, 0),
        ((MIN_WARMUP_STEPS + 1, MIN_WARMUP_STEPS + 3), 1, 0),
        (range(MIN_WARMUP_STEPS + 1, 99), 0, 1),  # moved in the warm-up alone
    ],
)
def test_updates_that_timed_steps_leave_out_are_missed(skipped, counted, unmoved):
    """`skipped`: the calls of the optimizer's step, counted from 1 and from the warm-up on."""
    trainer = make_trainer()
    update, calls = trainer.optimizer.step, count(1)
    trainer.optimizer.step = lambda: None if next(calls) in skipped else update()
    timings = trainer.run(make_batches(1, 2), steps=3)
    assert len(timings.step_ms) == 3
    assert (timings.optimizer_steps, timings.unmoved_adapters) == (counted, unmoved)
    assert timings.changed_batches == 0


def test_updates_that_change_nothing_and_an_adapter_without_a_gradient_are_found():
    model = Line()
    model.aside = torch.nn.Parameter(torch.ones(2))
    for trainer, updates in ((make_trainer(learning_rate=0.0), 3), (make_trainer(model=model), 0)):
        timings = trainer.run(make_batches(1), steps=3)
        assert (timings.optimizer_steps, timings.unmoved_adapters) == (updates, 1)


@pytest.mark.parametrize("name", ["input_ids", "labels", "attention_mask"])
def test_batches_that_a_step_writes_to_are_counted(name):
    class Scribbles(Line):
        def forward(self, **batch):
            found = super().forward(**batch)
            if batch["input_ids"][0, 0] == 2:
                batch[name].data.add_(5)
            return found

    batches = [
        Batch(b.input_ids, b.labels, torch.ones_like(b.labels)) for b in make_batches(1, 2, 3)
    ]
    assert make_trainer(model=Scribbles()).run(batches, steps=3).changed_batches == 1


def test_the_wall_clock_counts_milliseconds():
    clock = WallClock()
    start = clock.mark()
    assert clock.elapsed_ms(1.0, 1.25) == 250.0 and clock.elapsed_ms(start, clock.mark()) >= 0.0


@pytest.mark.gpu
@pytest.mark.alone
def test_cuda_events_agree_with_the_wall():
    """A step's event time covers its work, not only its launch."""

    class Products(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda"))

        def forward(self, **_):
            x = self.weight
            for _ in range(20):
                x = x @ self.weight / 64
            return SimpleNamespace(loss=x.square().mean())

    trainer = Trainer(Products(), nullcontext, trainer_module.CudaClock(), learning_rate=1e-4)
    batch = Batch(torch.zeros(1, 2, device="cuda"), torch.zeros(1, 2, device="cuda"), None)
    trainer.run([batch], steps=2)
    torch.cuda.synchronize()
    began = time.perf_counter()
    marks, _ = trainer.step([batch])
    trainer.clock.synchronize()
    wall_ms = (time.perf_counter() - began) * 1e3
    step_ms = trainer.clock.elapsed_ms(marks[0], marks[-1])
    assert 0.8 * wall_ms < step_ms <= wall_ms
