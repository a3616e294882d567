"""What launchers ask first: can a kernel run on this, on which device, is it being captured?"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    """Triton launches on the current device, which need not be the tensor's own."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def is_capturing(tensor: Tensor) -> bool:
    """Whether what is done with this tensor now goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


# As Triton has the first two, where a call takes the host as long as a third of a launch.


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def previous_power_of_2(n: int) -> int:
    return 1 << (n.bit_length() - 1)
