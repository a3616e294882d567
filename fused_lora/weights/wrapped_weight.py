"""Functions for subclasses of Tensor that stand for a weight."""

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Functions that return the same weight.
SAME = {aten.detach.default, aten.alias.default}

Kind = TypeVar("Kind", bound=Tensor)


def written_of(kind: type[Kind], func: Any, args: tuple, kwargs: dict) -> list[Kind]:
    """Return the tensors of this kind that a function writes to."""
    given = zip(func._schema.arguments, args, strict=False)
    by_place = [value for argument, value in given if argument.is_write]
    by_name = [kwargs.get(one.name) for one in func._schema.arguments if one.is_write]
    return [one for one in tree_leaves((by_place, by_name)) if isinstance(one, kind)]
