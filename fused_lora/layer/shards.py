"""Frozen weights sharded over ranks: each keeps some rows of every weight, and all together gather
a layer's before it runs.

    rank 0  rows 0 ... k - 1      |
    rank 1  rows k ... 2 k - 1    |  all-gather  ->  [out, in + width], a `Scratch` of all layers
    ...                           |

A shard has the row stride of the bordered matrix (`buffer.py`), so NCCL writes every row where the
matmul reads it, and nothing is copied. That takes a few bytes more: at rank 32 and 2,048 inputs,
5%. Frozen weights have no gradient, so a step needs nothing else: one all-gather per layer in the
forward, one in the backward. Qwen2.5-32B's layers are 63 GB; on four ranks each keeps 15.6 GB, and
sends and receives 3 x 15.6 GB in either pass.

When a layer begins, `Gathering` starts the all-gather of what followed it the last time, into a
second set of matrices. Every forward and every backward gathers each of its layers once, in their
order, even if its weights happen to be there. So ranks may differ in everything else: one may
replay a graph while another captures it or runs eagerly.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Shard:
    """This rank's rows of a weight [out, in].

    rows: [out / ranks, in]. group: the ranks, each with as many rows, in the order of the weight's.
    """

    def __init__(self, rows: Tensor, group: dist.ProcessGroup):
        self.rows, self.group = rows, group
        self.shape = torch.Size((rows.shape[0] * group.size(), rows.shape[1]))

    def space(self, stride: int) -> None:
        """Move the rows this far apart, with zeros between them."""
        if self.rows.stride(0) != stride or self.rows.storage_offset():
            spaced = self.rows.new_zeros(self.rows.shape[0], stride)
            self.rows = spaced[:, : self.shape[1]].copy_(self.rows)

    @property
    def memory(self) -> Tensor:
        """The rows with what is between them, [out / ranks, stride]."""
        stride = self.rows.stride(0)
        return self.rows.as_strided((self.rows.shape[0], stride), (stride, 1))

    def whole(self) -> Tensor:
        """Return the weight, gathered into new memory. All ranks have to ask for it."""
        weight = self.rows.new_empty(self.shape)
        dist.all_gather_into_tensor(weight, self.rows.contiguous(), group=self.group)
        return weight


class Gathered(Protocol):
    """A buffer that has sharded weights. group: which of its layer's it is."""

    key: tuple | None  # None: what lies in it is not this buffer's, or has no adapters
    group: int
    shards: Sequence[tuple[Shard, Tensor]]


class _Call(NamedTuple):
    """A call of a layer's function, in forward or in backward."""

    layer: int  # its place in a forward
    group: int  # the first that the function reads: a layer may be two functions
    is_backward: bool


class Gathering:
    """Gathers the weights of a model's layers, a function ahead."""

    def __init__(self) -> None:
        self._buffers: dict[_Call, Sequence[Gathered]] = {}
        self._next: dict[_Call, _Call] = {}
        self._last: _Call | None = None
        self._pending: tuple[Sequence[Gathered], list] | None = None  # and what to wait for

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
        ahead = self._wait()
        if ahead != buffers:
            self._start(buffers)
            self._wait()
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
        """Gather into the matrices once the GPU has done all that it has been given so far."""
        by_group: dict[dist.ProcessGroup, list[tuple[Shard, Tensor]]] = {}
        for buffer in buffers:
            buffer.key = None
            for shard, rows in buffer.shards:
                shard.space(rows.stride(0))  # there may be buffers of another rank
                by_group.setdefault(shard.group, []).append((shard, rows))
        works = []
        for group, pairs in by_group.items():
            with dist._coalescing_manager(group, async_ops=True) as work:  # one launch
                for shard, rows in pairs:
                    dist.all_gather_into_tensor(rows, shard.memory, group=group)
            works.append(work)
        self._pending = buffers, works

    def _wait(self) -> Sequence[Gathered] | None:
        """Wait for what has been started. Return its buffers, if there are any."""
        if self._pending is None:
            return None
        (buffers, works), self._pending = self._pending, None
        for work in works:
            work.wait()
        return buffers
