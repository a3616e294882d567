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


class Watch(TorchDispatchMode):
    """A record of the operations inside, and the bytes of the tensors they make."""

    def __init__(self):
        super().__init__()
        self.names, self.sizes = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.names.append(function.overloadpacket.__name__)
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        owned = {t.untyped_storage().data_ptr() for t in given}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in owned:  # neither a view nor written in place
                    self.sizes.append(storage.nbytes())
        return result

    def products(self):
        return sum(name.rstrip("_") in ("mm", "addmm", "bmm", "matmul") for name in self.names)


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
