"""Whole layers fused in tiny models, against plain PEFT."""

import copy

import pytest
import torch
from fused_case import (
    SHORT,
    assert_close,
    assert_right,
    assert_same,
    assert_trains_alike,
    batch,
    step,
)
from layer_case import (
    EVERYTHING,
    NAMES,
    layer_of,
    logits,
    operands_of_calls,
    pair,
    peft_model,
)
from reference import relative_error

from fused_lora import Fusion, decoder_layer, fuse, report, unfuse
from fused_lora.adopt.layer import borders_of
from fused_lora.kernels import layer_residual


@pytest.fixture
def calls(monkeypatch):
    return operands_of_calls(monkeypatch)


# --- right where it fuses -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_layers_are_right(family, calls, device):
    """Of the other families: test_layers_of_families.py."""
    fused, plain, done = pair(device, family=family)
    assert done.fused == {"layer": NAMES} and not done.left
    assert_same(fused, plain, length=17)  # more tokens than one program sums over
    assert len(calls) == 2


@pytest.mark.parametrize(("fp32_adapters", "family"), [
    (False, "Qwen3"),
    (True, "Qwen2"),
    pytest.param(False, "Qwen2", marks=pytest.mark.exhaustive),
    pytest.param(True, "Qwen3", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_layers_are_right_in_bf16(fp32_adapters, family, calls, device):
    options = {"dtype": torch.bfloat16, "autocast_adapter_dtype": fp32_adapters}
    fused, plain, _ = pair(device, family=family, **options)
    assert_right(fused, plain, autocast=fp32_adapters, length=9)
    assert len(calls) == 3 * 2  # each layer for three batches


def test_layers_join_every_other_part(calls, device):
    fused, plain, done = pair(device, EVERYTHING)
    assert done.fused["layer"] == NAMES and done.fused["rms_norm"] == [
        "base_model.model.model.norm"
    ]
    assert done.fused["mlp"] == done.fused["attention"] == done.fused["rope"] == []
    assert_same(fused, plain)
    assert len(calls) == 2


def test_layers_join_every_other_part_in_bf16_where_they_run_again(calls, device):
    fusion = Fusion(**(vars(EVERYTHING) | {"checkpoint": "full"}))
    fused, plain, _ = pair(device, fusion, dtype=torch.bfloat16)
    assert_right(fused, plain, autocast=True, length=9)
    assert len(calls) == 3 * 3  # with a fused loss the last one of two runs once


@pytest.mark.parametrize("how", ["ours", "reentrant", "not reentrant"])
def test_checkpointed_gradients_are_those_of_kept_ones(how, calls, device):
    model, _, _ = pair(device)
    want = step(model, length=SHORT)
    model.enable_input_require_grads()  # a reentrant checkpoint sees no other gradient
    if how == "ours":
        fuse(model, Fusion(checkpoint="full"))
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    calls.clear()
    got = step(model, length=SHORT)
    assert len(calls) == 4
    needed = [inputs[-1].output_needed for inputs in calls]
    assert needed == [True, True, *[how != "ours"] * 2]
    assert_close(got, want, 1e-12)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("family", "head_dim"),
    [("Qwen2", 26), ("Qwen2", 32), ("Qwen3", 32)],
    ids=("PyTorch's attention", "ours", "ours, normed heads"),
)
@pytest.mark.parametrize(("policy", "runs"), [("full", 4), ("offload", 3)])
def test_attention_and_o_run_once_where_their_output_is_offloaded(
    policy, runs, family, head_dim, device, monkeypatch
):
    """But in the last of two layers, which keeps its input: its backward comes first. SwiGLU runs
    once in any case."""
    model, _, _ = pair(device, family=family, config={"head_dim": head_dim})
    want = step(model, length=SHORT)
    counts = {"attention_forward": [], "add_adapted": [], "add_down": []}
    for name, seen in counts.items():
        module = layer_residual if name == "add_adapted" else decoder_layer
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name,
            lambda *given, seen=seen, function=function: seen.append(1) or function(*given),
        )  # fmt: skip
    fuse(model, Fusion(checkpoint=policy))
    got = step(model, length=SHORT)
    runs_of = dict.fromkeys(counts, runs) | {"add_down": 2}
    assert {name: len(seen) for name, seen in counts.items()} == runs_of
    assert_close(got, want, 1e-12)


def test_padding_and_hidden_states_are_as_without_fusion(calls, device):
    fused, plain, _ = pair(device)
    mask = torch.ones(2, SHORT, dtype=torch.int64, device=device)
    mask[1, 4:] = 0
    assert_same(fused, plain, attention_mask=mask)
    assert len(calls) == 2 and all(inputs[3] is not None for inputs in calls)
    ours, theirs = (
        m(**batch(m), output_hidden_states=True, output_attentions=False) for m in (fused, plain)
    )
    for got, want in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert torch.allclose(got, want, atol=1e-4)


WITH_LOSS = vars(EVERYTHING)
# As Qwen3-0.6B: attention is wider than hidden, and lm_head is the embedding.
LIKE_THE_SMALLEST = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                     "tie_word_embeddings": True}  # fmt: skip


