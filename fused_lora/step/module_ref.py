"""Weak references to a module, for objects that are set on it. A strong one would be a cycle, and
keep the weights alive until Python's collector runs."""

import weakref
from typing import Any

from torch import nn


class ModuleRef:
    """A weak reference that is copied and pickled with its module. Call it to get the module."""

    def __init__(self, module: nn.Module):
        self._ref = weakref.ref(module)

    def __call__(self) -> Any:
        module = self._ref()
        if module is None:
            raise ReferenceError(
                "a fused module is called by a forward that has outlived its model: keep the model"
            )
        return module

    def __getstate__(self) -> nn.Module:
        return self()

    def __setstate__(self, module: nn.Module) -> None:
        self._ref = weakref.ref(module)
