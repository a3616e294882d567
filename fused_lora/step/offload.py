"""Saved tensors in pinned host memory: out while the layer runs, back before its backward.

Copies run on a separate stream. The GPU memory that they read and write belongs to the compute
stream, which waits for a copy before it frees that memory. `Tensor.record_stream` would leave this
to the allocator. During a capture the allocator frees nothing, and would allocate pinned memory,
which CUDA forbids. We keep host memory (`host_memory.py`) and reuse it. Only the copy stream
touches it, so reuse is in order.

Each layer's input must wait somewhere. Attention's output and the sum after it, which `once` keeps,
take twice as much again and only spare a recompute: all layers keep them if there is room for all,
else none does. In a few layers they would save little time and cost as much GPU memory as in all:
those of one layer come back while the next one runs backward. At Llama-3.1-8B's sizes that is 16
KiB a token of some 104.
"""

import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fused_mlp.launching import is_capturing

from ..rerun import Keep
from ..telling import warn
from .host_memory import HostMemory, Taken, default_limit

# Smaller tensors are not worth a copy to the host: copying one takes as long as copying 2 MiB.
OFFLOAD_BYTES = 2 * 2**20
# What a layer's `once` may keep, in sizes of its input, until we have seen one. Llama-3-8B keeps
# 2.0, Qwen3-4B 2.6, Qwen3.5 with its gates more.
UNSEEN_KEPT = 2.75


class Offload:
    """Host memory and copy streams for the tensors that one model saves.

    limit_bytes: how much host memory to take at most; None: `default_limit` of the first forward.

    Host memory grows to the most ever in use and is never freed. CUDA graphs captured with it hold
    its addresses: keep this alive as long as they live.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._copies: dict[torch.device, Any] = {}  # the copy stream of each device
        self._layer: _Layer | None = None
        self._keeps: bool | None = None  # in this forward, what `once` keeps
        self._most_kept = 0.0  # by a layer's `once`, in sizes of its input
        self._row_bytes = 0  # of the inputs of all layers
        self._said_full = False

    def __reduce__(self):
        return Offload, (self.limit_bytes,)  # a copied model starts without host memory

    @cached_property
    def memory(self) -> HostMemory:
        return HostMemory(default_limit() if self.limit_bytes is None else self.limit_bytes)

    def start(self) -> None:
        """Begin a new forward: its first layer has no layer before it."""
        self._layer = self._keeps = None

    def hooks(self) -> saved_tensors_hooks:
        """Return the context of a layer in which tensors saved for backward go to the host."""
        if self._layer is not None:
            self._layer.end()
        self._layer = _Layer(self._layer)
        return saved_tensors_hooks(self.out, self.back)

    def reach_last(self) -> None:
        """Let go of all but the tensors of the layer just run. The last one runs next, and the loss
        after it, which may be the peak."""
        if self._layer is not None and self._layer.before is not None:
            self._layer.before.let_go()

    def keep(self, given: Tensor, inputs: int) -> Keep | None:
        """Return how `once` keeps results in the layers of this forward. None if there is no room
        for them beside their inputs, which are like `given`, the first one's."""
        if self._keeps is None:
            self._row_bytes = inputs * given.shape[-1] * given.itemsize
            room = self.memory.room(is_capturing(given))
            self._keeps = room >= self._bytes_with_kept(given.shape[:-1].numel())
        return Keep(partial(self._out_kept, given.nbytes), self.back) if self._keeps else None

    def _bytes_with_kept(self, rows: int) -> int:
        return int(rows * self._row_bytes * (1 + (self._most_kept or UNSEEN_KEPT)))

    def prepare(self, rows: int) -> None:
        """Pin what a capture of this many rows needs, which cannot pin: no eager call may have had
        as many."""
        if self._row_bytes:
            self.memory.reserve(self._bytes_with_kept(rows), rows * self._row_bytes)

    def _out_kept(self, input_bytes: int, tensor: Tensor) -> "Tensor | _Offloaded":
        saved = self.out(tensor)
        if isinstance(saved, _Offloaded):
            saved.layer.kept_bytes += tensor.nbytes
            saved.layer.kept_last = weakref.ref(saved)
            self._most_kept = max(self._most_kept, saved.layer.kept_bytes / input_bytes)
        return saved

    def finish(self) -> None:
        """End a forward whose backward is captured on its own: its copies end with it."""
        if self._layer is not None:
            self._layer.end()
            self._layer.let_go()

    def out(self, tensor: Tensor) -> "Tensor | _Offloaded":
        """Copy a large tensor to the host, as part of the layer that last called `hooks`."""
        if not _is_worth_it(tensor):
            return tensor
        if tensor.device not in self._copies:
            self._copies[tensor.device] = torch.cuda.Stream(tensor.device)
        taken = self.memory.take(tensor.nbytes, is_capturing(tensor))
        if taken is None:
            self._say_full()
            return tensor
        assert self._layer is not None
        return _Offloaded(tensor, taken, self._copies[tensor.device], self._layer)

    @staticmethod
    def back(saved: "Tensor | _Offloaded") -> Tensor:
        """Bring back a tensor that `out` took."""
        return saved if isinstance(saved, Tensor) else saved.fetch()

    def _say_full(self) -> None:
        if not self._said_full:
            self._said_full = True
            warn(
                f"checkpoint: {self.memory.limit_bytes / 2**30:.1f} GiB of host memory do not hold "
                "the inputs of all layers, and the rest stays on the GPU: raise host_gib, or train "
                "on shorter rows"
            )

    def __str__(self) -> str:
        """Say what the last forward put into host memory. Empty before the first."""
        if "memory" not in vars(self):
            return ""
        layers = [*_from(self._layer)]
        inputs = sum(bool(layer.tensors) for layer in layers)
        kept = sum(bool(layer.kept_bytes) for layer in layers)
        return (
            f"{self.memory.pinned_bytes / 2**30:.1f} of {self.memory.limit_bytes / 2**30:.1f} GiB: "
            f"inputs of {inputs} of {len(layers)} layers, attention of {kept}"
        )


