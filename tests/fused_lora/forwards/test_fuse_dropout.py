"""lora_dropout in fused models. With the same masks, losses, gradients and weights are vanilla
PEFT's. The tests also check which masks are drawn when."""

import copy
from dataclasses import replace

import pytest
import torch
from cases.families_case import FAMILIES
from cases.fused_case import ALL, assert_close, assert_same, batch, step
from cases.graph_case import captured, steps
from cases.layer_case import (
    LAYER,
    assert_layer_right,
    pair,
    peft_model,
)
from cases.peft_models import ATTENTION, LAYERS, MLP
from cases.reference import assert_near, masked, unpacked
from torch import nn

from fused_lora import Fusion, fuse
from fused_lora.reading import projection
from fused_mlp import dropout, utils

# --- vanilla PEFT that drops what a fused model drops ---------------------------------------------

SEED = torch.tensor([2**62 + 12_345])
# Each projection's number within its function, which selects its stream of random numbers. Phi
# joins q, k and v into one projection with one mask, and gate and up into another.
OF_LAYER = {name: i for i, name in enumerate((*ATTENTION, *MLP))}
OF_LAYER |= {"qkv_proj": OF_LAYER["q_proj"], "gate_up_proj": OF_LAYER["gate_proj"]}
OF_LAYER |= {name: i for i, name in enumerate(("in_proj", "out_proj", "w1", "w3", "w2"))}
OF_PARTS = {name: i for names in (ATTENTION, MLP) for i, name in enumerate(names)}
OF_JOINED_PARTS = OF_PARTS | {"qkv_proj": 0, "gate_up_proj": 0}


class Masked(nn.Module):
    """A stand-in for PEFT's nn.Dropout."""

    def __init__(self, p, stream):
        super().__init__()
        self.p, self.stream = p, stream

    def forward(self, x):
        if not self.training:
            return x
        rows = x.flatten(0, -2)
        return masked(rows, self.p, SEED.to(x.device), self.stream).view(x.shape)


def draw_one_seed(monkeypatch):
    """Make every fused function draw SEED. Return the device of each draw."""
    drawn = []
    monkeypatch.setattr(
        projection, "draw_seed", lambda device: drawn.append(device) or SEED.to(device)
    )
    return drawn


def follow(plain, streams):
    """Make a plain model drop what a fused one drops with these streams, by projection."""
    for layer in plain.get_submodule(LAYERS):
        for name, module in layer.named_modules():
            if (stream := streams.get(name.rpartition(".")[2])) is not None:
                dropouts = getattr(module, "lora_dropout", {})
                for adapter, dropout in list(dropouts.items()):
                    if isinstance(dropout, nn.Dropout):
                        dropouts[adapter] = Masked(dropout.p, stream)
    return plain.train()


# --- what is fused --------------------------------------------------------------------------------

ONE_LAYER = {"num_hidden_layers": 1}
PARTS = Fusion(**ALL)
APART = Fusion(mlp=True, attention=True)  # one function for q, k and v, another for o
FUSIONS = {  # what we fuse, and the stream of each projection
    "parts": (PARTS, OF_PARTS),
    "apart": (APART, OF_PARTS | {"o_proj": 0}),
    "layer": (LAYER, OF_LAYER),
    "parts, full": (replace(PARTS, checkpoint="full"), OF_PARTS),
    **{  # which keep more of a first run
        f"layer, {policy}": (replace(LAYER, checkpoint=policy, checkpoint_gib=gib), OF_LAYER)
        for policy, gib in (("full", None), ("offload", None), ("selective", 90e3 / 2**30))
    },
    "DoRA": (LAYER, OF_LAYER),
    "DoRA, offload": (replace(LAYER, checkpoint="offload"), OF_LAYER),
}


def model_with(fusion, device, p=0.3, **options):
    model = peft_model(device, lora_dropout=p, **options)
    assert fusion is None or not fuse(model, fusion).left
    return model


# --- the same masks -------------------------------------------------------------------------------


