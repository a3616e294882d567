"""Which tiling is chosen where none was measured, by a clock of the tests' own; and, on a GPU, that
the kernels choose and are right with whatever they choose."""

from concurrent.futures import ThreadPoolExecutor
from time import sleep
from types import SimpleNamespace

import pytest
import test_sums_over_tokens as sums_case
import test_swiglu_products_backward as backward_case
import test_swiglu_products_forward as forward_case
import torch
import triton
from cases.reference import assert_within_budget

from fused_lora.kernels import (
    autotune,
    sums_over_tokens,
    swiglu_products_backward,
    swiglu_products_forward,
)
from fused_lora.kernels.autotune import fastest
from fused_lora.kernels.tiling import Tiling

SHIPPED = Tiling(rows=16, columns=32, splits=2, warps=4, stages=3)
OTHERS = ({"rows": 32}, {"columns": 64, "warps": 8}, {"stages": 3})  # the last is the shipped one
TILINGS = [SHIPPED._replace(**changes) for changes in ({}, *OTHERS[:2])]
COMPILING_MS = 1000.0


@triton.jit
def _kernel():
    pass


class Gpu:
    """An A100 whose clock goes on by what a launch takes, and by COMPILING_MS at its first."""

    def __init__(self, monkeypatch, milliseconds):
        self.now, self.launched = 0.0, []
        self.milliseconds = dict(zip(TILINGS, milliseconds, strict=True))
        self.kernel = triton.JITFunction(getattr(_kernel, "fn", _kernel))
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        monkeypatch.setattr(autotune, "_capability", lambda device: (8, 0))
        monkeypatch.setattr(autotune, "is_capturing", lambda tensor: False)
        monkeypatch.setattr(autotune, "MEASURED_ON", {(9, 0)})
        monkeypatch.setattr(autotune, "CHOSEN", {})

    def event(self, enable_timing):
        event = SimpleNamespace(ms=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "ms", self.now)
        event.elapsed_time = lambda end: end.ms - event.ms
        return event

    def launch(self, tiling):
        time = self.milliseconds[tiling]
        if isinstance(time, Exception):
            raise time
        sleep(0.0001)  # lets other threads go on
        self.now += time + (0 if tiling in self.launched else COMPILING_MS)
        self.launched.append(tiling)

    def fastest(self, rows=1000, shape=(64, 8), dtype=torch.bfloat16, device=0, kernel=None):
        tensor = SimpleNamespace(is_cuda=device >= 0, get_device=lambda: device, dtype=dtype)
        kernel = kernel or self.kernel
        return fastest(kernel, tensor, rows, shape, SHIPPED, OTHERS, self.launch)


@pytest.mark.parametrize("best", range(3))
def test_the_fastest_is_chosen_once(best, monkeypatch):
    times = [3.0, 3.0, 3.0]
    times[best] = 2.5
    gpu = Gpu(monkeypatch, times)
    assert gpu.fastest() == TILINGS[best]
    # once to compile, then TIMED_RUNS times; the shipped one is not timed twice
    assert len(gpu.launched) == 3 * (1 + autotune.TIMED_RUNS)
    monkeypatch.setattr(autotune, "is_capturing", lambda tensor: True)  # a capture uses it as well
    assert gpu.fastest() == TILINGS[best] and len(gpu.launched) == 3 * (1 + autotune.TIMED_RUNS)


def test_a_run_that_something_else_delayed_does_not_decide(monkeypatch):
    gpu = Gpu(monkeypatch, [3.0, 2.5, 4.0])
    event, recorded = gpu.event, []

    def delayed(enable_timing):
        made = event(enable_timing)
        record = made.record

        def record_late():
            recorded.append(made)
            if len(recorded) == autotune.TIMED_RUNS + 3:  # in the second run of the second tiling
                gpu.now += 100.0
            record()

        made.record = record_late
        return made

    monkeypatch.setattr(torch.cuda, "Event", delayed)
    assert gpu.fastest() == TILINGS[1]


