"""Weights that lie elsewhere: `shard_base` has sharded them over ranks, or `host_base` has moved
them into host memory.

A layer that runs whole brings its weights into memory that layers take in turns
(`layer/gathering.py`). All other code sees a tensor on the GPU: every use brings the whole weight
into temporary memory. Of a sharded one all ranks have to ask for it. It cannot be written to.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..layer.gathering import WeightSource
from .wrapped_weight import SAME, BaseWeight, aten, written_of


class SourcedWeight(BaseWeight):
    """Rows [row, row + out) of a source."""

    source: WeightSource
    row: int

    @classmethod
    @torch.inference_mode(False)  # otherwise it could not be used outside
    def of(cls, source: WeightSource, row: int = 0, count: int | None = None) -> "SourcedWeight":
        size = (source.shape[0] if count is None else count, source.shape[1])
        return cls._made(size, source, row)

    @classmethod
    def _made(cls, size: tuple[int, ...], source: WeightSource, row: int = 0) -> Any:
        self: Any = Tensor._make_wrapper_subclass(
            cls, size, dtype=source.dtype, device=source.device
        )
        self.source, self.row = source, row
        return self

    def like(self, source: WeightSource) -> "SourcedWeight":
        """Return the same rows of another source."""
        return self.of(source, self.row, self.shape[0])

    @property
    def place(self) -> tuple[int, int]:  # type: ignore[override]
        return self.source.address, self.row

    @property
    def kept(self) -> str:  # type: ignore[override]
        return self.source.where

    def whole(self) -> Tensor:
        """Return these rows in new memory."""
        return self.source.whole()[self.row : self.row + self.shape[0]]

    def untyped_storage(self):
        return self.source.storage  # it has none itself

    def assign(self, value: Tensor) -> None:
        if not isinstance(value, SourcedWeight):
            raise RuntimeError(self._refused("assigned", "load and merge"))
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.source = value.source  # moved or cast

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = nn.Parameter(self.like(self.source.copied()), requires_grad=False)
        return memo.setdefault(id(self), copied)

    def _refused(self, done: str, to_do: str) -> str:
        return (
            f"this weight is {self.kept}, so it cannot be {done}: {to_do} before {self.source.call}"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and not kwargs and isinstance(args[1], SourcedWeight):
                return _Linear.apply(*args)
            return func(*args, **(kwargs or {}))

    @staticmethod
    def run(func: Any, args: Any, kwargs: dict) -> Any:
        first: Any = args[0] if args else None
        if func in SAME:
            return first.like(first.source)
        if func is aten._to_copy.default:
            device, dtype = kwargs.get("device"), kwargs.get("dtype")
            return first.like(first.source.moved(device or first.device, dtype or first.dtype))
        is_split = func is aten.split_with_sizes.default and not any(args[2:])
        if is_split and type(first) is SourcedWeight:
            starts = (first.row + sum(args[1][:i]) for i in range(len(args[1])))
            pairs = zip(starts, args[1], strict=True)
            return [first.of(first.source, start, size) for start, size in pairs]
        if written := written_of(SourcedWeight, func, args, kwargs):
            name = func._schema.name.removeprefix("aten::")
            raise RuntimeError(f"{name}: {written[0]._refused('changed', 'do that')}")
        args, kwargs = tree_map_only(SourcedWeight, lambda one: one.whole(), (args, kwargs))
        return func(*args, **kwargs)


class Params4bit(SourcedWeight):
    """Codes of a weight in 4 bits, [codes, 1] as bitsandbytes has them. PEFT knows codes by the
    name of this class, and asks for the two properties.

    quant_state: bitsandbytes', which stays on the GPU.
    """

    quant_state: Any

    @property
    def compress_statistics(self) -> bool:
        return self.quant_state.nested

    @property
    def quant_type(self) -> str:
        return self.quant_state.quant_type

    @staticmethod
    @torch.inference_mode(False)
    def of_codes(source: WeightSource, quant_state: Any) -> "Params4bit":
        self = Params4bit._made((source.shape[1], 1), source)
        self.quant_state = quant_state
        return self

    def like(self, source: WeightSource) -> "Params4bit":
        if source.dtype != self.dtype:
            raise RuntimeError(self._refused("cast", "cast the model"))
        if source.device != self.device:
            self.quant_state.to(source.device)  # as bitsandbytes does
        return self.of_codes(source, self.quant_state)

    def whole(self) -> Tensor:
        return self.source.whole().view(-1, 1)

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied: Any = super().__deepcopy__(memo)
        copied.quant_state = copy.deepcopy(self.quant_state, memo)
        return copied

    @staticmethod
    def run(func: Any, args: Any, kwargs: dict) -> Any:
        first: Any = args[0] if args else None
        if func is aten.view.default and args[1] == [-1, 1]:  # bitsandbytes saves it for backward
            return first.like(first.source)
        is_backward = torch._C._current_graph_task_id() != -1
        if func is torch.ops.bitsandbytes.dequantize_4bit.default and not is_backward:
            raise RuntimeError(first._refused("dequantised", "merge, or add DoRA adapters,"))
        return SourcedWeight.run(func, args, kwargs)


class _Linear(torch.autograd.Function):
    """F.linear with a weight that lies elsewhere, which backward brings again."""

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
