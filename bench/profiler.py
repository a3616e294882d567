"""The kernels of one training step: which ran, for what kind of work, and for how long.

Most kernels show their kind in their name: matmuls, attention, compiled or hand-written norms.
PyTorch's elementwise kernels have the same name everywhere. Their kind comes from the module that
called them: we mark every module call of the profiled step as a range, and a kernel of the backward
belongs to the range of its forward.

A replayed CUDA graph calls no module. Kernels without a telling name count as "other" there.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# The kinds of work, by words in kernels' names. The first match decides. Compiled kernels carry the
# names of all they fuse, so more telling patterns come first. `Part.kinds` (fused_lora/adopt) has
# those of our own kernels whose names say nothing.
KIND_BY_NAME = [
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("optimizer", r"multi_tensor_apply(?!.*CopyFunctor)|adam"),
        ("dequantising", r"dequant"),  # of a base in 4 bits: bitsandbytes', Unsloth's and ours
        ("loss", r"cross_entropy|nll_loss|softmax|_fl_\w+_kernel"),
        ("attention", r"flash|fmha|sdpa|attention|compute_dot_do_o|convert_dq"),
        ("matmul", r"nvjet|gemm|cutlass|cublas|splitk|\bmatmul"),
        ("norm", r"rms_?norm|layer_?norm|rsqrt|meanops"),
        ("activation", r"swiglu|geglu|silu|gelu|sigmoid|_fg_kernel|_dwf_dw_dfg_kernel"),
        ("rope", r"rope|rotary|cos_kernel|sin_kernel"),
        (
            "copy",
            r"copy_kernel|CopyFunctor|memcpy|memset|fillfunctor|fused_+(to_copy|addmm|t|transpose|_)+_\d",
        ),
    )
]

# The kind of a module, for kernels without a telling name. The first match of its class decides.
KIND_BY_MODULE = [
    ("norm", re.compile(r"Norm$")),
    ("adapter", re.compile(r"^Linear$")),  # PEFT's and torch's, without their matmuls
    ("activation", re.compile(r"MLP$|SiLU|Activation$")),
    ("rope", re.compile(r"Rotary|Attention$")),  # attention's own lines, without its matmuls
    ("other", re.compile(r"DecoderLayer$|Embedding$|Model$")),
    ("loss", re.compile(r"ForCausalLM$")),
]
# Kinds of kernels that KIND_BY_NAME does not know, and how their names begin.
Kinds = Sequence[tuple[str, tuple[str, ...]]]
RANGE = "module: "
AUTOGRAD_BACKWARD = "autograd::engine::evaluate_function: "


class Op(NamedTuple):
    """A call on the host: an operator, a range, or autograd running an operator's backward."""

    name: str
    thread: int
    start: int
    end: int
    id: int
    sequence: int  # ties a backward to its forward; -1 for none
    forward_thread: int  # for a backward, the thread of its forward


class Kernel(NamedTuple):
    """A kernel, copy or fill on the GPU, in ns. `op` is the id of the call that launched it."""

    name: str
    start: int
    end: int
    op: int


@dataclass(frozen=True)
class Profile:
    """Counts of the kernels and autograd functions of a step, and the kernels' time by kind.

    gpu_busy_ms: how long at least one kernel ran. On the CPU there are no kernels.
    """

    kernels_seen: dict[str, int] = field(default_factory=dict)
    functions_seen: dict[str, int] = field(default_factory=dict)
    kernel_ms: dict[str, float] = field(default_factory=dict)
    gpu_busy_ms: float | None = None

    def scaled(self, times: float) -> "Profile":
        """Return the profile with its times multiplied. Its counts stay."""
        busy_ms = self.gpu_busy_ms
        return replace(
            self,
            kernel_ms={kind: times * ms for kind, ms in self.kernel_ms.items()},
            gpu_busy_ms=None if busy_ms is None else times * busy_ms,
        )


def profile_step(
    step: Callable[[], Any], functions: Iterable[str], mark_modules: bool, kinds: Kinds = ()
) -> Profile:
    """Run `step` once under the profiler.

    functions: names of autograd functions to count. mark_modules: whether to mark module calls.
    Compiled models would compile again. kinds: of kernels whose names do not tell.
    """
    on_gpu = torch.cuda.is_available()
    # Without this CUPTI stays in every call to the GPU until the process ends. On an H100's host a
    # launch then took 12 to 17 us instead of 7, and steps that wait for the host ran 1.4x slower.
    os.environ["TEARDOWN_CUPTI"] = "1"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with _marked_modules() if mark_modules else nullcontext(), profile(activities=activities) as p:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    ops, kernels = read_events(p)
    names = Counter(kernel.name[:100] for kernel in kernels)
    called = Counter(op.name for op in ops)
    return Profile(
        kernels_seen=dict(names.most_common()),
        functions_seen={name: called[name] for name in functions},
        kernel_ms=kernel_ms_by_kind(ops, kernels, kinds),
        gpu_busy_ms=busy_ns(kernels) / 1e6 if kernels else None,
    )


