"""CUDA's side of a captured training step (`graph.py`): a stream, a memory pool, a capture."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class Cuda:
    """All that is asked of CUDA, for the model on one device."""

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self.device = device
        # one stream for all, so that what the eager calls set up for it is there at capture
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
        """Capture `body`; returns a function that replays it, and its result, into whose tensors a
        replay writes."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # a data loader's thread may pin memory meanwhile
        capture = torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode=mode)
        with capture, _no_garbage_collection(), _no_wait_for_the_device():
            result = body()
        # Before it captures, PyTorch sets on that stream what random numbers are counted from. A
        # replay sets it, too, on the stream that it is on, and has to come after that.
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return graph.replay, result

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Garbage may be an older step, whose graph CUDA does not destroy while it captures one: it
    breaks the capture instead (torch 2.11)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _no_wait_for_the_device() -> Iterator[None]:
    """PyTorch raises before it waits for the device. CUDA would only raise after it has broken the
    capture, which leaves PyTorch's allocator capturing for the rest of the process (torch 2.13)."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not detect all
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def noting(causes: list[Exception]) -> Iterator[None]:
    """Note an exception that ends a capture, for the capture's end may raise another that hides
    it."""
    try:
        yield
    except Exception as error:
        causes.append(error)
        raise
