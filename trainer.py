"""The timed loop: a model and its batches in, the time of every step out.

A step is forward, backward, optimizer and zero_grad, with a clock mark around each and one
synchronisation at its end. On a GPU marks are CUDA events. A step's time then runs from the GPU
reaching its start to the GPU finishing it, and includes waiting for the host.

With accumulation a step runs forward and backward of several micro-batches, each with its loss
divided by their number, and then one update. Its loss is the mean of theirs.

A step captured in CUDA graphs has only two marks, so its parts have no times.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice, pairwise, starmap
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batches import Batch
from models import Graph

# Warm-up: at least the minimum, then until the last three steps agree to this share or the maximum
# is reached. A graph's eager steps come before.
MIN_WARMUP_STEPS = 4
MAX_WARMUP_STEPS = 10
STEADY_SPREAD = 0.05
# Enough for a trainer that has run before.
AGAIN_WARMUP_STEPS = 2
# A step has two kinds of micro-batches: all but the last add to the gradients, the last updates.
# Two of them warm up, and show, a step of any number.
KINDS_OF_MICRO_BATCHES = 2
IDLE_ANSWER_S = 1e-4  # an idle GPU answers sooner: in some 10 us


class Clock(Protocol):
    def mark(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float: ...

    def synchronize(self) -> None: ...

    def busy_ms(self, for_ms: float) -> float: ...


class CudaClock:
    """Marks CUDA events on the current stream. Times are known after `synchronize`."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def busy_ms(self, for_ms: float) -> float:
        """Return how long the GPU works in the next `for_ms`, although we give it no work.

        We ask it again and again. CUDA spins while it waits, so we count CPU time: a host that is
        busy with something else adds none.
        """
        busy_s, began = 0.0, time.perf_counter()
        while (time.perf_counter() - began) * 1e3 < for_ms:
            asked = time.thread_time()
            torch.cuda.synchronize()
            waited_s = time.thread_time() - asked
            busy_s += waited_s if waited_s > IDLE_ANSWER_S else 0.0
        return busy_s * 1e3


