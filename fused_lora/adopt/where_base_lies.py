"""Places for the frozen base of a model: `shard_base` spreads it over ranks, `host_base` moves it
into host memory."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fused_mlp.launching import DTYPES

from ..foreign.parallel import is_in_fsdp, keep_from_ddp
from ..forwards.layer_reading import read_groups
from ..forwards.rms_norm import normed_layers
from ..layer.gathering import WeightSource
from ..layer.shards import Shard
from ..reading.four_bit import is_4bit, state_of
from ..reading.projection import has_adapters
from ..reading.refusal import attempt
from ..step.checkpoint import TILE_ROWS
from ..step.host_memory import HostMemory, available_to_rank, bytes_to_read
from ..weights.borders import borders_of
from ..weights.default_border import DefaultBorder
from ..weights.host_rows import HostRows
from ..weights.sourced_weight import Params4bit, SourcedWeight
from .report import NO_ADAPTERS

Bases = dict[str, nn.Linear]  # by name
# Layers that stay leave room for activations of 2 * TILE_ROWS tokens, if checkpoint="offload". From
# there on MLPs go through tiles. A token takes this for each input and output of a layer's frozen
# linear layers. On an H200 it was 3.4 at an 8B's sizes, less at a 32B's and a 70B's. The rest is
# for fragmentation.
BYTES_PER_FEATURE = 4
# An adapter's gradient and AdamW's two moments, in its own dtype.
TRAINED_COPIES = 3


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
            whole, the model is fused or in FSDP, its base is in host memory, or a weight's rows
            cannot be divided evenly.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("shard_base: call torch.distributed.init_process_group first")
    group = group or dist.group.WORLD
    assert group is not None
    layers = _bases_of_layers(model, Shard)
    ranks = group.size()
    for name, base in chain.from_iterable(bases.items() for bases in layers):
        if base.weight.shape[0] % ranks:
            raise ValueError(
                f"shard_base: {name} has {base.weight.shape[0]} rows, which {ranks} ranks cannot "
                "divide evenly: take another number, or fully_shard"
            )

    def shard(base: nn.Linear) -> SourcedWeight:
        rows = base.weight.detach().chunk(ranks)[group.rank()]
        return SourcedWeight.of(Shard(rows.to(_device_of(base.weight), copy=True), group))

    return _replace(model, layers, shard)


def host_base(model: nn.Module, layers_on_gpu: int | None = None) -> list[str]:
    """Move the frozen weights of decoder layers into host memory, for a model larger than its GPU.

    While a layer runs, the weights of the next one are copied to the GPU, in the forward and again
    in the backward. That takes layers that run whole. Any other use of a weight copies it first,
    and is slow. Adapters, norms, embeddings and the head stay on the GPU, and so do some layers. A
    step has to compute for longer than the copies take, or it waits for them.

        model = get_peft_model(...)  # on the CPU: transformers maps a checkpoint's files
        host_base(model)
        model.to("cuda")
        fuse(model, Fusion(layer=True, rms_norm=True, checkpoint="offload"))

    Args:
        model: a PEFT model that is not fused yet, in bf16, fp16, fp32 or bitsandbytes' 4 bits.
        layers_on_gpu: how many layers stay there. None: as many as fit beside the rest of the
            model, its gradients, AdamW's state and, with checkpoint="offload", the activations of
            16,000 tokens. Others take more: set fewer.

    Returns: the names of the weights, none if all layers fit. They cannot be changed any more: load
        and merge before.

    Raises:
        ValueError: nothing has been moved, because no layer could run whole, the model is fused, in
            FSDP or sharded, or host memory cannot hold the weights.
        RuntimeError: later, when `fuse` or the first forward pins the weights and the system does
            not let it.
    """
    layers = _bases_of_layers(model, HostRows)
    if layers_on_gpu is None:
        layers_on_gpu = _layers_that_fit(model, layers)
    if not isinstance(layers_on_gpu, int) or layers_on_gpu < 0:
        raise ValueError(
            f"host_base needs layers_on_gpu as a number from 0 on, or None, got {layers_on_gpu!r}"
        )
    moved = _all_but(layers_on_gpu, layers)
    weights = [base.weight for bases in moved for base in bases.values()]
    weights = [weight for weight in weights if not isinstance(weight, SourcedWeight)]
    needed, available = bytes_to_read(weights), available_to_rank()
    if needed > available:
        raise ValueError(
            f"host_base: {needed / 2**30:.1f} GiB of weights do not fit in the "
            f"{available / 2**30:.1f} GiB of host memory that are available: load the model in 4 "
            "bits, or raise layers_on_gpu"
        )
    memory = HostMemory(2**63 - 1)

    def move(base: Any) -> SourcedWeight:
        weight, device = base.weight, _device_of(base.weight)
        if not is_4bit(base):
            return SourcedWeight.of(HostRows(weight.detach(), device, memory))
        if state_of(base) is None:
            weight = weight.to(device)  # quantises it
        state = weight.quant_state
        state.to(device)
        return Params4bit.of_codes(HostRows(weight.data.view(1, -1), device, memory), state)

    return _replace(model, moved, move)


def _bases_of_layers(model: nn.Module, kind: type[WeightSource]) -> list[Bases]:
    """Return the linear layers under each decoder layer's projections whose weights are to move.
    Raises ValueError."""
    found: list[Bases] = []
    names = {id(module): name for name, module in model.named_modules()}
    reasons = []
    for _, layer in normed_layers(model):
        if borders_of(layer) is not None:
            raise ValueError(f"{kind.call}: the model is fused: call {kind.call} before fuse")
        if is_in_fsdp(layer):
            raise ValueError(f"{kind.call}: fully_shard shards the model already: take one of them")
        reads, reason = attempt(read_groups, layer, DefaultBorder)
        if reason or reads.left:
            reasons.append(reason or reads.left)
            continue
        bases: Bases = {}
        for read in (read for reads_of_group in reads.groups for read in reads_of_group):
            if (read.is_packed and kind is Shard) or read.weight.dtype not in DTYPES:
                continue
            weight = read.base.weight
            if isinstance(weight, SourcedWeight) and not isinstance(weight.source, kind):
                raise ValueError(
                    f"{kind.call}: the base is {weight.source.where} already: take one of the two"
                )
            bases[names[id(read.base)]] = read.base
        found.append(bases)
    if not any(found):
        why = (reasons or ["it has none in bf16, fp16 or fp32"])[0]
        verb = "shard" if kind is Shard else "move"
        raise ValueError(
            f"{kind.call} finds no layer to {verb}: {why if has_adapters(model) else NO_ADAPTERS}"
        )
    return found


def _replace(
    model: nn.Module, layers: list[Bases], made: Callable[[Any], SourcedWeight]
) -> list[str]:
    """Replace the weights of these layers, and return their names."""
    having: dict[int, list[nn.Linear]] = {}  # one weight may be several layers'
    for base in chain.from_iterable(bases.values() for bases in layers):
        having.setdefault(id(base.weight), []).append(base)
    for owners in having.values():
        if isinstance(owners[0].weight, SourcedWeight):
            continue
        replacing = nn.Parameter(made(owners[0]), requires_grad=False)
        for base in owners:
            base.weight = replacing
    names = [f"{name}.weight" for bases in layers for name in bases]
    keep_from_ddp(model, names)
    return names


def _device_of(weight: Tensor) -> torch.device:
    """Return where a weight is used: a model on the CPU moves to the GPU later."""
    is_late = weight.device.type == "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_late else weight.device


# --- how many layers stay on the GPU --------------------------------------------------------------


def _all_but(count: int, layers: list[Bases]) -> list[Bases]:
    """Return all layers but `count` that stay. Those lie evenly between the others, which gives
    each copy the time of several layers. The first one to stay is the last."""
    total = len(layers)
    return [
        bases for i, bases in enumerate(layers) if i * count // total == (i + 1) * count // total
    ]


def _layers_that_fit(model: nn.Module, layers: list[Bases]) -> int:
    """Return how many layers the GPU memory holds that nothing else will take."""
    bases = [base for layer in layers for base in layer.values()]
    device = _device_of(bases[0].weight)
    if device.type != "cuda":
        return 0
    free = _free_bytes(device)
    movable = {id(base.weight) for base in bases}
    for parameter in model.parameters():
        if id(parameter) in movable:
            free += parameter.nbytes * parameter.is_cuda
        else:
            free -= parameter.nbytes * (not parameter.is_cuda)
            free -= parameter.nbytes * TRAINED_COPIES * parameter.requires_grad
    free -= sum(map(_late_bytes_of_scales, bases))
    features = max(sum(map(_features, layer.values())) for layer in layers)
    free -= 2 * TILE_ROWS * features * BYTES_PER_FEATURE
    largest = max(sum(map(_bytes_of, layer.values())) for layer in layers)
    # two sets of codes and one of matrices, or two of matrices
    free -= largest * (2 + 4 if any(map(is_4bit, bases)) else 2)
    return max(min(free // largest, len(layers)), 0)


def _features(base: nn.Linear) -> int:
    return base.in_features + base.out_features


def _bytes_of(base: Any) -> int:
    return base.in_features * base.out_features // 2 if is_4bit(base) else base.weight.nbytes


def _late_bytes_of_scales(base: Any) -> int:
    """Return what 4 bits keep on the GPU and do not have there yet, for 64 weights each."""
    if not is_4bit(base) or base.weight.is_cuda:
        return 0
    return base.in_features * base.out_features // (64 if base.weight.compress_statistics else 16)


def _free_bytes(device: torch.device) -> int:
    """Return how much GPU memory this process can still take."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free, limit - reserved) + reserved - torch.cuda.memory_allocated(device)
