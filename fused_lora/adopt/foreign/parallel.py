"""DataParallel and FSDP take a model's modules and weights apart. We survive FSDP2 alone.

nn.DataParallel copies modules together with forwards that are bound to the originals. FSDP1
(FullyShardedDataParallel) treats a weight's memory as all its own, but in a buffer it includes the
border. FSDP2 (fully_shard) derives new classes from a module's. Its weights are plain tensors
during a forward and its backward, and DTensors otherwise.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, distributed, nn

# The method that nn.DataParallel calls on every module of a model.
REPLICATE = "_replicate_for_data_parallel"
# Set on parameters that `fuse` sees, until `unfuse`: those that FSDP2 gathers are others. PyTorch
# would move no DTensor that has a weak reference.
SEEN = "_seen_by_fuse"
FLATTENED = (
    "FullyShardedDataParallel mixes up base weights that lie in buffers: load the model anew and "
    "leave layer out of fuse, or wrap it in DistributedDataParallel"
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


def is_sharded(weight: Any) -> bool:
    """Return True for a weight whose ranks each hold a part of it now."""
    return type(weight).__name__ == "DTensor"


class _Thread(threading.local):
    is_between = False


_thread = _Thread()


@contextmanager
def between_forwards() -> Iterator[None]:
    """Take weights that FSDP2 shards for the plain ones that a forward will find, in this
    thread."""
    before, _thread.is_between = _thread.is_between, True
    try:
        yield
    finally:
        _thread.is_between = before


def may_gather(module: nn.Module | None) -> bool:
    """Return True in a forward within FSDP2: a weight may lie here for this pass alone."""
    return module is not None and is_in_fsdp(module) and not _thread.is_between


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
        return "is a DTensor, and not FSDP2's: only fully_shard's weights run fused"
    if _thread.is_between:
        return None
    return "is sharded (DTensor): call the model that fully_shard got last, not a part of it"


def is_fsdp(cls: type) -> bool:
    """Return True for a class that fully_shard has derived from a module's. It adds methods, but no
    forward."""
    return cls.__bases__[:1] != () and cls.__bases__[0].__name__ == "FSDPModule"
