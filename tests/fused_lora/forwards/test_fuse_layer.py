"""Whole layers fused in tiny models, against vanilla PEFT."""

import copy

import pytest
import torch
from cases.fused_case import SHORT, assert_close, assert_same, step
from cases.layer_case import EVERYTHING, NAMES, layer_of, operands_of_calls, pair
from cases.peft_models import logits
from cases.reference import assert_near
from torch.nn.utils import parametrize, prune

from fused_lora import Fusion, fuse, report, unfuse
from fused_lora.forwards.layer import borders_of
from fused_lora.layer import attention_block
from fused_lora.layer.buffer import Buffer


def pruned(linear):
    prune.l1_unstructured(linear, "weight", 0.3)


def parametrised(linear):
    parametrize.register_parametrization(linear, "weight", torch.nn.Softplus())


@pytest.fixture
def calls(monkeypatch):
    return operands_of_calls(monkeypatch)


# --- right where it fuses (in every family: test_families.py) -------------------------------------


@pytest.mark.parametrize("fusion", [Fusion(layer=True), Fusion(rms_norm=True)])
def test_a_layer_takes_its_inputs_by_position(fusion, device):
    fused, plain, _ = pair(device, fusion)
    hidden = torch.randn(2, 5, plain.config.hidden_size, device=device)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool, device=device).tril()
    mask[0, :, 2:, :2] = False
    angles = plain.get_submodule("base_model.model.model.rotary_emb")(
        hidden, torch.arange(5, device=device)[None]
    )
    outputs = [layer_of(one)(hidden, mask, position_embeddings=angles) for one in (fused, plain)]
    assert_near(*outputs, 1e-5)
    with pytest.raises(TypeError, match="by position, got 40"):
        layer_of(fused)(hidden, *[None] * 39)


@pytest.mark.slow("LoRA-ours", "DoRA-reentrant", "DoRA-not reentrant")
@pytest.mark.parametrize("how", ["ours", "reentrant", "not reentrant"])
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_checkpointed_gradients_are_those_of_kept_ones(use_dora, how, calls, device):
    model, _, _ = pair(device, use_dora=use_dora)
    want = step(model, length=SHORT)
    model.enable_input_require_grads()  # a reentrant checkpoint sees no other gradient
    if how == "ours":
        fuse(model, Fusion(checkpoint="full"))
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    calls.clear()
    got = step(model, length=SHORT)
    assert len(calls) == 4
    needed = [mlp.output_needed for *_, (_, mlp) in calls]
    assert needed == [True, True, *[how != "ours"] * 2]
    assert_close(got, want, 1e-12)


@pytest.mark.slow("full-4-PyTorch's attention")
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
    counts = {"attention_forward": [], "add_projected": [], "add_swiglu": []}
    owners = attention_block, Buffer, Buffer
    for (name, seen), owner in zip(counts.items(), owners, strict=True):
        function = getattr(owner, name)
        monkeypatch.setattr(
            owner, name,
            lambda *given, seen=seen, function=function: seen.append(1) or function(*given),
        )  # fmt: skip
    fuse(model, Fusion(checkpoint=policy))
    got = step(model, length=SHORT)
    runs_of = dict.fromkeys(counts, runs) | {"add_swiglu": 2}
    assert {name: len(seen) for name, seen in counts.items()} == runs_of
    assert_close(got, want, 1e-12)


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


@pytest.mark.parametrize("change", [pruned, parametrised])
def test_unfuse_gives_memory_back_to_a_weight_that_has_another_name_by_then(change, device):
    fused, plain, _ = pair(device)
    for model in (fused, plain):
        change(layer_of(model).self_attn.o_proj.base_layer)
    unfuse(fused)
    for parameter in fused.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert assert_same(fused, plain) == {}


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
        assert_near(logits(fused), logits(plain), 1e-5)
    assert report(fused).fused["mlp"] == []
    layer_of(fused).self_attn.register_forward_hook(lambda *_: None)
    assert report(fused).fused["mlp"] == [f"{NAMES[0]}.mlp"]  # within a layer that is not fused
    assert_same(fused, plain)
