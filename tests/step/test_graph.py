"""A training step in CUDA graphs: that it is the eager loop's, and refused where it cannot be."""

import copy
import gc
import weakref
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from cases.fp8_case import CONFIG
from cases.fused_case import ALL
from cases.graph_case import (
    EagerStep,
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
from cases.peft_models import LAYERS, ids

from fused_lora import Fusion, fuse, unfuse
from fused_lora.adopt.foreign.checkpointing import policy_of
from fused_lora.step import graph as graph_module
from fused_lora.step.graph import EAGER_CALLS, GraphedStep

ONE_LAYER = {"num_hidden_layers": 1}


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
    assert len({loss.item() for loss in losses[0]}) == 10  # no call overwrites an earlier loss
    assert not any(loss.requires_grad for loss in losses[0])
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
    """They can be read, changed and dropped, and come from a backward of the user's own; and graphs
    can be freed."""
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
    step, eager = steps(peft_model(device, config=ONE_LAYER), max_grad_norm=1.0)
    losses = [[one(**chat(seed, device)) for seed in range(6)] for one in (step, eager)]
    assert captured(step) == 1
    assert_same(*losses)


# --- what a call gives and keeps ------------------------------------------------------------------


def test_the_learning_rate_may_be_set_in_any_way(device):
    """By assignment of a float or a tensor, or in place; and the group keeps what was set."""
    step, eager = steps(tiny(device))
    rates = [2.0**-6, torch.tensor(2.0**-5), torch.tensor(2.0**-3, device=device), 2.0**-4]
    for one in (step, eager):
        group, other = one.optimizer.param_groups
        for seed in range(EAGER_CALLS + 2 * len(rates)):
            rate = rates[seed // 2 % len(rates)]
            # PyTorch's fused AdamW takes a tensor on the CPU for a number
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


# --- what is refused -----------------------------------------------------------------------------


def test_more_shapes_than_max_graphs(device):
    step, eager = steps(tiny(device), max_graphs=2)
    calls = [(batch(seed, 4 + seed % 2), True) for seed in range(8)]
    losses = train(step, calls)
    with pytest.raises(ValueError, match=r"input_ids \[3, 7\].* graph 3 of max_graphs=2: pad"):
        step(**batch(0, 7))
    assert_same([*losses, step(**batch(9))], [*train(eager, calls), eager(**batch(9))])


def change_options(step):
    step.optimizer.param_groups[0]["weight_decay"] = 0.5


def move_a_parameter(step):
    step.model.embedding.weight.data = step.model.embedding.weight.data.clone()


def freeze(step):
    step.model.second.bias.requires_grad_(False)


def load_the_optimizer(step):
    step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_options, "an option of the optimizer"),
        (move_a_parameter, "a parameter"),
        (freeze, "a parameter"),
        (load_the_optimizer, "the optimizer's state"),
    ],
)
def test_what_a_graph_works_on_has_changed(device, change, named):
    """It is refused, and after reset() the step is again that of the eager loop."""
    step, eager = steps(tiny(device))
    calls = [(batch(seed), True) for seed in range(5)]
    train(step, calls), train(eager, calls)
    change(step), change(eager)
    with pytest.raises(ValueError, match=rf"{named} is not what it was .* call reset\(\)"):
        step(**batch(5))
    step.reset()
    calls = [(batch(seed), True) for seed in range(6, 11)]
    assert_same(train(step, calls), train(eager, calls))


@pytest.mark.parametrize(
    ("change", "named"), [(change_options, "an option"), (load_the_optimizer, "the optimizer's")]
)
def test_a_refused_step_adds_nothing_to_accumulated_gradients(device, change, named):
    step, _ = steps(tiny(device))
    train(step, [(batch(seed), seed % 2 == 1) for seed in range(2 * EAGER_CALLS + 2)])
    assert captured(step) == 2
    step.accumulate(**batch(6))
    trained = [p for p in step.model.parameters() if p.requires_grad]
    before = [p.grad.clone() for p in trained]
    change(step)
    with pytest.raises(ValueError, match=f"{named} .* is not what it was"):
        step(**batch(7))
    assert all(map(torch.equal, [p.grad for p in trained], before))


