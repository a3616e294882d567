"""A quick check that a module is as it was when it was last read in full.

To read a layer takes hundreds of checks, and users may change whatever these look at between two
calls: a mode, a hook, an adapter, a weight. So every call looks at all of it again, but in one flat
pass: after a reading we note what every dict and list of the module and of those in it holds, and
the next call compares. If nothing differs, the result of that reading still holds.

The pass compares whatever is there, not what some check asks for: a new check needs no line here,
unless it looks beyond the module, its classes and the file of the model (`_elsewhere`).
"""

import sys
from collections.abc import Callable, Iterable
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller
from types import NoneType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ..foreign.ownership import owner_of
from ..foreign.parallel import is_in_fsdp
from ..layer.buffer import PlacedWeight
from ..rerun import join, split
from ..step.hooks import Bystander

Result = TypeVar("Result", bound=tuple)

# What every module has for saving and loading it, and options of its hooks: no reading asks.
SKIPPED = {
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
# Nobody calls these: they are what they hold. Half of the modules in a layer with adapters.
HOLDERS = {nn.ModuleDict, nn.ModuleList, nn.ParameterDict}
PLAIN = Tensor, nn.Parameter, NoneType
LONGEST_IDLE = 32  # calls: of micro-batches, say, between those of a reference
LEAVES = {bool, int, float, str, NoneType}
# What assigning to a tensor's .data changes, beside its address.
FACTS = attrgetter("__class__", "dtype", "device", "shape", "requires_grad")
STRIDE, ADDRESS = methodcaller("stride"), methodcaller("data_ptr")
# A frozen tensor's: writing to a checkpoint's codes changes them. That of an adapter counts steps.
VERSION, PLACE = attrgetter("_version"), attrgetter("place")


def result(
    module: nn.Module,
    read: Callable[[], Result],
    keep: Callable[[Result], Result] = lambda found: found,
    again: Callable[[Result], Result | None] = lambda kept: kept,
) -> Result:
    """Return ``read()``, a record, or its last result if the module is as it was then.

    A result with a tensor that is not one of the module's own is of its call alone: a
    parametrisation, say, computes it anew.

    keep: the record to hold until the next call. again: makes the result of that, or returns None
    if it no longer can.
    """
    owner = owner_of(module)
    if owner is None:
        return read()
    if owner.readings is None:
        owner.readings = Readings()
    for reading in owner.readings.kept:
        if (kept := reading.if_still(module)) is not None and (found := again(kept)) is not None:
            owner.readings.use(reading)
            return found
    found = read()
    if (state := State.of(module)) is not None:
        tensors, rest = split(keep(found))
        if (places := state.places_of(tensors)) is not None:
            owner.readings.use(Reading(state, rest, places))
    return found


class Readings:
    """The last readings of a module: two, as a model may be called with its adapters and without
    them in turns. A copy has none: a copied or unpickled module is read in full."""

    def __init__(self) -> None:
        self.kept: tuple[Reading, ...] = ()  # the last that was used first

    def __reduce__(self):
        return Readings, ()

    def use(self, reading: "Reading") -> None:
        """Keep this reading, and the one used before, unless that has been idle for long: it holds
        modules that may have left the model."""
        reading.idle = 0
        others = [one for one in self.kept if one is not reading][:1]
        for other in others:
            other.idle += 1
        self.kept = (reading, *(one for one in others if one.idle <= LONGEST_IDLE))


class Reading:
    """The result of a reading, and the state that the module had. Of the result's tensors it keeps
    their places among the module's. idle: how many calls in a row used another reading."""

    def __init__(self, state: "State", rest: Any, places: list[int]):
        self._state, self._rest, self._places = state, rest, places
        self.idle = 0

    def if_still(self, module: nn.Module) -> Any:
        """Return the result if the module has the same state now, else None."""
        if (tensors := self._state.tensors_if_still(module)) is None:
            return None
        return join(self._rest, [tensors[place] for place in self._places])


class State:
    """The state of a module and of all in it.

    It is reached from the module's own forward, so it holds neither the module nor its attributes'
    dict, which would be a cycle. It holds no parameter: one that is replaced is freed at once.
    """

    @staticmethod
    def of(root: nn.Module) -> "State | None":
        """Return the state that a module has now, None where a pass could not tell that it changes:
        FSDP gathers weights to another address in every call, and there are tensors of classes that
        we do not know."""
        found = _Found(root)
        return State(root, found) if found.is_complete else None

    def __init__(self, root: nn.Module, found: "_Found"):
        self._dicts, self._others, self._empty = found.dicts, found.others, found.empty
        self._inner, self._owners = found.modules[1:], found.owners
        self._values = [*self._values_now(root)]
        self._lengths = [len(vars(root)), *map(len, self._dicts), *map(len, self._others)]
        self._keys = [*chain.from_iterable(found.keyed)]
        self._keyed = found.keyed
        self._classes = [type(root), *map(type, self._inner)]
        self._shared = [vars(one) for one in _shared_by(set(self._classes))]
        self._shared_then = [dict(one) for one in self._shared]
        self._elsewhere = _elsewhere()
        self._names = [*chain.from_iterable(self._owners)]
        self._attributes = found.tensors
        self._empty_tensors: list[Tensor] = []
        every = self._tensors_now()
        # not by weak references: torch swaps no tensor that has one
        self._ids = [*map(id, every)]
        self._is_placed = [isinstance(one, PlacedWeight) for one in every]
        self._is_plain = [not is_placed for is_placed in self._is_placed]
        self._is_counted = [
            is_plain and not (one.requires_grad or one.is_inference() or id(one) in found.wrapped)
            for is_plain, one in zip(self._is_plain, every, strict=True)
        ]
        self._facts = self._facts_now(every)

    def places_of(self, tensors: list[Tensor]) -> list[int] | None:
        """Return the places of these among the module's tensors, None if one is not there. Empty
        ones, the adapters of projections that have none, join them."""
        place = {one: index for index, one in enumerate(self._ids)}
        for one in tensors:
            if not one.numel() and id(one) not in place:
                place[id(one)] = len(self._ids) + len(self._empty_tensors)
                self._empty_tensors.append(one)
        places = [place.get(id(one)) for one in tensors]
        return None if None in places else places  # type: ignore[return-value]

    def tensors_if_still(self, root: nn.Module) -> list[Tensor] | None:
        """Return the tensors of the module if all in it is as it was, else None."""
        dicts, others, owners = self._dicts, self._others, self._owners
        try:
            is_still = (
                not any(self._empty)
                and [len(vars(root)), *map(len, dicts), *map(len, others)] == self._lengths
                and [type(root), *map(type, self._inner)] == self._classes
                and all(map(is_, self._values_now(root), self._values))
                and [*chain.from_iterable(self._keyed)] == self._keys
                and [*chain.from_iterable(owners)] == self._names
                and [*map(id, tensors := self._tensors_now())] == self._ids
                and self._facts_now(tensors) == self._facts
                and self._shared == self._shared_then
                and _elsewhere() == self._elsewhere
            )
        except Exception:  # of comparing, say, a tensor with one that has taken its place
            return None
        return tensors + self._empty_tensors if is_still else None

    def _values_now(self, root: nn.Module) -> Iterable[Any]:
        own = vars(root).copy()
        own.pop("forward", None)  # `result` has been reached through it
        return chain(own.values(), _values_of(self._dicts), chain.from_iterable(self._others))

    def _tensors_now(self) -> list[Tensor]:
        owned = [one for one in _values_of(self._owners) if one is not None]
        return owned + self._attributes

    def _facts_now(self, tensors: list[Tensor]) -> list[Any]:
        """Return what may change in these tensors without any of them being replaced."""
        plain = [*compress(tensors, self._is_plain)]
        counted = compress(tensors, self._is_counted)
        with torch._C.DisableTorchFunctionSubclass():
            facts = [*map(FACTS, tensors), *map(VERSION, counted)]
            facts += [*map(STRIDE, plain), *map(ADDRESS, plain)]
        return [*facts, *map(PLACE, compress(tensors, self._is_placed))]


def _values_of(dicts: Iterable[dict]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, dicts))


