"""TRL's head on a causal language model: read it, take it over, and give it back. And its collator.

The trainers of TRL (from 1.15) call `add_fused_lm_head` (trl/trainer/utils.py). It sets a forward
on the model that answers `fused_lm_head=True` with log-probabilities from lm_head's weight, and
hands every other call to the forward that it found. So a forward of ours, set earlier, would lose
that call. We read TRL's settings out of its forward, and answer the call with them ourselves:

- `fuse` after the trainer is made sets our forward in its place;
- if the trainer is made after `fuse`, a hook on the model does so before the next call;
- `unfuse`, and a model that has to step aside, call TRL's `add_fused_lm_head` with these settings.
"""

import sys
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from .originals import closure_of, why_patched

UTILS, FORWARD = "trl.trainer.utils", "_fused_forward"
SFT, COLLATOR = "trl.trainer.sft_trainer", "DataCollatorForLanguageModeling"


class TrlHead(NamedTuple):
    """The settings of TRL's head, as `add_fused_lm_head` has them or reads them in the config."""

    temperature: float
    cast_lm_head_to_fp32: bool
    outputs: tuple[str, ...]
    final_logit_softcapping: float | None
    logit_scale: float


def trl_head_in(forward: Any) -> TrlHead | None:
    """Return the settings of TRL's head if this is its forward, in a form that we know."""
    found = _variables_of(forward)
    if not {*TrlHead._fields, "original_forward"} <= found.keys():
        return None
    return TrlHead(**{name: found[name] for name in TrlHead._fields})


def beneath(forward: Any) -> Any:
    """Return the forward that TRL's calls for everything but its head, or the forward itself."""
    while trl_head_in(forward) is not None:
        forward = _variables_of(forward)["original_forward"]
    return forward


def _variables_of(forward: Any) -> dict[str, Any]:
    """Return the variables that TRL's forward closes over; of any other forward none."""
    function: Any = forward.__func__ if isinstance(forward, MethodType) else None
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != FORWARD or function.__globals__["__name__"] != UTILS:
        return {}
    return dict(closure_of(function))


def trl_forward(model: nn.Module, head: TrlHead) -> Any:
    """Return TRL's own forward with these settings, over the forward of the model's class."""
    ours = vars(model).pop("forward", None)
    sys.modules[UTILS].add_fused_lm_head(
        model, temperature=head.temperature, cast_lm_head_to_fp32=head.cast_lm_head_to_fp32,
        outputs=head.outputs,
    )  # fmt: skip
    theirs = vars(model).pop("forward")
    if ours is not None:
        model.forward = ours
    return theirs


def is_flat_collator(collator: Any) -> bool:
    """Return True for TRL's own collator that puts documents end to end, with no other option set
    but a multiple to pad to. One that somebody derives from it may do anything."""
    cls = getattr(sys.modules.get(SFT), COLLATOR, None)
    if cls is None or type(collator) is not cls or why_patched(cls, "torch_call") is not None:
        return False
    usual = cls(collator.pad_token_id, padding_free=True)
    return vars(collator) | {"pad_to_multiple_of": None} == vars(usual)