def kernel_ms_by_kind(ops: list[Op], kernels: list[Kernel], kinds: Kinds = ()) -> dict[str, float]:
    """Add up the kernels' time in ms by kind. Kinds without any are left out."""
    module_kind = _kind_by_op(ops)
    total: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        kind = kind_of_name(kernel.name, kinds) or module_kind.get(kernel.op, "other")
        total[kind] += (kernel.end - kernel.start) / 1e6
    return dict(total)


def busy_ns(kernels: list[Kernel]) -> int:
    """Return how long at least one kernel ran."""
    busy, until = 0, 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        busy += max(0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return busy


def kind_of_name(name: str, kinds: Kinds = ()) -> str | None:
    """Return the kind of a kernel by its name, None if that does not tell."""
    given = (kind for kind, beginnings in kinds if name.startswith(beginnings))
    known = (kind for kind, pattern in KIND_BY_NAME if pattern.search(name))
    return next(chain(given, known), None)


def _kind_by_op(ops: list[Op]) -> dict[int, str]:
    """Return the kind of the innermost marked module around each call, by the call's id.

    Calls in a backward get the kind of their forward. When checkpointing recomputes a forward
    inside a backward, that forward has its own ranges.
    """
    kinds: dict[int, str] = {}
    forwards: dict[tuple[int, int], str | None] = {}
    by_thread: dict[int, list[Op]] = defaultdict(list)
    for op in ops:
        by_thread[op.thread].append(op)
    # threads without a backward come first: the others look up the forwards of these
    ordered = sorted(
        by_thread.values(), key=lambda t: any(o.name.startswith(AUTOGRAD_BACKWARD) for o in t)
    )
    for thread in ordered:
        thread.sort(key=lambda op: (op.start, -op.end))
        open_: list[tuple[int, str | None]] = []  # (end, kind) of the calls around this one
        for op in thread:
            while open_ and open_[-1][0] <= op.start:
                open_.pop()
            kind = open_[-1][1] if open_ else None
            if op.name.startswith(RANGE):
                kind = _kind_of_module(op.name.removeprefix(RANGE)) or kind
            elif op.name.startswith(AUTOGRAD_BACKWARD):
                kind = forwards.get((op.forward_thread, op.sequence))
            elif op.sequence >= 0:
                # autograd recorded the last call with this number
                forwards[op.thread, op.sequence] = kind
            open_.append((op.end, kind))
            if kind:
                kinds[op.id] = kind
    return kinds


def _kind_of_module(name: str) -> str | None:
    return next((kind for kind, pattern in KIND_BY_MODULE if pattern.search(name)), None)


@contextmanager
def _marked_modules() -> Iterator[None]:
    """Mark every module call as a profiler range, with global hooks: a fused module falls back to
    PEFT if it has hooks itself."""
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )

    open_ranges: list[Any] = []

    def enter(module, _):
        open_ranges.append(record_function(f"{RANGE}{type(module).__name__}").__enter__())

    def leave(*_):
        open_ranges.pop().__exit__(None, None, None)

    before = register_module_forward_pre_hook(enter)
    # checkpointing leaves a recomputed forward by an exception as soon as it has enough
    after = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def read_events(profiler: profile) -> tuple[list[Op], list[Kernel]]:
    """Return every kernel and the calls that tell its kind, or all calls if there are no kernels.

    The profiler's own tree of events takes seconds to build.
    """
    kernels, calls = [], []
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type() == torch.autograd.DeviceType.CPU:
            # a linked id marks the CUDA call below an operator, whose ids are numbered differently
            if not event.linked_correlation_id():
                calls.append(event)
        elif not event.is_user_annotation():  # the GPU's echo of a range
            start = event.start_ns()
            end = start + event.duration_ns()
            kernels.append(Kernel(event.name(), start, end, event.linked_correlation_id()))
    launching = {kernel.op for kernel in kernels}
    ops = []
    for event in calls:
        id, sequence, name = event.correlation_id(), event.sequence_nr(), event.name()
        tells = sequence >= 0 or id in launching or name.startswith((RANGE, AUTOGRAD_BACKWARD))
        if tells or not kernels:
            start = event.start_ns()
            end, thread = start + event.duration_ns(), event.start_thread_id()
            ops.append(Op(name, thread, start, end, id, sequence, event.fwd_thread_id()))
    return ops, kernels
