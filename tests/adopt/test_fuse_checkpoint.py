"""Each checkpointing policy in training as people do it: micro-batches, hidden states in the loss,
and transformers' own checkpointing switched on and off."""

import copy

import pytest
import torch
from layer_case import layer_of, pair
from peft_models import ids
from reference import relative_error
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from fused_lora import Fusion, fuse, unfuse
from fused_lora.step.checkpoint import policy_of

ALL = dict.fromkeys(("mlp", "attention", "rope", "rms_norm", "cross_entropy"), True)
KEPT = {"checkpoint": "selective", "checkpoint_gib": 150e3 / 2**30}  # one layer of three
FUSIONS = {
    "attention": Fusion(attention=True),
    "full": Fusion(attention=True, checkpoint="full"),
    "offload": Fusion(attention=True, checkpoint="offload"),
    "selective": Fusion(attention=True, **KEPT),
    "all, full": Fusion(**ALL, checkpoint="full"),
    "layer, offload": Fusion(layer=True, cross_entropy=True, checkpoint="offload"),
}
# the last one's input stays where it is, and nothing below the first is trained
THREE_LAYERS = {"num_hidden_layers": 3}
ALL_FUSIONS = pytest.mark.parametrize("fusion", FUSIONS.values(), ids=FUSIONS)


def assert_same_gradients(fused, plain):
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert wanted
    for name, parameter in fused.named_parameters():
        assert (parameter.grad is not None) == (name in wanted), name
        if name in wanted:
            assert relative_error(parameter.grad, wanted[name]) < 2e-5, name


@ALL_FUSIONS
def test_micro_batches_add_up_to_the_gradients_of_one_batch(fusion, device):
    """The first has its backward alone, the others have one together."""
    fused, plain, _ = pair(device, fusion, config=THREE_LAYERS)
    first, *others = (ids(device, seed) for seed in (3, 4, 5))
    whole = torch.cat((first, *others))
    plain(input_ids=whole, labels=whole).loss.backward()
    (fused(input_ids=first, labels=first).loss / 3).backward()
    sum(fused(input_ids=other, labels=other).loss / 3 for other in others).backward()
    assert_same_gradients(fused, plain)


@ALL_FUSIONS
def test_hidden_states_are_right_and_pass_their_gradients_on(fusion, device):
    fused, plain, _ = pair(device, fusion, config=THREE_LAYERS)
    tokens = ids(device)
    outputs = []
    for model in (fused, plain):
        outputs.append(model(input_ids=tokens, labels=tokens, output_hidden_states=True))
        of_hidden = sum(hidden.pow(3).mean() for hidden in outputs[-1].hidden_states)
        (outputs[-1].loss + of_hidden).backward()
    got, want = (output.hidden_states for output in outputs)
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < 2e-5
    assert_same_gradients(fused, plain)


# --- beside transformers' own switch --------------------------------------------------------------


def runs_of_a_layer(model, monkeypatch):
    """How often the second of three layers runs in a step."""
    layer, runs = layer_of(model, 1), []
    own = layer.mlp.forward
    monkeypatch.setattr(layer.mlp, "forward", lambda x: runs.append(x) or own(x))
    tokens = ids(next(model.parameters()).device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    monkeypatch.undo()
    return len(runs)


def own_of(layer):
    """What transformers has set on a layer: whether it is checkpointed, and by which function."""
    function = vars(layer).get("_gradient_checkpointing_func")
    return layer.gradient_checkpointing, getattr(function, "func", function)


@pytest.mark.parametrize("name", ["attention", "full", "offload", "selective"])
def test_a_policy_stays_when_checkpointing_is_switched_on_and_off(name, device):
    """By the Trainer, whose gradient_checkpointing=True comes after fuse()."""
    fusion = FUSIONS[name]
    fused, plain, _ = pair(device, fusion, config=THREE_LAYERS)
    layers = [layer_of(fused, index) for index in range(3)]
    policies = [policy_of(layer) for layer in layers]
    is_held = fusion.checkpoint != ""
    assert all(policies) == any(policies) == is_held
    for _ in range(2):
        fused.gradient_checkpointing_disable()
        assert not any(layer.gradient_checkpointing for layer in layers)
        fused.gradient_checkpointing_enable()
        assert all(layer.gradient_checkpointing for layer in layers)
    assert [policy_of(layer) for layer in layers] == policies
    tokens = ids(device)
    for model in (fused, plain):
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert_same_gradients(fused, plain)
    if is_held:
        unfuse(fused)
    assert [own_of(layer) for layer in layers] == [(True, torchs_checkpoint)] * 3


def test_what_is_switched_off_runs_once(monkeypatch, device):
    fused, _, _ = pair(device, Fusion(checkpoint="full"), config=THREE_LAYERS)
    assert runs_of_a_layer(fused, monkeypatch) == 2
    fused.gradient_checkpointing_disable()
    assert runs_of_a_layer(fused, monkeypatch) == 1
    fused.gradient_checkpointing_enable()
    assert runs_of_a_layer(fused, monkeypatch) == 2
    fuse(fused, Fusion(checkpoint="none"))
    fused.gradient_checkpointing_enable()
    assert runs_of_a_layer(fused, monkeypatch) == 1
    fused.gradient_checkpointing_disable()
    unfuse(fused)
    assert own_of(layer_of(fused, 1)) == (False, torchs_checkpoint)


def test_the_switch_of_a_copy_is_its_own(device):
    fused, _, _ = pair(device, Fusion(checkpoint="full"), config=THREE_LAYERS)
    twin = copy.deepcopy(fused)
    twin.gradient_checkpointing_disable()
    assert layer_of(fused).gradient_checkpointing and not layer_of(twin).gradient_checkpointing
    assert policy_of(layer_of(twin)) is not None
    unfuse(fused)
    assert "_set_gradient_checkpointing" not in vars(fused.get_base_model())
