"""Sites: the kinds of module whose forward a fused part stands in for.

Sites are found by the classes that are known to compute what the fused code computes and nothing
else (`families.py`). A site's `why_not` is asked at every forward, so that disabled, merged or
switched adapters, hooks and the like behave as they do without fusion: the module then runs its
class's own forward.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import triton
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import masking_utils, modeling_layers

from fused_mlp.swiglu import _swiglu_forward_kernel

from .families import FORMS
from .originals import is_fsdp, why_patched, why_replaced
from .owners import ModuleRef

KNOWN_TO = {
    "MLP": "an MLP class that is known to compute down(activation(gate) * up)",
    "Attention": "an attention class whose forward is known",
    "RMSNorm": "a norm class that is known to compute weight * (x / rms(x))",
    "NormedLayer": "a layer class whose forward is known",
    "DecoderLayer": "a layer class whose parts are known",
    "ForCausalLM": "a class that is known to compute its loss from lm_head alone",
}
# Functions, and methods of their own, that the forwards of these classes call and that fused ones
# compute themselves.
CALLED = {"Attention": ("apply_rotary_pos_emb", "rotate_half")}
METHODS = {"RMSNorm": "_norm"}

# Whether a layer is checkpointed by its class's forward, which one on the instance replaces, as in
# transformers 5.23; in 5.17 by its __call__.
CHECKPOINTED_BY_FORWARD = "__call__" not in vars(modeling_layers.GradientCheckpointingLayer)
LAYERS_FILE = modeling_layers.__file__

# transformers 5.24 renames past_key_values to cache. Its attention gives the cache its own options,
# and it checkpoints no layer where no gradient is wanted. Our functions keep the old name.
CACHE = "past_key_values"
IS_NAMED_CACHE = "cache" in inspect.signature(masking_utils.create_causal_mask).parameters
NO_CACHE = {"use_cache": False, CACHE: None}  # a second run would fill it again

# Not so in Triton's interpreter, which runs kernels on the CPU.
KERNELS_WANT_A_GPU = isinstance(_swiglu_forward_kernel, triton.JITFunction)
ON_CPU = (
    "its weights are on the CPU, where no kernel runs: it runs fused once the model is on a GPU"
)


BOUND_TO_THE_MODEL = (
    "accelerate has wrapped the forward that fuse set on the model itself: give the trainer what "
    "peft.get_peft_model returns, or call fuse without cross_entropy"
)


class Site(NamedTuple):
    """One kind of module that a part runs fused.

    candidates: the modules of a model that the part may concern, with their names.
    why_not: the reason for leaving one to its class's own forward, as it is now, or None.
    forward: what is set on it; called with the module and the set of parts that it runs.
    is_listed: whether the report lists it; not where its modules are listed by another site.
    units: the names of the units that the report counts in such a module; "": itself.
    left: of a module that runs fused in part, the units that do not, by name, and why.
    """

    candidates: Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]
    why_not: Callable[[nn.Module], str | None]
    forward: Callable[..., Any]
    is_listed: bool = True
    units: Callable[[nn.Module], Collection[str]] = lambda module: ("",)
    left: Callable[[nn.Module], dict[str, str]] = lambda module: {}


class Part(NamedTuple):
    """The sites of one switch of Fusion; `none_found`: the reason if a model has none of them;
    `units`: what the report counts."""

    sites: tuple[Site, ...]
    none_found: str
    units: str


class FusedForward:
    """The forward that stands in for a module's: a function of the module, of the parts that it
    runs fused, and of the module's inputs. It does not keep the module alive.

    Its method `forward` is set on the module. torch.compile shares the code of a method between
    layers; a callable object, or what functools.partial binds, it would compile for each layer
    until it gives up.
    """

    def __init__(self, function: Callable, module: nn.Module, parts: frozenset[str]):
        self.function, self._module, self.parts = function, ModuleRef(module), parts
        self.had_adapters = _has_adapters(module)
        self.told: set[str] = set()  # what `say_once` has said; `fuse` lets a model's share one
        self.reported: set[str] = set()  # of this module, by the report of `fuse`
        self.checkpoints = CHECKPOINTED_BY_FORWARD and isinstance(
            module, modeling_layers.GradientCheckpointingLayer
        )

    @property
    def module(self) -> Any:
        return self._module()

    @property
    def forward(self) -> MethodType:
        return MethodType(_with_signature_of(type(self.module).forward), self)

    def run(self, module: nn.Module, *inputs, **options):
        """Run on the module, which a checkpoint keeps alive until its backward."""
        reason = _why_not_in_transform()
        if KERNELS_WANT_A_GPU and all(map(_is_on_cpu, (*inputs, *options.values()))):
            reason = ON_CPU
        if reason is not None:
            say_once(module, reason)
            return class_forward(module, *inputs, **options)
        return self.function(module, self.parts, *inputs, **options)


@cache
def _with_signature_of(own: Callable) -> Callable:
    """`FusedForward.forward`, with the signature of the class's own: the Trainer drops the columns
    of a dataset that are not in it, and generate() looks there for what it may pass."""

    def forward(self: FusedForward, *inputs, **options):
        if isinstance(self, nn.Module):  # accelerate binds what it wraps in autocast to the model
            raise RuntimeError(BOUND_TO_THE_MODEL)
        layer: Any = self.module
        if IS_NAMED_CACHE and "cache" in options:
            options[CACHE] = options.pop("cache")
        if self.checkpoints and is_checkpointed(layer):
            # as the class's own; nothing else is kept from the run that backward repeats
            options.update({name: off for name, off in NO_CACHE.items() if name in options})
            run = partial(self.run, layer, **options)
            return layer._gradient_checkpointing_func(run, *inputs)
        return self.run(layer, *inputs, **options)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    return forward


def is_checkpointed(module: Any) -> bool:
    """Return True if transformers checkpoints this layer, or the layers of this decoder, now."""
    wanted = torch.is_grad_enabled() or not IS_NAMED_CACHE
    return module.gradient_checkpointing and module.training and wanted


def as_named(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a forward by the names that transformers has for them."""
    if IS_NAMED_CACHE and CACHE in options:
        return {"cache" if name == CACHE else name: one for name, one in options.items()}
    return options


