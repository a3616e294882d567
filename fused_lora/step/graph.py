"""A whole training step captured in CUDA graphs: forward and backward, then clipping and optimizer.

The host launches two graphs instead of thousands of kernels, and a short step no longer waits for
it. A graph repeats its kernels at fixed addresses. We copy each batch into the graph's buffers and
read the learning rate from a tensor; whatever else the host decided at capture stays decided. There
are two graphs so the host can check the update's operands while the GPU computes gradients, and so
several ranks can average these in between.

The first EAGER_CALLS calls with new shapes run as plain PyTorch: kernels are compiled and tuned,
libraries allocate their workspaces, the optimizer makes its state. These steps train like all
others, so nothing has to be undone.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import warnings
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.utils import clip_grad_norm_

from ..loss.label_check import LabelsSeen, raise_earlier
from .capture import Cuda, copy_into, empty_buffers
from .checkpoint import Checkpoint, policies_in
from .flat_gradients import FlatGradients, Shadow
from .graph_checks import (
    addresses_of,
    check_arguments,
    check_capturable,
    check_optimizer,
    check_unchanged,
    form_of,
    worked_on,
)
from .learning_rates import LearningRates
from .masks import LayersWithoutMask, PaddingSeen
from .settings import ModuleSettings

# The first compiles and makes the optimizer's state. The second runs as all later ones will.
EAGER_CALLS = 2


@dataclass(eq=False)
class _Captured:
    """A captured step: its replays, and what must not change between replays
    (`graph_checks.py`)."""

    replay_gradients: Callable[[], None]
    replay_update: Callable[[], None] | None  # None: the step ends with the gradients
    loss: Tensor
    addresses: dict[str, Any]
    worked_on: dict[str, Any]


@dataclass(eq=False)
class _Graph:
    """One set of shapes: its input buffers, and its step once captured."""

    inputs: dict[str, Any]
    policies: set[Checkpoint]  # kept alive: they own the host memory for offload
    without_mask: LayersWithoutMask
    labels: LabelsSeen = field(default_factory=LabelsSeen)
    eager_calls: int = 0
    captured: _Captured | None = None


class GraphedStep(Joinable):
    """A training step for your own loop, captured in CUDA graphs for each set of shapes.

    Equivalent PyTorch, for ``step.accumulate(**a); loss = step(**b)``::

        for batch in (a, b):
            with autocast():
                loss = model(**batch).loss
            (loss / accumulation_steps).backward()
        clip_grad_norm_(parameters, max_grad_norm)  # the optimizer's, in its order
        optimizer.step()
        optimizer.zero_grad()
        for refresh in after_update:
            refresh()

    It runs the same kernels in the same order and draws the same dropout. `group["lr"]` stays
    yours: set it with a scheduler or an assignment, as a float or a tensor. The next update reads
    it, rounded to fp32 like ``lr=torch.tensor(lr)``. There is no fp16 loss scaler.

    Each new set of shapes, dtypes and constants runs eagerly twice and is captured on the third
    call. Accumulation and other modes or dropouts of modules get separate graphs. From then on a
    call copies the batch, launches twice, and never waits for the device. Call `reset` after
    fuse(), or when you switch adapters or change the parameter groups. We refuse a replay when
    parameters or optimizer state were moved or loaded, or `requires_grad`, an adapter or an option
    of the optimizer changed.

    Layers that attend without a mask eagerly do so in the graph too, with attention's fast kernels
    (`masks.py`). For that, leave attention_mask and position_ids out of batches without padding: a
    graph cannot look at their values, so it attends with a mask, and warns. There are two
    exceptions. With fused attention, one graph attends to any packed documents, in rows of one
    length as `fill_row` makes them (`packing.py`). With a fused loss as well, padded rows need no
    mask if an eager call had some. The loss is then NaN if padding predicts a label or lies between
    a row's tokens; if an eager call saw that, the graphs have the mask.
    ``attention_mask={"full_attention": None}``, which some models take (Qwen), counts as left out.

    Under torchrun an update trains on the batches of all ranks. They start from rank 0's trained
    parameters, average gradients as DistributedDataParallel does, and clip that mean. So give
    `num_items_in_batch` as the count over all ranks divided by their number. Shapes may differ. If
    some ranks have fewer batches, put the loop into PyTorch's ``with Join([step]):``. Seed each
    rank differently for other dropout. Don't catch an error on one rank: torchrun stops the rest.

    Held until `reset`: the memory of the largest graph, activations and gradients too, which graphs
    share; each graph's batch; with accumulation or several ranks the summed gradients; the host
    memory of checkpoint="offload". Eager calls need their memory on top.

    Args:
        model: on one CUDA device; returns the loss, 0-d, or an output that has it as `.loss`.
        optimizer: over all parameters that the model trains, with capturable=True. That is not
            needed if you only call `accumulate` and step the optimizer yourself.
        autocast: makes the forward's context, ``lambda: torch.autocast("cuda", dtype)``.
        max_grad_norm: None clips nothing.
        accumulation_steps: divides the loss for backward; the loss we return is not divided.
            Leave it at 1 with `num_items_in_batch`, which divides already.
        after_update: called at the end of every update and captured with it. For values that your
            model computes from its parameters between steps.
        max_graphs: how many graphs there may be.
        process_group: ranks that train together, the default group if None.

    Raises:
        ValueError: an argument has the wrong type; the model, the optimizer or an input cannot be
            captured; there are more than max_graphs sets of shapes; something a graph works on has
            changed since its capture; ranks train other parameters; or a label is outside the
            vocabulary. A label on the CPU raises in this call, before anything is done, and one on
            the GPU in a later call (`label_check.py`).
        RuntimeError: the capture failed. Nothing of the step was done, all graphs are gone, and the
            model trains eagerly as before (out of memory: torch.OutOfMemoryError). Or another rank
            has ended.
    """

    _backend: type[Cuda] = Cuda  # the tests' own runs without a GPU
    _cuda: Cuda

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        after_update: Iterable[Callable[[], Any]] = (),
        max_graphs: int = 8,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        counts = {"accumulation_steps": accumulation_steps, "max_graphs": max_graphs}
        check_arguments(model, optimizer, autocast, max_grad_norm, counts)
        self.model, self.optimizer, self.autocast = model, optimizer, autocast
        self.max_grad_norm, self.accumulation_steps = max_grad_norm, accumulation_steps
        self.after_update = tuple(after_update)
        self.max_graphs, self.process_group = max_graphs, process_group
        self._graphs: dict[Hashable, _Graph] = {}
        self.reset()

    def __call__(self, **inputs: Any) -> Tensor:
        """Update once, from this batch and those accumulated before it. Afterwards every `.grad` is
        None.

        inputs: the model's arguments. Tensors are copied from any device, asynchronously from
        pinned memory. Anything else (None, numbers, strings and dicts of them) is a constant, and
        each new value makes a new graph: give `num_items_in_batch` as a tensor.

        Returns: this batch's loss, a new 0-d tensor, detached.
        """
        return self._run(inputs, update=True)

    def accumulate(self, **inputs: Any) -> Tensor:
        """Add this batch's gradients to this rank's `.grad`s, without an update. You may read,
        change or drop them (`optimizer.zero_grad`) before the next call."""
        return self._run(inputs, update=False)

    def reset(self) -> None:
        """Drop all graphs and their memory. Every set of shapes starts over with eager calls. All
        ranks call it, and get rank 0's trained parameters."""
        self._start_over()
        if self._held.ranks > 1:
            self._held.start_alike()
            for refresh in self.after_update:
                refresh()

    def _start_over(self) -> None:
        if self._graphs:
            self._cuda.synchronize()  # they may be running
            self._graphs.clear()
        groups = self.optimizer.param_groups
        optimized = [parameter for group in groups for parameter in group["params"]]
        self._parameters = list(dict.fromkeys([*self.model.parameters(), *optimized]))  # once each
        self._trained = [parameter for parameter in optimized if parameter.requires_grad]
        check_capturable(self.model, self._parameters, self._trained, self._backend.device_type)
        device = self._parameters[0].device
        self._cuda = self._backend(device)
        self._held = FlatGradients(self._trained, self.process_group)
        self._padding, self._settings = PaddingSeen(), ModuleSettings(self.model)
        self._learning_rates = LearningRates(self.optimizer, device)

    # --- one call ---------------------------------------------------------------------------------

    def _run(self, inputs: dict[str, Any], update: bool) -> Tensor:
        raise_earlier(self._cuda.device)
        # like backward(), we add to gradients that are already there
        adds = any(parameter.grad is not None for parameter in self._trained)
        accumulated = adds or not update or self._held.ranks > 1
        key = update, accumulated, self._settings.modes(), form_of(inputs)
        graph = self._graphs.get(key) or self._new_graph(key, inputs)
        if graph.captured is None:
            check_optimizer(self.optimizer, self._trained, update)
        graph.labels.check(inputs, graph.inputs)
        copy_into(graph.inputs, inputs)
        if update:
            self._learning_rates.copy()
        if graph.captured is None and graph.eager_calls < EAGER_CALLS:
            with graph.without_mask.noted(), graph.labels.noted():
                loss = self._cuda.run(lambda: self._gradients(graph, accumulated))
                if update:
                    self._average()
                    self._cuda.run(self._update)
            graph.eager_calls += 1
            return loss.clone()
        if graph.captured is None:
            graph.captured = self._capture(graph, update, accumulated)
        self._replay(graph.captured, update, accumulated, adds)
        return graph.captured.loss.clone()

    def _gradients(self, graph: _Graph, accumulated: bool, adds: bool = False) -> Tensor:
        """Run forward and backward, eagerly or in a capture, which adds what it accumulates. Return
        the loss."""
        with self.autocast():
            output = self.model(**graph.inputs)
        loss = getattr(output, "loss", output)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"GraphedStep needs a loss from the model, got {type(loss).__name__}: pass labels"
            )
        (loss if self.accumulation_steps == 1 else loss / self.accumulation_steps).backward()
        without = sum(parameter.grad is None for parameter in self._trained)
        if accumulated and without:  # the optimizer skips None, but not the zeros that we hold
            raise ValueError(
                f"GraphedStep: {without} of {len(self._trained)} parameters of the optimizer get "
                "no gradient; to accumulate or average, freeze or leave them out of the optimizer"
            )
        if accumulated and adds:
            self._held.add()
        return loss.detach()

    def _average(self) -> None:
        """Average the gradients over all ranks, between the step's two parts."""
        if self._held.ranks > 1:
            Join.notify_join_context(self)
            self._held.hold()
            self._held.average()

    def _update(self) -> None:
        """Run the step's end, which follows the last backward: eagerly, then captured."""
        if self.max_grad_norm is not None:
            clip_grad_norm_(self._trained, self.max_grad_norm)
        with self._learning_rates.as_tensors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This instance was constructed with capturable")
            self.optimizer.step()
        self.optimizer.zero_grad()
        for refresh in self.after_update:
            refresh()

    def _new_graph(self, key: Hashable, inputs: dict[str, Any]) -> _Graph:
        if len(self._graphs) >= self.max_graphs:
            given = ", ".join(f"{k} {list(getattr(v, 'shape', [v]))}" for k, v in inputs.items())
            raise ValueError(
                f"GraphedStep: {given} would be graph {len(self._graphs) + 1} of "
                f"max_graphs={self.max_graphs}: pad batches to few lengths, or raise max_graphs"
            )
        buffers = empty_buffers(inputs, self._cuda.device)
        without_mask = LayersWithoutMask(self.model, inputs, self._padding)
        graph = _Graph(buffers, policies_in(self.model), without_mask)
        return self._graphs.setdefault(key, graph)

    def _capture(self, graph: _Graph, update: bool, accumulated: bool) -> _Captured:
        gradients = [parameter.grad for parameter in self._trained]
        if accumulated:  # otherwise there are none
            self._held.clear()
        try:
            with graph.without_mask.kept():
                replay_gradients, loss = self._cuda.capture(
                    lambda: self._gradients(graph, accumulated, adds=True)
                )
            replay_update = self._cuda.capture(self._update)[0] if update else None
        except Exception as error:
            self._start_over()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = (str(error).splitlines() or [""])[0]
            raise RuntimeError(
                f"GraphedStep: this step cannot be captured: {type(error).__name__}: {reason}; "
                "train it eagerly, or remove what raised this"
            ) from error
        finally:  # a capture does nothing yet
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                parameter.grad = gradient
        addresses, found = addresses_of(self._parameters), self._worked_on(update)
        return _Captured(replay_gradients, replay_update, loss, addresses, found)

    def _replay(self, step: _Captured, update: bool, accumulated: bool, adds: bool) -> None:
        """Replay the captured step, unless something it works on has changed. In that case no
        parameter and no `.grad` changes. Only side effects of a forward may have happened, such as
        dropout's draws. adds: there are gradients to which this batch's are added.
        """
        check_unchanged(step.addresses, addresses_of(self._parameters))
        if adds:
            check_unchanged(step.worked_on, self._worked_on(update))
        if accumulated:
            self._held.gather()
        step.replay_gradients()
        if not adds:  # while the GPU is busy
            check_unchanged(step.worked_on, self._worked_on(update))
        if accumulated:
            self._held.show()
        if step.replay_update is not None:
            self._average()
            step.replay_update()
            if accumulated:
                self.optimizer.zero_grad()  # a replay does not touch the host's side

    def _worked_on(self, update: bool) -> dict[str, Any]:
        return worked_on(self._parameters, self._settings, self.optimizer if update else None)

    def join_hook(self, **_: Any) -> Shadow:
        return Shadow(self._held, self.optimizer, self.after_update)

    @property
    def join_device(self) -> torch.device:
        return self._cuda.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group or dist.group.WORLD
