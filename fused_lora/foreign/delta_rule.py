"""The recurrence of a gated delta net, which stays a library's.

transformers takes that of flash-linear-attention (`fla`) if it could import it, else its own, which
is PyTorch and more than ten times slower. fla (0.5.2 and 0.6.0) raises in backward where Triton
from 3.4.0 to below 3.7.1 computes it wrong on Hopper, unless tilelang computes it.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton
from torch import nn

from .originals import closure_of, unwrapped

NAME = "torch_chunk_gated_delta_rule"
NOT_INSTALLED = "it is transformers' own, in PyTorch: install flash-linear-attention"
NOT_IMPORTED = "it is transformers' own, in PyTorch, which could not import flash-linear-attention"
REFUSES_TRITON = (
    "it is transformers' own, in PyTorch: flash-linear-attention refuses Triton "
    f"{triton.__version__} on Hopper, take 3.7.1"
)


def delta_rule(net: nn.Module) -> tuple[Callable, str]:
    """Return the function for the recurrence of a gated delta net, and the reason if it is
    transformers' own."""
    return _choose(getattr(sys.modules[type(net).__module__], NAME))


@cache
def _choose(rule: Any) -> tuple[Callable, str]:
    home = _home_of(rule)
    if home == "transformers":
        return rule, NOT_INSTALLED if find_spec("fla") is None else NOT_IMPORTED
    if home == "fla" and _refuses_triton():
        return [*unwrapped(rule)][-1], REFUSES_TRITON
    return rule, ""


def _home_of(function: Any) -> str:
    """Return the package of the implementation that transformers chose behind one of its
    functions, "" for a function without any."""
    found = [
        one
        for wrapper in unwrapped(function)
        if hasattr(wrapper, "__code__")
        for name, one in closure_of(wrapper)
        if name == "implementation"
    ]
    return found[0].__module__.partition(".")[0] if found else ""


def _refuses_triton() -> bool:
    """Return True if a backward of fla would raise with this Triton on this GPU."""
    flags = vars(sys.modules["fla.utils"])
    names = ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
    if not torch.cuda.is_available() or any(name not in flags for name in names):
        return False
    is_hopper, is_late, is_mended = (flags[name] for name in names)
    return is_hopper and is_late and not is_mended and find_spec("tilelang") is None
