"""Fp8Weight: a base layer's weight with FP8 codes on the GPU, which looks like a plain weight.

A layer that runs whole in FP8 multiplies the codes (`layer/fp8/`). All other code sees a tensor on
the GPU:

    a matmul           multiplies the dequantised codes, as a layer that steps aside should
    any other read     copies the original from the host into temporary memory
    a write in place   changes the original, also through views, and quantises it again
    an assignment      to its .data makes it the plain parameter that is assigned; this is how
                       modules are moved and cast, and how PEFT merges safely

Copied or pickled, it becomes the original as a plain parameter. The next forward that runs whole
quantises any plain weight.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map_only

from ..foreign.parallel import keep_from_ddp
from ..kernels.fp8_rows import E4M3, SIZES, codes_and_scales
from ..layer.fp8.buffer import Fp8Buffer
from .expert_weight import ExpertWeight
from .wrapped_weight import SAME, BaseWeight, WrappedWeight, aten, written_of

FP8_DTYPES = (torch.bfloat16,)  # outputs of `_scaled_mm` with row scales
OLDEST_WITH_FP8 = (8, 9)  # compute capability
PRODUCTS = {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "linear", "mm", "mv", "vdot"}


class _Coded(WrappedWeight):
    """A weight in FP8 or a view of it. steps: how to get this view from the whole weight."""

    weight: "Fp8Weight"
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    def of(self, whole: Tensor) -> Tensor:
        """Apply this view's steps to a tensor of the whole weight."""
        for step in self.steps:
            whole = step(whole)
        return whole

    def exact(self) -> Tensor:
        """Return the original's values, on this weight's device."""
        return self.of(self.weight.whole())

    def dequantised(self) -> Tensor:
        """Return the dequantised codes as a new tensor in this weight's dtype."""
        weight = self.weight
        whole = weight.codes.to(torch.float32) * weight.scales[:, None]
        return self.of(whole.to(weight.dtype))

    def __deepcopy__(self, memo: dict) -> Tensor:
        return memo.setdefault(id(self), self.exact().clone())

    def __reduce_ex__(self, protocol):
        return self.exact().clone().__reduce_ex__(protocol)

    # The wrapper has no memory. Code that asks for it, say to compare weights, gets the original's
    # on the host.

    def untyped_storage(self):
        return self.weight.original.untyped_storage()

    def data_ptr(self) -> int:
        return self.of(self.weight.original).data_ptr()

    def __dlpack__(self, **_: Any):
        raise BufferError("a weight in FP8 has no memory to share: take that of a .clone()")

    def tolist(self):
        return self.exact().tolist()

    @staticmethod
    def run(func: Any, args: Any, kwargs: dict) -> Any:
        first = args[0] if args else None
        if func is aten.detach_.default:
            return first
        if isinstance(first, Fp8Weight):
            if func in SAME:
                return Fp8Weight.rows_of(first.buffer, first.row, first.original, first.changes)
            if func is aten.split_with_sizes.default and not any(args[2:]):
                starts = [sum(args[1][:i]) for i in range(len(args[1]))]
                return [
                    Fp8Weight.rows_of(first.buffer, first.row + start, original, first.changes)
                    for start, original in zip(starts, first.original.split(args[1]), strict=True)
                ]
        if isinstance(first, _Coded):
            if func.is_view:
                return _views(first, func, args[1:], kwargs)
            if func is aten._to_copy.default and kwargs.get("device") is not None:
                return func(first.of(first.weight.original), *args[1:], **kwargs)  # from the host
        if written := written_of(_Coded, func, args, kwargs):
            return _write(written, func, args, kwargs)
        is_product = func._schema.name.removeprefix("aten::").rstrip("_") in PRODUCTS
        read = _Coded.dequantised if is_product else _Coded.exact
        args, kwargs = tree_map_only(_Coded, read, (args, kwargs))
        return func(*args, **kwargs)


class Fp8Weight(_Coded, BaseWeight):
    """Rows [row, row + out) of a buffer's weight, in the compute dtype.

    original: [out, in] on the host, in that dtype. changes: a counter shared by all weights of one
    original.
    """

    buffer: Fp8Buffer
    row: int
    original: Tensor
    changes: list[int]

    @staticmethod
    def __new__(cls, data: Tensor, requires_grad: bool = True):
        """Return a plain parameter: accelerate calls the class of a parameter that it replaces."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def rows_of(
        cls, buffer: Fp8Buffer, row: int, original: Tensor, changes: list[int]
    ) -> "Fp8Weight":
        self = _wrapper(cls, original, buffer)
        self.buffer, self.row, self.original, self.changes = buffer, row, original, changes
        self.place = buffer.serial, row
        return self

    @property
    def weight(self) -> "Fp8Weight":  # type: ignore[override]
        return self

    @property
    def codes(self) -> Tensor:
        return self.buffer.weight[self.row : self.row + len(self.original)]

    @property
    def scales(self) -> Tensor:
        return self.buffer.scales[self.row : self.row + len(self.original)]

    def lies_in(self, buffer: Fp8Buffer, row: int, shape: torch.Size) -> bool:
        """Return whether these rows of a buffer are the codes of its current original."""
        is_place = self.buffer is buffer and self.row == row and self.shape == shape
        return is_place and buffer.made_of.get(row) == self.changes[0]

    def whole(self) -> Tensor:
        """Return the original on this weight's device. On the CPU that is no copy."""
        return self.original.to(self.device)

    def assign(self, value: Tensor) -> None:
        # torch would change only this object's shape and dtype, not the codes and the original
        if not isinstance(value, Tensor):
            raise TypeError(f"a weight's data must be a tensor, got {type(value).__name__}")
        if isinstance(value, Fp8Weight) and value.lies_in(self.buffer, self.row, self.shape):
            return  # `weight.data += delta` ends like this
        plain = value.exact().clone() if isinstance(value, _Coded) else value
        _become(self, nn.Parameter(plain, self.requires_grad))

    def full(self) -> nn.Parameter:
        """Return the original as a plain parameter to replace this one."""
        return nn.Parameter(self.original.to(self.device, copy=True), self.requires_grad)

    def leave_buffer(self) -> None:
        """Become the original again, on this device and as the same object."""
        _become(self, self.full())

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        return memo.setdefault(id(self), self.full())

    def __reduce_ex__(self, _):
        return nn.Parameter, (self.original.to(self.device), self.requires_grad)

    def rewrite(self, whole: Tensor) -> None:
        """Set the original to this, and update the codes."""
        self.original.copy_(whole)
        codes, scales = codes_and_scales(whole)
        self.scales.copy_(scales)
        self.buffer.write(self.row, codes)
        self.buffer.key = None  # the border's codes use the old scales
        self.changes[0] += 1
        self.buffer.made_of[self.row] = self.changes[0]


