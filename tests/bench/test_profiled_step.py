"""A real step under the profiler. On the CPU its kernels are made up."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from bench import cells
from bench import profiler as profiled
from bench.profiler import Kernel, Op, kernel_ms_by_kind, profile_step
from bench.records import Cell
from variants import Lora


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + x

    @staticmethod
    def backward(ctx, grad):
        return grad + grad


class TinyRMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Doubled.apply(x) * self.weight  # a product, and two in its backward


class TinyMLP(torch.nn.Module):
    def forward(self, x):
        return x * x  # a product, and two in its backward


class Tiny(torch.nn.Module):
    def __init__(self, checkpointing=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.first = torch.nn.Linear(4, 4)
        self.rest = torch.nn.Sequential(TinyRMSNorm(), TinyMLP())

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.rest, x, use_reentrant=False) if self.checkpointing else self.rest(x)


def step_of(checkpointing):
    model = Tiny(checkpointing)
    return lambda: (model(torch.ones(3, 4)) * 3.0).sum().backward()  # a product, one in backward


def calls_of(step, mark_modules=True):
    """Return the calls of a profiled step."""
    marks = profiled._marked_modules() if mark_modules else nullcontext()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, marks:
        step()
    ops, _ = profiled.read_events(profiler)
    return ops


def ranges_of(ops):
    return [call for call in ops if call.name.startswith("module: ")]


def event(name, device, start, duration, id=0, linked=0, annotation=False):
    """Make one of the profiler's own events, whose parts are methods."""
    parts = {
        **{"name": name, "device_type": device, "start_ns": start, "duration_ns": duration},
        **{"correlation_id": id, "linked_correlation_id": linked, "start_thread_id": 1},
        **{"sequence_nr": 7, "fwd_thread_id": 0, "is_user_annotation": annotation},
        "activity_type": "user_annotation" if annotation else "cpu_op",
    }
    return SimpleNamespace(**{part: lambda value=value: value for part, value in parts.items()})


def test_kernels_are_read_with_the_call_that_launched_them_and_without_the_echo_of_ranges():
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    listed = [
        event("module: TinyRMSNorm", cpu, 100, 50, id=1, annotation=True),
        event("aten::mul", cpu, 110, 30, id=2),
        event("module: TinyRMSNorm", gpu, 500, 80, linked=1, annotation=True),
        event("elementwise", gpu, 520, 40, id=9, linked=2),
    ]
    kineto_results = SimpleNamespace(events=lambda: listed)
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=kineto_results))
    assert profiled.read_events(profiler) == (
        [Op("module: TinyRMSNorm", 1, 100, 150, 1, 7, 0), Op("aten::mul", 1, 110, 140, 2, 7, 0)],
        [Kernel("elementwise", 520, 560, 2)],
    )


@pytest.mark.parametrize(("checkpointing", "forwards"), [(False, 1), (True, 2)])
def test_functions_are_counted_in_a_forward_that_runs_again_too(checkpointing, forwards):
    names = ("Doubled", "DoubledBackward", "Absent")
    found = profile_step(step_of(checkpointing), names, mark_modules=True)
    assert found.functions_seen == {"Doubled": forwards, "DoubledBackward": 1, "Absent": 0}
    assert (found.kernels_seen, found.kernel_ms, found.gpu_busy_ms) == ({}, {}, None)


@pytest.mark.parametrize(
    ("checkpointing", "milliseconds"),
    [
        (False, {"norm": 3.0, "activation": 3.0, "other": 2.0}),
        (True, {"norm": 4.0, "activation": 4.0, "other": 2.0}),
    ],
)
def test_products_of_forward_and_backward_belong_to_their_modules(checkpointing, milliseconds):
    """Pretend that each matmul of a real step launched one nameless kernel of 1 ms."""
    ops = calls_of(step_of(checkpointing))
    products = [call for call in ops if call.name == "aten::mul"]
    kernels = [Kernel("nameless", 0, 1_000_000, call.id) for call in products]
    assert kernel_ms_by_kind(ops, kernels) == milliseconds