def test_only_addresses_are_looked_at_while_the_gpu_waits(device, monkeypatch):
    """And the rest between the two launches, of which the second may do harm."""
    step, _ = steps(tiny(device))
    train(step, [(batch(seed), True) for seed in range(EAGER_CALLS + 1)])
    (graph,), calls = step._graphs.values(), Mock()
    for owner, name in (
        (graph_module, "addresses_of"),
        (graph_module, "worked_on"),
        (graph.captured, "replay_gradients"),
        (graph.captured, "replay_update"),
    ):
        noted = Mock(wraps=getattr(owner, name))
        calls.attach_mock(noted, name)
        monkeypatch.setattr(owner, name, noted)
    step(**batch(9))
    order = ["addresses_of", "replay_gradients", "worked_on", "replay_update"]
    assert [name for name, *_ in calls.mock_calls] == order


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: graphed(model, torch.optim.AdamW(model.parameters()))(**batch(0)),
            "capturable=True, got AdamW without: use",
        ),
        (
            lambda model: graphed(model, torch.optim.SGD(model.parameters(), lr=1.0))(**batch(0)),
            "capturable=True, got SGD without: use",
        ),
        (
            lambda model: graphed(model, adamw(model.first)),
            r"got second\.weight outside of it: freeze it",
        ),
        (
            lambda model: GraphedStep(model.cpu(), adamw(model)),
            "one cuda device, got cpu: move the model with",
        ),
        (lambda model: GraphedStep(None, None), r"model as a torch\.nn\.Module, got NoneType"),
        (lambda model: GraphedStep(adamw(model), model), "as a torch.nn.Module, got AdamW"),
        (lambda model: graphed(model, None), r"as a torch\.optim\.Optimizer, got NoneType"),
        (
            lambda model: graphed(model, adamw(model), autocast=torch.autocast("cpu")),
            r"autocast as a function .* got autocast: give lambda: torch\.autocast",
        ),
        (
            lambda model: graphed(model, adamw(model), max_grad_norm=float("nan")),
            "max_grad_norm as a number or None, got nan",
        ),
        (
            lambda model: graphed(model, adamw(model), max_graphs=0.5),
            "got 1 and 0.5",
        ),
        (lambda model: graphed(model, adamw(model), max_graphs=0), "of at least 1, got"),
        (lambda model: graphed(model, adamw(model), accumulation_steps=0), "of at least 1, got"),
        (
            lambda model: graphed(model, adamw(model))(**batch(0), scale=[1, 2]),
            "wants tensors and constants .* as list",
        ),
        (
            lambda model: graphed(model, adamw(model))(**batch(0), scale={"mask": torch.ones(1)}),
            "wants tensors and constants .* as Tensor",
        ),
    ],
)
def test_a_step_that_cannot_be_captured_is_a_value_error(make, message, device):
    with pytest.raises(ValueError, match=message):
        make(tiny(device))


def test_model_without_a_loss(device):
    step, _ = steps(peft_model(device, config=ONE_LAYER))
    with pytest.raises(ValueError, match="got NoneType: give labels"):
        step(input_ids=ids(device))


def test_accumulation_with_a_parameter_without_a_gradient(device):
    model = tiny(device)
    model.unused = torch.nn.Linear(3, 3).to(device)
    with pytest.raises(ValueError, match="2 of 6 parameters of the optimizer get no gradient"):
        graphed(model, adamw(model)).accumulate(**batch(0))


def test_what_was_offloaded_to_lives_as_long_as_the_graphs(device):
    """They have the addresses of its host memory, whatever becomes of the model."""
    model = peft_model(device, config=ONE_LAYER)
    fuse(model, Fusion(checkpoint="offload"))
    policy = weakref.ref(policy_of(model.get_submodule(f"{LAYERS}.0")))
    step = graphed(model, adamw(model))
    for seed in range(3):
        step(**chat(seed, device))
    unfuse(model), gc.collect()
    assert policy() is not None
    step.reset(), gc.collect()
    assert policy() is None


def test_a_failed_capture_leaves_everything_as_it_was(device):
    """The model asks the device for a number. Nothing of the refused step was done: repeating it
    eagerly gives the eager loop's training, and so does a graph once the cause is gone."""
    step, eager = steps(tiny(device, waits=True, dropout=0.5), max_grad_norm=0.05)
    for one in (step, eager):
        torch.manual_seed(2)
        for seed in range(EAGER_CALLS):
            one.accumulate(**batch(seed))
            one(**batch(seed + 10))
        if one is step:
            with pytest.raises(
                RuntimeError, match=r"cannot be captured: \w+: .*(synchroniz|captur)"
            ) as info:
                step.accumulate(**batch(5))
            assert "\n" not in str(info.value)
            assert not step._graphs
            assert all(p.grad is None for p in step.model.parameters())
        one.accumulate(**batch(6))
    assert_same_training(step, eager)
    by_hand = EagerStep(step.model, step.optimizer, max_grad_norm=0.05)
    assert_same(*(five_losses(one) for one in (by_hand, eager)))
    step.model.waits = eager.model.waits = False
    losses = [five_losses(one) for one in (step, eager)]
    assert captured(step) == 1
    assert_same(*losses)
    assert_same_training(step, eager)


