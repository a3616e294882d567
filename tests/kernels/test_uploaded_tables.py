"""Tables for kernels: what the host wrote, without a wait for the GPU."""

import pytest
import torch

from fused_lora.kernels.tables import uploaded


def test_values_arrive(device):
    values = [(1, 2**40), (-3, 0)]
    table = uploaded(values, torch.int64, torch.device(device))
    assert table.device.type == device and table.tolist() == [[1, 2**40], [-3, 0]]


@pytest.mark.gpu
def test_the_host_does_not_wait(device):
    uploaded([1.0], torch.float32, torch.device(device))  # makes pinned memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        table = uploaded([1.0, 2.5], torch.float32, torch.device(device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert table.tolist() == [1.0, 2.5]
