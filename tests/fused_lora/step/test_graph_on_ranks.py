"""A graphed step on several ranks: it trains as one process does on all their batches."""

import builtins
import copy
import time

import pytest
import torch
from cases.four_bit_case import quantised
from cases.graph_case import EagerStep, adamw, batch, captured, chat, graphed, tiny
from cases.layer_case import peft_model
from cases.ranks import on_ranks
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard

from fused_lora import Fusion, fuse, shard_base
from fused_lora.step.flat_gradients import FlatGradients
from fused_lora.step.graph import EAGER_CALLS

on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CLIP = 0.05
UPDATES = 6  # two of each length are eager
RANKS, SHORT = 2, 7
BOUND = {"rtol": 1e-4, "atol": 1e-5}
WHOLE = Fusion(rms_norm=True, cross_entropy=True, layer=True, checkpoint="full")
SHARDED = "layers of shard_base"
FUSED = {
    "layers": (WHOLE, {}),
    "layers in 4 bits": (WHOLE, {"change": quantised}),
    SHARDED: (WHOLE, {}),
}


def own_batch(rank, seed):
    """Shapes differ between ranks, and from one call to the next."""
    return batch(100 * rank + seed, length=4 + (rank + seed // 4) % 2)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def step_on(device, model=None, **options):
    model = tiny(device) if model is None else model
    return graphed(model, adamw(model), max_grad_norm=CLIP, **options)


def trained(rank, device, accumulated, group=None):
    """Train from different weights, which the step replaces by those of rank 0."""
    model = tiny(device)
    with torch.no_grad():
        model.first.weight.mul_(1 + rank)
    step = step_on(device, model, accumulation_steps=accumulated, process_group=group)
    losses = []
    for seed in range(UPDATES * accumulated):
        ends = seed % accumulated == accumulated - 1
        losses.append((step if ends else step.accumulate)(**own_batch(rank, seed)).item())
        assert all(parameter.grad is None for parameter in model.parameters()) or not ends
    assert captured(step)
    return {
        "losses": losses,
        "weights": weights(model),
        "state": list(step.optimizer.state.values()),
    }


def trained_alone(count, accumulated):
    """Train in one process on the batches of all ranks."""
    model = tiny("cpu")
    eager = EagerStep(model, adamw(model), torch.enable_grad, CLIP, count * accumulated)
    losses = [[] for _ in range(count)]
    for first in range(0, UPDATES * accumulated, accumulated):
        calls = [(rank, first + i) for rank in range(count) for i in range(accumulated)]
        for rank, seed in calls:
            call = eager if (rank, seed) == calls[-1] else eager.accumulate
            losses[rank].append(call(**own_batch(rank, seed)).item())
    return losses, weights(model)


@pytest.mark.parametrize(("count", "accumulated"), [(2, 1), (2, 3), (4, 1), (4, 3)])
def test_ranks_train_as_one_process_does_on_their_batches(count, accumulated):
    """Bit by bit where the sums are of two numbers, and on every rank the same."""
    found = on_ranks(count, trained, accumulated)
    losses, wanted = trained_alone(count, accumulated)
    exact = (count, accumulated) == (2, 1) and torch.cuda.device_count() < count
    bound = {"rtol": 0, "atol": 0} if exact else BOUND
    for rank, one in enumerate(found):
        torch.testing.assert_close(one["losses"], losses[rank], **bound)
        torch.testing.assert_close(one["weights"], wanted, **bound)
        torch.testing.assert_close(one["weights"], found[0]["weights"], rtol=0, atol=0)
        torch.testing.assert_close(one["state"], found[0]["state"], rtol=0, atol=0)


def trained_in_pairs(rank, device):
    pairs = [torch.distributed.new_group(pair) for pair in ([0, 1], [2, 3])]
    return trained(rank % 2, device, 1, pairs[rank // 2])


def test_a_process_group_trains_by_itself():
    wanted = on_ranks(RANKS, trained, 1)
    for found in zip(*[iter(on_ranks(4, trained_in_pairs))] * 2, strict=True):
        torch.testing.assert_close([*found], wanted, **BOUND)


def joined(rank, device, count):
    step = step_on(device)
    for seed in range(UPDATES):
        rows = [batch(100 * each + seed) for each in range(count)]
        if count > torch.distributed.get_world_size():
            step(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]})
        else:
            step(**rows[rank])
    return weights(step.model)


def test_ranks_train_as_one_does_on_the_joined_batch():
    (wanted,) = on_ranks(1, joined, 2)
    for found in on_ranks(2, joined, 2):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def averaged(rank, device):
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)
    parameters = [
        torch.full((2, 3), 1.0 + rank, dtype=dtype, device=device, requires_grad=True)
        for dtype in dtypes
    ]
    for one in parameters[rank:]:  # the second rank has none of the first
        one.grad = torch.full_like(one, 4.0 * (1 + rank))
    gradients = FlatGradients(parameters)
    gradients.hold()
    gradients.average()
    gradients.share(parameters, 1)
    return [
        (parameter.dtype, parameter.grad.unique().item(), parameter.unique().item())
        for parameter in parameters
    ]


def test_gradients_of_two_dtypes_are_averaged_and_parameters_shared():
    bf16, fp32 = torch.bfloat16, torch.float32
    for found in on_ranks(2, averaged):
        assert found == [(bf16, 2.0, 2.0), (fp32, 6.0, 2.0), (bf16, 6.0, 2.0)]


def dropped(rank, device):
    """Train twice from the same seed, on batches that all ranks share."""
    found = []
    for _ in range(2):
        step = step_on(device, tiny(device, dropout=0.5))
        torch.manual_seed(rank)
        found.append([step(**batch(seed)).item() for seed in range(UPDATES)])
    return *found, weights(step.model)


def test_dropout_differs_by_rank_and_repeats_by_seed():
    (first, first_again, kept), (second, second_again, others) = on_ranks(2, dropped)
    assert first == first_again and second == second_again
    assert not set(first) & set(second)
    torch.testing.assert_close(kept, others, rtol=0, atol=0)


def fused(rank, device, how):
    """Train a fused model, and its twin in the eager loop on the batches of all ranks."""
    fusion, options = FUSED[how]
    sizes = {"num_hidden_layers": 3, "intermediate_size": 140} if how == SHARDED else {}
    model = peft_model(device, config={"num_hidden_layers": 1} | sizes, **options)
    twin = copy.deepcopy(model)
    if how == SHARDED:
        shard_base(model)
    fuse(model, fusion), fuse(twin, fusion)
    step = graphed(model, adamw(model), max_grad_norm=CLIP)
    eager = EagerStep(twin, adamw(twin), torch.enable_grad, CLIP, RANKS)
    losses = []
    for seed in range(UPDATES if step._cuda.device.type == "cuda" else EAGER_CALLS):
        parts = [chat(RANKS * seed + part, device, length=SHORT + part) for part in range(RANKS)]
        losses.append((step(**parts[rank]).item(), []))
        for part in parts:
            call = eager if part is parts[-1] else eager.accumulate
            losses[-1][1].append(call(**part).item())
    own, wanted = zip(*((own, everybodys[rank]) for own, everybodys in losses), strict=True)
    torch.testing.assert_close(own, wanted, **BOUND)
    assert captured(step) == (device != "cpu")
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    return [[one.get_parameter(name).detach() for name in trained] for one in (model, twin)]


@pytest.mark.slow("layers")
@pytest.mark.parametrize("how", FUSED)
def test_fused_models_train_as_in_one_process(how):
    """The first calls are eager, and the only ones without a GPU: the interpreter's kernels are no
    operations that a recorded graph knows."""
    for found, wanted in on_ranks(RANKS, fused, how):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def replayed(rank, device):
    """Return the bytes that three replays leave allocated."""
    step = step_on(device)
    batches = [{k: v.pin_memory() for k, v in batch(seed).items()} for seed in range(7)]
    for one in batches[:4]:
        step(**one)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in batches[4:]:
            step(**one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert captured(step) == 1
    return torch.cuda.memory_allocated() - before


@pytest.mark.gpu
@on_two_gpus
def test_a_replay_on_several_gpus_does_not_wait_for_the_device():
    assert on_ranks(RANKS, replayed) == [0] * RANKS


# --- ends -----------------------------------------------------------------------------------------


def uneven(rank, device, updates):
    """Update `updates[rank]` times, and accumulate once more."""
    model = tiny(device)
    mirror = torch.zeros_like(model.first.weight)
    refresh = [lambda: mirror.copy_(model.first.weight.detach() * 2)]
    step = step_on(device, model, after_update=refresh)
    with Join([step]):
        for seed in range(updates[rank]):
            step(**own_batch(rank, seed))
        if updates[rank] < max(updates):
            step.accumulate(**own_batch(rank, updates[rank]))
    assert mirror.equal(model.first.weight * 2)
    return weights(step.model), list(step.optimizer.state.values())


@pytest.mark.parametrize("updates", [(6, 4), (3, 0), (2, 5, 5, 3)], ids=str)
def test_a_rank_with_fewer_batches_ends_with_the_others_weights(updates):
    found = on_ranks(len(updates), uneven, updates)
    model = tiny("cpu")
    eager = EagerStep(model, adamw(model), torch.enable_grad, CLIP, len(updates))
    for seed in range(max(updates)):
        left = [rank for rank, most in enumerate(updates) if seed < most or most == seed]
        for rank in left:
            (eager if rank == left[-1] else eager.accumulate)(**own_batch(rank, seed))
    for one in found:
        torch.testing.assert_close(one[0], weights(model), **BOUND)
        torch.testing.assert_close(one, found[0], rtol=0, atol=0)


def unlike(rank, device):
    model = tiny(device)
    model.second.bias.requires_grad_(rank == 0)
    with pytest.raises(ValueError, match="rank 1 trains 3 parameters unlike the 4 of rank 0"):
        step_on(device, model)


def sharded(rank, device):
    model = fully_shard(tiny(device))
    with pytest.raises(ValueError, match="sharded: leave out fully_shard"):
        step_on(device, model)


def test_sharded_parameters_are_an_error():
    on_ranks(2, sharded)


def test_ranks_that_train_other_parameters_are_an_error_on_all():
    on_ranks(2, unlike)


def failing(rank, device, at):
    step = step_on(device, max_graphs=1)
    own = r"\[3, 6\], labels \[3, 6\] would be graph 2 of max_graphs=1"
    what = ("ValueError", own) if rank == 1 else ("RuntimeError", "which one failed first")
    with pytest.raises(getattr(builtins, what[0]), match=what[1]):
        for seed in range(100):
            step(**batch(seed, length=6 if (rank, seed) == (1, at) else 5))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="only gloo tells the other ranks itself")
@pytest.mark.parametrize(
    ("count", "at"), [(2, 1), (2, 5), (4, 5)], ids=["eager", "graph", "graphs of four"]
)
def test_a_rank_that_fails_ends_the_others(count, at):
    began = time.monotonic()
    on_ranks(count, failing, at)
    assert time.monotonic() - began < 60
