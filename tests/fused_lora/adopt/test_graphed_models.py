"""The decoders of fused models as graphs, and the new leaves that they are captured with."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from cases import layer_case
from cases.families_case import FAMILIES
from cases.four_bit_case import EXPERTS, quantised
from cases.fp8_case import CONFIG, FP8
from cases.fused_case import ALL
from cases.graph_case import (
    Recorded,
    assert_same,
    captured,
    chat,
    held_nodes,
    seen_as_captured,
    steps,
)
from cases.layer_case import LAYER, on_host
from cases.peft_models import ids
from cases.reference import assert_near, relative_error

from fused_lora import Fusion, fuse
from fused_lora.adopt.graph_steps import _decoder_in, _forget_memory
from fused_lora.forwards.layer import borders_of
from fused_lora.kernels.document_bounds import is_documents
from fused_lora.step.graph import EAGER_CALLS
from fused_lora.step.graphed_module import GraphedModule, new_leaves
from fused_lora.weights.four_bit_parts import memories_of

BORDERED, PARTS = Fusion(layer=True, checkpoint="full"), Fusion(**ALL)
THREE = {"config": {"num_hidden_layers": 3}}
TRAINED = {"bias": "all", "modules_to_save": ["input_layernorm", "q_norm"]}


def qwen2(device, **options):
    return layer_case.peft_model(device, **{"config": {"num_hidden_layers": 1}} | options)


def family(name, dtype=torch.float32):
    return lambda device: FAMILIES[name].peft_model(device, dtype).train()


MODELS = {
    "whole layers, biases and norms trained": (qwen2, BORDERED, TRAINED),
    "DoRA": (qwen2, BORDERED, {"use_dora": True}),
    "4 bits": (qwen2, Fusion(layer=True), {"change": quantised}),
    "4 bits, parts": (qwen2, PARTS, {"change": quantised}),
    "in host memory": (qwen2, BORDERED, {"change": on_host} | THREE),
    "4 bits in host memory": (
        qwen2,
        BORDERED,
        {"change": lambda base: on_host(quantised(base))} | THREE,
    ),
    "FP8": (qwen2, FP8, {"config": CONFIG}),
    "4 bits, experts": (qwen2, PARTS, EXPERTS),
    # in fp32 a GPU's grouped matmuls wait for the host
    "experts": (family("Qwen3-MoE", torch.bfloat16), Fusion(**ALL, checkpoint="full"), {}),
    "experts beside a block": (
        family("Qwen3-MoE", torch.bfloat16),
        Fusion(**ALL, layer=True, checkpoint="full"),
        {},
    ),
    "delta nets": (family("Qwen3.5"), Fusion(**ALL, layer=True), {}),
    "convolutions": (family("LFM2"), Fusion(**ALL, layer=True), {}),
}


def fused(name, device):
    make, fusion, options = MODELS[name]
    model = make(device, **options)
    fuse(model, fusion)
    return model


def trained_in(decoder):
    return [parameter for parameter in decoder.parameters() if parameter.requires_grad]


def hidden_of(decoder, seed=3):
    tokens = ids(decoder.embed_tokens.weight.device, seed)[:1, :5]
    return decoder(input_ids=tokens, use_cache=False).last_hidden_state


def gradients_of(decoder):
    hidden_of(decoder).square().sum().backward()


def assert_same_or_none(got, want):
    """Bit by bit on the CPU. A GPU may sum in another order from one run to the next."""
    assert (got is None) == (want is None)
    if want is not None:
        assert got.equal(want) or (got.is_cuda and relative_error(got, want) < 1e-5)


def step(model, seed):
    """Run a forward, a reference pass on the same memory, and backward, as DPO does. Return hidden
    states and gradients."""
    decoder = _decoder_in(model)
    hidden = hidden_of(decoder, seed)
    with torch.no_grad(), model.disable_adapter():
        reference = hidden_of(decoder, seed + 9)
    model.zero_grad()
    hidden.square().mean().backward()
    return [hidden.detach(), reference, *[one.grad for one in trained_in(decoder)]]


@pytest.mark.slow("4 bits")
@pytest.mark.parametrize("name", MODELS)
def test_graphs_are_the_eager_steps(name, device, monkeypatch, fp8_in_fp32):
    if device == "cpu":
        monkeypatch.setattr(GraphedModule, "_backend", Recorded)
    model = fused(name, device)
    twin, decoder = copy.deepcopy(model), _decoder_in(model)
    forget = partial(_forget_memory, decoder)
    graphed = GraphedModule(decoder, forget, max_graphs=8)
    for seed in range(EAGER_CALLS):
        with graphed.in_place():
            step(model, seed)
    for seed in range(EAGER_CALLS, EAGER_CALLS + 2):
        with graphed.in_place():
            got = step(model, seed)
        for one, wanted in zip(got, step(twin, seed), strict=True):
            assert_same_or_none(one, wanted)
        with torch.no_grad():
            for one, other in zip(trained_in(decoder), trained_in(_decoder_in(twin)), strict=True):
                if one.grad is not None:
                    other.copy_(one.sub_(2**-4 * one.grad))
    assert graphed.captured == 2 and not graphed.told


@pytest.mark.slow("convolutions")
@pytest.mark.parametrize("name", ["delta nets", "convolutions"])
def test_a_graphed_step_without_attention_is_the_eager_loop(name, device):
    """With padding, on which no label depends. Graphs keep it, and matmuls have other sizes."""
    make, fusion, _ = MODELS[name]
    both = steps(make(device), 2**-12, fusion, max_grad_norm=1.0)
    losses = [[one(**chat(seed, device, length=7)) for seed in range(4)] for one in both]
    assert captured(both[0]) == 1
    torch.testing.assert_close(*map(torch.stack, losses), rtol=1e-5, atol=0)


@pytest.mark.slow("whole layers, biases and norms trained")
@pytest.mark.parametrize("name", MODELS)
def test_new_leaves_get_the_gradients_and_leave_nothing_behind(name, device, fp8_in_fp32):
    """As in a capture, eager steps precede and follow."""
    model = fused(name, device)
    decoder = _decoder_in(model)
    trained = trained_in(decoder)
    before, nodes = dict(decoder.named_parameters()), held_nodes(decoder)
    ran = []
    for node in nodes:
        node.register_prehook(lambda *_: ran.append(1))
    gradients_of(decoder)
    want = [one.grad for one in trained]
    decoder.zero_grad()
    ran.clear()
    with new_leaves(decoder, trained) as leaves, seen_as_captured():
        gradients_of(decoder)
    assert not ran and all(one.grad is None for one in trained)
    assert all(before[name] is one for name, one in decoder.named_parameters())
    gradients, left = [leaf.grad for leaf in leaves], [*map(weakref.ref, leaves)]
    del leaves
    gc.collect()
    assert all(leaf() is None for leaf in left)
    gradients_of(decoder)
    for one, gradient, wanted in zip(trained, gradients, want, strict=True):
        assert_same_or_none(gradient, wanted)
        assert_same_or_none(one.grad, wanted)


def test_tied_parameters_stay_tied():
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    own = first.weight
    model = torch.nn.Sequential(first, second)
    with new_leaves(model, [own]) as (leaf,):
        assert first.weight is second.weight is leaf is not own
        assert leaf.data_ptr() == own.data_ptr() and second.bias.requires_grad
    assert first.weight is second.weight is own


WRITTEN = {  # into memory that other forwards write as well
    "borders": (LAYER, {}),
    "borders in FP8": (FP8, {"config": CONFIG}),
    "4 bits": (LAYER, {"change": quantised}),
    "4 bits, parts": (Fusion(mlp=True, attention=True, rope=True), {"change": quantised}),
    "4 bits, experts": (PARTS, EXPERTS),
}


@pytest.mark.parametrize(("fusion", "options"), WRITTEN.values(), ids=WRITTEN)
def test_a_backward_writes_again_what_another_forward_may_have_written(
    fusion, options, device, fp8_in_fp32
):
    """Between the two, DPO's reference pass may run on the same memory. A captured backward cannot
    see that, so it always writes."""
    fused, _, _ = layer_case.pair(device, fusion, **options)
    twin = copy.deepcopy(fused)
    inputs = {"input_ids": ids(device, 0)[:, :7], "labels": ids(device, 0)[:, :7]}
    loss = fused(**inputs).loss
    _forget_memory(_decoder_in(fused))
    for borders in filter(None, map(borders_of, fused.modules())):
        buffers = [border.buffer() for border in borders.by_group]
        for buffer in buffers:
            buffer.A.zero_(), buffer.sB.zero_()
        buffers[0].encode(buffers)
    for memory in memories_of(fused).values():
        memory.memory.data.zero_()
    loss.backward()
    twin(**inputs).loss.backward()
    for got, want in zip(fused.parameters(), twin.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None)
        if want.grad is not None:
            assert_same(got.grad, want.grad)


@pytest.mark.parametrize("is_parted", [False, True])
def test_rows_keep_their_padding_where_graphs_want_one_shape(is_parted, device, monkeypatch):
    """As a separate document, or under transformers' mask if it lies between tokens."""
    if device == "cpu":
        monkeypatch.setattr(GraphedModule, "_backend", Recorded)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # on a GPU documents are for these
    config = {"num_hidden_layers": 1, "head_dim": 32}
    fusion = Fusion(layer=True, rms_norm=True, cross_entropy=True)
    fused, plain, _ = layer_case.pair(device, fusion, config=config, dtype=dtype)
    inputs = chat(0, device)
    if is_parted:
        inputs["attention_mask"][0, 2] = 0
    ran = layer_case.operands_of_calls(monkeypatch)
    decoder = _decoder_in(fused)
    with GraphedModule(decoder, tuple, max_graphs=8).in_place():
        loss = fused(**inputs).loss
    ((hidden, *_, (attention, _)),) = ran
    assert hidden.shape[:2] == inputs["input_ids"].shape
    assert is_documents(attention.mask) is not is_parted
    want = plain(**inputs).loss
    torch.testing.assert_close(loss, want, rtol=1e-5 if device == "cpu" else 2e-2, atol=0)
    loss.backward(), want.backward()
    pairs = zip(fused.parameters(), plain.parameters(), strict=True)
    for got, wanted in [(a.grad, b.grad) for a, b in pairs if b.requires_grad]:
        assert_near(got, wanted, 1e-4 if device == "cpu" else 0.1)
