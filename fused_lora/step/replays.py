"""A module's captured forward and backward as one function that autograd sees.

Its backward copies the gradient into a buffer and replays the second graph, which adds to each
parameter's `.grad`. Activations stay in the graphs' memory in between, so no other graph with a
backward runs before it.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .capture import copy_into


@dataclass(eq=False)
class CapturedModule:
    """The graphs for one form of a module's inputs, and the memory that they read and write."""

    inputs: dict[str, Any]
    output_class: type
    crossing: Tensor  # the hidden states, and before the backward their gradient
    received: list[Tensor]  # the parameters that get a gradient
    replay_forward: Callable[[], None]
    replay_backward: Callable[[], None] | None
    addresses: dict[str, Any]
    policies: set[Any]  # kept alive: they own the host memory for offload


class Crossing:
    """The memory in which hidden states leave a graph and their gradient enters one.

    Both are copied at once, so graphs of all shapes share it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape and dtype in this memory, which grows if needed."""
        if self._memory is None or self._memory.nbytes < tensor.nbytes:
            self._memory = tensor.new_empty(tensor.nbytes, dtype=torch.uint8)
        return self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Replays:
    """The replays of a module's graphs. At most one forward waits for its backward.

    sums: the tensors that the graphs add each parameter's gradients to.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop the sums. If a forward waits for its backward, that raises an error."""
        self.sums: dict[Tensor, Tensor] = {}
        self.crossing = Crossing()
        self._waiting: weakref.ref[_Call] | None = None

    @property
    def is_waiting(self) -> bool:
        """True between a forward with gradients and its backward, while that can come."""
        return self._waiting is not None and self._waiting() is not None

    def run(self, captured: CapturedModule, inputs: dict[str, Any]) -> Tensor:
        """Replay the forward on these inputs. Return the hidden states."""
        copy_into(captured.inputs, inputs)
        if captured.replay_backward is None:
            captured.replay_forward()
            return captured.crossing.clone()
        call = _Call(self, captured)
        self._waiting = weakref.ref(call)
        return _Replayed.apply(torch.empty(0, requires_grad=True), call)

    def run_backward(self, call: "_Call", gradient: Tensor) -> None:
        captured = call.captured
        if self._waiting is None or self._waiting() is not call:
            raise RuntimeError(
                "graph_steps: a second backward through one forward: its activations are gone"
            )
        captured.crossing.copy_(gradient)
        self._hold_gradients(captured.received)
        assert captured.replay_backward is not None
        captured.replay_backward()
        self._waiting = None

    def _hold_gradients(self, received: list[Tensor]) -> None:
        """Put every `.grad` where the graphs add to it, keeping its value."""
        empty = []
        for parameter in received:
            held = self.sums[parameter]
            if parameter.grad is None:
                empty.append(held)
            elif parameter.grad.data_ptr() != held.data_ptr():
                held.copy_(parameter.grad)
            else:
                continue
            parameter.grad = held.detach()  # users may set its .data
        if empty:
            torch._foreach_zero_(empty)


@dataclass(eq=False)
class _Call:
    """A replayed forward. Autograd keeps it alive until its backward, or as long as it can come."""

    owner: Replays
    captured: CapturedModule


class _Replayed(torch.autograd.Function):
    """The graphs as autograd sees them. `anchor` requires a gradient and gets none."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        call.captured.replay_forward()
        return call.captured.crossing.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.call.owner.run_backward(ctx.call, gradient)
        return None, None
