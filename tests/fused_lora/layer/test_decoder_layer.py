"""One decoder layer as an autograd function, compared with PEFT's own layer in float64."""

import pytest
import torch
from cases.layer_case import (
    BF16,
    DTYPES,
    FAMILIES,
    assert_layer_right,
    operands_of_calls,
    pair,
    run,
    tokens,
)
from cases.peft_models import MLP
from contract import LAYOUTS


@pytest.fixture
def check(device, monkeypatch):
    """Check that one layer, with these model options, is within the error budget."""
    calls = operands_of_calls(monkeypatch)

    def check(shape=(2, 5), config=None, mask=None, layout=None, grad_layout=None, **options):
        config = {"num_hidden_layers": 1} | (config or {})
        fused, plain, done = pair(device, config=config, **options)
        assert not done.left
        layouts = {"layout": layout, "grad_layout": grad_layout}
        dtype = options.get("dtype", torch.float32)
        draws = assert_layer_right(fused, plain, shape, dtype, mask=mask, **layouts)
        assert len(calls) == draws

    return check


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.slow("bf16-Qwen2-{}", "fp16-Qwen3-{}")
@pytest.mark.parametrize(
    ("dtype", "family", "lora"),
    [
        *((*one, {}) for one in zip(DTYPES, FAMILIES, strict=True)),
        ("fp32", "Qwen3", {}), ("fp16", "Qwen3", {}),
        *((dtype, "Qwen2", {"use_dora": True}) for dtype in DTYPES),
    ],
    ids=str,
)  # fmt: skip
def test_output_and_gradients_are_within_the_error_budget(dtype, family, lora, check):
    check(family=family, **DTYPES[dtype], **lora)


