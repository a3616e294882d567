"""Saved tensors in pinned host memory: out while the layer runs, back before its backward.

The copies run on a stream of their own. What they read and write on the GPU belongs to the stream
of the computation, which waits for a copy before it gives that memory away: `Tensor.record_stream`
would leave that to the allocator, which gives nothing back while a CUDA graph is captured, and
would allocate pinned memory there, which CUDA forbids. Host memory is kept and used again, by the
stream of the copies alone and so in order.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fused_mlp.launching import is_capturing, next_power_of_2

# Smaller tensors are not worth a copy to the host: it takes as long as a 2 MiB one.
OFFLOAD_BYTES = 2 * 2**20


class Offload:
    """Host memory and a stream of copies for what one model saves.

    Host memory comes in powers of two, grows to what was in use at once of each, and stays, also
    for the CUDA graphs that were captured with it, which have its addresses: it must live as long
    as they do.
    """

    def __init__(self) -> None:
        self._copies: dict[torch.device, Any] = {}  # a stream for each device
        self._free: dict[tuple[str, int], list[Tensor]] = {}  # host memory, by whose it is and size
        self._layer: _Layer | None = None

    def __reduce__(self):
        return Offload, ()  # a copy of a model has copies of its own

    def start(self) -> None:
        """A new forward begins: none of its layers comes after those until now."""
        self._layer = None

    def hooks(self) -> saved_tensors_hooks:
        """The context of a layer, in which what is saved for backward goes to the host."""
        if self._layer is not None:
            self._layer.let_go()
        self._layer = _Layer(self._layer)
        return saved_tensors_hooks(self.out, self.back)

    def out(self, tensor: Tensor) -> "Tensor | _Offloaded":
        """To the host, with the layer whose `hooks` were asked for last, if it is worth it."""
        if not _is_worth_it(tensor):
            return tensor
        if tensor.device not in self._copies:
            self._copies[tensor.device] = torch.cuda.Stream(tensor.device)
        free = self._free_for(tensor)
        memory = free.pop() if free else _pinned(next_power_of_2(tensor.nbytes))
        assert self._layer is not None
        return _Offloaded(tensor, memory, free.append, self._copies[tensor.device], self._layer)

    @staticmethod
    def back(saved: "Tensor | _Offloaded") -> Tensor:
        """Bring back the tensor that was given to `out`."""
        return saved if isinstance(saved, Tensor) else saved.fetch()

    def _free_for(self, tensor: Tensor) -> list[Tensor]:
        """The host memory for tensors of this one's size that is free: to take and to give back."""
        size = next_power_of_2(tensor.nbytes)
        eager, captured = (
            self._free.setdefault((whose, size), []) for whose in ("eager", "captured")
        )
        if not is_capturing(tensor):
            return eager
        # A replay overwrites it, whoever has it then: graphs, of which each is done with it when
        # the next one runs, share it with each other and with nobody else.
        captured += eager
        eager.clear()
        return captured


def _is_worth_it(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.nbytes >= OFFLOAD_BYTES


class _Layer:
    """One layer's tensors in host memory: given away together, and brought back together."""

    def __init__(self, before: "_Layer | None"):
        self.before = before  # which backward will want after it
        self.tensors: list[weakref.ref[_Offloaded]] = []

    def let_go(self) -> None:
        for offloaded in self._alive():
            offloaded.let_go()

    def prefetch(self) -> None:
        for offloaded in self._alive():
            offloaded.prefetch()

    def _alive(self) -> "list[_Offloaded]":
        return [offloaded for one in self.tensors if (offloaded := one()) is not None]


class _Offloaded:
    """A tensor in host memory, and on the GPU too while a copy of it is on its way.

    give_back: called with the memory when the tensor is no longer wanted. layer: whose it is.
    """

    def __init__(
        self,
        tensor: Tensor,
        memory: Tensor,
        give_back: Callable[[Tensor], None],
        copies: Any,
        layer: _Layer,
    ):
        self.memory, self.give_back, self.copies, self.layer = memory, give_back, copies, layer
        layer.tensors.append(weakref.ref(self))
        self.device = tensor.device
        self.host = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.on_gpu: Tensor | None = tensor
        self._copy(self.host, tensor)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        self.user = torch.cuda.current_stream(self.device)
        self.copies.wait_stream(self.user)
        with torch.cuda.stream(self.copies):
            to.copy_(source, non_blocking=True)
            self.copied = self.copies.record_event()

    def let_go(self) -> None:
        """Give the memory on the GPU away, once it is copied."""
        if self.on_gpu is not None:
            self.user.wait_event(self.copied)
            self.on_gpu = None

    def prefetch(self) -> None:
        if self.on_gpu is None:
            self.on_gpu = torch.empty_like(self.host, device=self.device)
            self._copy(self.on_gpu, self.host)

    def fetch(self) -> Tensor:
        """The tensor on its GPU again, with those of the layer before it set on their way."""
        self.prefetch()
        tensor = self.on_gpu
        assert tensor is not None
        self.let_go()
        if self.layer.before is not None:
            self.layer.before.prefetch()
        return tensor

    def __del__(self) -> None:
        # the events of a capture that failed cannot be waited for, and nothing of it ever runs
        with suppress(RuntimeError):
            self.let_go()
        self.give_back(self.memory)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
