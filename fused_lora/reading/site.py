"""Sites: the kinds of module whose forward a fused part replaces, and the forward that we set.

We find sites by class: we know that these compute what the fused code computes and nothing else
(`known.py`). We read a module in every forward, so disabled, merged or switched adapters, hooks and
the like behave as they do without fusion. If reading refuses, the module steps aside (`aside.py`):
it runs its class's forward, and warns once.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fused_mlp.launching import is_interpreted
from fused_mlp.swiglu import _swiglu_forward_kernel

from ..foreign.ownership import BOUND_TO_THE_MODEL, Owner
from ..foreign.versions import (
    CHECKPOINTED_BY_FORWARD,
    NO_CACHE,
    as_ours,
    is_checkpointed,
    without_checkpointing,
)
from .aside import step_aside
from .refusal import reason_of

# False in Triton's interpreter, which runs kernels on the CPU.
KERNELS_WANT_A_GPU = not is_interpreted(_swiglu_forward_kernel)
ON_CPU = (
    "its weights are on the CPU, where no kernel runs: it runs fused once the model is on a GPU"
)


class Site(NamedTuple):
    """One kind of module that a part runs fused."""

    # the modules of a model that the part may apply to, with their names
    candidates: Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]
    read: Callable[[Any], Any]  # reads one as it is now, or raises a Refusal
    forward: Callable[..., Any]  # to set; called with the module and the set of parts that it runs
    gives_way_to: str = ""  # a part that sets its forward and lists the module, if it runs that too
    # the names of the units that the report counts in such a module; "": itself
    units: Callable[[nn.Module], Collection[str]] = lambda module: ("",)
    # the units, given the result of `read`, that do not run fused: name -> reason
    left: Callable[[Any], dict[str, str]] = lambda read: {}
    # the reason if other modules of the model keep the one of this name from running fused
    why_not_there: Callable[[nn.Module, str], str | None] = lambda model, name: None

    def why_not(self, model: nn.Module, name: str) -> str | None:
        """Return the reason for leaving a model's module, as it is now, to its class's forward."""
        return reason_of(self.read, model.get_submodule(name)) or self.why_not_there(model, name)

    def why_not_now(self, model: nn.Module, name: str) -> str | None:
        """Return the reason of `why_not`, or that the weights are on the CPU."""
        if reason := self.why_not(model, name):
            return reason
        first = next(model.get_submodule(name).parameters(), None)
        is_here = first is not None and first.device.type == "cpu"
        return ON_CPU if KERNELS_WANT_A_GPU and is_here else None


class Evidence(NamedTuple):
    """Functions and kernels in the profile of a step which prove that a part's modules ran
    fused."""

    # autograd functions, with the number of modules each stands for. Their backwards count, because
    # forwards may run twice
    functions: dict[str, int]
    # parts of the names of GPU kernels, each at least once a module. "a|b": one of the two
    kernels: tuple[str, ...] = ()
    kernels_in_4_bits: tuple[str, ...] = ()  # that run as well if the base weights are in 4 bits
    without_backward: int = 0  # modules that have none, because nothing before them is trained


class Part(NamedTuple):
    """One switch of Fusion: its sites, and all that reports, benchmark and tests ask about it."""

    sites: tuple[Site, ...]
    none_found: str  # the reason if a model has none of the sites
    units: str  # the noun for the report's counts
    evidence: Evidence
    # of kernels whose names do not tell the benchmark their kind of work: how their names begin
    kinds: dict[str, tuple[str, ...]] = {}  # noqa: RUF012

    def candidates(self, model: nn.Module) -> Iterator[tuple[str, Any, Site]]:
        """Yield the modules of a model that the report lists, with their names and sites."""
        for site in self.sites:
            if not site.gives_way_to:
                for name, module in site.candidates(model):
                    yield name, module, site


class FusedForward(Owner):
    """The forward that replaces a module's: a function of the module, the parts that it runs fused,
    and the module's inputs.

    We set its method `forward` on the module. torch.compile runs it as it is, between what it
    compiles: tracing through fused functions took minutes and gave nothing.
    """

    def __init__(self, function: Callable, module: nn.Module, parts: frozenset[str]):
        super().__init__(module, parts)
        self.function = function
        is_layer = isinstance(module, GradientCheckpointingLayer)
        self.checkpoints = CHECKPOINTED_BY_FORWARD and is_layer

    @property
    def forward(self) -> MethodType:
        return MethodType(_with_signature_of(type(self.module).forward), self)

    def run(self, module: nn.Module, *inputs, **options):
        """Run on the module; a checkpoint keeps it alive until its backward."""
        if (reason := _why_not_inputs(*inputs, *options.values())) is not None:
            return step_aside(module, reason, *inputs, **options)
        return self.function(module, self.parts, *inputs, **options)


_is_unfused = ContextVar("is_unfused", default=False)


@contextmanager
def unfused() -> Iterator[None]:
    """Make every fused module run its class's forward, in this thread."""
    token = _is_unfused.set(True)
    try:
        yield
    finally:
        _is_unfused.reset(token)


@cache
def _with_signature_of(own: Callable) -> Callable:
    """Return `FusedForward.forward` with the signature of the class's forward. The Trainer drops
    dataset columns that are not in it, and generate() looks there for the arguments to pass."""

    def forward(self: FusedForward, *inputs, **options):
        if isinstance(self, nn.Module):  # accelerate binds what it wraps in autocast to the model
            raise RuntimeError(BOUND_TO_THE_MODEL)
        layer: Any = self.module
        if _is_unfused.get():  # for each token of generate()
            return without_checkpointing(type(layer).forward)(layer, *inputs, **options)
        options = as_ours(options)
        if self.checkpoints and is_checkpointed(layer):
            # like the class's forward; nothing else is hidden from the run that backward repeats
            options.update({name: off for name, off in NO_CACHE.items() if name in options})
            run = partial(self.run, layer, **options)
            return layer._gradient_checkpointing_func(run, *inputs)
        return self.run(layer, *inputs, **options)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    return torch.compiler.disable(forward)


def _why_not_inputs(*inputs: Any) -> str | None:
    """Return the reason if nothing can run fused on these inputs."""
    are_on_cpu = (not isinstance(one, Tensor) or one.device.type == "cpu" for one in inputs)
    if KERNELS_WANT_A_GPU and all(are_on_cpu):
        return ON_CPU
    if not torch._C._are_functorch_transforms_active():
        return None
    return "it is within a transform of torch.func, which knows no fused function"


def having(model: nn.Module, *names: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that themselves have submodules of these names. PEFT's wrappers pass on those
    of the wrapped module, and do not count."""
    for name, module in model.named_modules():
        if all(part in module._modules for part in names):
            yield name, module
