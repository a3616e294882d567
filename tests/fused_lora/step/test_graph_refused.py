"""A training step that CUDA graphs cannot hold, or no longer can: it is refused and leaves no
trace."""

import copy
import gc
import weakref
from unittest.mock import Mock

import pytest
import torch
from cases.graph_case import (
    EagerStep,
    adamw,
    assert_same,
    assert_same_training,
    batch,
    captured,
    chat,
    graphed,
    steps,
    tiny,
    train,
)
from cases.layer_case import peft_model
from cases.peft_models import LAYERS, ids
from torch.nn.parallel import DistributedDataParallel as DDP

from fused_lora import Fusion, fuse, unfuse
from fused_lora.foreign.checkpointing import policy_of
from fused_lora.step import graph as graph_module
from fused_lora.step.graph import EAGER_CALLS, GraphedStep

ONE_LAYER = {"num_hidden_layers": 1}


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
    """Refuse it. After reset() the step equals the eager loop's again."""
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
    ("change", "named"),
    [
        (lambda mlp: mlp.up_proj.set_scale("default", 3.0), "an adapter"),
        (lambda mlp: mlp.up_proj.enable_adapters(False), "a parameter"),
        (lambda mlp: mlp.add_module("act_fn", torch.nn.SiLU()), "a module"),
    ],
)
def test_what_a_graph_of_a_peft_model_works_on_has_changed(device, change, named):
    model = peft_model(device, config=ONE_LAYER)
    step = graphed(model, adamw(model))
    for seed in range(EAGER_CALLS + 1):
        step(**chat(seed, device))
    change(model.get_submodule(f"{LAYERS}.0").mlp)
    with pytest.raises(ValueError, match=rf"{named} is not what it was .* call reset\(\)"):
        step(**chat(5, device))


@pytest.mark.parametrize(
    ("change", "named", "earlier"),
    [
        (change_options, "an option", 1),
        (load_the_optimizer, "the optimizer's", 1),
        (freeze, "a parameter", 0),
    ],
)
def test_a_refused_step_adds_nothing_to_gradients(device, change, named, earlier):
    """Of micro-batches that were accumulated earlier, or of none."""
    step, _ = steps(tiny(device))
    train(step, [(batch(seed), seed % 2 == 1) for seed in range(2 * EAGER_CALLS + 2)])
    assert captured(step) == 2
    train(step, [(batch(6), False)] * earlier)
    trained = [p for p in step.model.parameters() if p.requires_grad]
    before = [p.grad.clone() if earlier else None for p in trained]
    change(step)
    with pytest.raises(ValueError, match=f"{named}.* is not what it was"):
        train(step, [(batch(7), bool(earlier))])
    for parameter, gradient in zip(trained, before, strict=True):
        assert parameter.grad is gradient or parameter.grad.equal(gradient)


@pytest.mark.parametrize("update", [True, False], ids=["update", "micro-batch"])
def test_only_addresses_are_looked_at_while_the_gpu_waits(device, monkeypatch, update):
    """Check everything else after the first launch, and before the second, which alone can do
    harm."""
    step, _ = steps(tiny(device))
    for seed in range(EAGER_CALLS + 1):
        train(step, [(batch(seed), update)])
        step.optimizer.zero_grad()
    (graph,), calls = step._graphs.values(), Mock()
    launches = ["replay_gradients", *["replay_update"] * update]
    for owner, name in (
        (graph_module, "addresses_of"),
        (graph_module, "worked_on"),
        *((graph.captured, name) for name in launches),
    ):
        noted = Mock(wraps=getattr(owner, name))
        calls.attach_mock(noted, name)
        monkeypatch.setattr(owner, name, noted)
    train(step, [(batch(9), update)])
    order = ["addresses_of", launches[0], "worked_on", *launches[1:]]
    assert [name for name, *_ in calls.mock_calls] == order


def step_on_thawed(model):
    model.second.requires_grad_(False)
    step = graphed(model, adamw(model))
    step.optimizer.param_groups[1]["params"] += model.second.parameters()
    step(**batch(0))
    model.second.requires_grad_(True)
    return step


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
            r"but second\.weight is not: freeze it",
        ),
        (
            lambda model: GraphedStep(model.cpu(), adamw(model)),
            "one cuda device, got cpu: move the model with",
        ),
        (
            lambda model: step_on_thawed(model).accumulate(**batch(0)),
            r"requires a gradient that required none before; call reset\(\)",
        ),
        (lambda model: GraphedStep(None, None), r"model as a torch\.nn\.Module, got NoneType"),
        (lambda model: GraphedStep(adamw(model), model), "as a torch.nn.Module, got AdamW"),
        (
            lambda model: GraphedStep(DDP.__new__(DDP), adamw(model)),
            "itself, got DistributedDataParallel: pass its .module",
        ),
        (lambda model: graphed(model, None), r"as a torch\.optim\.Optimizer, got NoneType"),
        (
            lambda model: graphed(model, adamw(model), autocast=torch.autocast("cpu")),
            r"autocast as a function .* got autocast: pass lambda: torch\.autocast",
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
            "needs tensors and constants .* as list",
        ),
        (
            lambda model: graphed(model, adamw(model))(**batch(0), scale={"mask": torch.ones(1)}),
            "needs tensors and constants .* as Tensor",
        ),
    ],
)
def test_a_step_that_cannot_be_captured_is_a_value_error(make, message, device):
    with pytest.raises(ValueError, match=message):
        make(tiny(device))


def test_model_without_a_loss(device):
    step, _ = steps(peft_model(device, config=ONE_LAYER))
    with pytest.raises(ValueError, match="got NoneType: pass labels"):
        step(input_ids=ids(device))


def test_accumulation_with_a_parameter_without_a_gradient(device):
    model = tiny(device)
    model.unused = torch.nn.Linear(3, 3).to(device)
    with pytest.raises(ValueError, match="2 of 6 parameters of the optimizer get no gradient"):
        graphed(model, adamw(model)).accumulate(**batch(0))


def test_what_was_offloaded_to_lives_as_long_as_the_graphs(device):
    """Keep the host memory alive, whatever happens to the model: graphs hold its addresses."""
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
    """Undo the refused step, whose model copies a number to the host. Repeating it eagerly trains
    as the eager loop does. So does a graph once the cause is gone."""
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