class Fp8View(_Coded):
    """A view of an Fp8Weight. Every read makes it anew, and writes go through to the weight."""

    @staticmethod
    def __new__(cls, weight: Fp8Weight, steps: tuple, shown: Tensor):
        self = _wrapper(cls, shown, weight.buffer)
        self.weight, self.steps = weight, steps
        return self


@torch.inference_mode(False)  # a view of an outside tensor must not be an inference tensor
def _wrapper(cls: Any, like: Tensor, buffer: Fp8Buffer) -> Any:
    return Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(),
        dtype=like.dtype, device=buffer.scales.device,
    )  # fmt: skip


def _views(one: _Coded, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the view, or list of views, that a view function makes of this."""
    weight = one.weight
    whole = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    shown = func(one.of(whole), *args, **kwargs)

    def view(shown: Tensor, pick: Callable = lambda given: given) -> Fp8View:
        step = lambda whole: pick(func(whole, *args, **kwargs))  # noqa: E731
        return Fp8View(weight, (*one.steps, step), shown)

    if isinstance(shown, Tensor):
        return view(shown)
    return [view(each, lambda given, i=i: given[i]) for i, each in enumerate(shown)]


def _write(written: list[_Coded], func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a function that writes to FP8 weights on their originals, and quantise these again."""
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(
            f"{func._schema.name.removeprefix('aten::')} of a weight in FP8 would leave its codes "
            "as they are: assign to its .data, or unfuse the model first"
        )
    wholes: dict[tuple, Tensor] = {}  # views of one weight see each other's writes
    plain: dict[int, Tensor] = {}

    def plain_of(one: _Coded) -> Tensor:
        weight = one.weight
        key = weight.original.data_ptr(), weight.original.shape
        if key not in wholes:
            wholes[key] = weight.whole()
        return plain.setdefault(id(one), one.of(wholes[key]))

    plain_args, plain_kwargs = tree_map_only(_Coded, plain_of, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for one in written:
        weight = one.weight
        weight.rewrite(wholes[weight.original.data_ptr(), weight.original.shape])
    itself = {id(plain[id(one)]): one for one in written}
    return tree_map_only(Tensor, lambda given: itself.get(id(given), given), result)


def why_not_in_fp8(weight: Tensor) -> str | None:
    """Return the reason if matmuls with this weight cannot be in FP8."""
    if any(size % SIZES for size in weight.shape):
        return f"a base weight is {list(weight.shape)}: FP8 needs multiples of {SIZES}"
    if not weight.is_cuda:
        return None
    if weight.dtype not in (*FP8_DTYPES, E4M3):
        return f"its weights are {weight.dtype}: for FP8 load the model in bfloat16"
    if torch.cuda.get_device_capability(weight.device) < OLDEST_WITH_FP8:
        name = torch.cuda.get_device_name(weight.device)
        return f"{name} has no FP8 matmul (sm_89 and newer have): leave fp8 out"
    return None


def become_fp8(parameter: Tensor, buffer: Fp8Buffer, row: int, original: Tensor) -> None:
    """Turn a parameter into these rows of a buffer. It stays the same object."""
    changes = getattr(parameter, "changes", [0])
    weight: Any = Fp8Weight.rows_of(buffer, row, original, changes)
    weight._is_param = True  # for isinstance(_, nn.Parameter)
    _become(parameter, weight)
    buffer.made_of[row] = changes[0]


def _become(parameter: Tensor, other: Tensor) -> None:
    """Turn a parameter into another tensor. It stays the same object."""
    grad = parameter.grad
    parameter.grad = None
    try:
        swap_tensors(parameter, other)
    except RuntimeError as error:
        raise RuntimeError(
            "a weight in FP8 is assigned, moved or made while a loss that has not run its backward "
            "holds it: call backward, or delete that loss, first"
        ) from error
    finally:
        if grad is not None and (grad.dtype, grad.device) == (parameter.dtype, parameter.device):
            parameter.grad = grad


def keep_codes_from_ddp(model: nn.Module) -> None:
    """Every rank has made or loaded the same codes. An Fp8Weight would be sent from the host and
    quantised again, experts in 4 bits cannot be written, and Gloo cannot send FP8 codes at all."""
    names = [
        name
        for name, one in model.named_parameters()
        if isinstance(one, Fp8Weight | ExpertWeight)
        or (one.is_floating_point() and one.element_size() == 1)
    ]
    if names:
        keep_from_ddp(model, names)
