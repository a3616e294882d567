"""Counts of what a function launches, and of what autograd keeps alive for its backward."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {"mm": "GEMM", "addmm": "GEMM", "addmm_": "GEMM", "_to_copy": "cast"}


class Calls(TorchDispatchMode):
    """Counts what launches a kernel on a GPU, by kind: all but views and new memory."""

    def __init__(self):
        super().__init__()
        self.counted = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and name not in ("empty", "empty_like", "new_empty"):
            kind = KINDS.get(name, name)
            self.counted[kind] = self.counted.get(kind, 0) + 1
        return function(*args, **(kwargs or {}))


@contextmanager
def saved_tensors():
    """The tensors that autograd keeps, in their order."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        yield saved


@contextmanager
def saved_for_backward():
    """The storages that autograd keeps, each once, by address; alive as long as the dict is."""
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved
