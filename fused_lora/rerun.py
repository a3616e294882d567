"""Questions of a function whose forward may run twice (`step/recompute.py`).

A recomputed forward keeps its inputs alone and runs again in backward. The functions in it ask here
what to keep from their first run, and what their second may leave out. Elsewhere each of these
calls its function and nothing more.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_thread = threading.local()


class Keep(NamedTuple):
    """A way for `once` to keep a tensor: `out` takes it away, and `back` brings it back from what
    `out` returned, as the hooks of `torch.autograd.graph.saved_tensors_hooks`."""

    out: Callable[[Tensor], Any]
    back: Callable[[Any], Tensor]


STAYS = Keep(lambda tensor: tensor, lambda tensor: tensor)


def runs() -> list[Any]:
    """Return the recomputed forwards (`step/recompute.py`) that this thread is in, the innermost
    last."""
    if not hasattr(_thread, "runs"):
        _thread.runs = []
    return _thread.runs


def saving_last(function: Callable[[bool], Tensor]) -> Tensor:
    """``function(output_needed)``: False where a recomputed forward runs again, if nothing after
    this call saved a tensor when it ran first: what it returns is then not used."""
    around = runs()
    if not around or torch.compiler.is_compiling():
        return function(True)
    return around[-1].saving_last(function)


def once(function: Callable[[], tuple], is_small: bool = False) -> tuple:
    """``function()``, whose result a recomputed forward with a `keep` keeps for its second run.

    For what is dearer to compute than to keep. A result that `is_small` every recomputed forward
    keeps, as it is. Not for what an autograd function returns: others may change that in place, and
    kept as it is it would keep its own graph alive.
    """
    around = runs()
    keep = STAYS if is_small else around[-1].keep if around else None
    if not around or keep is None or torch.compiler.is_compiling():
        return function()
    return around[-1].once(function, keep)


def has_kept() -> bool:
    """Return True where `once` does not call a function but hands back its first run's result."""
    around = runs()
    return bool(around) and around[-1].runs_again and around[-1].keep is not None


def takes_away() -> bool:
    """Return True where `once` moves what it keeps elsewhere, which is fast for rows without
    gaps."""
    around = runs()
    return bool(around) and around[-1].keep not in (None, STAYS)
