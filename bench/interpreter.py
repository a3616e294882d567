"""Triton's interpreter, which runs the kernels without a GPU, made to round as hardware does and to
take a third of the time (attention, forward and backward, with triton 3.6.0 and 3.9.0)."""

from types import SimpleNamespace
from typing import Any


def prepare_interpreter() -> None:
    """Patch Triton's interpreter for the rest of the process. A second call changes nothing."""
    from triton.runtime import interpreter

    if getattr(interpreter, "is_prepared", False):
        return
    interpreter.is_prepared = True
    _convert_bf16_as_hardware_does(interpreter)
    _patch_the_language_once(interpreter)
    _know_dtypes_by_name(interpreter)
    _make_shapes_once()


def _convert_bf16_as_hardware_does(interpreter: Any) -> None:
    """Let fp32 round to bf16 to nearest even. The interpreter truncates, an error twice as large
    as the hardware's, and error budgets are the hardware's (seen in triton 3.7.1). The other way is
    exact and a shift, where the interpreter takes numbers apart as between any two formats."""
    import numpy as np
    import torch
    import triton.language as tl

    original = interpreter._convert_float

    def convert_float(values, source, target, rounding_mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return values.astype(np.uint32) << 16
        return original(values, source, target, rounding_mode)

    interpreter._convert_float = convert_float


def _patch_the_language_once(interpreter: Any) -> None:
    """Leave triton.language as kernels here need it. The interpreter puts functions of its own into
    it at every launch and every call of a device function, and takes them out after the launch. In
    a process that compiles nothing nobody wants the others back."""
    import triton.language as tl

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: nothing_to_restore


def _know_dtypes_by_name(interpreter: Any) -> None:
    """Remember NumPy's dtype for one of Triton's, which takes a table of 19, made at every use."""
    original = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_dtype(dtype):
        if dtype.name not in known:
            known[dtype.name] = original(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = numpy_dtype


def _make_shapes_once() -> None:
    """Let tensors of one shape have the same shape object. It is a tuple of Triton's own, whose
    elements are wrapped, typed and checked, several times in every addition."""
    import triton.language as tl

    original_block_type, original_tensor = tl.block_type.__init__, tl.tensor.__init__
    of_types: dict[tuple, dict] = {}
    of_tensors: dict[tuple, dict] = {}

    def block_type(self, element_ty, shape):
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in of_types:
            original_block_type(self, element_ty, shape)
            of_types[sizes] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(
            of_types[sizes], element_ty=element_ty, name=f"<{sizes}, {element_ty}>"
        )

    def tensor(self, handle, type):
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in of_tensors:
            original_tensor(self, handle, type)
            of_tensors[sizes] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(of_tensors[sizes], handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