HOOKED = "_old_forward"  # where a module keeps the forward that a hook of accelerate calls


def fused_parts_of(module: nn.Module, at: str = "forward") -> frozenset[str]:
    """The parts that a module runs fused, told by the forward on its instance."""
    owner = _owner_of(module, at)
    return owner.parts if owner is not None else frozenset()


def _owner_of(module: nn.Module, at: str = "forward") -> FusedForward | None:
    forward = vars(module).get(at)
    # not getattr: torch.compile of torch 2.11 does not find a method's __self__ that way
    owner = forward.__self__ if isinstance(forward, MethodType) else None
    return owner if isinstance(owner, FusedForward) else None


# Of reasons that are the user's own wish: PEFT's ways to run a model with other adapters or none.
WISHES = ("adapters are disabled", "adapters are merged", "adapters are active",
          "adapters have been unloaded")  # fmt: skip


def say_once(module: nn.Module, reason: str) -> None:
    """Warn, once for each reason and model, that a module which `fuse` has set to run fused steps
    aside for a reason that nobody asked for. A forward calls it where it steps aside."""
    owner = _owner_of(module) or _owner_of(module, HOOKED)
    if owner is None or torch.compiler.is_compiling():
        return
    if reason in owner.told or reason in owner.reported:
        return
    owner.told.add(reason)
    if not any(wish in reason for wish in WISHES):
        warnings.warn(
            f"a fused {type(module).__name__} ran as its class has it: {reason} "
            "(fused_lora.report says which others do)",
            stacklevel=3,
        )


def say_left(module: nn.Module, left: dict[str, str] | str) -> None:
    """`say_once`, for a module of which some units, by name, step aside, or all."""
    for reason in [left] if isinstance(left, str) else map(": ".join, left.items()):
        say_once(module, reason)


def why_unloaded(module: nn.Module, projections: Iterable[Any]) -> str | None:
    """Return the reason if none of a module's projections, as they were read, has an adapter, and
    some had when `fuse` was called. A module that never had any runs fused with the others."""
    if any(len(one.A) for one in projections):
        return None
    owner = _owner_of(module)
    had = owner is not None and owner.had_adapters and not _has_adapters(module)
    return "its adapters have been unloaded: load others, or unfuse the model" if had else None