DRAWS = {"parts": 4, "apart": 6, "layer": 2, "DoRA": 2}  # of two layers


@pytest.mark.slow("parts, full", "layer")
@pytest.mark.parametrize("name", FUSIONS)
def test_each_function_draws_a_seed_once_and_drops_as_peft_with_the_same_masks(
    name, device, monkeypatch
):
    fusion, streams = FUSIONS[name]
    drawn = draw_one_seed(monkeypatch)
    fused, plain = (model_with(one, device, use_dora="DoRA" in name) for one in (fusion, None))
    if fusion.checkpoint == "selective":
        step(fused, length=7)  # this step measures what a layer holds
        drawn.clear()
    assert_same(fused, follow(plain, streams), most=2e-4)
    if not fusion.checkpoint:  # a recomputed layer draws once more
        assert len(drawn) == DRAWS[name]
    assert {one.type for one in drawn} == {device}


@pytest.mark.slow("Phi-3, full")
@pytest.mark.parametrize(
    ("attention", "fusion"),
    [("sdpa", replace(PARTS, checkpoint="full")), ("eager", PARTS)],
    ids=("Phi-3, full", "Phi-3, eager"),
)
def test_projections_of_one_adapter_share_a_mask(attention, fusion, device, monkeypatch):
    """PEFT shares it as well. Around eager attention q, k and v are one function, o another."""
    draw_one_seed(monkeypatch)
    family = FAMILIES["Phi-3"]
    family = replace(family, config=family.config | {"attn_implementation": attention})
    plain = family.peft_model(device, lora_dropout=0.3)
    fused = copy.deepcopy(plain).train()
    assert not fuse(fused, fusion).left
    streams = OF_JOINED_PARTS | ({"o_proj": 0} if attention == "eager" else {})
    assert_same(fused, follow(plain, streams), most=2e-4)


