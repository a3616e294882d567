"""Layers on bitsandbytes' 4-bit weights: bit for bit the layers on the weights that these
stand for. Other tests hold those against plain PEFT."""

import copy
import gc
import weakref
from collections import Counter
from itertools import cycle

import bitsandbytes as bnb
import pytest
import torch
from cases.four_bit_case import REFUSED, dequantised, quantised, rest_in_fp32, unquantised
from cases.fused_case import ALL, SHORT, assert_close, batch, beside, step, values_of
from cases.layer_case import EVERYTHING, LAYER, NAMES, layer_of, peft_model, tokens
from cases.peft_models import assert_equal, layers
from torch.utils.checkpoint import checkpoint

from fused_lora import Fusion, fuse, report, unfuse
from fused_lora.causal_lm.documents import takes_documents
from fused_lora.foreign.ownership import owner_of
from fused_lora.forwards.layer import borders_of
from fused_lora.kernels.dequantize_4bit import Dequantize4bit
from fused_lora.layer import scratch


def pair(device, fusion=LAYER, four_bit=None, **options):
    """Return a fused model on 4-bit weights, and its plain twin."""
    return beside(
        peft_model(device, change=lambda base: quantised(base, **four_bit or {}), **options), fusion
    )


def packed_of(model):
    return {name: p for name, p in model.named_parameters() if type(p).__name__ == "Params4bit"}


# --- right ----------------------------------------------------------------------------------------

PHI3 = {"family": "Phi3", "target_modules": "all-linear", "config": {"pad_token_id": 0}}
# What is quantised how, and the options of the model.
FORMS = {
    "double": ({}, {}),
    "single": ({"compress_statistics": False}, {}),
    "FP4": ({"quant_type": "fp4"}, {}),
    "stored as bf16": ({"quant_storage": torch.bfloat16}, {}),
    "computed as its inputs": ({"compute_dtype": None}, {}),
    "down alone": ({"only": "down_proj"}, {}),
    "q and gate among others": ({"only": "q_proj"}, {}),
    "normed heads": ({}, {"family": "Qwen3"}),
    "one layer for q, k and v": ({}, PHI3),
    "norms that add one": ({}, {"family": "Gemma3Text"}),
    "dropout": ({}, {"lora_dropout": 0.25}),
    "q and v alone": ({}, {"target_modules": ["q_proj", "v_proj"]}),
    "adapters in the first of three layers": (
        {}, {"layers_to_transform": [0], "config": {"num_hidden_layers": 3}}
    ),
    "o and down alike": ({}, {"config": {"intermediate_size": 52}}),
    "another rank in each": ({}, {"rank_pattern": {r"0\..*(q|up)_proj": 3, "down_proj": 12}}),
    "fp16": ({}, {"dtype": torch.float16, "autocast_adapter_dtype": False}),
    "adapters in bf16": ({}, {"autocast_adapter_dtype": False}),
    "trained biases": ({}, {"bias": "all"}),
    "trained norms": (
        {}, {"modules_to_save": ["input_layernorm", "post_attention_layernorm"]}
    ),
    "packed rows": ({}, {"config": {"head_dim": 32}}),
    "padded rows": ({}, {}),
    "magnitudes": ({}, {"use_dora": True}),
    "magnitudes, dropout": ({}, {"use_dora": True, "lora_dropout": 0.25}),
}  # fmt: skip
# Inputs beside the tokens, [2, SHORT].
INPUTS = {
    "packed rows": {"position_ids": [[0, 1, 2, 0, 1]] * 2},
    "padded rows": {"attention_mask": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]},
}


BY_PARTS = (
    "double", "down alone", "q and gate among others", "one layer for q, k and v",
    "norms that add one", "dropout", "adapters in the first of three layers",
    "adapters in bf16", "trained biases", "packed rows", "padded rows",
)  # fmt: skip
# The functions that run, where layers run whole and where they cannot.
WHOLE, PARTS = {"DecoderLayer"}, {"LoRA_MLP", "LoRA_Attention"}
# Each form runs under one policy of checkpoints in whole layers, and many under the other in parts.
RUNS = {
    f"{name}-{form}-{policy}": (fusion, form, functions, policy)
    for name, fusion, forms, functions, policies in (
        ("whole", EVERYTHING, FORMS, WHOLE, ("none", "full")),
        ("parts", Fusion(**ALL), BY_PARTS, PARTS, ("full", "none")),
        ("without rope", Fusion(mlp=True, attention=True), ("double",),
         {"LoRA_MLP", "LoRA_QKV", "LoRA_W"}, ("none",)),
    )
    for form, policy in zip(forms, cycle(policies), strict=False)
}  # fmt: skip


