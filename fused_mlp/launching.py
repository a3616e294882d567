"""Launching a Triton kernel: can it run on this, on which device, and without Triton's own lookup.

Triton looks at every argument of every call for what it compiled: types, which integers are 1 or
multiples of 16, which pointers are. That is a quarter to a third of the host's time for a launch,
and a training step makes the same few hundred again and again. `launch` remembers them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# What was compiled for a launch. Integers are part of a key as they are, so that of batches of any
# length there may be many: then all are forgotten, and Triton, which forgets none, is asked again.
_compiled: dict[tuple, Any] = {}
MAX_COMPILED = 4096

ALIGNMENT = 16  # bytes, which Triton compiles for where an address is a multiple


def launch(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """``kernel[grid](*arguments, **options)`` on the device of the first argument, a tensor.

    `arguments` are all that the kernel takes, in its order; `options` are Triton's own, num_warps
    and num_stages.
    """
    first = arguments[0]
    with on_device_of(first):
        known = None
        if first.is_cuda and not torch.compiler.is_compiling():
            known = _known_as(kernel, first.get_device(), arguments, options)
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


def launch_by_triton(kernel, grid: tuple[int, ...], *arguments, **options):
    """Launch ``kernel[grid](*arguments, **options)`` through Triton's own lookup, and return what
    it compiled. For tuples of tensors, which `launch` cannot remember. The caller makes their
    device the current one.

    Triton rounds a * b + c once (floating-point fusion) by default up to 3.9, and twice from 3.10
    on. All our kernels were tested and measured with the one rounding, so we ask for it.
    """
    # what kernel[grid](...) calls, with one call less
    return kernel.run(*arguments, grid=grid, warmup=False, **options, enable_fp_fusion=True)


def _known_as(
    kernel, device: int, arguments: tuple, options: dict[str, int]
) -> tuple[tuple, list[Any]] | None:
    """(key, arguments with addresses for tensors) of what may be remembered: all tensors are on
    the device and aligned, and there is no tuple of them. Else None.

    A compiled kernel asks CUDA about each tensor, but takes an address as it is.
    """
    key: list[Any] = [kernel, device, *options.items()]
    given = list(arguments)
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            given[i] = address = argument.data_ptr()
            if address % ALIGNMENT or argument.get_device() != device:
                return None
            key.append(argument.dtype)
        elif type(argument) is int:
            key.append(argument)
        elif isinstance(argument, tuple):
            return None
        else:
            key.append((type(argument), argument))  # for 2 == 2.0, and 1 == True
    return tuple(key), given


def check_runnable(name: str, kernel, tensor: Tensor) -> None:
    """Raise ValueError, in the name of the public function `name`, unless `kernel` can run on
    `tensor`: bf16, fp16 or fp32, on a GPU, or on the CPU under Triton's interpreter."""
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} computes in bfloat16, float16 or float32, got {tensor.dtype}: cast first"
        )
    if tensor.device.type == "cpu" and isinstance(kernel, triton.JITFunction):
        raise ValueError(
            f"{name} got tensors on the CPU: move them to a GPU, or set TRITON_INTERPRET=1 before "
            "triton is imported to run the kernel in Triton's interpreter"
        )


def on_device_of(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's own. `launch` sees to
    it; a launcher enters this itself where it has to choose a tiling on that device first."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def is_capturing(tensor: Tensor) -> bool:
    """Return True if work on this tensor goes into a CUDA graph now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


# As Triton has the first two, where a call takes the host as long as a third of a launch.


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def previous_power_of_2(n: int) -> int:
    return 1 << (n.bit_length() - 1)
