"""Frozen weights sharded over ranks: each keeps some rows of every weight, and all together gather
a layer's before it runs (`gathering.py`).

    rank 0  rows 0 ... k - 1      |
    rank 1  rows k ... 2 k - 1    |  all-gather  ->  [out, in + width], a `Scratch` of all layers
    ...                           |

A shard has the row stride of the bordered matrix (`buffer.py`), so NCCL writes every row where the
matmul reads it, and nothing is copied. That takes a few bytes more: at rank 32 and 2,048 inputs,
5%. Qwen2.5-32B's layers are 63 GB; on four ranks each keeps 15.6 GB, and sends and receives 3 x
15.6 GB in either pass.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .gathering import WeightSource


class Shard(WeightSource):
    """This rank's rows of a weight [out, in].

    rows: [out / ranks, in]. group: the ranks, each with as many rows, in the order of the weight's.
    """

    where, call = "sharded over ranks", "shard_base"

    def __init__(self, rows: Tensor, group: dist.ProcessGroup):
        shape = torch.Size((rows.shape[0] * group.size(), rows.shape[1]))
        super().__init__(shape, rows.dtype, rows.device)
        self.rows, self.group = rows, group

    @property
    def way(self) -> dist.ProcessGroup:
        return self.group

    @property
    def address(self) -> int:
        return self.rows.data_ptr()

    def space(self, stride: int) -> None:
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

    def copied(self) -> "Shard":
        return Shard(self.rows.clone(), self.group)

    def moved(self, device: torch.device, dtype: torch.dtype) -> "Shard":
        return Shard(self.rows.to(device, dtype), self.group)

    @staticmethod
    def start(pairs: Sequence[tuple["Shard", Tensor]]) -> Callable[[], None]:
        group = pairs[0][0].group
        with dist._coalescing_manager(group, async_ops=True) as work:  # one launch
            for shard, rows in pairs:
                dist.all_gather_into_tensor(rows, shard.memory, group=group)
        return work.wait
