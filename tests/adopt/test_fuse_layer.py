"""Whole layers fused in tiny models of three families, against plain PEFT."""

import copy

import pytest
import torch
from fused_case import step
from layer_case import (
    EVERYTHING,
    FAMILIES,
    LAYER,
    NAMES,
    assert_model_right,
    layer_of,
    logits,
    operands_of_calls,
    pair,
    peft_model,
)
from peft import LoraConfig
from peft_models import ATTENTION, MLP, ids, set_weights
from reference import relative_error

from fused_lora import Fusion, decoder_layer, fuse, report, unfuse
from fused_lora.adopt.layer import borders_of


@pytest.fixture
def calls(monkeypatch):
    return operands_of_calls(monkeypatch)


# --- right where it fuses -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("options", "autocast"),
    [
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.bfloat16, "autocast_adapter_dtype": False}, False),
        ({"dtype": torch.bfloat16}, True),
    ],
    ids=("fp32", "bf16", "fp32 adapters, autocast"),
)
def test_layers_are_right_in_every_family(family, options, autocast, calls, device):
    fused, plain, done = pair(device, family=family, **options)
    assert done.fused == {"layer": NAMES} and not done.left
    assert_model_right(fused, plain, autocast=autocast)
    assert len(calls) == 3 * 2  # each layer for three batches


@pytest.mark.parametrize("policy", [{}, {"checkpoint": "full"}], ids=("kept", "checkpointed"))
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_join_every_other_part(policy, autocast, calls, device):
    fusion = Fusion(**(vars(EVERYTHING) | policy))
    dtype = torch.bfloat16 if autocast else torch.float32
    fused, plain, done = pair(device, fusion, dtype=dtype)
    assert done.fused["layer"] == NAMES and done.fused["rms_norm"] == [
        "base_model.model.model.norm"
    ]
    assert done.fused["mlp"] == done.fused["attention"] == done.fused["rope"] == []
    assert_model_right(fused, plain, autocast=autocast)
    # with a fused loss the last one of two runs once
    assert len(calls) == 3 * (3 if policy else 2)


@pytest.mark.parametrize("how", ["ours", "reentrant", "not reentrant"])
def test_checkpointed_gradients_are_those_of_kept_ones(how, calls, device):
    model, _, _ = pair(device)
    want = step(model)
    model.enable_input_require_grads()  # a reentrant checkpoint sees no other gradient
    if how == "ours":
        fuse(model, Fusion(checkpoint="full"))
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    calls.clear()
    got = step(model)
    assert len(calls) == 4
    needed = [inputs[-1].output_needed for inputs in calls]
    assert needed == [True, True, *[how != "ours"] * 2]
    assert all(relative_error(got[name], want[name]) < 1e-12 for name in want)


@pytest.mark.parametrize("head_dim", [26, 32], ids=("PyTorch's attention", "ours"))
@pytest.mark.parametrize(("policy", "runs"), [("full", 4), ("offload", 3)])
def test_attention_and_o_run_once_where_their_output_is_offloaded(
    policy, runs, head_dim, device, monkeypatch
):
    """But in the last of two layers, which keeps its input: its backward comes first. SwiGLU runs
    once in any case."""
    model, _, _ = pair(device, config={"head_dim": head_dim})
    want = step(model)
    counts = {"attention_forward": [], "add_adapted": [], "add_down": []}
    for name, seen in counts.items():
        function = getattr(decoder_layer, name)
        monkeypatch.setattr(
            decoder_layer, name,
            lambda *given, seen=seen, function=function: seen.append(1) or function(*given),
        )  # fmt: skip
    fuse(model, Fusion(checkpoint=policy))
    got = step(model)
    runs_of = dict.fromkeys(counts, runs) | {"add_down": 2}
    assert {name: len(seen) for name, seen in counts.items()} == runs_of
    assert all(relative_error(got[name], want[name]) < 1e-12 for name in want)


def test_padding_and_hidden_states_are_as_without_fusion(calls, device):
    fused, plain, _ = pair(device)
    mask = torch.ones_like(ids(device))
    mask[1, 9:] = 0
    assert_model_right(fused, plain, attention_mask=mask)
    assert len(calls) == 6 and all(inputs[3] is not None for inputs in calls)
    ours, theirs = (
        m(input_ids=ids(device), output_hidden_states=True, output_attentions=False)
        for m in (fused, plain)
    )
    for got, want in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert torch.allclose(got, want, atol=1e-4)


def test_a_window_is_in_the_mask(calls, device):
    config = {"sliding_window": 4}
    fused, plain, _ = pair(device, family="Mistral", config=config)
    assert relative_error(logits(plain), logits(peft_model(device, family="Mistral"))) > 1e-3
    assert_model_right(fused, plain)
    assert len(calls) == 6


