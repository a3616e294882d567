"""What is in memory while a checkpointing policy trains, and dropout in a capture."""

import gc
import weakref

import pytest
import torch
from cases.fused_case import ALL, SHORT, batch, loss_of
from cases.layer_case import peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fused_lora import Fusion, fuse
from fused_lora.step import checkpoint

KEPT = {"checkpoint": "selective", "checkpoint_gib": 90e3 / 2**30}  # one layer of three
NONE_KEPT = {"checkpoint": "selective", "checkpoint_gib": 0}
THREE_LAYERS = {"num_hidden_layers": 3}


@pytest.fixture
def quick_collections():
    """`gc.collect` looks at what comes from now on alone, and not at all that was imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Storages(TorchDispatchMode):
    """Those that operations made, or took."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        self.seen += [weakref.ref(t.untyped_storage()) for t in tensors]
        return result

    def alive(self, model):
        """How large those are that are still there, by address; but the model's own."""
        gc.collect()
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        storages = {one.data_ptr(): one.nbytes() for see in self.seen if (one := see()) is not None}
        return {address: size for address, size in storages.items() if address not in own}


def held(model, length=SHORT):
    """Bytes that are there between a forward and its backward because the forward made them."""
    with Storages() as storages:
        loss = loss_of(model, batch(model, length))
    found = sum(storages.alive(model).values())
    loss.backward()
    model.zero_grad()
    return found


BUDGETED = {
    "nothing fused": ({}, {}),
    "a last layer that runs once": ({"attention": True, "cross_entropy": True}, {}),
    "a first layer that needs nothing": ({"attention": True}, {"layers_to_transform": [1, 2, 3]}),
}


@pytest.mark.slow("nothing fused")
@pytest.mark.parametrize("name", BUDGETED)
def test_a_budget_is_used_and_holds_from_the_first_step_on(name, quick_collections, device):
    parts, lora = BUDGETED[name]
    model = peft_model(device, config={"num_hidden_layers": 4}, **lora)

    def steps(**policy):
        fuse(model, Fusion(**parts, **policy))
        with torch.no_grad():
            loss_of(model)
        held(model, length=3)  # where layers need less
        return [held(model) for _ in range(3)]

    def selective(budget):
        return steps(checkpoint="selective", checkpoint_gib=budget / 2**30)

    least, most = steps(checkpoint="full")[-1], selective(2**30)[-1]
    layer_bytes = (most - least) / 4
    assert layer_bytes > 0
    for layers in (0.5, 2.5):
        budget = layers * layer_bytes
        first, *later = selective(budget)
        assert max(first, *later) - least <= budget, layers
        # what is left has no room for another: what layers share is counted for each
        assert min(budget, most - least) - (min(later) - least) < 1.6 * layer_bytes, layers


@pytest.mark.slow("parts, selective")
@pytest.mark.parametrize(
    "fusion",
    [
        Fusion(**ALL, checkpoint="full"),
        Fusion(**ALL, **NONE_KEPT),
        Fusion(layer=True, checkpoint="offload"),
    ],
    ids=("parts, full", "parts, selective", "layer, offload"),
)
def test_a_step_leaves_nothing_behind_but_gradients(fusion, quick_collections, device):
    """Also while its loss is kept. The tensors are so small that offloading leaves them where they
    are."""
    model = peft_model(device)
    fuse(model, fusion)
    with Storages() as first:
        loss_of(model).backward()
    model.zero_grad()
    # stays: 16 bytes, in which the loss looks for wrong labels; on a GPU each layer's table of
    # the adapters that it copies
    set_up = first.alive(model)
    with Storages() as storages:
        loss = loss_of(model)  # often still there when the next forward runs
        loss.backward()
    model.zero_grad()
    assert len(storages.seen) > 100
    assert sum(set_up.values()) <= (32 if device == "cpu" else 2048)
    assert storages.alive(model).keys() <= {*set_up, loss.untyped_storage().data_ptr()}


# --- in a capture ---------------------------------------------------------------------------------


PARTS = {"mlp": True, "attention": True, "rope": True}
CAPTURED = {  # options of the model and what is fused: whether all its dropout is
    "no dropout": ({}, {}, True),
    "dropout": ({"lora_dropout": 0.5}, {}, False),
    "in the MLP, which is not fused": ({"lora_dropout": 0.5}, {"attention": True}, False),
    "in parts": ({"lora_dropout": 0.5}, PARTS, True),
    "in layers": ({"lora_dropout": 0.5}, {"layer": True}, True),
    "of attention": ({"lora_dropout": 0.5, "config": {"attention_dropout": 0.5}}, PARTS, False),
}


@pytest.mark.slow("no dropout", "dropout", "in layers")
@pytest.mark.parametrize(("options", "parts", "is_fused"), CAPTURED.values(), ids=CAPTURED)
def test_dropout_in_a_capture_is_refused_where_it_would_be_another_when_a_layer_runs_again(
    options, parts, is_fused, device, monkeypatch
):
    """And nobody would see it."""
    model = peft_model(device, **options)
    fuse(model, Fusion(**parts, checkpoint="full"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "is_capturing", lambda tensor: True)
        if is_fused:
            assert loss_of(model).isfinite()
        else:
            with pytest.raises(ValueError, match="does not run fused cannot repeat its dropout"):
                loss_of(model)
    loss_of(model).backward()
