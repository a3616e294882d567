"""Fused models on two ranks, under DistributedDataParallel as trainers set it up, and under FSDP2,
with the base on each rank or sharded: they train as one process trains vanilla PEFT on all
batches, and without a warning."""

import copy
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cases.four_bit_case import EXPERTS, quantised
from cases.fused_case import ALL, SHORT
from cases.layer_case import LAYER, peft_model
from cases.peft_models import LAYERS, ids
from cases.ranks import on_ranks
from cases.reference import relative_error
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fused_lora import Fusion, fuse, host_base, report, shard_base, unfuse
from fused_lora.forwards.layer import borders_of
from fused_lora.weights.expert_weight import ExpertWeight

RANKS, UPDATES = 2, 2
EVERYTHING = Fusion(**ALL, layer=True, checkpoint="full")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
ADAPTERS = StateDictOptions(ignore_frozen_params=True, strict=False)
EVEN = {"config": {"intermediate_size": 140}}
# FSDP2 shards floating point alone
IN_4_BITS = EVEN | {"change": partial(quantised, quant_storage=torch.float32)}


def shard_adapters(model):
    """Replicate the base model, shard adapters, gather them once a step."""
    return fully_shard(model, ignored_params={p for p in model.parameters() if not p.requires_grad})


def shard_all(model):
    """Shard each layer with its adapters, and then the rest. Experts in 4 bits stay as they are."""
    coded = {one for one in model.parameters() if isinstance(one, ExpertWeight)}
    for layer in model.get_submodule(LAYERS):
        fully_shard(layer, ignored_params=coded)
    return fully_shard(model, ignored_params=coded)


def ddp(**options):
    return lambda model: DistributedDataParallel(model, **options)


WRAPPED = {
    "find_unused_parameters": ddp(find_unused_parameters=True),
    "gradient_as_bucket_view": ddp(gradient_as_bucket_view=True),
    "static_graph": ddp(static_graph=True),
    "FSDP2": shard_adapters,
    "FSDP2, all": shard_all,
    "FSDP2, all, before fuse": shard_all,
    "shard_base": DistributedDataParallel,
    "host_base": DistributedDataParallel,
    "shard_base, FSDP2": shard_adapters,
}
BY_US = {
    "shard_base": shard_base,
    "shard_base, FSDP2": shard_base,
    "host_base": partial(host_base, layers_on_gpu=0),
}
FUSED = {
    "layer": (LAYER, {}),
    "everything, full": (EVERYTHING, {}),
    "everything, even": (EVERYTHING, EVEN),
    "parts": (Fusion(**ALL), {}),
    "layer, 4 bits": (LAYER, IN_4_BITS),
    "layer, DoRA": (LAYER, EVEN | {"use_dora": True}),
    "parts, 4 bits": (Fusion(**ALL), IN_4_BITS),
    "experts in 4 bits": (Fusion(**ALL), EXPERTS | {"dtype": torch.float32}),
}


def wrapped_and_fused(model, how, fusion):
    """Return the wrapped model and the report of `fuse`."""
    if how.endswith("before fuse"):
        wrapped = WRAPPED[how](model)
        found = fuse(model, fusion)
        return wrapped.to(next(model.parameters()).device), found  # as trainers do
    if how in BY_US:
        assert len(BY_US[how](model)) == 14
    found = fuse(model, fusion)
    return WRAPPED[how](model), found


def without_sync(model, how):
    if how == "static_graph":  # whose first backward has to be one that reduces
        return None
    return nullcontext() if isinstance(model, FSDPModule) else model.no_sync()


