"""The weights that `shard_base` has sharded over ranks.

A layer that runs whole gathers its weights into matrices that all layers take in turns
(`layer/shards.py`). All other code sees a tensor on the GPU: every use gathers the whole weight
into temporary memory, so all ranks have to do the same. It cannot be written to.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..layer.buffer import PlacedWeight
from ..layer.shards import Shard
from .wrapped_weight import SAME, WrappedWeight, aten, written_of

NOT_SAVED = (
    "this weight is sharded over ranks and cannot be saved or read from memory: save the adapters "
    "alone, model.save_pretrained(folder)"
)


class ShardedWeight(WrappedWeight, PlacedWeight):
    """Rows [row, row + out) of a weight. Each rank has a shard of the whole."""

    shard: Shard
    row: int

    @staticmethod
    @torch.inference_mode(False)  # otherwise it could not be used outside
    def of(shard: Shard, row: int = 0, count: int | None = None) -> "ShardedWeight":
        size = (shard.shape[0] if count is None else count, shard.shape[1])
        self: Any = Tensor._make_wrapper_subclass(
            ShardedWeight, size, dtype=shard.rows.dtype, device=shard.rows.device
        )
        self.shard, self.row = shard, row
        return self

    @property
    def place(self) -> tuple[int, int]:  # type: ignore[override]
        return self.shard.rows.data_ptr(), self.row

    def whole(self) -> Tensor:
        """Return these rows, gathered. All ranks have to ask for them."""
        return self.shard.whole()[self.row : self.row + self.shape[0]]

    def untyped_storage(self):
        return self.shard.rows.untyped_storage()  # it has none itself

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ShardedWeight):
            raise RuntimeError(
                "this weight is sharded over ranks, so it cannot be assigned: load and merge "
                "before shard_base"
            )
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.shard = value.shard  # moved or cast

    def leave_buffer(self) -> None:
        """Stay as it is: it lies in no buffer."""

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = ShardedWeight.of(Shard(self.shard.rows.clone(), self.shard.group), self.row)
        return memo.setdefault(id(self), nn.Parameter(copied, requires_grad=False))

    # often one rank alone saves, and would wait for the others

    def __reduce_ex__(self, _: Any):
        raise RuntimeError(NOT_SAVED)

    def data_ptr(self) -> int:
        raise RuntimeError(NOT_SAVED)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and not kwargs and isinstance(args[1], ShardedWeight):
                return _Linear.apply(*args)
            return func(*args, **(kwargs or {}))

    @staticmethod
    def run(func: Any, args: Any, kwargs: dict) -> Any:
        first: Any = args[0] if args else None
        if func in SAME:
            return ShardedWeight.of(first.shard, first.row, first.shape[0])
        if func is aten._to_copy.default:
            rows = func(first.shard.rows, *args[1:], **kwargs)
            return ShardedWeight.of(Shard(rows, first.shard.group), first.row, first.shape[0])
        if func is aten.split_with_sizes.default and not any(args[2:]):
            starts = (first.row + sum(args[1][:i]) for i in range(len(args[1])))
            pairs = zip(starts, args[1], strict=True)
            return [ShardedWeight.of(first.shard, start, size) for start, size in pairs]
        if written_of(ShardedWeight, func, args, kwargs):
            raise RuntimeError(
                f"{func._schema.name.removeprefix('aten::')}: this weight is sharded over ranks, "
                "so it cannot be changed: do that before shard_base"
            )
        args, kwargs = tree_map_only(ShardedWeight, ShardedWeight.whole, (args, kwargs))
        return func(*args, **kwargs)


class _Linear(torch.autograd.Function):
    """F.linear with a sharded weight, which backward gathers again."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight.whole(), bias)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        grad_x = grad @ weight.whole() if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias
