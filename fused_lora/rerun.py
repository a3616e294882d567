"""Questions that a function asks when its forward may run twice (`step/recompute.py`).

A recomputed forward keeps only its inputs and reruns in backward. The functions in it ask here what
to keep from their first run and what to skip in their second. Outside of one, `once` and
`saving_last` just call their function.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

_thread = threading.local()


class Keep(NamedTuple):
    """A way for `once` to keep a tensor: `out` takes it away, and `back` restores it from the
    result of `out`, like the hooks of `torch.autograd.graph.saved_tensors_hooks`."""

    out: Callable[[Tensor], Any]
    back: Callable[[Any], Tensor]


STAYS = Keep(lambda tensor: tensor, lambda tensor: tensor)


def runs() -> list[Any]:
    """Return the recomputed forwards (`step/recompute.py`) that this thread is in, innermost
    last."""
    if not hasattr(_thread, "runs"):
        _thread.runs = []
    return _thread.runs


def saving_last(function: Callable[[bool], Tensor]) -> Tensor:
    """Call ``function(output_needed)``. It is False in a recompute if nothing after this call saved
    a tensor in the first run: nobody then uses the output."""
    around = runs()
    if not around:
        return function(True)
    return around[-1].saving_last(function)


def once(function: Callable[[], tuple], is_small: bool = False) -> tuple:
    """Call ``function()``. A recomputed forward with a `keep` keeps the result for its second run.

    Use it for results that cost more to compute than to keep. If the result `is_small`, every
    recomputed forward keeps it, unmoved. Do not use it for outputs of an autograd function: others
    may change them in place, and a kept output would keep its own graph alive.
    """
    around = runs()
    keep = STAYS if is_small else around[-1].keep if around else None
    if not around or keep is None:
        return function()
    return around[-1].once(function, keep)


def recompute_record(record: tuple) -> Callable[[], tuple] | None:
    """Return a function that makes this record of tensors again, for a function's backward, or None
    where nothing recomputes the forward. Instead of the record, save one tensor: the function works
    for as long as autograd keeps that.

    It does for all of a record what saving each of its tensors would, in a tenth of the time.
    """
    around = runs()
    if not around:
        return None
    return around[-1].recompute_record(record)


def has_kept() -> bool:
    """Return True in a second run, where `once` returns the first run's result without a call."""
    around = runs()
    return bool(around) and around[-1].runs_again and around[-1].keep is not None


def keeps_elsewhere() -> bool:
    """Return True if `once` moves what it keeps elsewhere, which is fast for rows without gaps."""
    around = runs()
    return bool(around) and around[-1].keep not in (None, STAYS)