@pytest.mark.parametrize(
    ("fusion", "count"),
    [
        pytest.param(
            Fusion(**WITH_LOSS | {"checkpoint": "full"}),
            3,
            marks=pytest.mark.exhaustive,  # "offload" runs layers again, too
        ),
        (Fusion(**WITH_LOSS | {"checkpoint": "offload"}), 3),
        (Fusion(**WITH_LOSS | {"layer": False}), 0),
    ],
    ids=("all, checkpointed", "all, offloaded", "parts"),
)
def test_normed_heads_train_as_in_plain_peft(fusion, count, calls, device):
    fused, plain, done = pair(device, fusion, family="Qwen3", config=LIKE_THE_SMALLEST)
    assert not done.left
    assert_trains_alike(fused, plain)
    assert len(calls) == 3 * count


def test_a_window_is_in_the_mask(calls, device):
    config = {"sliding_window": 4}
    fused, plain, _ = pair(device, family="Mistral", config=config)
    assert relative_error(logits(plain), logits(peft_model(device, family="Mistral"))) > 1e-3
    assert_same(fused, plain)
    assert len(calls) == 2


# --- in and out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_unfuse_gives_forwards_and_memory_back(family, calls, device):
    fused, plain, _ = pair(device, EVERYTHING, family=family)
    assert borders_of(layer_of(fused)) is not None
    assert set(NAMES) < set(unfuse(fused)) and unfuse(fused) == []
    assert report(fused).fused == {}
    assert not any("forward" in vars(module) for module in fused.modules())
    for parameter in fused.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    got, want = step(fused), step(plain)
    assert all(torch.equal(got[name], want[name]) for name in want) and not calls


def test_layers_of_a_model_hand_gradients_over_and_a_part_that_joins_moves_no_weight(device):
    fused, _, _ = pair(device)
    borders = [borders_of(layer_of(fused, index)) for index in range(2)]
    places = [p.data_ptr() for p in fused.parameters()]
    for model in (fused, copy.deepcopy(fused)):
        handovers = {id(borders_of(layer_of(model, index)).handover) for index in range(2)}
        assert len(handovers) == 1
    assert id(borders[0].handover) not in handovers
    fuse(fused, Fusion(rms_norm=True))  # its forward joins the layer's, in the same buffers
    assert [borders_of(layer_of(fused, index)) for index in range(2)] == borders
    assert places == [p.data_ptr() for p in fused.parameters()]


def test_a_part_that_joins_later_does_not_undo_the_layer(calls, device):
    fused, plain, _ = pair(device)
    done = fuse(fused, Fusion(rms_norm=True, mlp=True))
    assert done.fused["layer"] == NAMES
    assert_same(fused, plain)
    assert len(calls) == 2
    with fused.disable_adapter(), plain.disable_adapter():
        assert relative_error(logits(fused), logits(plain)) < 1e-5
    assert report(fused).fused["mlp"] == []
    layer_of(fused).self_attn.register_forward_hook(lambda *_: None)
    assert report(fused).fused["mlp"] == [f"{NAMES[0]}.mlp"]  # within a layer that is not fused
    assert_same(fused, plain)


def test_what_bordered_was_is_one_line_that_names_layer():
    with pytest.raises(ValueError, match=r"^Fusion: bordered=True .* ask for layer=True instead$"):
        Fusion(bordered=True)
    assert Fusion(bordered=False) == Fusion()
