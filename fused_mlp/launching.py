"""Launching Triton kernels: checks, the right device, and launches without Triton's own lookup.

To find what it compiled, Triton inspects every argument of every call: types, integers that are 1
or multiples of 16, aligned pointers. That is a quarter to a third of the host's time for a launch.
A training step makes the same few hundred launches again and again. `launch` remembers them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Compiled kernels by launch. Keys hold exact integers, except those that count tokens: our kernels
# do not specialise these. When there are too many we forget all of them and ask Triton again, which
# forgets none.
_compiled: dict[tuple, Any] = {}
MAX_COMPILED = 4096

# The positions of the integers that count tokens, by the kernel's id: Triton takes a microsecond to
# hash a kernel. Holding the kernel keeps its id its own.
_counts: dict[int, tuple[Any, frozenset[int]]] = {}

ALIGNMENT = 16  # bytes: Triton compiles for addresses that are multiples of it


def launch(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """Run ``kernel[grid](*arguments, **options)`` on the device of the first argument, a tensor.

    `arguments` are all of the kernel's, in its order. `options` are Triton's num_warps, num_stages,
    maxnreg and enable_fp_fusion.
    """
    first = arguments[0]
    if not first.is_cuda or torch.compiler.is_compiling():
        with on_device_of(first):
            launch_by_triton(kernel, grid, *arguments, **options)
        return
    device = first.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **options)
        return
    known = _known_as(kernel, device, arguments, options)
    if known is None:
        launch_by_triton(kernel, grid, *arguments, **options)
        return
    key, given = known
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*given)
        return
    if len(_compiled) >= MAX_COMPILED:
        _compiled.clear()
    _compiled[key] = launch_by_triton(kernel, grid, *arguments, **options)


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
) -> tuple[tuple, list[Any]] | None:
    """Return (key, arguments with addresses for tensors), or None if it cannot be remembered.

    It can if all tensors are aligned, on the device and in no tuple. A compiled kernel would ask
    CUDA about each tensor, but takes an address as it is.
    """
    if id(kernel) not in _counts:
        places = frozenset(param.num for param in kernel.params if param.do_not_specialize)
        _counts[id(kernel)] = kernel, places
    counts = _counts[id(kernel)][1]
    key: list[Any] = [id(kernel), device, *options.items()]
    given = list(arguments)
    for place, argument in enumerate(arguments):
        if type(argument) is int:
            # Triton passes one that is not specialised in 32 bits if it fits
            key.append(argument >> 31 if place in counts else argument)
        elif isinstance(argument, Tensor):
            given[place] = address = argument.data_ptr()
            if address % ALIGNMENT or argument.get_device() != device:
                return None
            key.append(argument.dtype)
        elif isinstance(argument, tuple):
            return None
        else:
            key.append((type(argument), argument))  # 2 == 2.0 and 1 == True
    return tuple(key), given


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
