"""A decoder layer with a gated delta net or a short convolution: a function before it and the
layer's blocks after it, compared with PEFT's own layer in float64.

In place of the recurrence, which transformers computes in fp32 and which amplifies each rounding,
stand a few operations on the same tensors. `test_delta_net.py` has the recurrence itself.
"""

import pytest
import torch
from cases.four_bit_case import dequantised, quantised
from cases.layer_case import (
    BF16,
    DTYPES,
    assert_layer_right,
    layer_of,
    operands_of,
    pair,
    run,
    tokens,
)
from contract import LAYOUTS
from transformers.models.qwen3_5 import modeling_qwen3_5

from fused_lora.foreign.delta_rule import NAME
from fused_mlp.dropout import draw_masks, draw_seed

ONE = {"num_hidden_layers": 1, "pad_token_id": 0}
MIXERS = {
    "delta net": ("Qwen3_5Text", ONE | {
        "layer_types": ["linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 10, "linear_value_head_dim": 6,
    }),
    "convolution": ("Lfm2", ONE | {"layer_types": ["conv"], "block_auto_adjust_ff_dim": False}),
}  # fmt: skip
EACH = pytest.mark.parametrize("mixer", MIXERS)


def rule(q, k, v, g, beta, **options):
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    repeats = v.shape[2] // q.shape[2]
    q, k = (one.to(wide).repeat_interleave(repeats, 2) for one in (q, k))
    scale = (beta.to(wide) * g.to(wide).exp())[..., None]
    found = v.to(wide) * scale + (q * k + q - k).mean(-1, keepdim=True)
    return (1.0 + found).to(dtype), None  # the norm that follows would amplify errors of small ones


@pytest.fixture(autouse=True)
def _without_the_recurrence(monkeypatch):
    monkeypatch.setattr(modeling_qwen3_5, NAME, rule)


def layers(device, mixer="delta net", config=None, **options):
    options = {"target_modules": "all-linear"} | options
    family, sizes = MIXERS[mixer]
    fused, plain, done = pair(device, family=family, config=sizes | (config or {}), **options)
    assert done.counts["layer"] == "1 of 1 layers"
    assert not done.left
    return fused, plain


def check(device, shape=(2, 5), dtype=torch.float32, mask=None, layouts=None, **options):
    fused, plain = layers(device, dtype=dtype, **options)
    assert_layer_right(fused, plain, shape, dtype, mask=mask, **(layouts or {}))


@pytest.mark.slow(
    "LoRA-bf16-delta net", "LoRA-bf16 with fp32 adapters-delta net", "LoRA-fp32-convolution",
    "DoRA-fp16-delta net", "DoRA-fp32-convolution",
)  # fmt: skip
@EACH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_output_and_gradients_are_within_the_error_budget(use_dora, dtype, mixer, device):
    """Of 39 tokens: over ten, how far rounding moves the gradients of four heads' g is luck."""
    check(device, (3, 13), mixer=mixer, use_dora=use_dora, **DTYPES[dtype])


OPTIONS = {
    "as many heads of q as of v": {"config": {"linear_num_key_heads": 4}},
    "each its own rank and scale": {
        "rank_pattern": {"in_proj_z": 3, "out_proj": 12}, "alpha_pattern": {"in_proj_qkv": 5}
    },
    "adapters on some": {"target_modules": ["in_proj_qkv", "in_proj_a", "down_proj"]},
    "magnitudes of some": {
        "target_modules": ["in_proj_qkv", "in_proj_a", "down_proj"], "use_dora": True
    },
    "a magnitude of the last alone": {"target_modules": ["out_proj"], "use_dora": True},
    "2 taps": {"config": {"linear_conv_kernel_dim": 2}},
    "biases": {"mixer": "convolution", "config": {"conv_bias": True}},
    "a trained convolution": {"mixer": "convolution", "modules_to_save": ["conv.conv"]},
    "a convolution without adapters": {"mixer": "convolution", "target_modules": ["w1", "w2"]},
}  # fmt: skip


@pytest.mark.slow("each its own rank and scale")
@pytest.mark.parametrize("name", OPTIONS)
def test_any_rank_scale_and_shape_of_a_layer(name, device):
    check(device, **BF16, **OPTIONS[name])


@pytest.mark.slow("shape1")
@pytest.mark.parametrize("shape", [(39, 1), (1, 67)])
def test_any_number_of_tokens(shape, device):
    check(device, shape)


@EACH
def test_an_empty_batch_has_gradients_of_zero(mixer, device):
    fused, _ = layers(device, mixer)  # transformers' own fails
    found = run(fused, *(token[:0] for token in tokens((2, 5), torch.float32, device)))
    assert found["hidden"].shape == (0, 5, 52) and len(found) > 2
    assert not any(one.any() for one in found.values())


@EACH
@pytest.mark.parametrize("use_dora", [False, True])
def test_padding_reaches_neither_the_mixer_nor_the_norm(use_dora, mixer, device):
    mask = torch.ones(2, 5, dtype=torch.int64, device=device)
    mask[0, :2] = mask[1, 4:] = 0
    check(device, mask=mask, mixer=mixer, use_dora=use_dora, **BF16)


@EACH
@pytest.mark.parametrize("layout", ["transposed", "one for all"])
def test_any_layout_of_the_input_and_the_gradient(layout, mixer, device):
    layouts = {"layout": LAYOUTS[layout], "grad_layout": LAYOUTS[layout]}
    check(device, mixer=mixer, layouts=layouts)


@EACH
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_second_backward_through_a_retained_graph_is_right(use_dora, mixer, device):
    fused, _ = layers(device, mixer, use_dora=use_dora)
    layer = layer_of(fused)
    hidden, grad = tokens((2, 5), torch.float32, device)
    want = run(fused, hidden, grad)
    layer.zero_grad()
    leaf = hidden.clone().requires_grad_()
    output = layer(leaf, position_embeddings=None)
    output.backward(grad, retain_graph=True)
    leaf.grad = None
    layer.zero_grad()
    run(fused, hidden + 1, grad)  # fills the borders, and takes what backward leaves for others
    layer.zero_grad()
    output.backward(grad)
    torch.testing.assert_close(leaf.grad, want["hidden"], rtol=0, atol=0)


def test_the_input_is_saved_once_and_masks_by_the_function_that_uses_them_alone(device):
    fused, _ = layers(device, lora_dropout=0.3)
    hidden, _ = tokens((2, 5), torch.float32, device)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    torch.manual_seed(0)
    *_, blocks = operands_of(layer_of(fused))
    groups = [group for block in blocks for group in block.frame.groups]
    columns = [group.in_features for group in groups for _ in group.out_features]
    seed = draw_seed(torch.device(device))
    whole = draw_masks("a layer", seed, [0.3] * 8, [10] * 8, columns)
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer_of(fused)(hidden, position_embeddings=None)
    assert sum(one.data_ptr() == hidden.data_ptr() for one in saved) == 1
    masks = [one for one in saved if one.dtype == torch.int32]
    want = [mask.bits for mask in whole]
    torch.testing.assert_close(masks, want, rtol=0, atol=0)


@EACH
@pytest.mark.parametrize("use_dora", [False, True])
def test_on_weights_in_4_bits_it_computes_what_these_stand_for(use_dora, mixer, device):
    found = []
    for change in (quantised, lambda base: dequantised(quantised(base))):
        fused, _ = layers(device, mixer, change=change, use_dora=use_dora, **BF16)
        found.append(run(fused, *tokens((2, 5), torch.bfloat16, device)))
    got, want = found
    assert got.keys() == want.keys() and any("out_proj.lora_A" in name for name in got)
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.gpu
@EACH
def test_at_real_sizes_it_is_within_the_error_budget(mixer, device):
    config = {"hidden_size": 512, "intermediate_size": 1536}
    if mixer == "delta net":
        config |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        config |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    check(device, (3, 515), mixer=mixer, config=config, **BF16)
