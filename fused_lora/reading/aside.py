"""Warnings when a module that `fuse` set to run fused steps aside.

We give each reason once for all modules of a model. We skip reasons that the report of `fuse`
already gave for the module, and those that the user asked for.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..foreign.checkpointing import IN_EVAL_MODE, has_policy_on, layers_of
from ..foreign.ownership import HOOKED, has_lora, owner_of, trl_head_of
from ..foreign.trl_head import trl_forward
from ..foreign.versions import as_named, class_forward
from ..telling import warn

# Found in reasons that the user asked for: PEFT's ways to run with other adapters or none.
WISHES = ("adapters are merged", "adapters are active", "adapters have been unloaded")


def say_once(module: nn.Module, reason: str) -> None:
    """Warn once that a module steps aside, unless the user asked for the reason."""
    owner = owner_of(module) or owner_of(module, HOOKED)
    if owner is None or reason in owner.reported or any(wish in reason for wish in WISHES):
        return
    if reason in owner.told:
        return
    owner.told.add(reason)
    warn(f"a fused {type(module).__name__} stepped aside: {reason} (see fused_lora.report)")


def say_not_checkpointed(model: nn.Module) -> None:
    """Warn if layers should be checkpointed, in the first call in eval mode after `fuse`."""
    owner = owner_of(model)
    if owner is None or IN_EVAL_MODE in owner.told:
        return
    owner.told.add(IN_EVAL_MODE)
    if any(has_policy_on(one) and not one.training for _, one in layers_of(model)):
        warn(f"checkpoint: {IN_EVAL_MODE}")


def step_aside(module: nn.Module, reason: str, *inputs, **options):
    """Warn, and run the forward of the module's class, or TRL's head if the call is for that."""
    say_once(module, reason)
    if options.pop("fused_lm_head", False) and (head := trl_head_of(module)) is not None:
        return trl_forward(module, head)(*inputs, fused_lm_head=True, **as_named(options))
    return class_forward(module, *inputs, **options)


def say_left(module: nn.Module, left: dict[str, str]) -> None:
    """Call `say_once` for each named unit of a module that steps aside."""
    for reason in reasons_of(left):
        say_once(module, reason)


def reasons_of(left: dict[str, str]) -> list[str]:
    """Return the reason of each unit with its name; "" is the module itself."""
    return [f"{unit}: {reason}" if unit else reason for unit, reason in left.items()]


def why_unloaded(module: nn.Module, projections: Iterable[Any]) -> str | None:
    """Return the reason if no projection of a module has an adapter now, but some had when `fuse`
    was called. A module that never had any runs fused with the others."""
    if any(len(projection.A) for projection in projections):
        return None
    owner = owner_of(module)
    had = owner is not None and owner.had_adapters and not has_lora(module)
    return "its adapters have been unloaded: load others, or unfuse the model" if had else None
