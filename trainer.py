"""The timed loop: a model and its batches in, the time of every step out.

A step is forward, backward, optimizer and zero_grad, with a mark of the clock around each and one
synchronisation at its end. On a GPU a mark is a CUDA event, so a step's time runs from the moment
the GPU reaches its start to the moment it has done all of it, waiting for the host included.

With accumulation a step is forward and backward of several micro-batches, each with its loss
divided by their number, and then one update: its gradients and its loss are means over them.

A step that is captured in CUDA graphs has a mark before and one after it, and no times of parts.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice, pairwise, starmap
from typing import Any, Protocol

import torch

from batches import Batch
from models import Graph

# Warm-up: at least this many steps, then on until the last three agree to this share of a step, or
# the host is so unsteady that they never will. A graph's eager steps come before them.
MIN_WARMUP_STEPS = 4
MAX_WARMUP_STEPS = 10
STEADY_SPREAD = 0.05
# A trainer that has been warm needs no more before its next run.
AGAIN_WARMUP_STEPS = 2
# The kinds of micro-batches in a step: one that adds to the gradients, and the last, which updates.
# So a step of both is warm for one of any number, and shows what runs in it.
KINDS_OF_MICRO_BATCHES = 2


class Clock(Protocol):
    def mark(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float: ...

    def synchronize(self) -> None: ...


class CudaClock:
    """Marks are CUDA events on the current stream; times are known after `synchronize`."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class WallClock:
    """For the CPU, where work is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def synchronize(self) -> None:
        pass


@dataclass
class Timings:
    """Raw times of every timed step, in ms, with the loss that each step saw.

    first_step_s: wall time of the warm-up until a step had run as the timed ones do: of the first;
    of a graph, the eager steps, the capture and the first replay. Of a trainer's first run.
    forward_ms, backward_ms: sums over micro-batches. These and optimizer_ms: empty for a graph.
    wall_ms: the host's clock, from before a step's first mark until its loss has been read.
    optimizer_steps: the fewest updates that any adapter matrix got from the timed steps.
    unmoved_adapters: matrices that the timed steps left as they were.
    changed_batches: batches that the steps wrote to.
    peak_allocated_bytes, peak_reserved_bytes: in the timed steps; of a graph, from its capture on.
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
        autocast: makes the context that the forward runs in.
        clock: what marks the parts of a step.
        max_warmup_steps: warm up no longer than this, steady or not, beside a graph's eager steps.
        graph: captures the step in CUDA graphs; None for an eager step.
        accumulate: micro-batches of a step.
        lengths_as: what the model is told of documents' lengths.
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
        self.graphed_step: Any = (
            graph.step_for(self.optimizer, accumulation_steps=accumulate) if graph else None
        )
        self.graph_constants: dict[str, Any] = {}  # what every batch of a run is given besides
        self.is_warm = False

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        return batch.inputs(self.lengths_as)

    def step(self, batches: Sequence[Batch]) -> tuple[list[Any], torch.Tensor]:
        """One training step on these micro-batches; returns the marks around its parts (forward and
        backward of each, and the optimizer's; of a graph two), and its loss."""
        marks = [self.clock.mark()]
        losses = []
        if self.graph:
            for number, batch in enumerate(batches, start=1):
                is_last = number == len(batches)
                run = self.graphed_step if is_last else self.graphed_step.accumulate
                losses.append(run(**self._inputs(batch), **self.graph_constants))
            marks.append(self.clock.mark())
            return marks, _mean(losses)
        for batch in batches:
            with self.autocast():
                loss = self.model(**self._inputs(batch)).loss
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
        """Warm up, go back to the first weights, then time `steps` steps over `batches`, in order.

        The adapters and the optimizer's state are put back after the warm-up, so that the losses
        of the timed steps can be compared between variants whatever their warm-up took. A second
        run warms up for AGAIN_WARMUP_STEPS alone, and a graph is not captured again.

        Args:
            on_step: called after each timed step, with the number of those that are done.
            before_step: called before each timed step, likewise; no time counts what it takes.
        """
        start = [parameter.detach().cpu().clone() for parameter in self.trained]
        given = [[tensor.clone() for tensor in batch.tensors()] for batch in batches]
        if self.graph and self.graph.takes_max_labelled:
            # an eager step drops what is not labelled, but a graph cannot ask how much that is
            most = max(batch.labelled for batch in batches)
            self.graph_constants = {"max_labelled_tokens": most}
        timings = Timings(first_step_s=self._warm_up(batches))
        self._rewind(start)
        # a full collection over a model's objects holds the host for a quarter of a second, every
        # twenty steps or so: what is there by now is not looked through again
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
        if self.on_gpu and not self.graph:  # see _warm_up
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
        """Note what the timed steps did to the adapters, to the optimizer and to their batches."""
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
        """Run steps until their times are steady; returns `first_step_s`."""
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
                # A replay allocates nothing: all that it works in was allocated by the capture. So
                # the peak is counted from here on, without what the eager steps left in the cache.
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
    """Return True if the times lie within STEADY_SPREAD of the smallest."""
    return max(times_ms) <= (1 + STEADY_SPREAD) * min(times_ms)


def _mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


def _around(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
