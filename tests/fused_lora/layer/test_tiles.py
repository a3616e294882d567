"""The MLP of a checkpointed layer in tiles of rows, beside the same in one piece."""

import pytest
import torch
from cases import fp8_case
from cases.four_bit_case import quantised
from cases.graph_case import Recorded
from cases.layer_case import BF16, layer_of, peft_model, run, tokens
from cases.peft_models import ids
from cases.reference import assert_near

from fused_lora import Fusion, fuse
from fused_lora.layer.mlp_block import MLPBlock
from fused_lora.layer.tiles import tiles_of
from fused_lora.reading.known import inner_norm
from fused_lora.step import graphed_module
from fused_lora.step.checkpoint import policies_in
from fused_lora.step.graphed_module import GraphedModule

ONE = {"num_hidden_layers": 1, "pad_token_id": 0}
MODELS = {
    "bf16": BF16,
    "fp32, two ranks, dropout": {"lora_dropout": 0.3, "rank_pattern": {"up_proj": 12}},
    "biases and norms that are trained, multiplied": {
        "family": "Granite", "lora_bias": True, "bias": "all",
        "modules_to_save": ["post_attention_layernorm"],
        "config": {"residual_multiplier": 0.22, "mlp_bias": True},
    },
    "norms of outputs, trained, GELU": {
        "family": "Gemma3Text", "modules_to_save": ["post_feedforward_layernorm"],
    },
    "magnitudes": {"use_dora": True},
    "magnitudes, dropout": {"use_dora": True, "lora_dropout": 0.3},
    "magnitudes in bf16, norms of outputs": BF16 | {"use_dora": True, "family": "Gemma3Text"},
    "gate and up without adapters": {"target_modules": ["q_proj", "down_proj"]},
    "4 bits": BF16 | {"change": quantised},
    "FP8": BF16 | {"fp8": True, "config": fp8_case.CONFIG},
    "FP8, dropout": BF16 | {"fp8": True, "config": fp8_case.CONFIG, "lora_dropout": 0.3},
}  # fmt: skip


@pytest.fixture
def small_tiles(monkeypatch):
    """Return a function that makes a model's tiles small, and the rows that its MLPs then computed
    at once."""
    computed, enter = [], MLPBlock._enter

    def seen(block, x, *others):
        computed.append(len(x))
        return enter(block, x, *others)

    monkeypatch.setattr(MLPBlock, "_enter", seen)

    def small(model):
        (policy,) = policies_in(model)
        policy.tile_rows = 32
        computed.clear()
        return computed

    return small


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_mlp_in_one_piece(name, small_tiles, device):
    options = MODELS[name] | {"config": ONE | MODELS[name].get("config", {})}
    fused = peft_model(device, **{key: one for key, one in options.items() if key != "fp8"})
    fuse(fused, Fusion(layer=True, fp8=options.get("fp8", False), checkpoint="full"))
    dtype = options.get("dtype", torch.float32)
    hidden, grad = tokens(
        (2, 65), dtype, device, hidden=inner_norm(layer_of(fused)).weight.shape[0]
    )

    def results():
        torch.manual_seed(0)
        return run(fused, hidden, grad)

    want = results()
    computed = small_tiles(fused)
    got = results()
    assert computed == [64, 64, 2] * 2  # in the forward, and in backward each tile on its own
    assert got.keys() == want.keys()
    # sums over tiles are fp32, so in bf16 a few elements may differ, by one rounding. A GPU's
    # matmuls add up in another order for fewer rows, and what that rounds differently grows where
    # softmax's backward cancels: 2.7 eps in fp32 and 1.01 in bf16 on an H200
    bound = 4 if dtype == torch.float32 else 2 if device == "cuda" else 0.25
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert_near(got[name], want[name], bound * torch.finfo(dtype).eps, name)


@pytest.mark.parametrize(
    ("rows", "tile_rows", "sizes"),
    [
        (0, 8192, []), (100_000, None, [100_000]), (16_383, 8192, [16_383]),
        (16_385, 8192, [8224, 8161]), (8192, 2048, [2048] * 4),
        (100_001, 8192, [8352] * 11 + [8129]),
    ],
)  # fmt: skip
def test_no_tile_is_larger_than_the_first_or_begins_within_a_word(rows, tile_rows, sizes):
    found = tiles_of(rows, tile_rows)
    assert not any(one.start % 32 for one in found)
    assert [one.stop - one.start for one in found] == sizes


def test_what_a_layer_kept_whole_would_hold_is_measured_in_one_piece(small_tiles, device):
    """By the run that checkpoint="selective" measures. Later runs may be in tiles."""
    fused = peft_model(device, config=ONE)
    fuse(fused, Fusion(layer=True, checkpoint="selective", checkpoint_gib=0.0))
    computed = small_tiles(fused)
    for _ in range(2):
        run(fused, *tokens((1, 130), torch.float32, device))
    assert computed == [130] * 2 + [64, 64, 2] * 2


def test_a_reference_pass_in_graph_steps_is_in_tiles(small_tiles, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(GraphedModule, "_backend", Recorded)
    monkeypatch.setattr(graphed_module, "TILE_ROWS_IN_GRAPHS", 32)
    fused = peft_model(device, config=ONE)
    fuse(fused, Fusion(layer=True, checkpoint="full"))
    graphed = GraphedModule(fused.get_base_model().model, lambda: None, max_graphs=1)
    inputs = {"input_ids": ids(device, 0)[:1, :1].expand(1, 130), "use_cache": False}
    fused.gradient_checkpointing_disable()  # as TRL does for a reference pass
    with torch.no_grad(), fused.disable_adapter():
        want = graphed.module(**inputs).last_hidden_state
        computed = small_tiles(fused)
        with graphed.in_place():
            got = graphed.module(**inputs).last_hidden_state
    assert computed == [64, 64, 2]
    assert_near(got, want, 4 * torch.finfo(want.dtype).eps)
