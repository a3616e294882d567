"""Weights that do not lie on the GPU as a whole, brought there a layer ahead.

A `WeightSource` says where a weight lies: its rows are spread over ranks (`shards.py`), or all of
them are in host memory (`weights/host_rows.py`). Layers bring theirs into memory that they take in
turns, two sets of it (`scratch.py`). Frozen weights have no gradient, so a step needs nothing else:
each layer's weights once in the forward, and once in the backward, where a recompute shares them.

When a layer begins, `Gathering` starts to bring what followed it the last time into the other set.
Every forward and every backward brings each of its layers once, in their order, even if its weights
happen to be there. So ranks may differ in everything else: one may replay a graph while another
captures it or runs eagerly.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fused_mlp.launching import is_capturing


class WeightSource(ABC):
    """A frozen weight [out, in] that lies elsewhere.

    shape, dtype, device: those of the weight where it is used. where, call: for messages, where it
    is and which call has put it there.
    """

    where: str
    call: str

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device):
        self.shape, self.dtype, self.device = shape, dtype, device
        self.storage = torch.UntypedStorage(1)  # tells those who look for shared weights apart

    @property
    @abstractmethod
    def way(self) -> Hashable:
        """Equal for sources that are brought together."""

    @property
    @abstractmethod
    def address(self) -> int:
        """The place of its memory, which a CUDA graph reads."""

    @abstractmethod
    def space(self, stride: int) -> None:
        """Move the rows this far apart, with zeros between them."""

    @abstractmethod
    def whole(self) -> Tensor:
        """Return the weight in new memory."""

    @abstractmethod
    def copied(self) -> "WeightSource":
        """Return a copy with its own memory."""

    @abstractmethod
    def moved(self, device: torch.device, dtype: torch.dtype) -> "WeightSource":
        """Return the same weight for use on a device, in a dtype."""

    @staticmethod
    @abstractmethod
    def start(pairs: Sequence[tuple[Any, Tensor]]) -> Callable[[], None]:
        """Start to bring sources of one way, spaced alike, into these rows [out, stride], once the
        GPU has done all that it has been given so far. Return a function that has the current
        stream wait for them."""


class Gathered(Protocol):
    """A buffer that has weights from elsewhere. group: which of its layer's it is."""

    key: tuple | None  # None: what lies in it is not this buffer's, or has no adapters
    group: int
    sources: Sequence[tuple[WeightSource, Tensor]]


class _Call(NamedTuple):
    """A call of a layer's function, in forward or in backward."""

    layer: int  # its place in a forward
    group: int  # the first that the function reads: a layer may be two functions
    is_backward: bool


class _Pending(NamedTuple):
    """Weights on their way."""

    buffers: Sequence[Gathered]
    waits: Sequence[Callable[[], None]]
    in_capture: bool


class Gathering:
    """Gathers the weights of a model's layers, a function ahead."""

    def __init__(self) -> None:
        self._buffers: dict[_Call, Sequence[Gathered]] = {}
        self._next: dict[_Call, _Call] = {}
        self._last: _Call | None = None
        self._pending: _Pending | None = None

    def __reduce__(self):
        return Gathering, ()  # a copied model gathers by itself

    def bring(self, layer: int, buffers: Sequence[Gathered]) -> None:
        """Have the weights of a layer's function in its buffers, and start with those of the next.

        layer: its place in a forward. The layer after it has other matrices.
        """
        is_backward = torch._C._current_graph_task_id() != -1  # as FSDP2 asks
        now = _Call(layer, buffers[0].group, is_backward)
        last, self._last = self._last, now
        known, self._buffers[now] = self._buffers.get(now), buffers
        if last == now and known == buffers:
            return  # recomputed just before
        self._learn(last, now)
        if self._wait(buffers) != buffers:
            self._start(buffers)
            self._wait(buffers)
        if (following := self._next.get(now)) is not None:
            self._start(self._buffers[following])

    def _learn(self, last: _Call | None, now: _Call) -> None:
        """Note which call follows the last one within a forward, or within a backward, and has
        other matrices. A graph cannot end while weights are on their way, so after the last of
        either nothing follows."""
        if last is None:
            return
        is_same_pass = last.is_backward == now.is_backward
        is_next = now[:2] < last[:2] if now.is_backward else now[:2] > last[:2]
        has_others = last.layer == now.layer or (last.layer - now.layer) % 2 == 1
        if is_same_pass and is_next and has_others:
            self._next[last] = now
        else:
            self._next.pop(last, None)

    def _start(self, buffers: Sequence[Gathered]) -> None:
        """Start to bring these buffers' weights."""
        by_way: dict[Hashable, list[tuple[WeightSource, Tensor]]] = {}
        for buffer in buffers:
            buffer.key = None
            for source, rows in buffer.sources:
                source.space(rows.stride(0))  # there may be buffers of another rank
                by_way.setdefault(source.way, []).append((source, rows))
        waits = [pairs[0][0].start(pairs) for pairs in by_way.values()]
        self._pending = _Pending(buffers, waits, _in_capture(buffers))

    def _wait(self, now: Sequence[Gathered]) -> Sequence[Gathered] | None:
        """Wait for what has been started. Return its buffers, if there are any. After an error a
        capture may have left some that never come: forget them."""
        pending, self._pending = self._pending, None
        if pending is None or pending.in_capture != _in_capture(now):
            return None
        for wait in pending.waits:
            wait()
        return pending.buffers


def _in_capture(buffers: Sequence[Gathered]) -> bool:
    return is_capturing(buffers[0].sources[0][1])
