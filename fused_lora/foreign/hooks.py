"""Hooks that a fused function may skip, because they would do nothing."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.utils import output_capturing

from ..step.hooks import Bystander

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module, is_allowed: Callable[[Any], bool] | None = None) -> bool:
    """Return True if the module has hooks that would do something if it were called now. Those that
    are allowed don't count.

    A call with output_hidden_states or output_attentions leaves permanent hooks on modules. They do
    nothing unless such an output is being collected.
    """
    state = vars(module)
    if not (state[HOOKS[0]] or state[HOOKS[1]] or state[HOOKS[2]] or state[HOOKS[3]]):
        return False  # true in nearly every call of every forward
    hooks = (hook for name in HOOKS for hook in state[name].values())
    return not all(
        _is_idle(hook) or (is_allowed is not None and is_allowed(hook)) for hook in hooks
    )


def _is_idle(hook: Any) -> bool:
    if isinstance(hook, Bystander):
        return True
    code = getattr(hook, "__code__", None)
    if code is None or code.co_filename != output_capturing.__file__:
        return False
    collected = output_capturing._active_collector.get()
    key = hook.__closure__[code.co_freevars.index("key")].cell_contents
    return not collected or key not in collected
