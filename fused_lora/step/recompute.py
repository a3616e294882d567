"""A forward that keeps only its inputs, and is recomputed in backward for the tensors it saves.

Does the work of non-reentrant `torch.utils.checkpoint` in less host time. That time matters: the
functions of a layer save about 39 tensors, and each passes through Python three times. Chen et al.,
arXiv 1604.06174.

    forward     forget every saved tensor; its place in a list stands for it
    backward    when the first of them is needed, rerun the forward with the same inputs, autocast
                and random numbers, stop once as many are saved, and drop its graph
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..rerun import Keep, runs, split
from .settings import ModuleSettings


def recomputed(
    forward: Callable,
    *inputs: Any,
    keep_random_state: bool = True,
    keep: Keep | None = None,
    see: Callable[[list[Tensor]], Any] | None = None,
    module: nn.Module | None = None,
    tile_rows: int | None = None,
):
    """Run ``forward(*inputs)``, keeping only the inputs for backward.

    Equivalent PyTorch, except that only the first input's device counts::

        torch.utils.checkpoint.checkpoint(
            forward, *inputs, use_reentrant=False, preserve_rng_state=keep_random_state)

    Args:
        forward: must save the same tensors in the same order both times.
        inputs: the first is a tensor; the others may be anything. An autograd function saves the
            tensors among them, so hooks around the call see them.
        keep: how `once` keeps a result; None: recompute it, unless it is small.
        see: called with everything that the second run saved, while it is all there.
        tile_rows: of an MLP's tiles (`rerun.rows_of_a_tile`).
        module: what runs. Its modes, dropouts and adapters are the same in the second run.

    Raises:
        RuntimeError: from backward, if the second run saves other tensors than the first.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs)
    run = _Run(forward, inputs, keep_random_state, keep, see, module, tile_rows)
    with run, saved_tensors_hooks(run.forget, _remember):
        return forward(*inputs)


class _Run:
    """One recomputed forward: its inputs, and the tensors that its second run saved for backward.
    The thread that runs it enters it; for the second run that is backward's thread."""

    def __init__(
        self,
        forward: Callable,
        inputs: tuple,
        keep_random_state: bool,
        keep: Keep | None,
        see: Callable[[list[Tensor]], Any] | None,
        module: nn.Module | None,
        tile_rows: int | None,
    ):
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        device = tensors[0].device.type
        self.forward = forward
        self.inputs = [None if isinstance(x, Tensor) else x for x in inputs]
        self.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        # we keep the function's output: without it torch 2.11 frees its saved tensors
        self.saved = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors)
        self.autocast = (
            device, torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled(),
        )  # fmt: skip
        generators = _generators_of(tensors[0]) if keep_random_state else ()
        self.random_states = [(generator, generator.get_state()) for generator in generators]
        self.keep, self.see = keep, see
        # the run that measures is in one piece
        self.tile_rows = None if see is not None else tile_rows
        self.settings = ModuleSettings(nn.Module() if module is None else module)
        self.were = self.settings.kept()
        self.kept: list[list[tuple[bool, Any]]] = []  # by call of `once`: is_tensor, value
        self.ends: list[int] = []  # by call of `saving_last`: tensors saved when it ended
        self.runs_again, self.next_kept, self.next_end = False, 0, 0
        self.shapes: list[torch.Size | None] = []  # None: of a record
        self.found: list[Tensor | tuple] = []  # by the second run, which stops at the last
        self.remembered: dict[int, Tensor | tuple] = {}

    def __enter__(self) -> None:
        runs().append(self)

    def __exit__(self, *_) -> None:
        runs().pop()

    def once(self, function: Callable[[], tuple], keep: Keep) -> tuple:
        if self.runs_again:
            kept = self.kept[self.next_kept]
            self.next_kept += 1
            return tuple(keep.back(one) if is_tensor else one for is_tensor, one in kept)
        result = function()
        self.kept.append([_kept(one, keep) for one in result])
        return result

    def saving_last(self, function: Callable[[bool], Tensor]) -> Tensor:
        if self.runs_again:
            end = self.ends[self.next_end]
            self.next_end += 1
            return function(end < len(self.shapes))
        result = function(True)
        self.ends.append(len(self.shapes))
        return result

    def forget(self, tensor: Tensor) -> tuple["_Run", int]:
        self.shapes.append(tensor.shape)
        return self, len(self.shapes) - 1

    def recompute_record(self, record: tuple) -> Callable[[], tuple]:
        """Return a function that makes this record of tensors again. It works for as long as
        autograd keeps a tensor that is saved beside it."""
        if self.runs_again:
            self._find(record)
        else:
            self.shapes.append(None)
        owner, place = weakref.ref(self), len(self.shapes) - 1

        def again() -> tuple:
            run = owner()
            assert run is not None  # what was saved beside the record keeps it
            return _remember((run, place))

        return again

    def _find(self, saved: Tensor | tuple) -> None:
        self.found.append(saved)
        if len(self.found) == len(self.shapes):
            raise _Stop

    def run_again(self) -> None:
        inputs = list(self.inputs)
        for place, tensor in zip(self.places, self.saved.grad_fn.saved_tensors, strict=True):
            inputs[place] = tensor
        self.found = []

        def keep(tensor: Tensor) -> None:
            self._find(tensor.detach())  # without its graph

        now = [(one, one.get_state()) for one, _ in self.random_states]
        self.runs_again, self.next_kept, self.next_end = True, 0, 0
        try:
            _set_random(self.random_states)
            with (
                self, self.settings.restored(self.were), torch.enable_grad(),
                torch.autocast(*self.autocast),
                saved_tensors_hooks(keep, lambda nothing: nothing),
            ):  # fmt: skip
                self.forward(*inputs)
        except _Stop:
            pass
        finally:
            self.runs_again = False
            _set_random(now)
        found, self.found = self.found, []
        if [one.shape if isinstance(one, Tensor) else None for one in found] != self.shapes:
            raise RuntimeError(
                f"checkpoint: a layer saved {len(self.shapes)} tensors in its forward, and "
                f"{len(found)} or others when recomputed; it must do the same both times"
            )
        if self.see is not None:
            self.see(split(tuple(found))[0])
        self.remembered = dict(enumerate(found))


def _kept(value: Any, keep: Keep) -> tuple[bool, Any]:
    if not isinstance(value, Tensor):
        return False, value
    # what becomes a function's output gets a graph, which must not keep itself alive
    return True, keep.out(value if value.requires_grad else value.detach())


def _remember(forgotten: tuple[_Run, int]) -> Any:
    run, place = forgotten
    if place not in run.remembered:
        run.run_again()
    return run.remembered.pop(place)  # a second backward recomputes once more


class _Stop(Exception):
    """Everything that backward needs has been saved."""


class _Inputs(torch.autograd.Function):
    """Save tensors for whoever asks its `grad_fn`. There is one only if an input requires a
    gradient."""

    @staticmethod
    def forward(ctx, requires_grad, *tensors):
        ctx.save_for_backward(*tensors)
        return requires_grad.new_empty(0)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("nothing is computed from its output")


def _generators_of(tensor: Tensor) -> tuple[torch.Generator, ...]:
    if tensor.is_cuda:
        return torch.default_generator, torch.cuda.default_generators[tensor.get_device()]
    return (torch.default_generator,)


def _set_random(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)
