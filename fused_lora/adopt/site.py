"""What a site is: a kind of module whose forward a fused part stands in for.

Sites are found by the classes that are known to compute what the fused code computes and nothing
else (CLASSES). A site's `why_not` is asked at every forward, so that disabled, merged or switched
adapters, hooks and the like behave as they do without fusion: the module then runs its class's own
forward.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
CLASSES = {
    kind: {
        f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}{kind}"
        for family in FAMILIES
    }
    for kind in ("MLP", "Attention", "RMSNorm", "DecoderLayer", "ForCausalLM")
}
KNOWN_TO = {
    "MLP": "an MLP class that is known to compute SwiGLU",
    "Attention": "an attention class whose forward is known",
    "RMSNorm": "a norm class that is known to compute weight * (x / rms(x))",
    "DecoderLayer": "a layer class whose forward is known",
    "ForCausalLM": "a class that is known to compute its loss from lm_head alone",
}


class Site(NamedTuple):
    """One kind of module that a part runs fused.

    candidates: the modules of a model that the part may concern, with their names.
    why_not: the reason for leaving one to its class's own forward, as it is now, or None.
    forward: what is set on it; called with the module and the set of parts that it runs.
    is_listed: whether the report lists it; not where its modules are listed by another site.
    """

    candidates: Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]
    why_not: Callable[[nn.Module], str | None]
    forward: Callable[..., Any]
    is_listed: bool = True


class Part(NamedTuple):
    """What one switch of Fusion concerns; `none_found`: why a model may have nothing for it."""

    sites: tuple[Site, ...]
    none_found: str


class FusedForward:
    """What runs in the place of a module's forward: a function of the module, of the parts that it
    runs fused, and of the module's inputs.

    Its method `forward` is set on the module. torch.compile shares the code of a method between
    layers; a callable object, or what functools.partial binds, it would compile for each layer
    until it gives up.
    """

    def __init__(self, function: Callable, module: nn.Module, parts: frozenset[str]):
        self.function, self.module, self.parts = function, module, parts

    @property
    def forward(self) -> MethodType:
        return MethodType(_with_signature_of(type(self.module).forward), self)


@cache
def _with_signature_of(own: Callable) -> Callable:
    """`FusedForward.forward`, with the signature of the class's own: the Trainer drops the columns
    of a dataset that are not in it, and generate() looks there for what it may pass."""

    def forward(self: FusedForward, *inputs, **options):
        return self.function(self.module, self.parts, *inputs, **options)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    return forward


def parts_of(module: nn.Module) -> frozenset[str]:
    """The parts that a module runs fused, told by the forward on its instance."""
    forward = vars(module).get("forward")
    # not getattr: torch.compile of torch 2.11 does not find a method's __self__ that way
    owner = forward.__self__ if isinstance(forward, MethodType) else None
    return owner.parts if isinstance(owner, FusedForward) else frozenset()


def is_kind(module: nn.Module, kind: str) -> bool:
    cls = type(module)
    if cls.__bases__[0].__name__ == "FSDPModule":  # fully_shard's, which changes no forward
        cls = cls.__bases__[1]
    return f"{cls.__module__}.{cls.__qualname__}" in CLASSES[kind]


def why_not_class(module: nn.Module, kind: str) -> str | None:
    if "forward" in vars(module) and not parts_of(module):
        return "its forward has been replaced by something else"
    if not is_kind(module, kind):
        return f"{type(module).__name__} is not {KNOWN_TO[kind]}"
    return None


def having(*names: str) -> Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]:
    """Modules that have submodules of these names, of their own: PEFT's wrappers pass on those of
    what they wrap."""

    def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, module in model.named_modules():
            if all(part in module._modules for part in names):
                yield name, module

    return candidates


def reason_in(operands: Any) -> str | None:
    return operands if isinstance(operands, str) else None
