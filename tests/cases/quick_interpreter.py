"""Triton's interpreter with less Python around every operation: the same bits in a seventh to a
quarter less time. (fused_lora.kernels.interpreter has the patches that a rehearsal of the benchmark shares.)"""

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

convert = TritonSemantic.binary_op_type_checking_impl
common_sizes: dict[tuple[int, int], list[int]] = {}  # by the ids of two shapes: none is freed


def make_quick():
    """Patch Triton's interpreter for the rest of the process. fused_lora.kernels.interpreter has to come first:
    it leaves triton.language patched and makes equal shapes the same object."""
    TritonSemantic.binary_op_type_checking_impl = convert_operands
    # the interpreter checks each integer operation for overflow, but only debug mode looks at that
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *given: None
    _call_builtins_directly()
    _leave_room_for_frames()


def convert_operands(
    self, lhs, rhs, left_pointer=False, right_pointer=False, arithmetic=True, divides=False
):
    """Return two operands in their common dtype and shape. Their values keep their shapes: NumPy
    broadcasts them when it computes."""
    blocks = [x.type for x in (lhs, rhs) if isinstance(x, tl.tensor) and x.type.is_block()]
    if not _is_converted(lhs, rhs, left_pointer, divides):
        scalars = (
            tl.tensor(x.handle, x.dtype) if isinstance(x, tl.tensor) else x for x in (lhs, rhs)
        )
        lhs, rhs = convert(self, *scalars, left_pointer, right_pointer, arithmetic, divides)
    elif lhs.shape is rhs.shape:
        return lhs, rhs
    if not blocks:
        return lhs, rhs
    shapes = blocks[0].shape, blocks[-1].shape
    key = id(shapes[0]), id(shapes[1])
    if key not in common_sizes:
        common_sizes[key] = [*np.broadcast_shapes(*map(tuple, shapes))]
    return tuple(tl.tensor(x.handle, tl.block_type(x.dtype, common_sizes[key])) for x in (lhs, rhs))


def _is_converted(lhs, rhs, left_pointer, divides):
    """Return whether two operands share a dtype, or are a pointer and an offset."""
    if not isinstance(lhs, tl.tensor) or not isinstance(rhs, tl.tensor) or divides:
        return False
    if lhs.dtype.is_ptr():
        return left_pointer and rhs.dtype.is_int()
    return lhs.dtype is rhs.dtype


def _call_builtins_directly():
    """Skip the two wrappers around each builtin. They drop the semantics passed in, add the
    interpreter's, and check that semantics were passed."""
    for owner in (tl, tl.core, tl.math, tl.tensor):
        for name, patched in vars(owner).copy().items():
            defaults = getattr(patched, "__kwdefaults__", None) or {}
            if tl.core.is_builtin(defaults.get("member")):
                member = defaults["member"]
                setattr(owner, name, _directly(getattr(member, "__wrapped__", member)))


def _directly(builtin):
    def call(*given, **named):
        named["_semantic"] = interpreter.interpreter_semantic
        return builtin(*given, **named)

    return call


def _leave_room_for_frames():
    """Give a launch one large chunk of memory for frames. CPython keeps frames in chunks of 16 KB,
    and maps and unmaps one at every call that does not fit into the last. A frame of 320 KB gets a
    chunk of 512 KB, with room for everything it calls. All tests together take 22% less time."""
    launch = interpreter.GridExecutor.__call__

    def call(self, *given, **named):
        return launch(self, *given, **named)

    call.__code__ = call.__code__.replace(co_stacksize=40_000)
    interpreter.GridExecutor.__call__ = call