def _is_worth_it(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.nbytes >= OFFLOAD_BYTES


class _Layer:
    """One layer's tensors in host memory: they leave the GPU together and come back together."""

    def __init__(self, before: "_Layer | None"):
        self.before = before  # backward needs it next
        self.tensors: list[weakref.ref[_Offloaded]] = []
        self.kept_bytes = 0  # by `once`
        self.kept_last: weakref.ref[_Offloaded] | None = None  # likewise

    def end(self) -> None:
        """Let go of all but what was kept last: its copy may only have begun, as that of what down
        gives with DoRA. It has the next layer's time."""
        last = None if self.kept_last is None else self.kept_last()
        for offloaded in self._alive():
            if offloaded is not last:
                offloaded.let_go()
        if self.before is not None:
            self.before.let_go()

    def let_go(self) -> None:
        for offloaded in self._alive():
            offloaded.let_go()

    def prefetch(self) -> None:
        for offloaded in self._alive():
            offloaded.prefetch()

    def _alive(self) -> "list[_Offloaded]":
        return [offloaded for tensor in self.tensors if (offloaded := tensor()) is not None]


def _from(layer: "_Layer | None") -> "Iterator[_Layer]":
    """Yield a layer and those before it."""
    while layer is not None:
        yield layer
        layer = layer.before


class _Offloaded:
    """A tensor in host memory, which also lies on the GPU while a copy is in flight. It comes back
    without gaps. layer: the layer that saved it."""

    def __init__(self, tensor: Tensor, taken: Taken, copies: Any, layer: _Layer):
        self.taken, self.copies, self.layer = taken, copies, layer
        layer.tensors.append(weakref.ref(self))
        self.device, self.dtype, self.shape = tensor.device, tensor.dtype, tensor.shape
        self.on_gpu: Tensor | None = tensor.contiguous()
        self._copy(out=True)

    def _copy(self, out: bool) -> None:
        assert self.on_gpu is not None
        self.user = torch.cuda.current_stream(self.device)
        self.copies.wait_stream(self.user)
        sizes = [len(piece) for piece in self.taken.pieces]
        with torch.cuda.stream(self.copies):
            on_gpu = self.on_gpu.view(-1).view(torch.uint8).split(sizes)
            for there, here in zip(self.taken.pieces, on_gpu, strict=True):
                to, source = (there, here) if out else (here, there)
                to.copy_(source, non_blocking=True)
            self.copied = self.copies.record_event()

    def _memory(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def let_go(self) -> None:
        """Free the memory on the GPU once it is copied."""
        if self.on_gpu is not None:
            self.user.wait_event(self.copied)
            self.on_gpu = None

    def prefetch(self) -> None:
        if self.on_gpu is None:
            self.on_gpu = self._memory()
            self._copy(out=False)

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
        self.taken.give_back()
