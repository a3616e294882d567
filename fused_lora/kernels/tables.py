"""Tables that a kernel reads: lists of the host's numbers, in GPU memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def uploaded(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values as a tensor on a device.

    ``torch.tensor(values, device=device)`` makes the host wait for everything that the GPU still
    has to do. This does not: the values are copied from pinned memory. Weights and adapters that
    FSDP2 gathers lie elsewhere in each pass, so their layers may upload new tables every time.
    """
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)
