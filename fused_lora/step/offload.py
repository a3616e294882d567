"""Saved tensors in pinned host memory: out while the layer runs, back before its backward.

Copies run on a separate stream. The GPU memory that they read and write belongs to the compute
stream, which waits for a copy before it frees that memory. `Tensor.record_stream` would leave this
to the allocator. During a capture the allocator frees nothing, and would allocate pinned memory,
which CUDA forbids. We keep host memory and reuse it. Only the copy stream touches it, so reuse is
in order.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fused_mlp.launching import is_capturing, next_power_of_2

# Smaller tensors are not worth a copy to the host: copying one takes as long as copying 2 MiB.
OFFLOAD_BYTES = 2 * 2**20


class Offload:
    """Host memory and copy streams for the tensors that one model saves.

    Host memory comes in powers of two, grows to the most ever in use of each size, and is never
    freed. CUDA graphs captured with it hold its addresses: keep this alive as long as they live.
    """

    def __init__(self) -> None:
        self._copies: dict[torch.device, Any] = {}  # the copy stream of each device
        self._free: dict[tuple[str, int], list[Tensor]] = {}  # host memory, by user and size
        self._layer: _Layer | None = None

    def __reduce__(self):
        return Offload, ()  # a copied model starts without host memory

    def start(self) -> None:
        """Begin a new forward: its first layer has no layer before it."""
        self._layer = None

    def hooks(self) -> saved_tensors_hooks:
        """Return the context of a layer in which tensors saved for backward go to the host."""
        if self._layer is not None:
            self._layer.let_go()
        self._layer = _Layer(self._layer)
        return saved_tensors_hooks(self.out, self.back)

    def finish(self) -> None:
        """End a forward whose backward is captured on its own: its copies end with it."""
        if self._layer is not None:
            self._layer.let_go()

    def out(self, tensor: Tensor) -> "Tensor | _Offloaded":
        """Copy a large tensor to the host, as part of the layer that last called `hooks`."""
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
        """Bring back a tensor that `out` took."""
        return saved if isinstance(saved, Tensor) else saved.fetch()

    def _free_for(self, tensor: Tensor) -> list[Tensor]:
        """Return the free host memory for a tensor's size: a list to take from and give back to."""
        size = next_power_of_2(tensor.nbytes)
        eager, captured = (
            self._free.setdefault((whose, size), []) for whose in ("eager", "captured")
        )
        if not is_capturing(tensor):
            return eager
        # A replay overwrites this memory no matter who is using it. Graphs can share it, because
        # each is done with it before the next one runs. Eager calls must not.
        captured += eager
        eager.clear()
        return captured


def _is_worth_it(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.nbytes >= OFFLOAD_BYTES


class _Layer:
    """One layer's tensors in host memory: they leave the GPU together and come back together."""

    def __init__(self, before: "_Layer | None"):
        self.before = before  # backward needs it next
        self.tensors: list[weakref.ref[_Offloaded]] = []

    def let_go(self) -> None:
        for offloaded in self._alive():
            offloaded.let_go()

    def prefetch(self) -> None:
        for offloaded in self._alive():
            offloaded.prefetch()

    def _alive(self) -> "list[_Offloaded]":
        return [offloaded for tensor in self.tensors if (offloaded := tensor()) is not None]


class _Offloaded:
    """A tensor in host memory, which also lies on the GPU while a copy is in flight.

    give_back: called with the memory when the tensor is dropped. layer: the layer that saved it.
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
        """Free the memory on the GPU once it is copied."""
        if self.on_gpu is not None:
            self.user.wait_event(self.copied)
            self.on_gpu = None

    def prefetch(self) -> None:
        if self.on_gpu is None:
            self.on_gpu = torch.empty_like(self.host, device=self.device)
            self._copy(self.on_gpu, self.host)

    def fetch(self) -> Tensor:
        """Return the tensor on its GPU, and start bringing back those of the layer before it."""
        self.prefetch()
        tensor = self.on_gpu
        assert tensor is not None
        self.let_go()
        if self.layer.before is not None:
            self.layer.before.prefetch()
        return tensor

    def __del__(self) -> None:
        # after a failed capture its events cannot be waited for, and nothing of it ever runs
        with suppress(RuntimeError):
            self.let_go()
        self.give_back(self.memory)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
