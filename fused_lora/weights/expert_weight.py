"""Experts' weights in 4 bits, which bitsandbytes' linear layers do not cover.

A parameter [experts, out, in] that holds codes (`kernels/packed_4bit.py`) of the matrix [experts
out, in]. The fused function has them dequantised into memory that all layers share
(`four_bit_parts.py`). All other code sees a tensor, and each use of it dequantises the whole weight
into temporary memory. What is written to it is quantised again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kernels.packed_4bit import Packed4bit, dequantized
from ..reading.four_bit import packed_from
from .mxfp4 import encoded_in_mxfp4
from .wrapped_weight import SAME, BaseWeight, aten, written_of

CASTS = None, torch.bfloat16, torch.float16, torch.float32  # what codes can be dequantised to
NOT_SHARDED = (
    "fully_shard would keep its parts of this weight dequantised: give it experts in 4 bits as "
    "ignored_params"
)


class Encoding(NamedTuple):
    """quant_type: "nf4", "fp4" or "mxfp4". double_quant: of the scales of the first two.
    is_transposed: the codes of a weight [experts, in, out] are those of [experts out, in]."""

    quant_type: str
    double_quant: bool = False
    is_transposed: bool = False

    def encode(self, weight: Tensor) -> Packed4bit:
        """Return a weight of experts in 4 bits."""
        weight = (weight.mT if self.is_transposed else weight).contiguous()
        if self.quant_type == "mxfp4":
            return encoded_in_mxfp4(weight)
        from bitsandbytes.functional import quantize_4bit

        options: dict[str, Any] = {
            "compress_statistics": self.double_quant,
            "quant_type": self.quant_type,
        }
        return packed_from(*quantize_4bit(weight, **options))


class ExpertWeight(BaseWeight):
    """packed: the weight. encoding: how other values become one."""

    packed: Packed4bit
    encoding: Encoding
    kept = "in 4 bits"

    @staticmethod
    @torch.inference_mode(False)  # otherwise it could not be used outside
    def of(
        packed: Packed4bit, encoding: Encoding, shape: torch.Size, dtype: torch.dtype
    ) -> "ExpertWeight":
        self: Any = Tensor._make_wrapper_subclass(
            ExpertWeight, shape, dtype=dtype, device=packed.codes.device
        )
        self.packed, self.encoding = packed, encoding
        return self

    @property
    def place(self) -> tuple[int, int]:  # type: ignore[override]
        return self.packed.codes.data_ptr(), self.packed.absmax.data_ptr()

    def stand_in(self) -> Tensor:
        """Return a tensor like the matrix [experts out, in], without memory."""
        return self.packed.codes.new_zeros(1, dtype=self.dtype).expand(self.packed.shape)

    def shaped(self, matrix: Tensor) -> Tensor:
        """Return the matrix [experts out, in] in the shape of this weight."""
        weight = matrix.view(len(self), -1, matrix.shape[1])
        return weight.mT if self.encoding.is_transposed else weight

    def whole(self) -> Tensor:
        """Return the weight, dequantised into new memory."""
        return self.shaped(dequantized(self.packed, self.dtype))

    def moved(self, move: Callable[[Tensor], Tensor], dtype: torch.dtype) -> "ExpertWeight":
        """Return the codes that `move` makes of these, to be dequantised to a dtype."""
        return ExpertWeight.of(
            tree_map_only(Tensor, move, self.packed), self.encoding, self.shape, dtype
        )

    def rewrite(self, value: Tensor) -> None:
        """Take another weight's value. The codes stay where they are."""
        if isinstance(value, ExpertWeight) and value.encoding == self.encoding:
            other = value.packed
        else:
            other = self.encoding.encode(value.to(self.device, self.dtype))
        for mine, one in zip(tree_leaves(self.packed), tree_leaves(other), strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(one)

    def untyped_storage(self):
        return self.packed.codes.untyped_storage()  # it has none itself

    def assign(self, value: Tensor) -> None:
        if not isinstance(value, ExpertWeight):
            if value.dtype != self.dtype:
                raise RuntimeError(
                    f"experts in 4 bits cannot be {value.dtype}: leave the model in bfloat16, "
                    "float16 or float32"
                )
            self.rewrite(value)
            return
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.packed, self.encoding = value.packed, value.encoding  # moved or cast

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = self.moved(Tensor.clone, self.dtype)
        return memo.setdefault(id(self), nn.Parameter(copied, requires_grad=False))

    @staticmethod
    def run(func: Any, args: Any, kwargs: dict) -> Any:
        first: Any = args[0] if args else None
        if func in SAME:
            return first.moved(lambda one: one, first.dtype)
        if func is aten.clone.default:
            return first.moved(Tensor.clone, first.dtype)
        if func is aten._to_copy.default and kwargs.get("dtype") in CASTS:
            device = kwargs.get("device") or first.device
            return first.moved(lambda one: one.to(device), kwargs.get("dtype") or first.dtype)
        if func is aten.set_.source_Tensor and args[1] is first:  # as parametrize does
            return first
        if func is aten.split.Tensor:
            raise RuntimeError(NOT_SHARDED)
        if func is aten.copy_.default and isinstance(first, ExpertWeight):
            first.rewrite(args[1])
            return first
        written = written_of(ExpertWeight, func, args, kwargs)
        every = [one for one in tree_leaves((args, kwargs)) if isinstance(one, ExpertWeight)]
        wholes = {id(one): one.whole() for one in every}
        args, kwargs = tree_map_only(ExpertWeight, lambda one: wholes[id(one)], (args, kwargs))
        result = func(*args, **kwargs)
        for one in written:
            one.rewrite(wholes[id(one)])
        return written[0] if written else result