BF16 = {"dtype": torch.bfloat16, "autocast_adapter_dtype": False}
PHI = {
    "family": "Phi3", "config": {"pad_token_id": 0},
    "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}  # fmt: skip
OPTIONS = {  # of one layer of a model, with more tokens than a word has bits
    "bf16, normed heads": {"family": "Qwen3", **BF16},
    "each its own rank": {"rank_pattern": {"q_proj": 3, "up_proj": 70, "down_proj": 130}},
    "bf16, q and down alone in fp32": {
        "target_modules": ["q_proj", "down_proj"], "dtype": torch.bfloat16
    },
    "norms on both sides, GELU": {"family": "Gemma3Text", "config": {"pad_token_id": 0}},
    "joined projections": PHI,
    "DoRA, a multiplier": {
        "family": "Granite", "config": {"residual_multiplier": 0.5}, "use_dora": True
    },
    "DoRA in bf16": BF16 | {"use_dora": True},
    "DoRA on q and down alone": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "DoRA, norms on both sides, GELU": {
        "family": "Gemma3Text", "config": {"pad_token_id": 0}, "use_dora": True
    },
    "DoRA, joined projections": PHI | {"use_dora": True},
    "DoRA, a convolution": {
        "family": "Lfm2", "use_dora": True, "target_modules": "all-linear",
        "config": {"pad_token_id": 0, "layer_types": ["conv"], "block_auto_adjust_ff_dim": False},
    },
}  # fmt: skip


@pytest.mark.slow("bf16, q and down alone in fp32", "DoRA, a convolution")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_layer_is_within_the_error_budget(options, device, monkeypatch):
    draw_one_seed(monkeypatch)
    config = ONE_LAYER | options.get("config", {})
    fused, plain, done = pair(device, lora_dropout=0.3, **options | {"config": config})
    assert not done.left
    dtype = options.get("dtype", torch.float32)
    assert_layer_right(fused, follow(plain, OF_LAYER), (2, 17), dtype)


# --- which masks, and when ------------------------------------------------------------------------


def seeded(model, seed=0):
    torch.manual_seed(seed)
    return step(model, length=7)


@pytest.mark.slow("attention-full")
@pytest.mark.parametrize("policy", ["full", "offload", "transformers'"])
@pytest.mark.parametrize(
    "fusion", [Fusion(attention=True), Fusion(mlp=True), LAYER], ids=["attention", "mlp", "layer"]
)
def test_what_runs_again_drops_the_same_beside_dropout_of_pefts_own(fusion, policy, device):
    """PEFT drops in the MLP after a fused attention, and in the attention before a fused MLP."""
    kept, again = (model_with(fusion, device) for _ in range(2))
    if policy == "transformers'":
        again.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        fuse(again, Fusion(checkpoint=policy))
    assert_close(seeded(again), seeded(kept))


@pytest.mark.slow("parts")
@pytest.mark.parametrize("name", ["parts", "layer", "DoRA"])
def test_evaluation_is_exact(name, device):
    options = {"config": ONE_LAYER, "use_dora": name == "DoRA"}
    model, without = (model_with(FUSIONS[name][0], device, p, **options) for p in (0.3, 0.0))
    inputs = batch(model)
    assert not torch.equal(model(**inputs).loss, without(**inputs).loss)
    model.eval(), without.eval()
    for module in model.modules():
        if hasattr(module, "lora_dropout"):  # DoRA asks the projection, LoRA its dropout
            module.lora_dropout.train(name == "DoRA")
    assert torch.equal(model(**inputs).loss, without(**inputs).loss)
    model.train()
    # with one projection in evaluation mode, the others still drop
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout.eval()
    without.train()
    assert torch.equal(model(**inputs).loss, without(**inputs).loss)


# --- in CUDA graphs -------------------------------------------------------------------------------


def in_operations(monkeypatch):
    """Draw masks with PyTorch operations. A recorded graph replays those, but not the interpreter's
    launches. The bits of each word are a hash of the seed and of the word's number."""

    def keep_bits(seed, stream, keep, rows, columns):
        words = torch.arange(-(-rows // 32) * columns, device=seed.device) + stream * 7919
        hashed = (words * 0x9E3779B97F4A7C15 + seed) * 0xBF58476D1CE4E5B
        return (hashed >> 20).to(torch.int32).view(-1, columns)

    def drop(x, mask):
        return x * unpacked(mask, len(x)).to(x.dtype)

    asked = torch.cuda.is_current_stream_capturing  # graph_case replaces this in a capture
    monkeypatch.setattr(
        projection,
        "is_capturing",
        lambda x: torch.cuda.is_current_stream_capturing is not asked,
    )
    monkeypatch.setattr(dropout, "keep_bits", keep_bits)
    monkeypatch.setattr(utils, "drop", drop)
    monkeypatch.setattr(utils, "add_dropped", lambda total, x, mask: total.add_(drop(x, mask)))


@pytest.mark.parametrize(("fusion", "use_dora"), [
    (Fusion(attention=True, checkpoint="full"), False),
    *(pytest.param(FUSIONS[name][0], "DoRA" in name, marks=pytest.mark.gpu) for name in FUSIONS),
], ids=["attention, full", *FUSIONS])  # fmt: skip
def test_replays_draw_new_masks_and_run_layers_again_with_those(
    fusion, use_dora, device, monkeypatch
):
    """Ten steps on one batch match the eager loop, which draws the same seeds."""
    if device == "cpu":
        in_operations(monkeypatch)
    options = {"use_dora": use_dora}
    if not fusion.mlp and not fusion.layer:
        options["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    run, eager = steps(model_with(None, device, **options), fusion=fusion)
    inputs = batch(run.model)
    losses = []
    for one in (run, eager):
        torch.manual_seed(0)
        losses.append(torch.stack([one(**inputs) for _ in range(10)]))
    assert captured(run) == 1
    assert len(losses[0].unique()) == 10
    assert_near(*losses, 1e-5)
    for one, other in zip(run.model.parameters(), eager.model.parameters(), strict=True):
        assert_near(one, other, 1e-5)