@pytest.mark.slow(
    "whole-double-none",
    "whole-down alone-full",
    "parts-double-full",
    "whole-adapters in the first of three layers-none",
)
@pytest.mark.parametrize(("fusion", "form", "functions", "policy"), RUNS.values(), ids=RUNS)
def test_it_runs_as_on_what_its_weights_stand_for(fusion, form, functions, policy, device):
    fusion = Fusion(**vars(fusion) | {"checkpoint": policy})
    four_bit, options = FORMS[form]
    options = {"dtype": torch.bfloat16} | options
    inputs = {k: torch.tensor(v, device=device) for k, v in INPUTS.get(form, {}).items()}

    def gradients(change):
        model = peft_model(device, change=change, **options)
        fuse(model, fusion, strict=False)
        torch.manual_seed(0)  # of dropout
        return step(model, length=SHORT, **inputs)

    got = gradients(lambda base: quantised(base, **four_bit))
    want = gradients(lambda base: dequantised(quantised(base, **four_bit)))
    assert got.functions == want.functions and functions <= got.functions.keys()
    assert_equal(got, want)


def test_a_layer_computes_in_another_dtype_as_if_it_were_fused_then(device):
    fused, late, _ = pair(device, dtype=torch.bfloat16)
    assert step(fused, length=SHORT).functions == {"DecoderLayer": 2}
    for model in (fused, late):
        for module in model.float().modules():
            if isinstance(module, bnb.nn.Linear4bit):
                module.compute_dtype = torch.float32
    fuse(late, LAYER)
    assert_equal(step(fused, length=SHORT), step(late, length=SHORT))


def test_packed_rows_have_no_mask_of_positions_x_positions(device):
    fused, plain, _ = pair(device, dtype=torch.bfloat16, config={"head_dim": 32})
    assert takes_documents(fused.get_base_model().model)
    assert not takes_documents(plain.get_base_model().model)


def test_layers_take_turns_in_one_memory_which_goes_with_the_model(device):
    fused, _, _ = pair(device)
    values_of(fused, fused(**batch(fused)).loss)
    scratches = [borders_of(layer_of(fused, index)).scratches for index in range(2)]
    assert scratches[0] is scratches[1] and len(scratches[0]) == 4
    memory = [weakref.ref(scratch.memory) for scratch in scratches[0].values()]
    copied = copy.deepcopy(fused)
    assert_equal(step(copied), step(fused))
    own = borders_of(layer_of(copied)).scratches
    assert {id(one.memory) for one in own.values()}.isdisjoint(map(id, (m() for m in memory)))
    gc.disable()
    try:
        del fused, scratches
        assert [one() for one in memory] == [None] * 4
    finally:
        gc.enable()


def test_parts_take_turns_in_one_memory_which_goes_with_the_model(device):
    fused, _, _ = pair(device, Fusion(**ALL))
    first = step(fused)

    def memories_of(model):
        """Of MLPs, and of the buffers of q, k and v and of o."""
        owners = [[owner_of(getattr(layer, part)) for layer in layers(model)]
                  for part in ("mlp", "self_attn")]  # fmt: skip
        (mlp, other_mlp), (attention, other_attention) = owners
        assert mlp.memories is other_mlp.memories
        assert attention.borders.scratches is other_attention.borders.scratches
        return [*mlp.memories.values(), *attention.borders.scratches.values()]

    memory = [weakref.ref(one.memory) for one in memories_of(fused)]
    fuse(fused, Fusion(**ALL))  # a CUDA graph may hold this memory
    step(fused)
    assert all(one.memory is it() for one, it in zip(memories_of(fused), memory, strict=True))
    copied = copy.deepcopy(fused)
    assert_equal(step(copied), first)
    assert {id(one.memory) for one in memories_of(copied)}.isdisjoint(id(m()) for m in memory)
    gc.disable()
    try:
        del fused
        assert [one() for one in memory] == [None] * 5
    finally:
        gc.enable()


# Checkpointing, "" for the model's own, and how often it has the last layer's weights written.
WRITES = {"none": 1, "full": 1, "offload": 1, "selective": 1, "": 2}


@pytest.mark.slow("none-fusion0", "full-fusion1", "own-fusion0")
@pytest.mark.parametrize("fusion", [EVERYTHING, Fusion(**ALL)])
@pytest.mark.parametrize(
    ("policy", "last"), WRITES.items(), ids=[policy or "own" for policy in WRITES]
)
def test_weights_are_written_twice_a_step_and_the_last_once(
    fusion, policy, last, monkeypatch, device
):
    """A recompute and the backward after it share what is written, as do the last layer's forward
    and backward."""
    written: Counter = Counter()
    write = Dequantize4bit.write

    def count(self, key, *rest):
        written[key] += 1
        write(self, key, *rest)

    monkeypatch.setattr(Dequantize4bit, "write", count)
    model = peft_model(device, change=quantised)
    if not policy:
        model.gradient_checkpointing_enable()
    gib = 30e3 / 2**30 if policy == "selective" else None
    fuse(model, Fusion(**vars(fusion) | {"checkpoint": policy, "checkpoint_gib": gib}))
    functions = step(model, length=SHORT).functions.keys() & (WHOLE | PARTS)
    assert sorted(written.values()) == sorted([last, 2] * len(functions))


