"""Policies of checkpointing (`step/checkpoint.py`) on the layers of a transformers model.

transformers' layers read two attributes, and a method of their model sets these on all of them. So
a policy lies in those attributes, and stays there when the method is called: as the Trainer does,
whose gradient_checkpointing=True comes after `fuse`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ...step.checkpoint import Checkpoint, LayerPolicy
from ...step.module_ref import ModuleRef

# What transformers' layers read: whether to checkpoint, and the function that does it.
ENABLED, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
# The method of a model that sets them, on all of its layers.
SWITCH = "_set_gradient_checkpointing"


class Installed(LayerPolicy):
    """A LayerPolicy in a layer's attribute; `before`: what the attributes were without it."""

    before: dict[str, Any]


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that transformers can checkpoint, in the order of a forward."""
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield name, module


def install(policy: Checkpoint, layers: Sequence[nn.Module], last_runs_once: bool = False) -> None:
    """Run these layers, in the order of a forward, under this policy.

    last_runs_once: all of the last one is kept. For a model whose loss takes little memory.
    """
    for index, layer in enumerate(layers):
        remove(layer)
        is_last = index == len(layers) - 1
        installed = Installed(policy, ModuleRef(layer), index, is_last, is_last and last_runs_once)
        _set(layer, installed, policy.policy != "none")


def _set(layer: nn.Module, installed: Installed, is_enabled: bool) -> None:
    installed.before = {one: vars(layer)[one] for one in (ENABLED, FUNCTION) if one in vars(layer)}
    setattr(layer, ENABLED, is_enabled)
    setattr(layer, FUNCTION, installed)


def _installed_on(layer: nn.Module) -> Installed | None:
    function = vars(layer).get(FUNCTION)
    return function if isinstance(function, Installed) else None


def policy_of(layer: nn.Module) -> Checkpoint | None:
    """Return the policy that was installed on this layer, if any."""
    installed = _installed_on(layer)
    return None if installed is None else installed.policy


def remove(layer: nn.Module) -> bool:
    """Give the layer the checkpointing back that it had before a policy was installed, if one was;
    returns whether."""
    installed = _installed_on(layer)
    if installed is None:
        return False
    for name in (ENABLED, FUNCTION):
        delattr(layer, name)
        if name in installed.before:
            setattr(layer, name, installed.before[name])
    return True


def hold(model: nn.Module) -> None:
    """Let the policies of a model's layers stay when its checkpointing is switched on or off,
    whatever options come with that."""
    for module in model.modules():
        if hasattr(type(module), SWITCH):
            # a method of the module would be looked for in its class when the model is unpickled
            setattr(module, SWITCH, partial(_switch, ModuleRef(module)))
    _agree(model)


def let_go(model: nn.Module) -> None:
    """The opposite of `hold`, once the policies are removed."""
    for module in model.modules():
        if SWITCH in vars(module):
            delattr(module, SWITCH)
    _agree(model)


def _agree(model: nn.Module) -> None:
    """Let the modules that hold layers say of themselves what these do: in training transformers
    makes no cache where they say that they are checkpointed."""
    for module in model.modules():
        if ENABLED in vars(module) and not isinstance(module, GradientCheckpointingLayer):
            enabled = (getattr(layer, ENABLED) for _, layer in layers_of(module))
            setattr(module, ENABLED, any(enabled))


def _switch(model_ref: ModuleRef, enable: bool = True, **options) -> None:
    """Stand in on a model for its class's own `_set_gradient_checkpointing`."""
    model = model_ref()
    held = {layer: one for layer in model.modules() if (one := _installed_on(layer)) is not None}
    getattr(type(model), SWITCH)(model, enable=enable, **options)
    for layer, installed in held.items():
        # before: what was asked for meanwhile, which `remove` gives back
        _set(layer, installed, enable and installed.policy.policy != "none")
    _agree(model)
