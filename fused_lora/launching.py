"""What every Triton launcher here does first: refuse what no kernel can run on, pick the device."""

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
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