def test_ranges_end_with_their_modules_even_where_checkpointing_leaves_them_early():
    ops = calls_of(step_of(checkpointing=True))
    ranges = sorted(ranges_of(ops), key=lambda call: call.start)
    again = ["Sequential", "TinyRMSNorm", "TinyMLP"]
    ran = [call.name.removeprefix("module: ") for call in ranges]
    assert ran == ["Tiny", "Linear", *again, *again]
    evaluated = [call for call in ops if call.name.startswith(profiled.AUTOGRAD_BACKWARD)]
    for found in ranges[-3:]:
        assert any(e.start <= found.start and found.end <= e.end for e in evaluated)


def test_modules_are_marked_only_when_asked_for_and_while_profiled_even_if_the_step_fails():
    model, right, wrong = Tiny(), torch.ones(3, 4), torch.ones(3, 5)
    hooks, seen = torch.nn.modules.module._global_forward_hooks, []
    for mark_modules in (True, False):
        profile_step(lambda: seen.append(len(hooks)), (), mark_modules)
    assert seen == [1, 0]
    assert len(ranges_of(calls_of(lambda: model(right)))) == 5
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        profile_step(lambda: model(wrong), (), mark_modules=True)
    assert ranges_of(calls_of(lambda: model(right), mark_modules=False)) == []


def test_a_module_has_no_hooks_of_its_own_while_it_is_marked():
    """Check that marking adds no hooks: a fused module would fall back to PEFT."""
    seen = []

    class Looks(Tiny):
        def forward(self, x):
            seen.extend((len(m._forward_hooks), len(m._forward_pre_hooks)) for m in self.modules())
            return super().forward(x)

    model = Looks()
    profile_step(lambda: model(torch.ones(3, 4)), (), mark_modules=True)
    assert seen == [(0, 0)] * 5


@pytest.mark.gpu
def test_kernels_of_a_real_step_are_counted_timed_and_told_apart():
    model = Tiny().cuda()
    x = torch.ones(512, 4, device="cuda")

    def step():
        model(x).sum().backward()

    step()
    found = profile_step(step, ("DoubledBackward",), mark_modules=True)
    assert found.functions_seen == {"DoubledBackward": 1}
    assert found.kernels_seen and found.gpu_busy_ms > 0
    assert {"norm", "activation"} <= found.kernel_ms.keys()
    assert found.gpu_busy_ms <= sum(found.kernel_ms.values()) + 1e-6


@pytest.mark.gpu
@pytest.mark.alone
def test_launches_are_as_quick_after_a_profile_as_before():
    """Take the quickest of many: a shared host can be slower at any moment."""
    tensor = torch.zeros(8, device="cuda")

    def quickest_launches_us() -> float:
        took_s = []
        for _ in range(200):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(50):
                tensor.add_(1.0)
            took_s.append(time.perf_counter() - began)
        return min(took_s) / 50 * 1e6

    before = quickest_launches_us()
    profile_step(lambda: tensor.add_(1.0), (), mark_modules=False)
    assert quickest_launches_us() < 1.3 * before


@pytest.mark.parametrize(
    ("accumulate", "profiled_batches", "times"), [(1, 1, 1), (2, 2, 1), (6, 2, 3)]
)
def test_a_step_of_many_micro_batches_is_profiled_by_two_and_has_the_time_of_all(
    accumulate, profiled_batches, times, monkeypatch
):
    def profile_step(step, functions, mark_modules, kinds):
        step()
        counts = {name: profiled_batches for name in functions}
        return profiled.Profile({"gemm": 4}, counts, {"matmul": 8.0}, 9.0)

    ran = []
    monkeypatch.setattr(cells, "profile_step", profile_step)
    plan = SimpleNamespace(accumulate=accumulate, device="cpu", lora=Lora(), base="bf16")
    cell = Cell("fused_mlp", 64, 1, "error", fused_modules=["layers.0.mlp: mlp"])
    trainer = SimpleNamespace(step=ran.append)
    profile, problem = cells._profiled(plan, cell, trainer, list("abcdefghijkl"))
    assert ran == [list("ab")[:profiled_batches]] and problem is None
    assert (profile.kernel_ms, profile.gpu_busy_ms) == ({"matmul": 8.0 * times}, 9.0 * times)
    assert profile.kernels_seen == {"gemm": 4}
