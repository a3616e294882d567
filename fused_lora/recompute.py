"""A forward that keeps its inputs alone, and runs again in backward for what its functions save.

What `torch.utils.checkpoint` does without reentrant backwards, in less of the host's time: the
functions of a layer save some 39 tensors, each of which passes through Python three times. Chen et
al., arXiv 1604.06174.

    forward     every tensor that is saved is forgotten; a place in a list stands for it
    backward    the first of them that is wanted runs the forward again, with the inputs, autocast
                and random numbers that it had, until as many are saved, and drops its graph
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_thread = threading.local()


def is_recomputing() -> bool:
    """Whether this thread is running a forward again, so that its output is unused."""
    return getattr(_thread, "depth", 0) > 0


class Recomputing:
    """While a forward runs again. Entered in the thread that runs backward, any number of times."""

    def __enter__(self) -> None:
        _thread.depth = getattr(_thread, "depth", 0) + 1

    def __exit__(self, *_) -> None:
        _thread.depth -= 1


def recomputed(forward: Callable, *inputs: Any, keep_random_state: bool = True):
    """``forward(*inputs)``, of which only the inputs are kept for backward.

    Equivalent PyTorch, but that it knows the device of the first input alone::

        torch.utils.checkpoint.checkpoint(
            forward, *inputs, use_reentrant=False, preserve_rng_state=keep_random_state)

    Args:
        forward: saves the same tensors in the same order when it runs again.
        inputs: the first is a tensor; the others may be anything. Tensors among them are saved by
            an autograd function, so that hooks around the call see them.

    Raises:
        RuntimeError: from backward, if the second run saves other tensors than the first.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs)
    run = _Run(forward, inputs, keep_random_state)
    with saved_tensors_hooks(run.forget, _remember):
        return forward(*inputs)


class _Run:
    """One such forward: what it starts from, and what its second run has saved for backward."""

    def __init__(self, forward: Callable, inputs: tuple, keep_random_state: bool):
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        device = tensors[0].device.type
        self.forward = forward
        self.inputs = [None if isinstance(x, Tensor) else x for x in inputs]
        self.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        # its output is kept, too: without it torch 2.11 frees what the function saved
        self.saved = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors)
        self.autocast = (
            device, torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled(),
        )  # fmt: skip
        generators = _generators_of(tensors[0]) if keep_random_state else ()
        self.random_states = [(one, one.get_state()) for one in generators]
        self.shapes: list[torch.Size] = []
        self.remembered: dict[int, Tensor] = {}

    def forget(self, tensor: Tensor) -> tuple["_Run", int]:
        self.shapes.append(tensor.shape)
        return self, len(self.shapes) - 1

    def run_again(self) -> None:
        inputs = list(self.inputs)
        for place, tensor in zip(self.places, self.saved.grad_fn.saved_tensors, strict=True):
            inputs[place] = tensor
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            found.append(tensor.detach())  # without its graph
            if len(found) == len(self.shapes):
                raise _Stop

        now = [(one, one.get_state()) for one, _ in self.random_states]
        try:
            _set_random(self.random_states)
            with (
                torch.enable_grad(), torch.autocast(*self.autocast), Recomputing(),
                saved_tensors_hooks(keep, lambda nothing: nothing),
            ):  # fmt: skip
                self.forward(*inputs)
        except _Stop:
            pass
        finally:
            _set_random(now)
        if [tensor.shape for tensor in found] != self.shapes:
            raise RuntimeError(
                f"checkpoint: a layer saved {len(self.shapes)} tensors when it ran first, and "
                f"{len(found)} or others when it ran again; it has to do the same both times"
            )
        self.remembered = dict(enumerate(found))


def _remember(forgotten: tuple[_Run, int]) -> Tensor:
    run, place = forgotten
    if place not in run.remembered:
        run.run_again()
    return run.remembered.pop(place)  # a second backward runs it once more


class _Stop(Exception):
    """All has been saved that is wanted."""


class _Inputs(torch.autograd.Function):
    """Saves tensors for whoever asks its `grad_fn`. Something has to require a gradient for one."""

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