class WallClock:
    """Reads the host's clock: on the CPU work is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def synchronize(self) -> None:
        pass

    def busy_ms(self, for_ms: float) -> float:
        """Return how long other threads of this process work in the next `for_ms`."""
        began = time.process_time() - time.thread_time()
        time.sleep(for_ms / 1e3)
        return (time.process_time() - time.thread_time() - began) * 1e3


@dataclass
class Timings:
    """Raw times in ms and the loss of every timed step.

    first_step_s: time until a step had run like the timed ones: the first step, or for a graph the
    eager steps, the capture and the first replay. Only in a trainer's first run.
    forward_ms, backward_ms: sums over micro-batches. These and optimizer_ms are empty for a graph.
    wall_ms: by the host's clock, from before a step's first mark until its loss is read.
    optimizer_steps: the fewest updates that any adapter matrix got in the timed steps.
    unmoved_adapters: matrices that the timed steps did not change.
    changed_batches: batches that the steps wrote to.
    peak_allocated_bytes, peak_reserved_bytes: in the timed steps, and for a graph in its capture.
    """

    first_step_s: float | None
    step_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    optimizer_steps: int = 0
    unmoved_adapters: int = 0
    changed_batches: int = 0
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


class Trainer:
    """Trains `model` with AdamW, `accumulate` batches a step.

    Args:
        autocast: makes the context of the forward.
        clock: marks the parts of a step.
        max_warmup_steps: the most warm-up steps, without a graph's eager ones.
        graph: captures the step in CUDA graphs; None for an eager step.
        accumulate: micro-batches of a step.
        lengths_as: turns documents' lengths into inputs of the model.
        group: the processes that train together and average their gradients; None: this one alone.
            All take as many steps: give max_warmup_steps=MIN_WARMUP_STEPS.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        autocast: Callable[[], AbstractContextManager],
        clock: Clock,
        learning_rate: float,
        max_warmup_steps: int = MAX_WARMUP_STEPS,
        graph: Graph | None = None,
        accumulate: int = 1,
        lengths_as: Callable[[torch.Tensor], dict[str, Any]] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self.model = model
        self.autocast = autocast
        self.clock = clock
        self.max_warmup_steps = max_warmup_steps
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.on_gpu = self.trained[0].is_cuda
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=learning_rate, fused=self.on_gpu, capturable=graph is not None
        )
        self.graph = graph
        self.accumulate = accumulate
        self.lengths_as = lengths_as
        self.graphed_step: Any = None
        if graph:
            self.graphed_step = graph.step_for(
                self.optimizer, accumulation_steps=accumulate, process_group=group
            )
        self.called: Any = model
        if group is not None and group.size() > 1 and not graph:
            self.called = DistributedDataParallel(model, process_group=group)
        self.graph_constants: dict[str, Any] = {}  # inputs beside each batch of a run
        self.is_warm = False

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        return batch.inputs(self.lengths_as)

    def step(self, batches: Sequence[Batch]) -> tuple[list[Any], torch.Tensor]:
        """Run a step on these micro-batches. Return the marks around its parts, which are forward
        and backward of each and the optimizer (a graph has two marks), and its loss."""
        marks = [self.clock.mark()]
        losses = []
        if self.graph:
            for number, batch in enumerate(batches, start=1):
                is_last = number == len(batches)
                run = self.graphed_step if is_last else self.graphed_step.accumulate
                losses.append(run(**self._inputs(batch), **self.graph_constants))
            marks.append(self.clock.mark())
            return marks, _mean(losses)
        for number, batch in enumerate(batches, start=1):
            is_added = isinstance(self.called, DistributedDataParallel) and number < len(batches)
            with self.autocast(), self.called.no_sync() if is_added else nullcontext():
                loss = self.called(**self._inputs(batch)).loss
            marks.append(self.clock.mark())
            (loss if self.accumulate == 1 else loss / self.accumulate).backward()
            marks.append(self.clock.mark())
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        marks.append(self.clock.mark())
        return marks, _mean(losses)

    def run(
        self,
        batches: list[Batch],
        steps: int,
        on_step: Callable[[int], None] = lambda done: None,
        before_step: Callable[[int], None] = lambda done: None,
    ) -> Timings:
        """Warm up, go back to the first weights, then time `steps` steps over `batches` in order.

        After the warm-up adapters and optimizer state are put back. The losses of timed steps then
        compare between variants however long each warm-up took. A second run only warms up for
        AGAIN_WARMUP_STEPS and does not capture a graph again.

        Args:
            on_step: called after each timed step with the number of steps done.
            before_step: called before each timed step likewise. No time includes it.
        """
        start = [parameter.detach().cpu().clone() for parameter in self.trained]
        given = [[tensor.clone() for tensor in batch.tensors()] for batch in batches]
        if self.graph and self.graph.takes_max_labelled:
            # an eager step drops unlabelled tokens, but a graph cannot count them
            most = max(batch.labelled for batch in batches)
            self.graph_constants = {"max_labelled_tokens": most}
        timings = Timings(first_step_s=self._warm_up(batches))
        self._rewind(start)
        # A full garbage collection over a model's objects takes the host a quarter of a second,
        # every twenty steps or so. Frozen objects are not looked through.
        gc.collect()
        gc.freeze()
        try:
            self._time(timings, batches, steps, on_step, before_step)
        finally:
            gc.unfreeze()
        self._audit(timings, start, zip(batches, given, strict=True))
        return timings

    def _time(
        self,
        timings: Timings,
        batches: list[Batch],
        steps: int,
        on_step: Callable[[int], None],
        before_step: Callable[[int], None],
    ) -> None:
        if self.on_gpu and not self.graph:  # for a graph, see _warm_up
            torch.cuda.reset_peak_memory_stats()
        around = _around(batches)
        for done in range(steps):
            before_step(done)
            micro_batches = list(islice(around, self.accumulate))
            began = time.perf_counter()
            marks, loss = self.step(micro_batches)
            self.clock.synchronize()
            timings.losses.append(loss.item())
            timings.wall_ms.append((time.perf_counter() - began) * 1e3)
            timings.step_ms.append(self.clock.elapsed_ms(marks[0], marks[-1]))
            if not self.graph:
                *parts, optimizer = starmap(self.clock.elapsed_ms, pairwise(marks))
                timings.forward_ms.append(sum(parts[::2]))
                timings.backward_ms.append(sum(parts[1::2]))
                timings.optimizer_ms.append(optimizer)
            on_step(done + 1)
        if self.on_gpu:
            timings.peak_allocated_bytes = torch.cuda.max_memory_allocated()
            timings.peak_reserved_bytes = torch.cuda.max_memory_reserved()

    def _audit(
        self,
        timings: Timings,
        start: list[torch.Tensor],
        batches: Iterable[tuple[Batch, list[torch.Tensor]]],
    ) -> None:
        """Note what the timed steps did to adapters, optimizer and batches."""
        updates = (self.optimizer.state[parameter].get("step", 0) for parameter in self.trained)
        timings.optimizer_steps = int(min(updates))
        timings.unmoved_adapters = sum(
            torch.equal(parameter.detach().cpu(), value)
            for parameter, value in zip(self.trained, start, strict=True)
        )
        timings.changed_batches = sum(
            not all(map(torch.equal, batch.tensors(), given)) for batch, given in batches
        )

    def _warm_up(self, batches: list[Batch]) -> float | None:
        """Run steps until their times are steady, and return `first_step_s`."""
        times_ms: list[float] = []
        micro_batches = min(self.accumulate, KINDS_OF_MICRO_BATCHES)
        around = _around(batches)
        if self.is_warm:
            for _ in range(min(AGAIN_WARMUP_STEPS, self.max_warmup_steps)):
                self.step(list(islice(around, micro_batches)))
                self.clock.synchronize()
            return None
        self.is_warm = True
        began = time.perf_counter()
        first_step_s = 0.0
        eager = self.graph.eager_calls if self.graph else 0
        for _ in range(eager + self.max_warmup_steps):
            if self.graph and self.on_gpu and len(times_ms) == eager:
                # A replay allocates nothing: the capture has allocated its memory. So the peak
                # counts from here, without what the eager steps left in the cache.
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            marks, _ = self.step(list(islice(around, micro_batches)))
            self.clock.synchronize()
            times_ms.append(self.clock.elapsed_ms(marks[0], marks[-1]))
            if len(times_ms) == eager + 1:
                first_step_s = time.perf_counter() - began
            if len(times_ms) >= eager + MIN_WARMUP_STEPS and is_steady(times_ms[-3:]):
                break
        return first_step_s

    def _rewind(self, start: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.trained, start, strict=True):
                parameter.copy_(value)
                for state in self.optimizer.state[parameter].values():
                    state.zero_()


def is_steady(times_ms: list[float]) -> bool:
    """Return True if the times lie within STEADY_SPREAD of the shortest."""
    return max(times_ms) <= (1 + STEADY_SPREAD) * min(times_ms)


def _mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


def _around(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
