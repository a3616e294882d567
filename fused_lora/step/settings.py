"""Settings of a module that its forward reads on the host: modes, dropouts, adapters.

A graph repeats those that it was captured with (`graph.py`, `graphed_module.py`). A recompute needs
those of the forward (`recompute.py`).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

Attributes = dict[type, tuple[str, ...]]  # by class
MODES: Attributes = {nn.Module: ("training",), _DropoutNd: ("p",)}
# PEFT's, which only rooms above know. Adapters that are merged stay so: the weights hold them.
ADAPTERS: Attributes = {}
MERGED: Attributes = {}
# Three quarters of a model with adapters, the same in both modes.
WITHOUT_MODE = {nn.Linear, nn.ModuleDict, nn.ModuleList, nn.ParameterDict}
AS_TUPLE: dict[type, Callable[[Any], Any]] = {list: tuple, dict: lambda one: tuple(one.items())}
COPIED: dict[type, Callable[[Any], Any]] = {list: list, dict: dict}


class ModuleSettings:
    """The settings of a module and of those in it. Each call reads them anew.

    The modules are found once. A layer with seven adapters takes 20 us for that and 8 to be read.
    """

    def __init__(self, module: nn.Module):
        self._all = [module]
        for one in self._all:  # `modules()` takes seven times as long
            self._all += [inner for inner in one._modules.values() if inner is not None]
        parts = [one for one in self._all if type(one) not in WITHOUT_MODE]
        self._modes, self._adapters, self._merged = (
            [
                (name, having)
                for cls, names in attributes.items()
                if (having := [part for part in parts if isinstance(part, cls)])
                for name in names
            ]
            for attributes in (MODES, ADAPTERS, MERGED)
        )

    def modes(self) -> Hashable:
        """Return the mode of every module and the probability of every dropout."""
        return _read(self._modes, {})

    def adapters(self) -> Hashable:
        """Return which adapters are active, disabled and merged, and their scaling."""
        return _read(self._adapters + self._merged, AS_TUPLE)

    def kept(self) -> Sequence[Sequence]:
        """Return all that `restored` sets: modes, dropouts, adapters, and what trains."""
        return _read(self._restorable, COPIED)

    @contextmanager
    def restored(self, kept: Sequence[Sequence]) -> Iterator[None]:
        """Context in which all is as it was when `kept`."""
        changed = [
            (one, name, now, then)
            for (name, having), values in zip(self._restorable, kept, strict=True)
            for one, now, then in zip(having, map(attrgetter(name), having), values, strict=True)
            if now != then
        ]
        for one, name, _, then in changed:
            setattr(one, name, then)
        try:
            yield
        finally:
            for one, name, now, _ in changed:
                setattr(one, name, now)

    # --- the modules themselves -------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """False if a module has been replaced, added or removed since this was first asked."""
        return self._now_inside() == self._inside

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the modules have now. Tied ones come twice."""
        owned = chain.from_iterable(map(dict.values, self._owners))
        return [one for one in owned if one is not None]

    def _now_inside(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self._parents))]

    @cached_property
    def _restorable(self) -> list[tuple[str, list]]:
        return [*self._modes, *self._adapters, ("requires_grad", self.parameters())]

    @cached_property
    def _inside(self) -> list[nn.Module | None]:
        return self._now_inside()

    @cached_property
    def _parents(self) -> list[dict[str, nn.Module | None]]:
        return [one._modules for one in self._all if one._modules]

    @cached_property
    def _owners(self) -> list[dict[str, nn.Parameter | None]]:
        return [one._parameters for one in self._all if one._parameters]


def _read(
    attributes: list[tuple[str, list]], changes: dict[type, Callable[[Any], Any]]
) -> tuple[tuple, ...]:
    """Return these attributes of these modules. changes: by type of value."""
    if not changes:
        return tuple(tuple(map(attrgetter(name), having)) for name, having in attributes)
    return tuple(
        tuple(
            one if (change := changes.get(type(one))) is None else change(one)
            for one in map(attrgetter(name), having)
        )
        for name, having in attributes
    )
