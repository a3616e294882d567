"""Checks of a captured step (`graph.py`): it can be captured, and nothing that it was captured for
has changed since."""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..layer.buffer import PlacedWeight
from .settings import ModuleSettings


def check_arguments(
    model: Any, optimizer: Any, autocast: Any, max_grad_norm: Any, counts: dict[str, Any]
) -> None:
    """Raise ValueError for an argument of the wrong type."""
    for name, given, wanted in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(given, wanted):
            raise ValueError(
                f"GraphedStep needs {name} as a "
                f"torch.{wanted.__module__.split('.')[1]}.{wanted.__name__}, got "
                f"{type(given).__name__}"
            )
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "GraphedStep averages gradients over all ranks itself, got DistributedDataParallel: "
            "pass its .module"
        )
    # a context manager is callable as well: as a decorator
    if not callable(autocast) or isinstance(autocast, AbstractContextManager):
        raise ValueError(
            "GraphedStep needs autocast as a function that makes a context, got "
            f"{type(autocast).__name__}: pass lambda: torch.autocast('cuda', torch.bfloat16)"
        )
    if max_grad_norm is not None and not (
        isinstance(max_grad_norm, int | float) and max_grad_norm >= 0
    ):
        raise ValueError(
            f"GraphedStep needs max_grad_norm as a number or None, got {max_grad_norm!r}"
        )
    if any(not isinstance(count, int) or count < 1 for count in counts.values()):
        raise ValueError(
            f"GraphedStep needs {' and '.join(counts)} of at least 1, got "
            f"{' and '.join(map(repr, counts.values()))}"
        )


def check_capturable(
    model: nn.Module,
    parameters: Sequence[Tensor],
    trained: Iterable[Tensor],
    device_type: str,
) -> None:
    """Raise ValueError for a model that we can see at once cannot be captured.

    parameters: the model's and the optimizer's. trained: those of the optimizer that require a
    gradient.
    """
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) != 1 or torch.device(devices[0]).type != device_type:
        raise ValueError(
            f"GraphedStep needs all parameters on one {device_type} device, got "
            f"{', '.join(devices) or 'no parameters'}: move the model with .to('{device_type}')"
        )
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ValueError(
            "GraphedStep needs whole parameters on every rank, got some that are sharded: leave "
            "out fully_shard; GraphedStep averages gradients over ranks itself"
        )
    optimized = set(trained)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in optimized:
            raise ValueError(
                "GraphedStep needs every parameter that requires a gradient in the optimizer, but "
                f"{name} is not: freeze it, or give it to the optimizer"
            )


def check_optimizer(
    optimizer: torch.optim.Optimizer, trained: Iterable[Tensor], updates: bool
) -> None:
    """Raise ValueError for an optimizer whose update cannot be captured, or that trains more than
    it did. trained: what it trained when the step was made or reset."""
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if any(parameter.requires_grad for parameter in optimized.difference(trained)):
        raise ValueError(
            "GraphedStep: a parameter of the optimizer requires a gradient that required none "
            "before; call reset() to clip and average it too"
        )
    if updates and not all(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError(
            f"GraphedStep needs an optimizer with capturable=True, got {type(optimizer).__name__} "
            "without: use torch.optim.AdamW(parameters, lr, fused=True, capturable=True)"
        )


def form_of(inputs: dict[str, Any], nested: bool = False) -> tuple[tuple, ...]:
    """Return the form of a call's inputs. Calls of one form share a graph."""
    form: list[tuple] = []
    for name, value in sorted(inputs.items()):
        if isinstance(value, Tensor) and not nested:
            form.append((name, value.shape, value.dtype))
        elif isinstance(value, dict):
            form.append((name, form_of(value, nested=True)))
        elif value is None or isinstance(value, (bool, int, float, str)):
            form.append((name, type(value), value))
        else:
            raise ValueError(
                "GraphedStep needs tensors and constants (None, numbers, strings, dicts of them) "
                f"as inputs, got {name} as {type(value).__name__}: pass its parts one by one"
            )
    return tuple(form)


def addresses_of(parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Return the addresses that the forward reads. If they have changed, it must not be replayed.

    The GPU waits for this, and a model has hundreds of these tensors: `map` takes half as long as a
    loop.
    """
    addresses: list[Hashable] = [*map(Tensor.data_ptr, parameters)]
    if 0 in addresses:
        addresses = [
            one.place if isinstance(one, PlacedWeight) else address
            for one, address in zip(parameters, addresses, strict=True)
        ]
    return {"a parameter": addresses}


def which_train(parameters: Iterable[Tensor]) -> tuple[bool, ...]:
    return tuple(map(attrgetter("requires_grad"), parameters))


def worked_on(
    parameters: Iterable[Tensor], settings: ModuleSettings, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Return everything else that must not change after capture. optimizer: the update's, or
    None."""
    found: dict[str, Any] = {
        "a parameter": which_train(parameters),
        "a module": settings.is_current,
        "an adapter": settings.adapters(),
    }
    if optimizer is not None:
        states = optimizer.state.values()
        tensors = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        found["the optimizer's state"] = [*map(Tensor.data_ptr, tensors)]
        names = optimizer.defaults.keys() - {"lr"}
        found["an option of the optimizer"] = [
            {name: group[name] for name in names} for group in optimizer.param_groups
        ]
    return found


def check_unchanged(at_capture: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError that names the first thing that has changed."""
    for what, value in at_capture.items():
        if value != now[what]:
            raise ValueError(
                f"GraphedStep: {what} is not what it was when this step was captured; call reset() "
                "to capture it again (only lr may change)"
            )
