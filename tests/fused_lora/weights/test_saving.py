"""Every public way to save and load a model or its training state works on a fused model as it does
on plain PEFT."""

import copy
import pickle

import huggingface_hub
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cases import fp8_case
from cases.fused_case import SHORT, step
from cases.layer_case import EVERYTHING, LAYER, NAMES, pair
from cases.peft_models import assert_equal, ids
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch.distributed.checkpoint import state_dict as dcp_state
from transformers import Trainer, TrainingArguments

from fused_lora.foreign.saved_weights import BufferedWeight

pytestmark = pytest.mark.usefixtures("fp8_in_fp32")
ONE_LAYER = {"num_hidden_layers": 1}
FUSIONS = {
    "layers": lambda device: pair(device, EVERYTHING, config=ONE_LAYER),
    "layers, DoRA": lambda device: pair(device, LAYER, config=ONE_LAYER, use_dora=True),
    "layers in FP8": fp8_case.pair,
}


def accelerated(model):
    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer may have left bf16 there
    accelerator = Accelerator(cpu=next(model.parameters()).device.type == "cpu")
    trained = [p for p in model.parameters() if p.requires_grad]
    accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1))
    return accelerator


def saved_by_dcp(model, folder):
    dcp.save(dcp_state.get_model_state_dict(model), checkpoint_id=folder)


def loaded_by_dcp(model, folder):
    state = dcp_state.get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    dcp_state.set_model_state_dict(model, state)


# How to save a model into a folder, and how to load it from there.
WAYS = {
    "accelerator.save_state": (
        lambda model, folder: accelerated(model).save_state(folder),
        lambda model, folder: accelerated(model).load_state(folder),
    ),
    "accelerator.save_model": (
        lambda model, folder: accelerated(model).save_model(model, folder),
        lambda model, folder: safetensors.torch.load_model(model, folder / "model.safetensors"),
    ),
    "safetensors.save_model": (
        lambda model, folder: safetensors.torch.save_model(model, folder / "model.safetensors"),
        lambda model, folder: safetensors.torch.load_model(model, folder / "model.safetensors"),
    ),
    "safetensors.save_file": (
        lambda model, folder: safetensors.torch.save_file(model.state_dict(), folder / "state"),
        lambda model, folder: model.load_state_dict(safetensors.torch.load_file(folder / "state")),
    ),
    "huggingface_hub.save_torch_model": (
        huggingface_hub.save_torch_model,
        lambda model, folder: huggingface_hub.load_torch_model(model, folder, strict=True),
    ),
    "torch.save of the state": (
        lambda model, folder: torch.save(model.state_dict(), folder / "state"),
        lambda model, folder: model.load_state_dict(torch.load(folder / "state")),
    ),
    "torch.save of the model": (
        lambda model, folder: torch.save(model, folder / "model"),
        lambda model, folder: model.load_state_dict(
            torch.load(folder / "model", weights_only=False).state_dict()
        ),
    ),
    "get_model_state_dict": (saved_by_dcp, loaded_by_dcp),
    "DCP in place": (
        lambda model, folder: dcp.save(model.state_dict(), checkpoint_id=folder),
        lambda model, folder: dcp.load(model.state_dict(), checkpoint_id=folder),
    ),
    "save_pretrained of the model within PEFT": (
        lambda model, folder: model.base_model.model.save_pretrained(folder),
        lambda model, folder: model.base_model.model.load_state_dict(
            safetensors.torch.load_file(folder / "model.safetensors")
        ),
    ),
}


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def places(model):
    return {name: p.data_ptr() for name, p in model.named_parameters()}


def zero(model, only=""):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.zero_()


@pytest.mark.slow("layers-get_model_state_dict")
@pytest.mark.filterwarnings("error:a fused ")
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("layers", way) for way in WAYS),
        *(("layers in FP8", way) for way in WAYS),
        ("layers, DoRA", "safetensors.save_model"),
    ],
)
def test_what_was_saved_is_loaded(kind, way, tmp_path, device, caplog):
    fused, plain, _ = FUSIONS[kind](device)
    save, load = WAYS[way]
    before, want, lay = step(fused, length=SHORT), values(plain), places(fused)
    save(fused, tmp_path)
    assert "shared" not in caplog.text
    for model in (fused, plain):
        zero(model)
        load(model, tmp_path)
        assert_equal(values(model), want)
    assert places(fused) == lay  # as a CUDA graph has them
    after = step(fused, length=SHORT)
    assert after.functions == before.functions
    assert torch.equal(after["loss"], before["loss"])


# --- adapters alone -------------------------------------------------------------------------------


def trained(model, folder, checkpoint=None):
    """Train one step, or none when resuming from its checkpoint."""
    rows = [{"input_ids": row, "labels": row} for row in ids("cpu")[:, :SHORT].tolist()]
    arguments = TrainingArguments(
        str(folder), max_steps=1, save_steps=1, report_to=[], disable_tqdm=True, learning_rate=0.0,
        use_cpu=next(model.parameters()).device.type == "cpu", per_device_train_batch_size=2,
        gradient_checkpointing=False,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows).train(checkpoint)


def trained_on(model, folder):
    trained(model, folder, str(folder / "checkpoint-1"))


ADAPTERS = {
    "save_pretrained": (
        lambda model, folder: model.save_pretrained(folder),
        lambda model, folder: model.load_adapter(folder, "default", is_trainable=True),
    ),
    "get_peft_model_state_dict": (
        lambda model, folder: torch.save(get_peft_model_state_dict(model), folder / "state"),
        lambda model, folder: set_peft_model_state_dict(model, torch.load(folder / "state")),
    ),
    "Trainer": (trained, trained_on),
}


@pytest.mark.parametrize("kind", ["layers", "layers, DoRA"])
@pytest.mark.parametrize("way", ADAPTERS)
def test_adapters_are_saved_without_a_copy_of_base_weights(
    way, kind, tmp_path, device, monkeypatch
):
    fused, plain, _ = FUSIONS[kind](device)
    want, (save, load) = values(plain), ADAPTERS[way]
    monkeypatch.setattr(BufferedWeight, "_copy", None)
    save(fused, tmp_path)
    for model in (fused, plain):
        zero(model, only=".lora_")
        load(model, tmp_path)
        assert_equal(values(model), want)


# --- what state_dict hands out --------------------------------------------------------------------


def test_a_state_is_the_weights_themselves_and_assigned_it_makes_plain_parameters(device):
    fused, plain, _ = FUSIONS["layers"](device)
    name = f"{NAMES[0]}.mlp.up_proj.base_layer.weight"
    state, weight = fused.state_dict(), fused.get_parameter(name)
    assert fused.state_dict(keep_vars=True)[name] is weight
    state[name].untyped_storage()  # makes a copy, which is none of what follows
    with torch.no_grad():
        state[name].add_(1.0)
        assert torch.equal(weight, plain.get_parameter(name) + 1)
    assert torch.equal(pickle.loads(pickle.dumps(state[name])), weight)
    copied = copy.deepcopy(state)[name]
    assert type(copied) is torch.Tensor and torch.equal(copied, weight)
    plain.load_state_dict(state, assign=True)
    assigned = plain.get_parameter(name)
    assert type(assigned) is torch.nn.Parameter and torch.equal(assigned, weight)
    assert assigned.data_ptr() == weight.data_ptr() and not assigned.is_contiguous()