def test_tilings_that_cannot_run_are_passed_over(monkeypatch):
    too_much = triton.OutOfResources(110_000, 101_376, "shared memory")
    gpu = Gpu(monkeypatch, [1.0, too_much, 2.0])
    assert gpu.fastest() == SHIPPED
    gpu = Gpu(monkeypatch, [RuntimeError("PassManager::run failed"), 2.0, 1.0])
    assert gpu.fastest() == TILINGS[2]
    # if none can, the caller's own launch raises what the shipped one does
    gpu = Gpu(monkeypatch, [RuntimeError("shipped"), RuntimeError("one"), RuntimeError("other")])
    with pytest.raises(RuntimeError, match="shipped"):
        gpu.launch(gpu.fastest())


def test_rows_share_a_choice_up_to_the_next_power_of_two_and_all_else_has_its_own(monkeypatch):
    gpu = Gpu(monkeypatch, [3.0, 2.0, 1.0])
    for rows in (513, 1000, 1024):
        gpu.fastest(rows=rows)
    assert len(autotune.CHOSEN) == 1
    for number, other in enumerate(
        ({"rows": 512}, {"rows": 1025}, {"shape": (64, 4)}, {"dtype": torch.float16}, {"device": 1})
    ):
        gpu.fastest(**other)
        assert len(autotune.CHOSEN) == 2 + number


def test_threads_that_ask_at_once_time_once(monkeypatch):
    gpu = Gpu(monkeypatch, [3.0, 2.0, 1.0])
    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda _: gpu.fastest(), range(8)))
    assert set(chosen) == {TILINGS[2]} and len(gpu.launched) == 3 * (1 + autotune.TIMED_RUNS)


@pytest.mark.parametrize(
    "where",
    [
        {"device": -1},
        {"kernel": SimpleNamespace(__name__="_kernel")},  # in the interpreter
        {"dtype": torch.float32},
        (autotune, "MEASURED_ON", {(8, 0)}),
        (torch.compiler, "is_compiling", lambda: True),
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
        (autotune, "is_capturing", lambda tensor: True),
    ],
    ids=("CPU", "interpreter", "fp32", "measured", "compiling", "deterministic", "capturing"),
)
def test_the_shipped_one_is_taken_untimed(where, monkeypatch):
    gpu = Gpu(monkeypatch, [3.0, 2.0, 1.0])
    if isinstance(where, tuple):
        monkeypatch.setattr(*where)
    assert gpu.fastest(**(where if isinstance(where, dict) else {})) == SHIPPED
    assert not gpu.launched and not autotune.CHOSEN


# --- the kernels ----------------------------------------------------------------------------------


CASES = {
    swiglu_products_backward: backward_case,
    swiglu_products_forward: forward_case,
    sums_over_tokens: sums_case,
}


def prepared(kernel, device):
    """A run of the kernel, the same in eager PyTorch, and the truth."""
    case = CASES[kernel]
    operands = case.make("whole tiles", torch.bfloat16, device)
    exact = [t.double() for t in operands]
    if case is sums_case:
        sized = "whole tiles", operands
        return lambda: case.fused(*sized), case.eager(*sized), case.eager("whole tiles", exact)
    return lambda: case.fused(*operands), case.eager(*operands), case.eager(*exact)


def assert_right(got, budget, truth):
    for number, row in enumerate(zip(got, budget, truth, strict=True)):
        assert_within_budget(f"result {number}", *row)


@pytest.mark.parametrize(
    ("kernel", "changes"), [(kernel, changes) for kernel in CASES for changes in kernel._OTHERS]
)
def test_every_tiling_that_may_be_chosen_is_right(kernel, changes, device, monkeypatch):
    def choose(_, tensor, rows, shape, shipped, others, launch):
        assert changes in others and hash(shape) is not None
        return shipped._replace(**changes)

    monkeypatch.setattr(kernel, "fastest", choose)
    run, budget, truth = prepared(kernel, device)
    assert_right(run(), budget, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CASES)
def test_a_kernel_chooses_on_this_gpu_and_is_right_and_repeats_itself(kernel, device, monkeypatch):
    monkeypatch.setattr(autotune, "MEASURED_ON", set())
    run, budget, truth = prepared(kernel, device)
    one = run()
    (chosen,) = autotune.CHOSEN.items()
    other = run()
    assert [chosen] == list(autotune.CHOSEN.items())
    assert_right(one, budget, truth)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