def _has_adapters(module: nn.Module) -> bool:
    return any(hasattr(part, "lora_A") for part in module.modules())


def share_told(model: nn.Module) -> None:
    """Let what is said of one module of the model be said of all."""
    owners = [owner for owner in map(_owner_of, model.modules()) if owner is not None]
    for owner in owners:
        owner.told = owners[0].told


def keep_reported(module: nn.Module, left: dict[str, str]) -> None:
    """Let what the report of `fuse` says of the units of a module not be said again."""
    if (owner := _owner_of(module)) is not None:
        owner.reported = set(map(": ".join, left.items()))


def _is_on_cpu(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def why_not_here(module: nn.Module) -> str | None:
    """Return the reason if a module that is fit to run fused does not where its weights are."""
    first = next(module.parameters(), None)
    is_here = first is not None and first.device.type == "cpu"
    return ON_CPU if KERNELS_WANT_A_GPU and is_here else None


def _why_not_in_transform() -> str | None:
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return None
    return "it is within a transform of torch.func, which knows no fused function"


def known_form(module: nn.Module, kind: str) -> Any:
    """Return the form of a module's class (`families.py`), None where it is not known as `kind`."""
    return _form_of(_class_of(module), kind)


@cache
def _form_of(cls: type, kind: str) -> Any:  # several are asked for in every forward of a layer
    return FORMS[kind].get(_name_of(cls))


def why_not_class(module: nn.Module, kind: str) -> str | None:
    if (reason := why_not_own_forward(module)) is not None:
        return reason
    cls = _class_of(module)
    if cls is ModulesToSaveWrapper:
        return "it is trained whole: leave it out of modules_to_save"
    if _form_of(cls, kind) is None:
        return f"{cls.__name__} is not {KNOWN_TO[kind]} (docs/support.md lists the families)"
    method = METHODS.get(kind, "forward")
    return (
        why_patched(cls)
        or (why_patched(cls, method) if hasattr(cls, method) else None)
        or why_replaced(cls.__module__, *CALLED.get(kind, ()))
    )


def has_own_forward(module: nn.Module) -> bool:
    """Return True if calling the module runs its class's forward, which accelerate leaves on the
    instance when it takes a hook away."""
    forward = vars(module).get("forward")
    if not isinstance(forward, MethodType):
        return forward is None
    return forward.__self__ is module and forward.__func__ is type(module).forward


def why_not_own_forward(module: nn.Module) -> str | None:
    """Return the reason if calling the module runs neither its class's forward nor the one that
    `fuse` has set."""
    if has_own_forward(module) or fused_parts_of(module):
        return None
    if "_hf_hook" in vars(module):
        return (
            f"its forward has been replaced by accelerate's hook {type(module._hf_hook).__name__}: "
            "take that away (accelerate.hooks.remove_hook_from_module) and call fuse again"
        )
    home = _home_of(vars(module)["forward"])
    to_do = ", whose trainers compute the loss" if home.startswith("trl.") else ": undo that"
    return f"its forward has been replaced by {home}{to_do}"


def _home_of(forward: Any) -> str:
    """The module whose code a forward is, whatever functools.wraps says of it."""
    code = getattr(forward, "__func__", getattr(forward, "func", forward))
    return getattr(code, "__globals__", {}).get("__name__") or type(forward).__module__


def _class_of(module: nn.Module) -> type:
    cls = type(module)
    return cls.__bases__[1] if is_fsdp(cls) else cls


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_forward(module: nn.Module, *inputs, **options):
    """Run the forward of the module's class, where a FusedForward steps aside: without the
    checkpointing around it, which that one has seen to."""
    forward: Any = type(module).forward
    while getattr(getattr(forward, "__code__", None), "co_filename", "") == LAYERS_FILE:
        forward = forward.__wrapped__
    return forward(module, *inputs, **as_named(options))


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


def left_in(operands: Any) -> dict[str, str]:
    return operands if isinstance(operands, dict) else {}
