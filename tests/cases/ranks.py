"""Ranks that train together: one per GPU with NCCL, or without a GPU processes with gloo."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing


def on_ranks(count, body, *arguments, fresh=False):
    """Return the results of body(rank, device, *arguments), of each rank in order. fresh: processes
    that know nothing of this one."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < count:  # there kernels do not run on a CPU
        pytest.skip(f"{count} ranks need {count} GPUs, or none; here are {gpus}")
    # a fork starts at once, but CUDA does not survive it
    method = "spawn" if fresh or gpus else "fork"
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _run, (count, gpus > 0, folder, body, arguments), count, start_method=method
        )
        return [torch.load(Path(folder) / str(rank), map_location="cpu") for rank in range(count)]


def _run(rank, count, has_gpus, folder, body, arguments):
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if has_gpus else "cpu"
    if has_gpus:
        torch.cuda.set_device(rank)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # as torchrun; nobody connects
    store = f"file://{folder}/store"
    dist.init_process_group("nccl" if has_gpus else "gloo", store, rank=rank, world_size=count)
    try:
        torch.save(body(rank, device, *arguments), Path(folder) / str(rank))
    finally:
        dist.destroy_process_group()
