"""Fp8Weight: a base layer's weight of which FP8 codes lie on the GPU, and a weight to all others.

A layer that runs whole in FP8 multiplies the codes (`fp8.py`). Whatever else reads the weight, a
layer that steps aside say, gets what the codes stand for, in memory of the moment. Whatever writes
it (merging, loading) changes the original, which lies on the host, and the codes are made anew.
Moved, cast, copied or pickled it is the original again, as a plain parameter.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map_only

from ..fp8 import SIZES, Fp8Buffer, codes_and_scales
from ..kernels.fp8_rows import E4M3

aten = torch.ops.aten
FP8_DTYPES = (torch.bfloat16,)  # that `_scaled_mm` gives with a scale for each row
OLDEST_WITH_FP8 = (8, 9)  # compute capability
# What gives the same weight, and what gives some of its rows.
SAME = {aten.detach.default, aten.alias.default}
MOVES = {aten._to_copy.default, aten.clone.default}


class Fp8Weight(torch.Tensor):
    """Rows [row, row + out) of a buffer's weight, in the dtype of the products.

    original: [out, in] on the host, in that dtype.
    """

    buffer: Fp8Buffer
    row: int
    original: Tensor

    @staticmethod
    def __new__(cls, buffer: Fp8Buffer, row: int, original: Tensor):
        self = torch.Tensor._make_wrapper_subclass(
            cls, original.shape, dtype=original.dtype, device=buffer.scales.device
        )
        self.buffer, self.row, self.original = buffer, row, original
        return self

    @property
    def codes(self) -> Tensor:
        return self.buffer.weight[self.row : self.row + len(self.original)]

    @property
    def scales(self) -> Tensor:
        return self.buffer.scales[self.row : self.row + len(self.original)]

    def dequantised(self) -> Tensor:
        """The numbers that the codes stand for, [out, in] in its dtype, new."""
        return (self.codes.to(torch.float32) * self.scales[:, None]).to(self.dtype)

    def full(self) -> nn.Parameter:
        """The original as a plain parameter in the place of this one."""
        return nn.Parameter(self.original.to(self.device, copy=True), requires_grad=False)

    # What its memory is to those that save it.

    def data_ptr(self) -> int:
        return self.original.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.original.untyped_storage()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fp8Weight({list(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        return memo.setdefault(id(self), self.full())

    def __reduce_ex__(self, _):
        return nn.Parameter, (self.original.to(self.device), False)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ):
        kwargs = kwargs or {}
        if func is aten.copy_.default and isinstance(args[1], Fp8Weight):  # as load_state_dict's
            args = (args[0], args[1].original, *args[2:])
        first = args[0] if args else None
        if isinstance(first, Fp8Weight):
            if func in SAME:
                return Fp8Weight(first.buffer, first.row, first.original)
            if func in MOVES:
                return func(first.original.to(first.device), *args[1:], **kwargs)
            if func is aten.split_with_sizes.default and not any(args[2:]):
                return first._split(args[1])
            if func._schema.arguments[0].is_write:
                return first._change(func, _plain(args[1:]), _plain(kwargs))
        return func(*_plain(args), **_plain(kwargs))

    def _split(self, sizes: list[int]) -> list["Fp8Weight"]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Fp8Weight(self.buffer, self.row + start, self.original[start : start + size])
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _change(self, func: Callable, args: tuple, kwargs: dict) -> "Fp8Weight":
        weight = self.original.to(self.device)
        func(weight, *args, **kwargs)
        self.original.copy_(weight)
        codes, scales = codes_and_scales(weight)
        self.scales.copy_(scales)
        self.buffer.write(self.row, codes)
        return self


def _plain(tree: Any) -> Any:
    return tree_map_only(Fp8Weight, Fp8Weight.dequantised, tree)


def why_not_in_fp8(weight: Tensor) -> str | None:
    """Return the reason if products with this weight may not be in FP8."""
    if any(size % SIZES for size in weight.shape):
        return f"a base weight is {list(weight.shape)}: FP8 wants multiples of {SIZES}"
    if not weight.is_cuda:
        return None
    if weight.dtype not in (*FP8_DTYPES, E4M3):
        return f"its weights are {weight.dtype}: for FP8 load the model in bfloat16"
    if torch.cuda.get_device_capability(weight.device) < OLDEST_WITH_FP8:
        name = torch.cuda.get_device_name(weight.device)
        return f"{name} has no products in FP8 (sm_89 and newer have): leave fp8 out"
    return None


def become_fp8(parameter: Tensor, buffer: Fp8Buffer, row: int, original: Tensor) -> None:
    """Make a parameter, which stays the same object, these rows of a buffer."""
    weight: Any = Fp8Weight(buffer, row, original)
    weight._is_param = True  # as isinstance(_, nn.Parameter) asks
    swap_tensors(parameter, weight)


def become_plain(parameter: Fp8Weight) -> None:
    """Make it its original again, on its device."""
    swap_tensors(parameter, parameter.full())


def keep_from_ddp(model: Any) -> None:
    """Let DistributedDataParallel not send this model's FP8 weights from the first rank, as it
    sends all others: each rank has made or loaded the same, what would be sent of Fp8Weight is what
    its codes stand for, and codes Gloo cannot send."""
    names = [
        name
        for name, one in model.named_parameters()
        if isinstance(one, Fp8Weight) or (one.is_floating_point() and one.element_size() == 1)
    ]
    if names:
        before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        model._ddp_params_and_buffers_to_ignore = list(dict.fromkeys([*before, *names]))
