import copy
import gc
from functools import partial

import pytest
import torch
from fused_case import ALL
from graph_case import (
    EagerStep,
    adamw,
    assert_same,
    assert_same_training,
    batch,
    captured,
    chat,
    graphed,
    halving,
    sdpa_model,
    steps,
    tiny,
    train,
)
from peft_models import ids

from fused_lora import Fusion
from fused_lora.step.graph import EAGER_CALLS

# --- the same as the eager loop -------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_ten_steps_are_those_of_the_eager_loop(device, dropout):
    """Two lengths, a scheduler, clipping; and dropout draws the same numbers."""
    step, eager = steps(tiny(device, dropout=dropout), max_grad_norm=0.05)
    losses = []
    for one in (step, eager):
        torch.manual_seed(7)
        scheduler = halving(one.optimizer)
        found = []
        for seed in range(10):
            found.append(one(**batch(seed, length=5 if seed % 3 else 4)))
            scheduler.step()
        losses.append(found)
    assert captured(step) == 2
    assert_same(*losses)
    assert len({loss.item() for loss in losses[0]}) == 10
    assert_same_training(step, eager)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_accumulation_is_that_of_the_eager_loop(device, accumulation_steps):
    """Three micro-batches an update, of two lengths, with a plain step between now and then."""
    options = {"max_grad_norm": 0.05, "accumulation_steps": accumulation_steps}
    step, eager = steps(tiny(device), **options)
    calls = []
    for seed in range(0, 40, 4):
        calls += [(batch(seed), False), (batch(seed + 1, 4), False), (batch(seed + 2), True)]
        if seed % 8:
            calls.append((batch(seed + 3), True))
    assert_same(train(step, calls), train(eager, calls))
    assert captured(step) == 4  # accumulate at both lengths, update after that, update alone
    assert_same_training(step, eager)


def test_gradients_in_the_middle_of_an_accumulation_are_the_users(device):
    """They can be read, changed and dropped, and come from a backward of the user's own."""
    step, eager = steps(tiny(device))
    for seed in range(0, 24, 3):
        for one in (step, eager):
            one.accumulate(**batch(seed))
            assert all(p.grad is not None for p in one.model.parameters() if p.requires_grad)
            one.optimizer.zero_grad(set_to_none=bool(seed % 2))
            inputs = batch(seed + 1, device=device)
            one.model(**inputs).backward()
            one.accumulate(**batch(seed + 2))
            one.model.first.weight.grad.mul_(2)
        assert_same_training_of_gradients(step, eager)
        assert_same(step(**batch(seed)), eager(**batch(seed)))
    assert captured(step) == 2
    assert_same_training(step, eager)


def assert_same_training_of_gradients(step, eager):
    for got, want in zip(step.model.parameters(), eager.model.parameters(), strict=True):
        if want.requires_grad:
            assert_same(got.grad, want.grad)


def test_zero_grad_after_every_step_changes_nothing(device):
    step, eager = steps(tiny(device))
    losses = []
    for one in (step, eager):
        found = []
        for seed in range(6):
            found.append(one(**batch(seed)))
            one.optimizer.zero_grad()
        losses.append(found)
    assert_same(*losses)
    assert captured(step) == len(step._graphs) == 1


def test_a_parameter_without_a_gradient_stays_as_it_is(device):
    """As in PyTorch, weight decay leaves it alone as well."""
    model = tiny(device)
    model.unused = torch.nn.Linear(3, 3).to(device)
    before = model.unused.weight.detach().clone()
    step, eager = steps(model)
    calls = [(batch(seed), True) for seed in range(5)]
    assert_same(train(step, calls), train(eager, calls))
    assert captured(step) == 1 and torch.equal(model.unused.weight, before)


def test_peft_model_is_trained_as_by_the_eager_loop(device):
    """With padding, and labels that are ignored."""
    step, eager = steps(sdpa_model(device), max_grad_norm=1.0)
    losses = [[one(**chat(seed, device)) for seed in range(6)] for one in (step, eager)]
    assert captured(step) == 1
    assert_same(*losses)


