"""A module as known to what is set on it: a strong reference would keep both alive, weights and
all, until Python's collector comes by."""

import weakref
from typing import Any

from torch import nn


class ModuleRef:
    """A weak reference to a module that is copied and pickled with it. Called, it returns it."""

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
