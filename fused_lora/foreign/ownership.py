"""Ownership of a module's forward: its class's, ours, or a replacement by somebody else.

accelerate, TRL and others set forwards on instances, as we do. A fused function replaces the
modules in it, so it checks that a call of each would run its class's forward.
"""

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..step.hooks import Bystander
from ..step.module_ref import ModuleRef
from ..telling import warn
from .trl_head import TrlHead, beneath, trl_forward, trl_head_in

HOOKED = "_old_forward"  # where a module keeps the forward that a hook of accelerate calls
# The parts of a forward of ours that computes the same as the class's.
STAND_IN = frozenset({"stand-in"})
BOUND_TO_THE_MODEL = (
    "accelerate has wrapped the forward that fuse set on the model itself: give the trainer what "
    "peft.get_peft_model returns, or call fuse without cross_entropy"
)

NEXT_CALL = (
    "TRL set its own head after fuse, and computed this call with it; ours computes the next: call "
    "fuse after the trainer is made"
)


class Owner:
    """The object that our forwards are methods of. It does not keep the module alive.

    parts: those the module runs fused. told, reported: reasons not to repeat (`aside.py`).
    memories: for weights in 4 bits (`weights/four_bit_parts.py`). borders: of a whole layer
    (`weights/borders.py`). trl_head: TRL's, which it answers for. readings: the last ones of the
    module (`reading/unchanged.py`).
    """

    def __init__(self, module: nn.Module, parts: frozenset[str]):
        self._module, self.parts = ModuleRef(module), parts
        self.trl_head = trl_head_of(module)
        self.had_adapters = has_lora(module)
        self.told: set[str] = set()  # `fuse` shares it among all modules of a model
        self.reported: set[str] = set()  # for this module, by the report of `fuse`
        self.memories: Any = None  # one for a model
        self.borders: Any = None
        self.readings: Any = None

    @property
    def module(self) -> Any:
        return self._module()


def has_lora(module: nn.Module) -> bool:
    return any(hasattr(part, "lora_A") for part in module.modules())


def owner_of(module: nn.Module, at: str = "forward") -> Owner | None:
    """Return the owner of a forward of ours, which may lie beneath TRL's head."""
    forward = vars(module).get(at)
    owner = forward.__self__ if isinstance(forward, MethodType) else None
    if owner is module:
        owner = getattr(beneath(forward), "__self__", None)
        if isinstance(owner, Owner) and owner.module is not module:
            return None  # TRL's head on a copy still calls the model that was copied
    return owner if isinstance(owner, Owner) else None


def trl_head_of(module: nn.Module) -> TrlHead | None:
    """Return the settings of TRL's head on a model, whoever answers for it."""
    forward = vars(module).get("forward")
    if not isinstance(forward, MethodType):
        return None
    owner = forward.__self__
    return owner.trl_head if isinstance(owner, Owner) else trl_head_in(forward)


class HeadTaker(Bystander):
    """A hook on a model that `fuse` got: before a call, our forward takes the place of TRL's head.

    names: of the causal language models inside.
    """

    def __init__(self, names: Iterable[str]):
        self.names = tuple(names)

    @torch.compiler.disable
    def __call__(self, model: nn.Module, _: Any) -> None:
        for module in map(model.get_submodule, self.names):
            head, owner = trl_head_in(vars(module).get("forward")), owner_of(module)
            if head is None or owner is None:
                continue
            owner.trl_head = head
            module.forward = owner.forward  # type: ignore[attr-defined]
            if module is model:  # torch has looked its forward up before it calls hooks
                warn(NEXT_CALL)


def remove_taker(module: nn.Module) -> None:
    """Remove the hook on a model, if it has one."""
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, HeadTaker)]:
        del hooks[key]


def fused_parts_of(module: nn.Module, at: str = "forward") -> frozenset[str]:
    """Return the parts that a module runs fused, according to the forward on its instance."""
    owner = owner_of(module, at)
    return owner.parts if owner is not None else frozenset()


def take_back(module: nn.Module) -> bool:
    """Give a module its own forward back if it has one of ours, also inside an accelerate hook.
    Return whether it had."""
    if fused_parts_of(module):
        head = trl_head_of(module)
        del module.forward
        if head is not None:
            module.forward = trl_forward(module, head)
    elif fused_parts_of(module, HOOKED):
        setattr(module, HOOKED, MethodType(type(module).forward, module))
    else:
        return False
    return True


def has_own_forward(module: nn.Module) -> bool:
    """Return True if calling the module runs its class's forward, as TRL's head does for calls that
    are not its own. accelerate leaves that forward on the instance when it removes a hook."""
    forward = vars(module).get("forward")
    if not isinstance(forward, MethodType):
        return forward is None
    forward = beneath(forward)
    return forward.__self__ is module and forward.__func__ is type(module).forward


def why_not_own_forward(module: nn.Module) -> str | None:
    """Return the reason if calling the module runs neither its class's forward nor one set by
    `fuse`."""
    if has_own_forward(module) or fused_parts_of(module):
        return None
    if "_hf_hook" in vars(module):
        return (
            f"accelerate's {type(module._hf_hook).__name__} has replaced its forward: "
            "remove_hook_from_module, then fuse again"
        )
    home = _home_of(vars(module)["forward"])
    to_do = ", whose trainers compute the loss" if home.startswith("trl.") else ": undo that"
    return f"its forward has been replaced by {home}{to_do}"


def _home_of(forward: Any) -> str:
    """Return the name of the module that defines a forward's code, despite functools.wraps."""
    code = getattr(forward, "__func__", getattr(forward, "func", forward))
    return getattr(code, "__globals__", {}).get("__name__") or type(forward).__module__