RANKS = {"q_proj": 3, "up_proj": 12, "down_proj": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
NORMS = ["input_layernorm", "post_attention_layernorm"]
PHI = {
    "family": "Phi3",
    "config": {"pad_token_id": 0},
    "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
UNROTATED = {"no_rope_layers": [0], "pad_token_id": 0}
OPTIONS = {
    "rank 40, rsLoRA, MHA, narrow MLP": {
        "r": 40, "use_rslora": True, "config": {"num_key_value_heads": 2, "intermediate_size": 17}
    },
    "each its own rank and scale, biases everywhere": {
        "family": "Llama", "config": {"attention_bias": True, "mlp_bias": True},
        "rank_pattern": RANKS, "alpha_pattern": {"v_proj": 5},
    },
    "MQA of 3, wider than hidden": {"config": {"num_attention_heads": 3}},
    "norms of heads, MQA of 3, narrower": {
        "family": "Qwen3", "config": {"num_attention_heads": 3, "head_dim": 10}
    },
    "norms of heads and biases": {
        "family": "Qwen3", "config": {"attention_bias": True, "rms_norm_eps": 1e-2} | HEADS
    },
    "q and k not rotated": {"family": "SmolLM3", "config": UNROTATED},
    "not rotated, our own attention": {
        "family": "SmolLM3", "config": UNROTATED | HEADS
    },
    "multiplied, with biases": {
        "family": "Granite",
        "config": {"residual_multiplier": 0.22, "attention_bias": True, "mlp_bias": True},
    },
    "norms of outputs, our own attention": {
        "family": "Olmo2", "config": {"pad_token_id": 0, "attention_bias": True} | HEADS
    },
    "norms of inputs and outputs, about one, GELU, our own attention": {
        "family": "Gemma3Text", "config": {"pad_token_id": 0, "attention_bias": True} | HEADS
    },
    "a part of each head rotated, interleaved, norms of outputs, our own attention": PHI | {
        "family": "Glm4",
        "config": {"pad_token_id": 0, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
        | HEADS,
        "target_modules": "all-linear",
    },
    "a gate beside each head, a part rotated, norms of heads about one": {
        "family": "Qwen3_5Text",
        "config": {"pad_token_id": 0, "layer_types": ["full_attention"],
                   "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}} | HEADS,
    },
    "q scaled by position": {
        "family": "Ministral3",
        "config": {"rope_parameters": ROPE | {"llama_4_scaling_beta": 0.5,
                                              "original_max_position_embeddings": 2}},
    },
    "biases that are trained": {"lora_bias": True, "bias": "all"},
    "biases and norms that are trained, multiplied": {
        "family": "Granite", "modules_to_save": NORMS, "lora_bias": True,
        "config": {"residual_multiplier": 0.22},
    },
    "norms of inputs and outputs that are trained, about one": {
        "family": "Gemma3Text", "config": {"pad_token_id": 0},
        "modules_to_save": [*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"],
    },
    "joined projections": PHI,
    "magnitudes, each its own rank, rsLoRA, biases everywhere": {
        "family": "Llama", "config": {"attention_bias": True, "mlp_bias": True},
        "rank_pattern": RANKS, "use_rslora": True, "use_dora": True,
    },
    "magnitudes, rank 80, norms of heads": {
        "family": "Qwen3", "use_dora": True, "r": 80, "config": HEADS,
    },
    "magnitudes, multiplied, with biases": {
        "family": "Granite", "use_dora": True,
        "config": {"residual_multiplier": 0.22, "attention_bias": True, "mlp_bias": True},
    },
    "magnitudes, norms of inputs and outputs, about one, GELU, our own attention": {
        "family": "Gemma3Text", "use_dora": True,
        "config": {"pad_token_id": 0, "attention_bias": True} | HEADS,
        "modules_to_save": ["post_feedforward_layernorm"],
    },
    "magnitudes, a gate beside each head, a part rotated": {
        "family": "Qwen3_5Text", "use_dora": True,
        "config": {"pad_token_id": 0, "layer_types": ["full_attention"],
                   "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}} | HEADS,
    },
    "magnitudes, joined projections": PHI | {"use_dora": True},
    "joined projections, our own attention": PHI | {"config": PHI["config"] | HEADS},
}  # fmt: skip


@pytest.mark.slow(
    "each its own rank and scale, biases everywhere",
    "biases and norms that are trained, multiplied",
    "norms of inputs and outputs, about one, GELU, our own attention",
    "joined projections",
    "magnitudes, each its own rank, rsLoRA, biases everywhere",
)
@pytest.mark.parametrize("name", OPTIONS)
def test_any_rank_scale_and_shape_of_a_layer(name, check):
    check(**BF16, **OPTIONS[name])


@pytest.mark.slow("shape0")
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7)])
def test_any_number_of_tokens(shape, check):
    """The softmax over one token is 1: gradients of q and k are 0, and their errors all there is of
    them."""
    without = {"target_modules": ["v_proj", "o_proj", *MLP]} if shape[1] == 1 else {}
    check(shape=shape, **without)


def test_no_sequences_give_empty_results_and_gradients_of_zero(device):
    fused, _, _ = pair(device)
    hidden, grad = tokens((0, 5), torch.float32, device)
    got = run(fused, hidden, grad)
    assert got["output"].shape == got["hidden"].shape == (0, 5, 52)
    adapters = [t for name, t in got.items() if ".lora_" in name]
    assert len(adapters) == 14 and not any(t.any() for t in adapters)


def test_a_mask_is_taken(check, device):
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool, device=device).tril()
    mask[1, :, 3:, :2] = False
    check(shape=(2, 9), mask=mask, **BF16)


@pytest.mark.slow("every second row-one for all")
@pytest.mark.parametrize(
    ("layout", "grad_layout"),
    [
        ("every second row", "one for all"),
        ("elements apart", "features first"),
        ("features first", "elements apart"),
        ("one for all", "every second row"),
    ],
)
def test_any_layout_of_the_input_and_of_the_gradient(layout, grad_layout, check):
    check(layout=LAYOUTS[layout], grad_layout=LAYOUTS[grad_layout])


@pytest.mark.parametrize("positions", [17, pytest.param(70, marks=pytest.mark.gpu)])
def test_heads_that_our_own_attention_takes_are_within_the_error_budget(positions, check):
    """Where there are more of them it takes only the backward of PyTorch's."""
    check(shape=(1, positions), config={"hidden_size": 128} | HEADS, **BF16)
