"""New leaves in fused models: a step gives them the gradients of the parameters that they stand in
for, and nothing that a fused forward keeps refers to either."""

import gc
import weakref

import pytest
import torch
from cases import layer_case
from cases.families_case import FAMILIES
from cases.four_bit_case import quantised
from cases.fp8_case import CONFIG, FP8
from cases.fused_case import ALL
from cases.graph_case import held_nodes
from cases.peft_models import ids
from cases.reference import relative_error

from fused_lora import Fusion, fuse
from fused_lora.adopt.graphed_trainer import _decoder_in
from fused_lora.step.leaves import new_leaves

BORDERED, PARTS = Fusion(layer=True, checkpoint="full"), Fusion(**ALL)
TRAINED = {"bias": "all", "modules_to_save": ["input_layernorm", "q_norm"]}


def qwen2(device, **options):
    return layer_case.peft_model(device, **{"config": {"num_hidden_layers": 1}} | options)


def family(name):
    return lambda device: FAMILIES[name].peft_model(device).train()


MODELS = {
    "whole layers, biases and norms trained": (qwen2, BORDERED, TRAINED),
    "offloaded": (layer_case.peft_model, Fusion(layer=True, checkpoint="offload"), {}),
    "4 bits": (qwen2, BORDERED, {"change": quantised}),
    "4 bits, parts": (qwen2, PARTS, {"change": quantised}),
    "FP8": (qwen2, FP8, {"config": CONFIG}),
    "experts": (family("Qwen3-MoE"), Fusion(**ALL, checkpoint="full"), {}),
    "delta nets": (family("Qwen3.5"), Fusion(**ALL, layer=True), {}),
    "convolutions": (family("LFM2"), PARTS, {}),
}


def gradients_of(decoder, device):
    hidden = decoder(input_ids=ids(device)[:, :5], use_cache=False).last_hidden_state
    hidden.square().sum().backward()


def assert_same(got, want):
    """Bit by bit on the CPU. A GPU may sum in another order from one run to the next."""
    assert got.equal(want) or (got.is_cuda and relative_error(got, want) < 1e-5)


@pytest.mark.slow("whole layers, biases and norms trained", "4 bits", "experts")
@pytest.mark.parametrize("name", MODELS)
def test_new_leaves_get_the_gradients_and_leave_nothing_behind(name, device, fp8_in_fp32):
    """As in a capture, eager steps precede and follow."""
    make, fusion, options = MODELS[name]
    model = make(device, **options)
    fuse(model, fusion)
    decoder = _decoder_in(model)
    trained = [one for one in decoder.parameters() if one.requires_grad]
    before, nodes = dict(decoder.named_parameters()), held_nodes(decoder)
    ran = []
    for node in nodes:
        node.register_prehook(lambda *_: ran.append(1))
    gradients_of(decoder, device)
    want = [one.grad for one in trained]
    decoder.zero_grad()
    ran.clear()
    with new_leaves(decoder, trained) as leaves:
        gradients_of(decoder, device)
    assert not ran and all(one.grad is None for one in trained)
    assert all(before[name] is one for name, one in decoder.named_parameters())
    gradients, left = [one.grad for one in leaves], [*map(weakref.ref, leaves)]
    del leaves
    gc.collect()
    assert all(leaf() is None for leaf in left)
    gradients_of(decoder, device)
    for one, gradient, wanted in zip(trained, gradients, want, strict=True):
        assert (gradient is None) == (one.grad is None) == (wanted is None)
        if wanted is not None:
            assert_same(gradient, wanted)
            assert_same(one.grad, wanted)


def test_tied_parameters_stay_tied():
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    own = first.weight
    model = torch.nn.Sequential(first, second)
    with new_leaves(model, [own]) as (leaf,):
        assert first.weight is second.weight is leaf is not own
        assert leaf.data_ptr() == own.data_ptr() and second.bias.requires_grad
    assert first.weight is second.weight is own
