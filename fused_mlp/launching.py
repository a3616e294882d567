"""Launching Triton kernels: checks, the right device, and launches without Triton's own lookup.

To find what it compiled, Triton inspects every argument of every call: types, integers that are 1
or multiples of 16, aligned pointers. That is a quarter to a third of the host's time for a launch.
A training step makes the same few hundred launches again and again. `launch` remembers them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Compiled kernels to keep for launches of one kind. When there are too many we forget all of them
# and ask Triton again, which forgets none.
MAX_COMPILED = 4096

ALIGNMENT = 16  # bytes: Triton compiles for addresses that are multiples of it


class _Kind(NamedTuple):
    """Launches of one kernel with arguments of the same types."""

    kernel: Any  # held: no other kernel gets its id
    tensors: list[int]  # the positions of tensors
    counts: list[int]  # and of integers that count tokens: our kernels do not specialise these
    compiled: dict[tuple, Any] | None  # by a launch's other arguments; None: some are tuples


# By the kernel's id, which Triton takes a microsecond to hash, and types: 2 == 2.0 and 1 == True.
_kinds: dict[tuple, _Kind] = {}


def launch(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """Run ``kernel[grid](*arguments, **options)`` on the device of the first argument, a tensor.

    `arguments` are all of the kernel's, in its order. `options` are Triton's num_warps, num_stages,
    maxnreg and enable_fp_fusion.
    """
    device = arguments[0].get_device()  # -1: the CPU
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **options)
        return
    known = None
    if device >= 0 and not torch.compiler.is_compiling():
        known = _known_as(kernel, device, arguments, options)
    if known is None:
        launch_by_triton(kernel, grid, *arguments, **options)
        return
    all_compiled, key, given = known
    compiled = all_compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*given)
        return
    if len(all_compiled) >= MAX_COMPILED:
        all_compiled.clear()
    all_compiled[key] = launch_by_triton(kernel, grid, *arguments, **options)


def launch_by_triton(
    kernel, grid: tuple[int, ...], *arguments, enable_fp_fusion: bool = True, **options
):
    """Launch ``kernel[grid](*arguments, **options)`` through Triton's own lookup. Return the
    compiled kernel. `launch` does not remember tuples, because it would take longer than Triton:
    they come here. The caller makes their device the current one.

    By default Triton rounds a * b + c once (floating-point fusion) up to 3.9, and twice from 3.10
    on. We tested and measured our kernels with one rounding, so we ask for it. A kernel that
    repeats somebody else's two roundings passes enable_fp_fusion=False.
    """
    options |= {"grid": grid, "warmup": False, "enable_fp_fusion": enable_fp_fusion}
    return kernel.run(*arguments, **options)  # kernel[grid](...) calls this as well


def _known_as(
    kernel, device: int, arguments: tuple, options: dict[str, Any]
) -> tuple[dict[tuple, Any], tuple, list[Any]] | None:
    """Return (compiled kernels, the key of this one, arguments with addresses for tensors), or None
    if it cannot be remembered.

    It can if all tensors are aligned, on the device and in no tuple. A compiled kernel would ask
    CUDA about each tensor, but takes an address as it is.
    """
    types = tuple([id(kernel), *map(type, arguments)])
    kind = _kinds.get(types)
    if kind is None:
        kind = _kinds[types] = _kind_of(kernel, arguments)
    if kind.compiled is None:
        return None
    given, key = list(arguments), [*arguments, device, *options, *options.values()]
    for place in kind.tensors:
        tensor = given[place]
        given[place] = address = tensor.data_ptr()
        key[place] = tensor.dtype
        if address % ALIGNMENT or tensor.get_device() != device:
            return None
    for place in kind.counts:
        key[place] >>= 31  # Triton passes them in 32 bits if they fit
    return kind.compiled, tuple(key), given


def _kind_of(kernel, arguments: tuple) -> _Kind:
    every = list(enumerate(arguments))
    tensors = [place for place, one in every if isinstance(one, Tensor)]
    unspecialised = {param.num for param in kernel.params if param.do_not_specialize}
    counts = [place for place, one in every if place in unspecialised and type(one) is int]
    has_tuples = any(isinstance(one, tuple) for one in arguments)
    return _Kind(kernel, tensors, counts, None if has_tuples else {})


def check_runnable(name: str, kernel, tensor: Tensor) -> None:
    """Raise ValueError, in the name of the public function `name`, unless `kernel` can run on
    `tensor`: bf16, fp16 or fp32, on a GPU or in Triton's interpreter on the CPU."""
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} computes in bfloat16, float16 or float32, got {tensor.dtype}: cast first"
        )
    if tensor.is_cpu and not is_interpreted(kernel):
        raise ValueError(
            f"{name} got tensors on the CPU: move them to a GPU, or set TRITON_INTERPRET=1 before "
            "triton is imported to run the kernel in Triton's interpreter"
        )


def is_interpreted(kernel) -> bool:
    """Return True in Triton's interpreter, which runs kernels on the CPU."""
    return not isinstance(kernel, triton.JITFunction)


def on_device_of(tensor: Tensor) -> AbstractContextManager:
    """Make the tensor's device the current one, on which Triton launches.

    `launch` enters this itself. A launcher enters it earlier to choose a tiling on that device.
    """
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def is_capturing(tensor: Tensor) -> bool:
    """Return True if a CUDA graph is capturing the work on this tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


# Triton has the first two, but its own take the host a third of a launch.


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def previous_power_of_2(n: int) -> int:
    return 1 << (n.bit_length() - 1)
