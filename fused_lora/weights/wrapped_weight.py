"""Functions for subclasses of Tensor that stand for a weight."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..layer.buffer import PlacedWeight

aten = torch.ops.aten
# Functions that return the same weight.
SAME = {aten.detach.default, aten.alias.default}

NOT_SAVED = "this weight is {}: save the adapters alone, model.save_pretrained(folder)"

Kind = TypeVar("Kind", bound=Tensor)


class WrappedWeight(Tensor):
    """A tensor that holds no memory. Subclasses implement functions on it in `run`."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ):
        kwargs = kwargs or {}
        parts = func.decompose(*args, **kwargs)  # in inference_mode nobody has done this yet
        return cls.run(func, args, kwargs) if parts is NotImplemented else parts

    @staticmethod
    def run(func: Any, args: Any, kwargs: dict) -> Any:
        raise NotImplementedError


class BaseWeight(WrappedWeight, PlacedWeight):
    """A base weight whose data is set by `assign`. It cannot be saved, unless a subclass says how.
    kept: where or how it is kept, for that error."""

    kept: str
    assign: Callable[[Tensor], None]

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        self.assign(value)

    def leave_buffer(self) -> None:
        """Stay as it is."""

    def data_ptr(self) -> int:  # whoever saves a tensor asks for it
        raise RuntimeError(NOT_SAVED.format(self.kept))


def written_of(kind: type[Kind], func: Any, args: tuple, kwargs: dict) -> list[Kind]:
    """Return the tensors of this kind that a function writes to."""
    given = zip(func._schema.arguments, args, strict=False)
    by_place = [value for argument, value in given if argument.is_write]
    by_name = [
        kwargs.get(argument.name) for argument in func._schema.arguments if argument.is_write
    ]
    return [leaf for leaf in tree_leaves((by_place, by_name)) if isinstance(leaf, kind)]
