"""Each checkpointing policy in training as people do it: micro-batches, and hidden states in the
loss."""

import pytest
import torch
from layer_case import pair
from peft_models import ids
from reference import relative_error

from fused_lora import Fusion

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
