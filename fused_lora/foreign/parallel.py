"""DataParallel and FSDP take a model's modules and weights apart. We survive FSDP2 alone.

nn.DataParallel copies modules together with forwards that are bound to the originals. FSDP1
(FullyShardedDataParallel) treats a weight's memory as all its own, but in a buffer it includes the
border. FSDP2 (fully_shard) derives new classes from a module's. Its weights are plain tensors
during a forward and its backward, and DTensors otherwise.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, distributed, nn

from ..step.module_ref import ModuleRef

# The method that nn.DataParallel calls on every module of a model.
REPLICATE = "_replicate_for_data_parallel"
# The method that fully_shard calls on each module that it gets, before it looks at its weights.
REGISTER = "register_forward_pre_hook"
FLATTENED = (
    "FullyShardedDataParallel mixes up base weights that lie in buffers: load the model anew and "
    "call fully_shard (in accelerate fsdp_version=2), or leave layer out"
)
JOINED = (
    "FullyShardedDataParallel joins it with trained weights: call fully_shard (in "
    "accelerate fsdp_version=2)"
)
ON_LAYERS = "call fully_shard(layer) on whole layers alone"
APART = f"fully_shard shards it by itself: {ON_LAYERS}"
TOO_LATE = (
    "fully_shard got a module of a model that it has sharded already: call fully_shard(layer) for "
    "each layer first, and fully_shard(model) last"
)


def refuse_data_parallel() -> NoReturn:
    """Replace REPLICATE: replicas would share the original's forwards and parameters."""
    raise RuntimeError(
        "nn.DataParallel copies the model, which breaks a fused one: start one process per GPU "
        "with torchrun, show it one GPU (CUDA_VISIBLE_DEVICES), or unfuse it"
    )


def is_flattened(base: Any) -> bool:
    """Return True if FSDP1 holds the weight of a linear layer. During a forward it is a plain view,
    otherwise a marked parameter."""
    return is_in_fsdp(base) and (
        type(base.weight) is Tensor or hasattr(base.weight, "_fsdp_flattened")
    )


def is_in_fsdp(module: nn.Module) -> bool:
    """Return True for a module within FSDP1 or FSDP2."""
    return "_is_fsdp_managed_module" in vars(module)


def is_dtensor(weight: Any) -> bool:
    """Return True for a weight whose ranks each hold a part of it now."""
    return type(weight).__name__ == "DTensor"


_is_between = ContextVar("is_between", default=False)


@contextmanager
def between_forwards() -> Iterator[None]:
    """Take weights that FSDP2 shards for the plain ones that a forward will find, in this
    thread."""
    token = _is_between.set(True)
    try:
        yield
    finally:
        _is_between.reset(token)


def is_gathered_in(module: nn.Module | None) -> bool:
    """Return True in a forward for a module whose weights FSDP2 has gathered. It marks no module
    whose weights it ignores."""
    return module is not None and is_in_fsdp(module) and not _is_between.get()


def keep_from_ddp(model: Any, names: Iterable[str]) -> None:
    """Keep DistributedDataParallel from broadcasting these parameters from the first rank."""
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    model._ddp_params_and_buffers_to_ignore = list(dict.fromkeys([*before, *names]))


def may_shard_later() -> bool:
    """Return True among ranks, where fully_shard may follow."""
    if not distributed.is_available():
        return False
    return distributed.is_initialized() or distributed.is_torchelastic_launched()


def reshard(model: nn.Module) -> None:
    """Have FSDP2 free what it has gathered: a forward leaves some of it."""
    for module in model.modules():
        if is_fsdp(type(module)):
            module.reshard()  # type: ignore[operator]


def why_sharded(module: nn.Module) -> str | None:
    """Return the reason if a module whose weight is sharded cannot run fused."""
    if not is_in_fsdp(module):
        return (
            "is a DTensor that no fully_shard manages: load the model without tensor parallelism "
            "(tp_plan)"
        )
    if _is_between.get():
        return None
    if is_fsdp(type(module)):
        return f"is sharded by itself: {ON_LAYERS}"
    return "is sharded (DTensor): call the model that fully_shard got last, not a part of it"


def is_fsdp(cls: type) -> bool:
    """Return True for a class that fully_shard has derived from a module's. It adds methods, but no
    forward."""
    return cls.__bases__[:1] != () and cls.__bases__[0].__name__ == "FSDPModule"


def own_class(module: nn.Module) -> type:
    """Return a module's class, without what fully_shard has made of it."""
    cls = type(module)
    return cls.__bases__[1] if is_fsdp(cls) else cls


def is_fsdp_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def call_with(modules: Iterable[nn.Module], function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return function(x), which reads weights of these modules, the outermost first. fully_shard
    gathers those of a module that it shards by itself for a call alone, and for its backward: the
    function is that call's forward."""
    for module in reversed(dict.fromkeys(modules)):
        if is_fsdp(type(module)):
            function = partial(_call_as, module, function)
    return function(x)


def _call_as(module: nn.Module, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    module.forward = function
    try:
        return module(x)
    finally:
        del module.forward


class _Register:
    """A module's REGISTER. Before fully_shard looks at its weights, `leave` moves those in buffers
    out of these: it takes none with gaps between rows."""

    def __init__(self, module: nn.Module, leave: Callable[[nn.Module], None]):
        self._module, self._leave = ModuleRef(module), leave

    def __call__(self, hook: Callable, **options: Any) -> Any:
        module = self._module()
        if is_fsdp_hook(hook):
            if is_in_fsdp(module):
                raise ValueError(TOO_LATE)
            self._leave(module)
        return getattr(type(module), REGISTER)(module, hook, **options)


def let_shard(module: nn.Module, leave: Callable[[nn.Module], None]) -> None:
    """Have leave(module) called before fully_shard shards this module."""
    setattr(module, REGISTER, _Register(module, leave))
