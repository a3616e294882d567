"""A training step in CUDA graphs: it equals the eager loop's."""

import copy

import pytest
import torch
from cases.graph_case import (
    adamw,
    assert_same,
    assert_same_training,
    batch,
    captured,
    chat,
    graphed,
    halving,
    steps,
    tiny,
    train,
)
from cases.layer_case import peft_model

from fused_lora.step.graph import EAGER_CALLS

ONE_LAYER = {"num_hidden_layers": 1}


# --- the same as the eager loop -------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_ten_steps_are_those_of_the_eager_loop(device, dropout):
    """Train with two lengths, a scheduler and clipping. Dropout draws the same numbers."""
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
    assert len({loss.item() for loss in losses[0]}) == 10  # no call overwrites an earlier loss
    assert not any(loss.requires_grad for loss in losses[0])
    assert_same_training(step, eager)


@pytest.mark.parametrize(
    ("accumulation_steps", "is_transposed"), [(1, False), (3, False), (3, True)]
)
def test_accumulation_is_that_of_the_eager_loop(device, accumulation_steps, is_transposed):
    """Accumulate three micro-batches of two lengths per update, with a plain step now and then."""
    options = {"max_grad_norm": 0.05, "accumulation_steps": accumulation_steps}
    model = tiny(device)
    if is_transposed:  # the optimizer's kernel takes gradients that lie as their parameters do
        model.first.weight.data = model.first.weight.data.t().contiguous().t()
    step, eager = steps(model, **options)
    calls = []
    for seed in range(0, 40, 4):
        calls += [(batch(seed), False), (batch(seed + 1, 4), False), (batch(seed + 2), True)]
        if seed % 8:
            calls.append((batch(seed + 3), True))
    assert_same(train(step, calls), train(eager, calls))
    assert captured(step) == 4  # accumulate at both lengths, update after that, update alone
    assert_same_training(step, eager)


def clamped(parameter):
    parameter.grad.clamp_(-0.02, 0.02)


def replaced(parameter):
    parameter.grad = parameter.grad * 0.5


@pytest.mark.parametrize("hook", [clamped, replaced])
def test_a_hook_sees_the_gradients_that_it_sees_in_the_eager_loop(device, hook):
    step, eager = steps(tiny(device))
    for one in (step, eager):
        one.model.first.weight.register_post_accumulate_grad_hook(hook)
    calls = [(batch(seed), seed % 3 == 2) for seed in range(18)]
    assert_same(train(step, calls), train(eager, calls))
    assert captured(step) == 2
    assert_same_training(step, eager)


def test_gradients_in_the_middle_of_an_accumulation_are_the_users(device):
    """Let the user read, change and drop gradients, run another backward, and free the graphs."""
    step, eager = steps(tiny(device))
    for seed in range(0, 24, 3):
        if seed == 12:
            step.accumulate(**batch(1)), eager.accumulate(**batch(1))
            step.reset()
            assert not step._graphs
        for one in (step, eager):
            one.accumulate(**batch(seed))
            assert all(p.grad is not None for p in one.model.parameters() if p.requires_grad)
            one.optimizer.zero_grad(set_to_none=bool(seed % 2))
            inputs = batch(seed + 1, device=device)
            one.model(**inputs).backward()
            one.accumulate(**batch(seed + 2))
            one.model.first.weight.grad.mul_(2)
        assert_same_training(step, eager)
        assert_same(step(**batch(seed)), eager(**batch(seed)))
    assert captured(step) == 2
    assert_same_training(step, eager)


def test_a_gradient_may_get_other_data(device):
    step, eager = steps(tiny(device))
    for seed in range(6):
        for one in (step, eager):
            one.accumulate(**batch(seed))
            gradient = one.model.first.weight.grad
            gradient.data = gradient * 2
            one(**batch(seed + 9))
    assert captured(step) == 2
    assert_same_training(step, eager)


def test_a_parameter_without_a_gradient_stays_as_it_is(device):
    """Check that weight decay leaves it alone as well, as in PyTorch."""
    model = tiny(device)
    model.unused = torch.nn.Linear(3, 3).to(device)
    before = model.unused.weight.detach().clone()
    step, eager = steps(model)
    calls = [(batch(seed), True) for seed in range(5)]
    assert_same(train(step, calls), train(eager, calls))
    assert captured(step) == 1 and torch.equal(model.unused.weight, before)


def test_peft_model_is_trained_as_by_the_eager_loop(device):
    """Train with padding and ignored labels."""
    step, eager = steps(peft_model(device, config=ONE_LAYER), max_grad_norm=1.0)
    losses = [[one(**chat(seed, device)) for seed in range(6)] for one in (step, eager)]
    assert captured(step) == 1
    assert_same(*losses)


# --- what a call gives and keeps ------------------------------------------------------------------


def test_the_learning_rate_may_be_set_in_any_way(device):
    """Assign a float or a tensor, or change it in place. The group keeps the value that was set."""
    step, eager = steps(tiny(device))
    rates = [2.0**-6, torch.tensor(2.0**-5), torch.tensor(2.0**-3, device=device), 2.0**-4]
    for one in (step, eager):
        group, other = one.optimizer.param_groups
        for seed in range(EAGER_CALLS + 2 * len(rates)):
            rate = rates[seed // 2 % len(rates)]
            # to PyTorch's fused AdamW a tensor on the CPU is a number
            group["lr"] = rate
            other["lr"] /= 2
            one(**batch(seed))
            assert group["lr"] is rate
        group["lr"] = torch.tensor(2.0**-7, device=device)
        for seed in range(3):
            one(**batch(seed))
            group["lr"].mul_(2)
    assert captured(step) == 1
    assert_same_training(step, eager)


def test_an_optimizer_that_is_loaded_before_the_capture_keeps_its_learning_rate(device):
    """Load new groups. The graph then reads the values that we set there."""
    step, eager = steps(tiny(device))
    for one in (step, eager):
        one(**batch(0))
        one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        for seed in range(1, 6):
            one(**batch(seed))
            one.optimizer.param_groups[0]["lr"] *= 2
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


def test_constants_modes_and_dropouts_have_graphs_of_their_own(device):
    step, eager = steps(tiny(device, dropout=0.5), max_graphs=5)
    tensors = [{"scale": torch.tensor(2.0)}, {"scale": torch.tensor(3.0)}]
    calls = 3 * [{"scale": 2}, {"scale": 3}, *tensors]
    losses = []
    for one in (step, eager):
        torch.manual_seed(1)
        found = [one(**batch(seed), **options) for seed, options in enumerate(calls)]
        one.model.dropout.eval()
        found += [one(**batch(3), scale=2) for _ in range(4)]
        one.model.train()
        one.model.dropout.p = 0.25
        found += [one(**batch(3), scale=2) for _ in range(4)]
        losses.append(found)
    assert captured(step) == 5
    assert_same(*losses)
