"""Tell a library's own functions from patches.

A fused function replaces the library's code, so it would silently override a patch of that code:
`LlamaMLP.forward = f`, `modeling_llama.apply_rotary_pos_emb = f`. A patch may come before our
import, so we cannot keep copies to compare with. A function counts as the library's own if its name
and file match the place where we find it, and all decorators around it (`__wrapped__`) are the
library's as well.
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from .parallel import is_fsdp


def why_patched(cls: type, name: str = "forward") -> str | None:
    """Return the reason if a method of a class is not the one that its library defines, else
    None."""
    return _why_not_own_method(cls, name, getattr(cls, name))


def why_replaced(module: str, *names: str) -> str | None:
    """Return the same for functions of a module, skipping those it does not have."""
    for name in names:
        found = getattr(sys.modules[module], name, None)
        if found is not None and (reason := why_not(found, module, name)) is not None:
            return reason
    return None


@cache
def _why_not_own_method(cls: type, name: str, found: Any) -> str | None:
    # a class made by FSDP may wrap the forward of the original class
    classes = [one for one in cls.__mro__ if name in vars(one) and not is_fsdp(one)]
    return why_not(found, classes[0].__module__, f"{classes[0].__qualname__}.{name}")


@cache
def why_not(found: Any, module: str, qualname: str) -> str | None:
    """Return the reason if `found` is not the function that this module defines by this name."""
    package = module.partition(".")[0]
    folder = Path(str(sys.modules[package].__file__)).parent
    function = found
    for function in unwrapped(found):
        code = getattr(function, "__code__", None)
        if code is None or folder not in Path(code.co_filename).parents:
            break
    else:
        if (function.__module__, function.__qualname__) == (module, qualname):
            return None
    own = f"{package}'" if package.endswith("s") else f"{package}'s"
    return f"{qualname} is {_named(function)}, not {own} own: undo that patch to run it fused"


def unwrapped(function: Any) -> Iterator[Any]:
    """Yield a function and those that it wraps, innermost last."""
    while function is not None:
        if isinstance(function, nn.Module) and "forward" not in vars(function):
            # the package `kernels` turns a function that it may replace in a model into a module
            forward = type(function).forward
            if forward.__module__.partition(".")[0] == "kernels":
                function = dict(closure_of(forward)).get("func", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def closure_of(function: Any) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents


def _named(function: Any) -> str:
    """Return the name of a function. For a wrapper, whose name is that of the wrapped function,
    return its place."""
    code = getattr(function, "__code__", None)
    if code is None:
        return f"an object of {type(function).__module__}.{type(function).__qualname__}"
    if hasattr(function, "__wrapped__"):
        return f"wrapped by {code.co_filename}:{code.co_firstlineno}"
    return f"{function.__module__}.{function.__qualname__}"