def five_losses(step):
    torch.manual_seed(3)
    return [step(**batch(seed)) for seed in range(5)]


# --- on a GPU -------------------------------------------------------------------------------------

AGAIN = Fusion(**ALL, layer=True, checkpoint="full")
TRAINED = {
    "target_modules": "all-linear",
    "bias": "all",
    "modules_to_save": ["input_layernorm", "post_attention_layernorm"],
}
FUSED = {
    "layers": ("Qwen2", Fusion(mlp=True, attention=True, rope=True, rms_norm=True)),
    "all": ("Qwen2", Fusion(**ALL)),
    "all, checkpointed": ("Qwen2", Fusion(**ALL, checkpoint="full")),
    "selective": ("Qwen2", Fusion(checkpoint="selective", checkpoint_gib=50e3 / 2**30)),
    "all, normed heads": ("Qwen3", Fusion(**ALL)),
    "whole layers, normed heads": ("Qwen3", Fusion(**ALL, layer=True)),
    "whole layers, biases and norms trained": ("Qwen2", AGAIN, TRAINED),
    "whole layers, one product for q, k and v": ("Phi3", AGAIN, TRAINED),
    "whole layers in FP8": (
        "Qwen2",
        Fusion(**ALL | {"cross_entropy": False}, layer=True, fp8=True, checkpoint="full"),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("autocast", [False, True])
def test_fused_model_is_trained_as_by_the_eager_loop(device, fused, autocast):
    """Scheduler, clipping, accumulation, two lengths. The fused loss drops ignored tokens only
    while it may wait, so its products have other sizes in a graph: within bf16's own error there.
    In FP8 a code that falls to the other side is 6% of it, and 1e-6 of an adapter 1e-3 of a later
    loss: sizes are the same there, with transformers' loss, and each step begins with the same.
    """
    family, fusion, *lora = fused
    dtype = torch.bfloat16 if autocast else torch.float32
    if fusion.fp8 and not autocast:
        pytest.skip("FP8 computes in bf16")
    config = {"pad_token_id": 0} | (CONFIG if fusion.fp8 else {})
    model = peft_model(device, family, dtype, config, **dict(*lora))
    context = partial(torch.autocast, "cuda", torch.bfloat16, enabled=autocast)
    both = steps(model, 2**-12, fusion, autocast=context, max_grad_norm=1.0)
    schedulers = [halving(one.optimizer) for one in both]
    trained = [[p for p in one.model.parameters() if p.requires_grad] for one in both]
    losses = [], []
    for seed in range(10):
        for one, scheduler, found in zip(both, schedulers, losses, strict=True):
            found.append(one.accumulate(**chat(seed, device)))
            found.append(one(**chat(seed + 20, device, length=11)))
            scheduler.step()
        if fusion.fp8:
            torch._foreach_copy_([p.detach() for p in trained[1]], trained[0])
    assert captured(both[0]) == 2
    bound = 2e-3 if autocast and fusion.cross_entropy else 1e-5
    torch.testing.assert_close(*map(torch.stack, losses), rtol=bound, atol=0)
    assert len({loss.item() for loss in losses[0]}) == 20


@pytest.mark.gpu
@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_checkpointing_by_transformers(device, preserve_rng_state):
    """torch's checkpoint reads the random generator, which not every torch can while it captures:
    it is captured, then, or refused, and trains right either way."""
    model = peft_model(device)
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
def test_the_first_replay_draws_what_the_eager_step_would_where_the_gpu_is_late(
    device, monkeypatch
):
    """What PyTorch sets for random numbers before a capture arrives while the graph is running."""
    begin, third_of_a_second = torch.cuda.CUDAGraph.capture_begin, 600_000_000

    def begin_late(*asked, **options):
        torch.cuda._sleep(third_of_a_second)
        begin(*asked, **options)

    def sleep_in_the_graph(*_):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(3 * third_of_a_second)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin_late)
    step, eager = steps(tiny(device, dropout=0.5))
    step.model.register_forward_pre_hook(sleep_in_the_graph)
    losses = []
    for one in (step, eager):
        torch.manual_seed(7)
        losses.append([one(**batch(seed)) for seed in range(EAGER_CALLS + 2)])
    assert captured(step) == 1
    assert_same(*losses)


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
