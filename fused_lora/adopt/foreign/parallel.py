"""DataParallel and FSDP take a model's modules and weights apart, in ways that we do not survive.

nn.DataParallel copies modules together with forwards that are bound to the originals. FSDP1
(FullyShardedDataParallel) treats a weight's memory as all its own, but in a buffer it includes the
border. FSDP2 (fully_shard) derives new classes from a module's.
"""

from typing import Any, NoReturn

from torch import Tensor, nn

# The method that nn.DataParallel calls on every module of a model.
REPLICATE = "_replicate_for_data_parallel"
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


def is_fsdp(cls: type) -> bool:
    """Return True for a class that fully_shard has derived from a module's. It adds methods, but no
    forward."""
    return cls.__bases__[:1] != () and cls.__bases__[0].__name__ == "FSDPModule"