class _Found:
    """All that a module consists of, found from it. Objects that none of these rules opens are
    compared by identity."""

    def __init__(self, root: nn.Module):
        self.is_complete = True
        self.modules: list[nn.Module] = []
        self.dicts: list[dict] = []  # also those of attributes
        self.keyed: list[dict] = []  # but not these
        self.others: list[Any] = []  # lists and sets
        self.empty: list[Any] = []  # dicts, lists and sets: nearly all, and quickly compared
        self.owners: list[dict[str, Any]] = []  # parameters and buffers
        self.tensors: list[Tensor] = []  # other tensors
        self.wrapped: set[int] = set()  # ids of parameters that PEFT sets in each of its forwards
        self._seen: set[int] = set()
        self._open(root)
        del self.dicts[0]  # the root's attributes

    def _open(self, value: Any) -> None:
        if type(value) in LEAVES or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict | list | set):
            self._open_container(value)
        elif isinstance(value, nn.Module):
            self._open_module(value)
        elif isinstance(value, Tensor):
            self.tensors.append(value)
            self.is_complete &= type(value) in PLAIN
        elif isinstance(value, tuple):
            self._open_each(value)
        elif isinstance(value, Bystander):  # on the module for a call, and may hold the model
            self.is_complete = False
        elif isinstance(value, PretrainedConfig) or _is_bitsandbytes(value):
            self.dicts.append(vars(value))
            self._open_each(vars(value).values())

    def _open_each(self, values: Iterable[Any]) -> None:
        for value in values:
            self._open(value)

    def _open_module(self, module: nn.Module) -> None:
        attributes = vars(module)
        self.modules.append(module)
        self.is_complete &= not is_in_fsdp(module)
        if type(module) is ParamWrapper:
            self.wrapped.add(id(module.get_param()))
        for owner in (module._parameters, module._buffers):
            self._seen.add(id(owner))
            (self.owners if owner else self.empty).append(owner)
            for tensor in owner.values():
                self._open_owned(tensor)
        if type(module) in HOLDERS:
            self._open(module._modules)
            return
        self.dicts.append(attributes)
        for name in attributes.keys() - SKIPPED:
            self._open(attributes[name])

    def _open_container(self, container: Any) -> None:
        if not container:
            self.empty.append(container)
        elif isinstance(container, dict):
            self.dicts.append(container)
            self.keyed.append(container)
            self._open_each(container.values())
        else:
            self.others.append(container)
            self._open_each(container)

    def _open_owned(self, tensor: Tensor | None) -> None:
        """Open a parameter or buffer. What it is comes from its owner in each pass."""
        self._seen.add(id(tensor))
        if _is_bitsandbytes(tensor):  # its quant_state
            self.dicts.append(vars(tensor))
            self._open_each(vars(tensor).values())
        elif type(tensor) not in PLAIN and not isinstance(tensor, PlacedWeight):
            self.is_complete = False


def _is_bitsandbytes(value: Any) -> bool:
    return type(value).__module__.startswith("bitsandbytes.")


def _shared_by(classes: set[type]) -> list[Any]:
    """Return what modules of these classes share with others, and somebody may patch: the classes
    with their bases, and the files of models."""
    bases = dict.fromkeys(base for cls in classes for base in cls.__mro__ if base is not object)
    files = {base.__module__ for base in bases if base.__module__.startswith("transformers.models")}
    return [*bases, *(sys.modules[name] for name in files), sdpa_attention]


def _elsewhere() -> tuple:
    """Return all else that readings look at: the attention functions, and what a call collects from
    modules' hooks."""
    collected = output_capturing._active_collector.get()
    attention = F.scaled_dot_product_attention, ALL_ATTENTION_FUNCTIONS["sdpa"]
    return *attention, collected and tuple(collected)