def test_accumulated_steps_add_up(device):
    fused, plain, _ = pair(device)
    gradients = []
    for model in (fused, plain):
        for row in ids(device):
            model(input_ids=row[None], labels=row[None]).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert len(gradients[1]) == 28
    for name, want in gradients[1].items():
        assert relative_error(gradients[0][name], want) < 1e-4, name


# --- follows its adapters -------------------------------------------------------------------------


def train(model, **options):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, **options)
    for seed in (3, 4):
        step(model, seed=seed)
        optimizer.step()


def load(model):
    state = {n: t + 0.05 if ".lora_" in n else t for n, t in model.state_dict().items()}
    model.load_state_dict(state)


def assign(model):
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data + 0.05


CHANGES = {
    "an optimizer's steps": lambda model: train(model, foreach=True),
    "a fused optimizer's steps": lambda model: train(model, fused=True),
    "load_state_dict": load,
    "other data": assign,
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_may_change_between_steps(change, calls, device):
    fused, plain, _ = pair(device)
    before = step(plain)["loss"]
    for model in (fused, plain):
        CHANGES[change](model)
    got, want = step(fused), step(plain)
    assert relative_error(before, want["loss"]) > 1e-3
    assert all(relative_error(got[name], want[name]) < 1e-3 for name in want)
    assert calls


def test_another_adapter_may_become_the_active_one(calls, device):
    plain = peft_model(device)
    plain.add_adapter("second", LoraConfig(r=12, lora_alpha=20, target_modules=[*ATTENTION, *MLP]))
    set_weights(plain, device, only=".second.")
    fused = copy.deepcopy(plain)
    fuse(fused, LAYER)
    for name in ("second", "default"):
        for model in (fused, plain):
            model.set_adapter(name)
        got, want = step(fused), step(plain)
        assert got.keys() == want.keys() and len(calls) == 2
        assert all(relative_error(got[key], want[key]) < 1e-4 for key in want)
        calls.clear()


def test_frozen_adapters_get_no_gradient(calls, device):
    fused, plain, _ = pair(device)
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            if ".lora_A." in name or "layers.0.self_attn" in name:
                parameter.requires_grad_(False)
    assert_model_right(fused, plain)
    assert calls


# --- in and out -----------------------------------------------------------------------------------


def test_unfuse_gives_forwards_and_memory_back(calls, device):
    fused, plain, _ = pair(device, EVERYTHING)
    assert borders_of(layer_of(fused)) is not None
    assert set(NAMES) < set(unfuse(fused)) and unfuse(fused) == []
    assert report(fused).fused == {}
    assert not any("forward" in vars(module) for module in fused.modules())
    for parameter in fused.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    got, want = step(fused), step(plain)
    assert all(torch.equal(got[name], want[name]) for name in want) and not calls


def test_the_buffers_live_as_long_as_the_fused_modules(device):
    import gc
    import weakref

    fused, _, _ = pair(device)
    borders = weakref.ref(borders_of(layer_of(fused)))
    assert borders_of(layer_of(fused, 1)) is borders()
    fuse(fused, Fusion(rms_norm=True))  # its forward joins the layer's, in the same buffers
    assert borders() is borders_of(layer_of(fused)) is not None
    unfuse(fused)
    gc.collect()
    assert borders() is None


def test_a_part_that_joins_later_does_not_undo_the_layer(calls, device):
    fused, plain, _ = pair(device)
    done = fuse(fused, Fusion(rms_norm=True, mlp=True))
    assert done.fused["layer"] == NAMES
    assert_model_right(fused, plain)
    assert len(calls) == 6
    with fused.disable_adapter(), plain.disable_adapter():
        assert relative_error(logits(fused), logits(plain)) < 1e-5
    assert report(fused).fused["mlp"] == []
    layer_of(fused).self_attn.register_forward_hook(lambda *_: None)
    assert report(fused).fused["mlp"] == [f"{NAMES[0]}.mlp"]  # within a layer that is not fused
    assert_model_right(fused, plain)


def test_a_copy_runs_as_its_class_has_it_and_can_be_fused(calls, device):
    fused, plain, _ = pair(device)
    copied = copy.deepcopy(fused)
    assert "call fuse again" in report(copied).left[NAMES[0]]
    assert torch.equal(logits(copied), logits(plain)) and not calls
    assert fuse(copied, LAYER).fused == {"layer": NAMES}
    assert_model_right(copied, plain)
    assert len(calls) == 6


def test_state_dict_is_unchanged(device):
    fused, plain, _ = pair(device)
    got, want = fused.state_dict(), plain.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
