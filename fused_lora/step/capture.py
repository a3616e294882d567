"""CUDA's side of a captured training step (`graph.py`): a stream, a memory pool, a capture, and the
buffers of its inputs."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Cuda:
    """Every call to CUDA that a captured step makes, for a model on one device."""

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self.device = device
        # eager calls share the capture's stream: what they set up on it is there when we capture
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, body: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = body()
        current.wait_stream(self.stream)
        return result

    def capture(self, body: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Capture `body`. Return a function that replays it, and its result. Each replay writes
        into the tensors of that result. Raises what ends the capture, where closing it may raise
        another exception that hides this."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # a data loader's thread may pin memory meanwhile
        capture = torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode=mode)
        causes: list[Exception] = []
        try:
            with capture, _no_garbage_collection(), _no_wait_for_the_device():
                try:
                    result = body()
                except Exception as error:
                    causes.append(error)
                    raise
        except Exception as error:
            # PyTorch refuses a pool whose only capture failed while something in it is still held
            self.pool = torch.cuda.graph_pool_handle()
            # kept in a list, it would hold this graph until Python's collector runs
            raise (causes.pop() if causes else error) from None
        # Before a capture, PyTorch sets the random offset on the capture's stream. A replay sets it
        # on the current stream, which must happen later: hence the wait.
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return graph.replay, result

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector off during a capture. It might collect an older step, and CUDA does
    not destroy a graph while it captures another: the capture breaks instead (torch 2.11)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _no_wait_for_the_device() -> Iterator[None]:
    """Make PyTorch raise before it waits for the device. CUDA would raise only after the capture is
    broken, and PyTorch's allocator would keep capturing until the process ends (torch 2.13)."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not detect every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def empty_buffers(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a call's inputs with new memory on the device for each tensor among them."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device=device)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


def copy_into(buffers: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Copy the tensors among a call's inputs into its buffers."""
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            buffers[name].copy_(value, non_blocking=True)
