"""Experts' weights in 4 bits, which bitsandbytes' linear layers do not cover.

A parameter [experts, out, in] that holds bitsandbytes' codes of the matrix [experts out, in]. The
fused function has them dequantised into memory that all layers share (`four_bit_parts.py`). All
other code sees a tensor, and each use of it dequantises the whole weight into temporary memory. It
cannot be written to.
"""

import copy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..layer.buffer import PlacedWeight
from .wrapped_weight import SAME, WrappedWeight, aten, written_of

CASTS = None, torch.bfloat16, torch.float16, torch.float32  # what codes can be dequantised to
NOT_SAVED = (
    "this weight is in 4 bits and cannot be saved or read from memory: save the adapters alone, "
    "model.save_pretrained(folder)"
)


class ExpertWeight(WrappedWeight, PlacedWeight):
    """codes: uint8. quant_state: bitsandbytes' QuantState, with the shape and dtype of this."""

    codes: Tensor
    quant_state: Any

    @staticmethod
    @torch.inference_mode(False)  # otherwise it could not be used outside
    def of(codes: Tensor, quant_state: Any) -> "ExpertWeight":
        self: Any = Tensor._make_wrapper_subclass(
            ExpertWeight, quant_state.shape, dtype=quant_state.dtype, device=codes.device
        )
        self.codes, self.quant_state = codes, quant_state
        return self

    @property
    def weight(self) -> Tensor:
        """The codes, as a Linear4bit has them."""
        return self.codes

    @property
    def place(self) -> tuple[int, int]:  # type: ignore[override]
        return self.codes.data_ptr(), self.quant_state.absmax.data_ptr()

    def stand_in(self) -> Tensor:
        """Return a tensor like the matrix [experts out, in], without memory."""
        *rows, inputs = self.shape
        return self.codes.new_zeros(1, dtype=self.dtype).expand(prod(rows), inputs)

    def whole(self) -> Tensor:
        """Return the weight [experts, out, in], dequantised into new memory."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.codes, self.quant_state)

    def moved(self, device: Any, dtype: torch.dtype | None) -> "ExpertWeight":
        """Return these codes on a device, to be dequantised to a dtype. None: as they are."""
        state = copy.copy(self.quant_state)
        state.state2 = copy.copy(state.state2)
        state.to(device or self.device)
        state.dtype = dtype or self.dtype
        return ExpertWeight.of(self.codes.to(device or self.device), state)

    def untyped_storage(self):
        return self.codes.untyped_storage()  # it has none itself

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ExpertWeight):
            raise RuntimeError("this weight is in 4 bits, so it cannot be assigned: load it anew")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.codes, self.quant_state = value.codes, value.quant_state  # moved or cast

    def leave_buffer(self) -> None:
        """Stay as it is: it lies in no buffer."""

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = ExpertWeight.of(self.codes.clone(), copy.deepcopy(self.quant_state))
        return memo.setdefault(id(self), nn.Parameter(copied, requires_grad=False))

    def __reduce_ex__(self, _: Any):
        raise RuntimeError(NOT_SAVED)

    def data_ptr(self) -> int:
        raise RuntimeError(NOT_SAVED)

    @staticmethod
    def run(func: Any, args: Any, kwargs: dict) -> Any:
        first: Any = args[0] if args else None
        if func in SAME:
            return ExpertWeight.of(first.codes, first.quant_state)
        if func is aten._to_copy.default and kwargs.get("dtype") in CASTS:
            return first.moved(kwargs.get("device"), kwargs.get("dtype"))
        if func is aten.set_.source_Tensor and args[1] is first:  # as parametrize does
            return first
        if written_of(ExpertWeight, func, args, kwargs):
            raise RuntimeError(
                f"{func._schema.name.removeprefix('aten::')}: this weight is in 4 bits, so it "
                "cannot be changed: merge adapters into experts in 16 bits"
            )
        args, kwargs = tree_map_only(ExpertWeight, ExpertWeight.whole, (args, kwargs))
        return func(*args, **kwargs)
