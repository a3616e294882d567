"""The recurrence and the convolution of a gated delta net, which stay a library's.

transformers takes those of flash-linear-attention (`fla`) and causal-conv1d if it could import
them, else its own, which are PyTorch and slower; the recurrence by more than ten times. fla up to
0.5.2 raises in backward where Triton from 3.4.0 to below 3.7.1 computes it wrong on Hopper, unless
tilelang computes it.
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
NAMES = NAME, "causal_conv1d_fn"
NOT_INSTALLED = "it is transformers' own, in PyTorch: install {}"
NOT_IMPORTED = "it is transformers' own, in PyTorch, which could not import {}"
REFUSES_TRITON = (
    "it is transformers' own, in PyTorch: flash-linear-attention refuses Triton "
    f"{triton.__version__} on Hopper, take 3.7.1"
)

_chosen: dict[tuple, tuple[Callable, dict[str, str]]] = {}


def delta_rule(net: nn.Module) -> tuple[Callable, dict[str, str]]:
    """Return the function for the recurrence of a gated delta net, and the reasons if it or the
    convolution is transformers' own, by name."""
    functions = tuple(getattr(sys.modules[type(net).__module__], name) for name in NAMES)
    if torch.compiler.is_compiling():  # `fuse` has asked before
        return _chosen.get(functions, (functions[0], {}))
    if functions not in _chosen:
        _chosen[functions] = _choose(*functions)
    return _chosen[functions]


def _choose(rule: Any, convolution: Any) -> tuple[Callable, dict[str, str]]:
    reasons = {
        "recurrence": _why_own(rule, "fla", "flash-linear-attention"),
        "conv1d": _why_own(convolution, "causal_conv1d", "causal-conv1d"),
    }
    if _home_of(rule) == "fla" and _refuses_triton():
        rule, reasons["recurrence"] = [*unwrapped(rule)][-1], REFUSES_TRITON
    return rule, {name: reason for name, reason in reasons.items() if reason}


def _why_own(function: Any, package: str, distribution: str) -> str:
    if _home_of(function) != "transformers":
        return ""
    reason = NOT_INSTALLED if find_spec(package) is None else NOT_IMPORTED
    return reason.format(distribution)


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