def test_sdpa_without_a_mask_is_captured_as_it_runs_eagerly(device):
    """transformers would build a mask in the graph alone, unless told that there is none."""
    model = sdpa_model(device)
    step, eager = steps(model)
    inputs = [{"input_ids": ids(device, seed), "labels": ids(device, seed)} for seed in range(6)]
    mask = {"full_attention": None}
    losses = [[one(**given, attention_mask=mask) for given in inputs] for one in (step, eager)]
    assert captured(step) == 1
    assert_same(*losses)


# --- what a call gives and keeps ------------------------------------------------------------------


def test_a_loss_is_not_overwritten_by_the_next_call(device):
    step, eager = steps(tiny(device))
    losses = [step(**batch(seed)) for seed in range(8)]
    assert len({loss.data_ptr() for loss in losses}) == 8
    assert not any(loss.requires_grad for loss in losses)
    assert_same(losses, [eager(**batch(seed)) for seed in range(8)])


def test_the_learning_rate_may_be_set_in_any_way(device):
    """By assignment of a float or a tensor, or in place; and the group keeps what was set."""
    step, eager = steps(tiny(device))
    rates = [2.0**-6, torch.tensor(2.0**-5), torch.tensor(2.0**-3, device=device), 2.0**-4]
    for one in (step, eager):
        (group,) = one.optimizer.param_groups
        for seed in range(EAGER_CALLS + 2 * len(rates)):
            rate = rates[seed // 2 % len(rates)]
            # PyTorch's fused AdamW takes a tensor on the CPU for a number
            group["lr"] = rate
            one(**batch(seed))
            assert group["lr"] is rate
        group["lr"] = torch.tensor(2.0**-7, device=device)
        for seed in range(3):
            one(**batch(seed))
            group["lr"].mul_(2)
    assert captured(step) == 1
    assert_same_training(step, eager)


def test_an_optimizer_that_is_loaded_before_the_capture_keeps_its_learning_rate(device):
    """It has other groups then, and what the graph reads is set from those."""
    step, eager = steps(tiny(device))
    for one in (step, eager):
        one(**batch(0))
        one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        for seed in range(1, 6):
            one(**batch(seed))
            one.optimizer.param_groups[0]["lr"] *= 2
    assert captured(step) == 1
    assert_same_training(step, eager)


def test_two_parameter_groups_have_their_own_learning_rates(device):
    model = tiny(device)
    twin = copy.deepcopy(model)
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [*one.first.parameters()], "lr": 2**-5},
                {"params": [*one.second.parameters()], "lr": 2**-9, "weight_decay": 0.0},
            ],
            fused=True,
            capturable=True,
        )
        for one in (model, twin)
    ]
    step, eager = graphed(model, optimizers[0]), EagerStep(twin, optimizers[1])
    for one in (step, eager):
        for seed in range(6):
            one(**batch(seed))
            one.optimizer.param_groups[1]["lr"] *= 2
    assert captured(step) == 1
    assert_same_training(step, eager)


def test_after_update_runs_in_every_step(device):
    model = tiny(device)
    mirror = torch.zeros_like(model.first.weight)
    step = graphed(
        model, adamw(model), after_update=[lambda: mirror.copy_(model.first.weight.detach() * 2)]
    )
    for seed in range(5):
        step.accumulate(**batch(seed))
        before = mirror.clone()
        step(**batch(seed))
        assert torch.equal(mirror, model.first.weight * 2) and not torch.equal(mirror, before)
    assert captured(step) == 2


def test_constants_and_training_mode_have_graphs_of_their_own(device):
    step, eager = steps(tiny(device, dropout=0.5), max_graphs=4)
    tensors = [{"scale": torch.tensor(2.0)}, {"scale": torch.tensor(3.0)}]
    calls = 3 * [{"scale": 2}, {"scale": 3}, *tensors]
    losses = []
    for one in (step, eager):
        torch.manual_seed(1)
        found = [one(**batch(seed), **options) for seed, options in enumerate(calls)]
        one.model.eval()
        found += [one(**batch(3), scale=2) for _ in range(4)]
        losses.append(found)
    assert captured(step) == 4
    assert_same(*losses)


def test_reset_frees_the_graphs_and_training_goes_on(device):
    step, eager = steps(tiny(device))
    calls = [(batch(seed), seed % 2 == 1) for seed in range(12)]
    losses = train(step, calls[:7])  # in the middle of an accumulation
    step.reset()
    assert not step._graphs
    losses += train(step, calls[7:])
    assert_same(losses, train(eager, calls))
    assert_same_training(step, eager)


