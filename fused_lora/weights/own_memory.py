"""Weights move out of their buffers (`borders.py`) to be saved, to be sharded, or by `unfuse`."""

from typing import Any

import torch
from torch import nn

from ..foreign.saved_weights import hand_out_buffered
from ..layer.buffer import PlacedWeight


def let_save(base: nn.Linear) -> None:
    """Prepare a linear layer whose weight will lie in a buffer for saving, even after PEFT is
    removed from its model (`_leave_peft`)."""
    if _leave_peft not in base._state_dict_pre_hooks.values():
        base.register_state_dict_pre_hook(_leave_peft)
        base.register_state_dict_post_hook(hand_out_buffered)


def _leave_peft(base: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Move a linear layer out of its buffer if its state is asked for outside any PEFT layer or
    model, after `merge_and_unload` or `unload`. safetensors refuses weights that share memory or
    are not contiguous."""
    if not prefix.endswith("base_layer.") and "base_model." not in prefix:
        _give_own_memory(base)


HOOKS = (_leave_peft, hand_out_buffered)


def _give_own_memory(base: Any) -> None:
    """Move weight and bias out of their buffer, whatever their names are now (weight_orig after
    pruning)."""
    for parameter in base.parameters():
        if isinstance(parameter, PlacedWeight):
            parameter.leave_buffer()
        elif type(parameter) is nn.Parameter and not (
            parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes
        ):
            parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)


def leave_buffers(model: nn.Module) -> None:
    """Move weights out of their buffers until the next forward, apart from those in codes."""
    for module in model.modules():
        is_placed = any(
            isinstance(parameter, PlacedWeight) for parameter in module.parameters(recurse=False)
        )
        if _leave_peft in module._state_dict_pre_hooks.values() and not is_placed:
            _give_own_memory(module)


def unborder(model: nn.Module) -> None:
    """Move every weight and bias of `model` that lies in a buffer back to separate contiguous
    memory, with its current value. This frees the buffers."""
    for module in model.modules():
        for hooks in (module._state_dict_pre_hooks, module._state_dict_hooks):
            for key in [key for key, hook in hooks.items() if hook in HOOKS]:
                del hooks[key]
                _give_own_memory(module)
