"""`shard_base`: the frozen weights of a model's decoder layers, sharded over ranks."""

import torch
import torch.distributed as dist
from torch import nn

from fused_mlp.launching import DTYPES

from ..foreign.parallel import is_in_fsdp, keep_from_ddp
from ..forwards.layer_reading import read_groups
from ..forwards.rms_norm import normed_layers
from ..layer.shards import Shard
from ..reading.projection import has_adapters
from ..reading.refusal import attempt
from ..weights.borders import borders_of
from ..weights.default_border import DefaultBorder
from ..weights.sharded_weight import ShardedWeight
from .report import NO_ADAPTERS


def shard_base(model: nn.Module, group: dist.ProcessGroup | None = None) -> list[str]:
    """Shard the frozen weights of decoder layers over ranks, for a model larger than a GPU.

    Each of N ranks keeps 1/N of every projection's rows, on its GPU. While a layer runs, all ranks
    gather the weights of the next one, in the forward and again in the backward. That takes layers
    that run whole. Any other use of a weight gathers it first, and is slow. Adapters, norms,
    embeddings and the head stay whole on every rank, so `GraphedStep`, DistributedDataParallel and
    trainers work as without it. All ranks have to train the same number of batches.

        model = get_peft_model(...)  # on the CPU if it does not fit
        shard_base(model)
        model.to("cuda")
        fuse(model)

    Args:
        model: a PEFT model that is not fused yet, the same on all ranks, or first its layers, one
            by one as they are loaded, and then the model. Weights in 4 bits stay whole.
        group: the ranks, the default group if None. Each keeps rows of its model.

    Returns: the names of the weights. They cannot be changed any more: load and merge before.

    Raises:
        ValueError: nothing has been sharded, because there is no process group, no layer could run
            whole, the model is fused or in FSDP, or a weight's rows cannot be divided evenly.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("shard_base: call torch.distributed.init_process_group first")
    group = group or dist.group.WORLD
    assert group is not None
    bases = _bases_to_shard(model, group.size())
    having: dict[int, list[nn.Linear]] = {}  # one weight may be several layers'
    for base in bases.values():
        having.setdefault(id(base.weight), []).append(base)
    for owners in having.values():
        weight = owners[0].weight
        if isinstance(weight, ShardedWeight):
            continue
        rows = weight.detach().chunk(group.size())[group.rank()]
        is_late = weight.device.type == "cpu" and torch.cuda.is_available()
        device = f"cuda:{torch.cuda.current_device()}" if is_late else weight.device
        shard = Shard(rows.to(device, copy=True), group)
        sharded = nn.Parameter(ShardedWeight.of(shard), requires_grad=False)
        for base in owners:
            base.weight = sharded
    names = [f"{name}.weight" for name in bases]
    keep_from_ddp(model, names)
    return names


def _bases_to_shard(model: nn.Module, ranks: int) -> dict[str, nn.Linear]:
    """Return the linear layers whose weights are to be sharded, by name. Raises ValueError."""
    bases: dict[str, nn.Linear] = {}
    names = {id(module): name for name, module in model.named_modules()}
    reasons = []
    for _, layer in normed_layers(model):
        if borders_of(layer) is not None:
            raise ValueError("shard_base: the model is fused: call shard_base before fuse")
        if is_in_fsdp(layer):
            raise ValueError("shard_base: fully_shard shards the model already: take one of them")
        reads, reason = attempt(read_groups, layer, DefaultBorder)
        if reason or reads.left:
            reasons.append(reason or reads.left)
            continue
        for read in (read for reads_of_group in reads.groups for read in reads_of_group):
            if read.is_packed or read.weight.dtype not in DTYPES:
                continue
            if read.weight.shape[0] % ranks:
                raise ValueError(
                    f"shard_base: {names[id(read.base)]} has {read.weight.shape[0]} rows, which "
                    f"{ranks} ranks cannot divide evenly: take another number, or fully_shard"
                )
            bases[names[id(read.base)]] = read.base
    if not bases:
        why = (reasons or ["it has none in bf16, fp16 or fp32"])[0]
        raise ValueError(
            f"shard_base finds no layer to shard: {why if has_adapters(model) else NO_ADAPTERS}"
        )
    return bases
