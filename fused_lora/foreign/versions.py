"""Differences between the versions of transformers that we support.

Since 5.23 a class's forward does a layer's checkpointing, so a forward on the instance replaces it;
in 5.17 it is __call__. 5.24 renames past_key_values to cache, passes attention's options to the
cache, and checkpoints no layer when gradients are off. Our functions keep the old name. In 5.17
the recurrence of a gated delta net takes as many heads of q and k as of v, from 5.24 on fewer.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

CACHE = "past_key_values"
IS_NAMED_CACHE = "cache" in inspect.signature(masking_utils.create_causal_mask).parameters
STATES = "cache" if IS_NAMED_CACHE else "cache_params"  # most mixers' name for the cache
RULE_REPEATS_HEADS = not IS_NAMED_CACHE
CONVOLUTION = "causal_conv1d_fn"  # the function in which mixers convolve
# a class's forward does a layer's checkpointing
CHECKPOINTED_BY_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)
LAYERS_FILE = inspect.getfile(GradientCheckpointingLayer)
NO_CACHE = {"use_cache": False, CACHE: None}  # a recompute would fill it twice


def is_checkpointed(module: Any) -> bool:
    """Return True if transformers checkpoints this layer, or the layers of this decoder, now."""
    wanted = torch.is_grad_enabled() or not IS_NAMED_CACHE
    return module.gradient_checkpointing and module.training and wanted


def as_ours(options: dict[str, Any]) -> dict[str, Any]:
    """Rename options of a forward to our functions' names."""
    return _renamed(options, "cache", CACHE)


def as_named(options: dict[str, Any]) -> dict[str, Any]:
    """Rename options of a forward to transformers' names."""
    return _renamed(options, CACHE, "cache")


def as_mixers(mixer: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a layer's forward as its mixer takes them: without positions, and with the
    cache by its name there."""
    takes = _signature_of(type(mixer).forward).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    left_out = (CACHE, "position_embeddings", "position_ids")
    others = {
        name: one for name, one in options.items()
        if name not in left_out and (takes_any or name in takes)
    }  # fmt: skip
    name = name_of_cache(mixer)
    assert name is not None
    return {name: options.get(CACHE), **others}


def name_of_cache(mixer: nn.Module) -> str | None:
    """Return the name of the cache among a mixer's inputs. None: a wrapper's forward, which names
    none."""
    takes = _signature_of(type(mixer).forward).parameters
    return next((one for one in (STATES, CACHE) if one in takes), None)


_signature_of = cache(inspect.signature)


def by_name(module: nn.Module, inputs: Sequence[Any]) -> dict[str, Any]:
    """Return inputs of a module's forward that follow the first, by our functions' names."""
    if not inputs:
        return {}
    names = _input_names(type(module).forward)
    if len(inputs) > len(names):
        raise TypeError(
            f"{type(module).__name__} takes {1 + len(names)} inputs by position, got "
            f"{1 + len(inputs)}"
        )
    return as_ours(dict(zip(names, inputs, strict=False)))


@cache
def _input_names(forward: Callable) -> list[str]:
    """Return the names of a forward's inputs, after the first, that may be given by position."""
    every = inspect.signature(forward).parameters.values()
    return [one.name for one in every if one.kind is one.POSITIONAL_OR_KEYWORD][2:]


def _renamed(options: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    if not IS_NAMED_CACHE or old not in options:
        return options
    return {new if name == old else name: one for name, one in options.items()}


def class_forward(module: nn.Module, *inputs, **options):
    """Run the forward of the module's class without the checkpointing around it: our forward has
    done that."""
    return without_checkpointing(type(module).forward)(module, *inputs, **as_named(options))


@cache
def without_checkpointing(forward: Any) -> Callable:
    """Return a class's forward as `class_forward` runs it."""
    while getattr(getattr(forward, "__code__", None), "co_filename", "") == LAYERS_FILE:
        forward = forward.__wrapped__
    return forward
