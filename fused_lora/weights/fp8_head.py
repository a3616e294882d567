"""The switch `fp8_lm_head`: whether the fused loss computes a model's head in FP8."""

from typing import Any

from torch import nn

from ..reading.aside import say_once
from .fp8_weight import why_not_in_fp8


def why_not_head(head: nn.Linear) -> str | None:
    """Return the reason if the loss cannot compute a head in FP8."""
    if any(parameter.requires_grad for parameter in head.parameters()):
        return "its lm_head is trained, which is done in its own precision: leave fp8_lm_head out"
    return why_not_in_fp8(head.weight)


def multiplies_in_fp8(model: Any, head: nn.Linear, parts: frozenset[str]) -> bool:
    """Return whether the loss of a model that runs these parts computes its head in FP8 now. If it
    should but cannot, warn once."""
    if "fp8_lm_head" not in parts:
        return False
    if (reason := why_not_head(head)) is not None:
        say_once(model, reason)
    return reason is None
