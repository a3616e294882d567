"""Checkpointing policies (`step/checkpoint.py`) on the layers of a transformers model.

transformers' layers read two attributes, and a method of their model sets these on all of them. We
store a policy in those attributes and keep it there when the method is called. The Trainer calls
it: its gradient_checkpointing=True comes after `fuse`.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..step.checkpoint import Checkpoint, LayerPolicy
from ..step.module_ref import ModuleRef

# The attributes of transformers' layers: whether to checkpoint, and the function that does it.
ENABLED, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
# The method of a model that sets them on all of its layers.
SWITCH = "_set_gradient_checkpointing"
IN_EVAL_MODE = "transformers checkpoints nothing in eval mode: call model.train(), as trainers do"


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that transformers can checkpoint, in the order of a forward."""
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield name, module


def install(policy: Checkpoint, layers: Sequence[nn.Module], last_runs_once: bool = False) -> None:
    """Run these layers, in the order of a forward, under this policy.

    last_runs_once: keep the last layer whole, but on long rows. For a model whose loss takes little
        memory.
    """
    for index, layer in enumerate(layers):
        remove(layer)
        following = len(layers) - 1 - index
        is_kept_last = last_runs_once and not following
        installed = LayerPolicy(policy, ModuleRef(layer), index, following, is_kept_last)
        _set(layer, installed, policy.policy != "none")


def _set(layer: nn.Module, installed: LayerPolicy, is_enabled: bool) -> None:
    installed.before = {one: vars(layer)[one] for one in (ENABLED, FUNCTION) if one in vars(layer)}
    setattr(layer, ENABLED, is_enabled)
    setattr(layer, FUNCTION, installed)


def _installed_on(layer: nn.Module) -> LayerPolicy | None:
    function = vars(layer).get(FUNCTION)
    return function if isinstance(function, LayerPolicy) else None


def policy_of(layer: nn.Module) -> Checkpoint | None:
    """Return the policy that was installed on this layer, if any."""
    installed = _installed_on(layer)
    return None if installed is None else installed.policy


def has_policy_on(layer: nn.Module) -> bool:
    """Return True if a layer is to run under a policy, which it does in training mode."""
    return _installed_on(layer) is not None and getattr(layer, ENABLED)


def remove(layer: nn.Module) -> bool:
    """Restore the checkpointing that the layer had before a policy was installed. Return whether
    there was a policy."""
    installed = _installed_on(layer)
    if installed is None:
        return False
    for name in (ENABLED, FUNCTION):
        delattr(layer, name)
        if name in installed.before:
            setattr(layer, name, installed.before[name])
    return True


def hold(model: nn.Module) -> None:
    """Keep the policies of a model's layers when its checkpointing is switched on or off, whatever
    options come with that."""
    for module in model.modules():
        if hasattr(type(module), SWITCH):
            # unpickling the model would look for a bound method in the module's class
            setattr(module, SWITCH, partial(_switch, ModuleRef(module)))
    _agree(model)


def let_go(model: nn.Module) -> None:
    """Undo `hold`, after the policies are removed."""
    for module in model.modules():
        if SWITCH in vars(module):
            delattr(module, SWITCH)
    _agree(model)


def _agree(model: nn.Module) -> None:
    """Make modules that hold layers report the layers' checkpointing as theirs. In training,
    transformers makes no cache if they do."""
    for module in model.modules():
        if ENABLED in vars(module) and not isinstance(module, GradientCheckpointingLayer):
            enabled = (getattr(layer, ENABLED) for _, layer in layers_of(module))
            setattr(module, ENABLED, any(enabled))


def _switch(model_ref: ModuleRef, enable: bool = True, **options) -> None:
    """Replace a model's `_set_gradient_checkpointing`."""
    model = model_ref()
    held = {layer: one for layer in model.modules() if (one := _installed_on(layer)) is not None}
    getattr(type(model), SWITCH)(model, enable=enable, **options)
    for layer, installed in held.items():
        # this stores the values just set as `before`, and `remove` will restore them
        _set(layer, installed, enable and installed.policy.policy != "none")
    _agree(model)
