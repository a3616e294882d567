"""`del model` frees a model at once, fused or not, without Python's collector."""

import copy
import gc
import weakref

import pytest
import torch
from cases import codes_case, fp8_case, graph_case, layer_case
from cases.fused_case import ALL, SHORT, batch, pickled, step
from torch.multiprocessing.reductions import StorageWeakRef

from fused_lora import Fusion, fuse, unfuse
from fused_lora.step.masks import LayersWithoutMask, PaddingSeen

ONE_LAYER = {"num_hidden_layers": 1}
LAYER = layer_case.EVERYTHING


def made(fusion=None, **options):
    def make(device):
        model = layer_case.peft_model(device, config=ONE_LAYER, **options)
        if fusion is not None:
            fuse(model, fusion)
        step(model, length=SHORT)
        return model

    return make


def after(do):
    return lambda device: do(made(LAYER)(device))


def unfused(model):
    unfuse(model)
    step(model, length=SHORT)
    return model


def switched(model):
    fuse(model, Fusion(checkpoint="full"))
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable()
    step(model, length=SHORT)
    return model


def hooked(model):
    handle = layer_case.layer_of(model).mlp.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="it has hooks"):
        step(model, length=SHORT)
    handle.remove()
    return model


def saved(model):
    model.state_dict()["base_model.model.lm_head.weight"].untyped_storage()
    return model


def coded(device):
    model, _ = codes_case.models(device, codes_case.BLOCKS)
    fuse(model, fp8_case.FP8)
    step(model, length=SHORT)
    return model


def graphed(device):
    # without a GPU nothing that is fused knows that it is captured
    model = made(LAYER if device == "cuda" else None)(device)
    train = graph_case.graphed(model, graph_case.adamw(model))
    for seed in range(4):
        train(**batch(model, seed=seed, length=SHORT))
    assert graph_case.captured(train)
    return model


def noted(device):
    model = made(LAYER)(device)
    hook = LayersWithoutMask(model, {}, PaddingSeen())
    for seed in range(2):
        with hook.noted():
            model(**batch(model, seed=seed, length=SHORT)).loss.backward()
    return model


pytestmark = pytest.mark.usefixtures("fp8_in_fp32")
MODELS = {
    "plain": made(),
    **{name: made(Fusion(**{name: True})) for name in (*ALL, "layer")},
    **{name: made(Fusion(**ALL, checkpoint=name)) for name in ("none", "full", "offload")},
    "selective": made(Fusion(**ALL, checkpoint="selective", checkpoint_gib=1.0)),
    "all parts, dropout": made(Fusion(**ALL), lora_dropout=0.1),
    "layers, offload": made(Fusion(layer=True, checkpoint="offload")),
    "FP8": lambda device: fp8_case.pair(device)[0],
    "codes of a checkpoint": coded,
    "unfused": after(unfused),
    "checkpointing switched": after(switched),
    "hooked": after(hooked),
    "state_dict": after(saved),
    "deep copy": after(copy.deepcopy),
    "pickled": after(pickled),
    "noted for a graph": noted,
    "graphed": graphed,
}


@pytest.mark.slow("layers, offload", "graphed")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_deleted_model_is_freed_at_once(make, device):
    gc.collect()
    gc.disable()
    try:
        model = make(device)
        parts = {name: weakref.ref(one) for name, one in model.named_modules()}
        parts |= {name: weakref.ref(one) for name, one in model.named_parameters()}
        storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
        del model
        assert not [name for name, part in parts.items() if part() is not None]
        # the interpreter leaves a cycle around the arguments of every launch
        assert device == "cpu" or all(storage.expired() for storage in storages)
    finally:
        gc.enable()


@pytest.mark.slow("none")
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_loss_outlives_its_model(policy, device):
    gradients = []
    for fusion in (None, Fusion(**ALL, checkpoint=policy), Fusion(layer=True, checkpoint=policy)):
        model = made(fusion)(device)
        adapters = [p for p in model.parameters() if p.requires_grad]
        loss = model(**batch(model, length=SHORT)).loss
        del model
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in adapters]))
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=1e-3, atol=1e-4)


def test_a_forward_that_outlives_its_model_says_so(device):
    model = made(LAYER)(device)
    forward = layer_case.layer_of(model).forward
    del model
    with pytest.raises(ReferenceError, match="has outlived its model: keep the model"):
        forward(torch.zeros(1, 2, 52, device=device))