@pytest.mark.parametrize("fusion", [LAYER, Fusion(mlp=True, attention=True)])
def test_a_backward_writes_again_what_a_graphs_replay_may_have_changed(fusion, monkeypatch, device):
    fused, _, _ = pair(device, fusion)
    want = values_of(fused, fused(**batch(fused)).loss)
    with monkeypatch.context() as capture:
        capture.setattr(scratch, "is_capturing", lambda _: True)
        loss = fused(**batch(fused)).loss
    owners = [*filter(None, map(owner_of, fused.modules()))]
    memories = [one.borders.scratches if one.borders else one.memories for one in owners]
    for memory in {id(one): one for each in memories for one in each.values()}.values():
        memory.memory.data.zero_()
    assert_equal(values_of(fused, loss), want)


# --- parts ----------------------------------------------------------------------------------------


def test_projections_run_alone_where_another_of_their_group_cannot(device):
    def gradients(change):
        model = peft_model(device, change=change)
        for layer in (layer_of(model, index) for index in range(2)):
            for left in (layer.mlp.up_proj, layer.self_attn.k_proj):
                left.register_forward_hook(lambda *_: None)
        fuse(model, Fusion(mlp=True, attention=True))
        return step(model, length=SHORT)

    got = gradients(quantised)
    want = gradients(lambda base: dequantised(quantised(base)))
    assert got.functions == {"LoRA_W": 10}
    assert_close(got, want)


def test_a_checkpoint_of_many_layers_is_recomputed_within_a_backward_of_the_first(device):
    """Its recompute writes the later layers' weights over those that this backward reads."""

    def gradients(change):
        model = peft_model(device, change=change)
        fuse(model, Fusion(mlp=True, attention=True, rope=True))
        rotary = model.get_base_model().model.rotary_emb
        hidden = tokens((2, SHORT), torch.float32, device)[0].requires_grad_()
        angles = rotary(hidden, torch.arange(SHORT, device=device)[None])

        def both(x):
            first = layer_of(model)(x, position_embeddings=angles)
            return first, layer_of(model, 1)(first, position_embeddings=angles)

        first, _ = checkpoint(both, hidden, use_reentrant=False)
        return values_of(model, first.square().sum())

    got = gradients(quantised)
    want = gradients(lambda base: dequantised(quantised(base)))
    assert_close(got, want)


# --- bitsandbytes' tensors are its own ------------------------------------------------------------


def test_its_tensors_stay_where_they_are_and_are_saved_as_plain_peft_saves_them(device):
    fused, plain, _ = pair(device)
    before = {name: one.data_ptr() for name, one in packed_of(fused).items()}
    step(fused, length=SHORT)
    assert {name: one.data_ptr() for name, one in packed_of(fused).items()} == before != {}
    assert_equal(fused.state_dict(), plain.state_dict())
    assert set(NAMES) < set(unfuse(fused)) and packed_of(fused).keys() == before.keys()
    assert_equal(step(fused), step(plain))


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("four_bit", "change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_says_why(four_bit, change, reason, device):
    if change is unquantised and device == "cuda":
        pytest.skip("a weight on the CPU is quantised when it moves to a GPU")
    model = peft_model(
        device, dtype=torch.bfloat16, change=lambda base: quantised(base, **four_bit)
    )
    change(model)
    for fusion in (LAYER, Fusion(mlp=True, attention=True)):
        done = fuse(model, fusion, strict=False)
        left = [f"{name}: {why}" for name, why in done.left.items()]
        assert any(reason in why for why in left)


def test_in_fp8_it_says_what_to_leave_out(device):
    model = peft_model(device, dtype=torch.bfloat16, change=quantised)
    found = fuse(model, Fusion(layer=True, fp8=True), strict=False)
    assert found.left[NAMES[0]] == "q_proj: its weight is in 4 bits: leave fp8 out"
    assert report(model) == found
    assert not fuse(model, LAYER).left and not report(model).left


def test_parts_step_aside_where_activations_become_fp32(device):
    fused, plain, _ = pair(device, Fusion(mlp=True, attention=True), dtype=torch.bfloat16)
    rest_in_fp32(fused), rest_in_fp32(plain)
    with pytest.warns(UserWarning, match=r"weights are torch.bfloat16, input torch.float32"):
        got = step(fused, length=SHORT)
    assert got.functions == {}
    assert_equal(got, step(plain, length=SHORT))
    assert all("make them alike" in why for why in report(fused).left.values())