# --- on a GPU -------------------------------------------------------------------------------------

FUSED = {
    "layers": Fusion(mlp=True, attention=True, rope=True, rms_norm=True),
    "all": Fusion(**ALL),
    "all, checkpointed": Fusion(**ALL, checkpoint="full"),
    "selective": Fusion(checkpoint="selective", checkpoint_gib=50e3 / 2**30),
}


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("autocast", [False, True])
def test_fused_model_is_trained_as_by_the_eager_loop(device, fusion, autocast):
    """Scheduler, clipping, accumulation, two lengths. The fused loss drops ignored tokens only
    while it may wait, so its products have other sizes in a graph: within bf16's own error there.
    """
    model = sdpa_model(device, torch.bfloat16 if autocast else torch.float32)
    context = partial(torch.autocast, "cuda", torch.bfloat16, enabled=autocast)
    step, eager = steps(model.train(), 2**-12, fusion, autocast=context, max_grad_norm=1.0)
    losses = []
    for one in (step, eager):
        scheduler = halving(one.optimizer)
        found = []
        for seed in range(10):
            found.append(one.accumulate(**chat(seed, device)))
            found.append(one(**chat(seed + 20, device, length=11)))
            scheduler.step()
        losses.append(torch.stack(found).double())
    assert captured(step) == 2
    bound = 2e-3 if autocast else 1e-5
    torch.testing.assert_close(*losses, rtol=bound, atol=0)
    assert len({loss.item() for loss in losses[0]}) == 20


@pytest.mark.gpu
@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_checkpointing_by_transformers(device, preserve_rng_state):
    """torch's checkpoint reads the random generator, which not every torch can while it captures:
    it is captured, then, or refused, and trains right either way."""
    model = sdpa_model(device).train()
    options = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    model.gradient_checkpointing_enable(options)
    step, eager = steps(model)
    inputs = [{"input_ids": ids(device, seed), "labels": ids(device, seed)} for seed in range(5)]
    losses = [step(**one) for one in inputs[:EAGER_CALLS]]
    try:
        losses.append(step(**inputs[EAGER_CALLS]))
    except RuntimeError as error:
        assert preserve_rng_state and "cannot be captured" in str(error)
        step = EagerStep(step.model, step.optimizer)
    losses += [step(**one) for one in inputs[len(losses) :]]
    assert_same(losses, [eager(**one) for one in inputs])


@pytest.mark.gpu
def test_a_replay_allocates_nothing_but_its_loss_and_does_not_wait(device):
    model = tiny(device)
    step = graphed(model, adamw(model))
    batches = [{k: v.pin_memory() for k, v in batch(seed).items()} for seed in range(8)]
    for one in batches[:4]:
        step(**one)
    torch.cuda.synchronize()
    before, mode = torch.cuda.memory_allocated(), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [step(**one) for one in batches[4:]]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    del losses
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.gpu
def test_pytorch_works_after_a_failed_capture(device):
    """Random numbers, the allocator, and another capture."""
    model = tiny(device, waits=True)
    step = graphed(model, adamw(model))
    for seed in range(EAGER_CALLS):
        step(**batch(seed))
    with pytest.raises(RuntimeError, match="cannot be captured"):
        step(**batch(2))
    torch.rand(4, device=device)
    torch.cuda.empty_cache()
    model.waits = False
    for seed in range(EAGER_CALLS + 2):
        assert step(**batch(seed)).isfinite()
    assert captured(step) == 1


@pytest.mark.gpu
def test_garbage_with_a_graph_in_it_does_not_break_a_capture(device):
    """An older step that has to be collected, and a collection at every allocation of an object."""
    older = tiny(device)
    step = graphed(older, adamw(older))
    for seed in range(EAGER_CALLS + 1):
        step(**batch(seed))
    assert captured(step) == 1
    model = tiny(device)
    newer = graphed(model, adamw(model))
    for seed in range(EAGER_CALLS):
        newer(**batch(seed))
    gc.collect()
    step.itself = step
    thresholds = gc.get_threshold()
    del step, older
    gc.set_threshold(1, 1, 1)
    try:
        assert newer(**batch(2)).isfinite()
    finally:
        gc.set_threshold(*thresholds)
    assert captured(newer) == 1 and gc.isenabled()
