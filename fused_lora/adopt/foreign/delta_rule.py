"""The recurrence of a gated delta net, which stays a library's.

transformers takes flash-linear-attention's (`fla`) if it could import that, else its own, which is
PyTorch and many times as slow. fla up to 0.5.2 raises in backward where Triton from 3.4.0 to below
3.7.1 computes it wrong on Hopper, unless tilelang computes it.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import triton
from torch import nn

from .originals import closure_of, unwrapped

NAME = "torch_chunk_gated_delta_rule"
OWN = "its recurrence is transformers' own, in PyTorch"
NOT_INSTALLED = f"{OWN}: install flash-linear-attention"
NOT_IMPORTED = f"{OWN}: transformers could not import flash-linear-attention"
REFUSES_TRITON = (
    f"{OWN}: flash-linear-attention refuses Triton {triton.__version__} on Hopper, take 3.7.1"
)

_chosen: dict[Callable, tuple[Callable, str]] = {}


def delta_rule(net: nn.Module) -> tuple[Callable, str]:
    """Return the function for the recurrence of a gated delta net, and the reason if it is
    transformers' own, "" if not."""
    rule = getattr(sys.modules[type(net).__module__], NAME)
    if torch.compiler.is_compiling():  # `fuse` has asked before
        return _chosen.get(rule, (rule, ""))
    if rule not in _chosen:
        _chosen[rule] = _choose(rule)
    return _chosen[rule]


def _choose(rule: Any) -> tuple[Callable, str]:
    functions = list(unwrapped(rule))
    found = [
        one
        for function in functions
        if hasattr(function, "__code__")
        for name, one in closure_of(function)
        if name == "implementation"
    ]
    home = found[0].__module__.partition(".")[0] if found else ""
    if home == "transformers":
        return rule, NOT_INSTALLED if find_spec("fla") is None else NOT_IMPORTED
    if home == "fla" and _refuses_triton():
        return functions[-1], REFUSES_TRITON
    return rule, ""


def _refuses_triton() -> bool:
    """Return True if a backward of fla would raise with this Triton on this GPU."""
    flags = vars(sys.modules["fla.utils"])
    names = ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
    if not torch.cuda.is_available() or any(name not in flags for name in names):
        return False
    is_hopper, is_late, is_mended = (flags[name] for name in names)
    return is_hopper and is_late and not is_mended and find_spec("tilelang") is None