def trained(rank, device, how, fused):
    """Train a fused model on this rank's batches, and a plain twin on those of all ranks."""
    fusion, options = FUSED[fused]
    model = peft_model(device, **options)
    plain, start = copy.deepcopy(model), dict(copy.deepcopy(model).named_parameters())
    wrapped, found_by_fuse = wrapped_and_fused(model, how, fusion)
    assert report(model) == found_by_fuse and not found_by_fuse.left
    optimizers = [
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        for one in (model, plain)
    ]

    def backward(one, seed, share):
        tokens = ids(device, seed)[:1, :SHORT]
        (one(input_ids=tokens, labels=tokens).loss * share).backward()

    for update in range(UPDATES):
        first, second = (100 * part + RANKS * update for part in (1, 2))
        context = without_sync(wrapped, how)
        if context is not None:
            with context, warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
                backward(wrapped, first + rank, 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
            backward(wrapped, second + rank, 1.0)
        for other in range(RANKS):
            if context is not None:
                backward(plain, first + other, 1 / RANKS)
            backward(plain, second + other, 1 / RANKS)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # a forward leaves some weights gathered
    assert report(model) == fuse(model, fusion) == found_by_fuse
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    wanted = dict(plain.named_parameters())
    return {
        name: relative_error(found[name].to(device) - start[name], wanted[name] - start[name])
        for name in wanted
        if wanted[name].requires_grad and (rank == 0 or not isinstance(wrapped, FSDPModule))
    }


TRIED = [
    *((how, "layer") for how in WRAPPED if how not in BY_US),
    *((how, "everything, even") for how in BY_US),
    *(
        (how, fused)
        for how in ("find_unused_parameters", "FSDP2, all")
        for fused in ("parts", "everything, full", "layer, 4 bits", "parts, 4 bits")
    ),
    ("FSDP2", "everything, full"),
    ("find_unused_parameters", "experts in 4 bits"),
    ("FSDP2", "experts in 4 bits"),
    ("FSDP2, all", "experts in 4 bits"),
    ("FSDP2, all, before fuse", "layer, 4 bits"),
    *((how, "layer, DoRA") for how in ("static_graph", "FSDP2", "FSDP2, all", "shard_base")),
]


@pytest.mark.slow(
    "find_unused_parameters-layer", "find_unused_parameters-parts", "FSDP2-everything, full",
    "FSDP2, all-everything, full", "FSDP2, all-parts",
)  # fmt: skip
@pytest.mark.parametrize(("how", "fused"), TRIED)
def test_two_ranks_train_as_one_process_does_on_all_batches(how, fused):
    errors, others = on_ranks(RANKS, trained, how, fused)
    assert errors and max(errors.values()) < 1e-4
    assert others or "FSDP2" in how


def kept(rank, device, how, fused, folder):
    """Lose and load adapters and optimizer, go on, save, and take the model back."""
    fusion, options = FUSED[fused]
    model = peft_model(device, **options)
    wrapped, _ = wrapped_and_fused(model, how, fusion)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    tokens = ids(device, rank)[:1, :SHORT]

    def step(update):
        """Return the loss. Its backward shards again what the forward gathered."""
        loss = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if update:
            optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(update=True)
    want = step(update=False)
    is_copied = how in BY_US or "all" in how or "4 bits" in fused
    for layer in model.get_submodule(LAYERS):
        borders = borders_of(layer)  # weights on each rank lie in place
        assert bool(borders.scratches or borders.ahead) == is_copied
    states = copy.deepcopy(get_state_dict(model, optimizer, options=ADAPTERS))
    step(update=True)
    later = step(update=False)
    assert later != want
    parts = dict(zip(("model_state_dict", "optim_state_dict"), states, strict=True))
    set_state_dict(model, optimizer, **parts, options=ADAPTERS)
    assert step(update=False) == want
    step(update=True)
    assert step(update=False) == later  # the optimizer is back, not only the adapters
    saved = get_model_state_dict(model, options=WHOLE)
    if rank == 0:
        model.save_pretrained(folder, state_dict=saved)
    unfuse(model)
    return {"loss": later, "unfused": step(update=False), "tokens": tokens}


@pytest.mark.slow("FSDP2, all, before fuse-layer")
@pytest.mark.parametrize(
    ("how", "fused"),
    [
        ("FSDP2", "layer, DoRA"), ("FSDP2", "layer, 4 bits"), ("FSDP2, all, before fuse", "layer"),
        ("FSDP2, all", "layer, 4 bits"), ("shard_base", "everything, even"),
        ("shard_base, FSDP2", "everything, even"), ("host_base", "everything, even"),
    ],
)  # fmt: skip
def test_sharded_adapters_are_saved_loaded_and_unfused(how, fused, tmp_path, device):
    first, second = on_ranks(RANKS, kept, how, fused, tmp_path)
    assert first["loss"] != second["loss"]
    base = peft_model(device, **FUSED[fused][1]).unload()
    loaded = PeftModel.from_pretrained(base, tmp_path)
    for one in (first, second):
        tokens = one["tokens"].to(device)
        loss = loaded(input_ids=tokens, labels=tokens).loss.item()
        assert one["unfused"] == pytest.approx(one["loss"], rel=1e-4)
        assert loss == pytest.approx(one["loss"], rel=1e-4)
