"""MXFP4: weights rounded to the nearest there is, exact where they are in it already, and experts
as a checkpoint has them."""

import json
from dataclasses import replace

import pytest
import torch
from cases.families_case import FAMILIES, everywhere
from cases.fused_case import step
from cases.operands import BF16, DTYPES
from cases.peft_models import MLP_ON, adapt, assert_equal
from cases.reference import random, seeded
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from fused_lora import fuse, keep_mxfp4
from fused_lora.adopt import keep_mxfp4 as loading
from fused_lora.kernels.packed_4bit import dequantized
from fused_lora.weights.mxfp4 import MAGNITUDES, encoded_in_mxfp4, packed_in_mxfp4

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@EACH_DTYPE
def test_weights_are_rounded_to_the_nearest(dtype, device):
    """With the smallest power of two that keeps the largest of 32 values within 6. A value halfway
    between two goes to the one with an even code."""
    weight = random(3, 8, 64, dtype=dtype, device=device)
    weight[0] = torch.arange(512, device=device).view(8, 64) / 64  # with every value halfway
    weight[1, 0], weight[2, 0, :32] = -weight[0, 0], -0.0
    blocks = weight.double().view(-1, 32)
    largest = blocks.abs().amax(1, keepdim=True).clamp_min(1e-9)
    steps = 2.0 ** torch.ceil(torch.log2(largest / 6))
    away = (blocks.abs() / steps)[..., None] - torch.tensor(MAGNITUDES, device=device)
    odd = torch.arange(8, device=device) % 2
    nearest = (away.abs() + 1e-9 * odd).argmin(-1)
    want = torch.tensor(MAGNITUDES, device=device)[nearest] * steps * blocks.sign()
    got = dequantized(encoded_in_mxfp4(weight), dtype)
    assert torch.equal(got.double(), want.view_as(got).double())


def test_what_is_in_mxfp4_is_exact(device):
    codes = torch.randint(256, (3, 8, 4, 16), dtype=torch.uint8, generator=seeded(0))
    codes[0, 0] %= 2  # magnitudes up to 0.5, and none
    codes[1] &= 0b10111011  # up to 1.5
    scales = torch.randint(10, 240, (3, 8, 4), dtype=torch.uint8, generator=seeded(1))
    weight = dequantized(packed_in_mxfp4(codes.to(device), scales.to(device)), BF16)
    again = dequantized(encoded_in_mxfp4(weight.view(3, 8, 128)), BF16)
    assert torch.equal(weight.view(torch.int16), again.view(torch.int16))  # and zeros keep signs


def test_rows_of_other_lengths_are_refused(device):
    with pytest.raises(ValueError, match="but rows have 48: take quant_type='nf4'"):
        encoded_in_mxfp4(torch.ones(2, 8, 48, device=device))


# --- a checkpoint ---------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """gpt-oss's files, as OpenAI ships them."""
    oss = FAMILIES["gpt-oss"]
    oss = replace(oss, config=oss.config | {"intermediate_size": 64, "num_local_experts": 4})
    oss.base_model(BF16).save_pretrained(tmp_path)
    state, generator = load_file(tmp_path / "model.safetensors"), seeded(2)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outs = state.pop(name).shape
        for kind, low, high, *rest in (("blocks", 0, 256, 16), ("scales", 115, 122)):
            state[f"{name}_{kind}"] = torch.randint(
                low, high, (experts, outs, inputs // 32, *rest), dtype=torch.uint8,
                generator=generator,
            )  # fmt: skip
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def load(folder, device, **options):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=BF16, device_map={"": device}, experts_implementation="grouped_mm", **options
    )


def test_a_checkpoints_codes_are_kept_and_train(checkpoint, device):
    kept = load(checkpoint, device, config=keep_mxfp4(AutoConfig.from_pretrained(checkpoint)))
    plain = load(checkpoint, device, quantization_config=Mxfp4Config(dequantize=True))
    assert_equal(*({n: p + 0 for n, p in m.named_parameters()} for m in (kept, plain)))
    state = load_file(checkpoint / "model.safetensors")
    for at in everywhere("mlp.experts"):
        name = at.removeprefix("base_model.model.")
        packed = kept.get_submodule(name).down_proj.packed
        for kind, got in (("blocks", packed.codes), ("scales", packed.absmax)):
            want = state[f"{name}.down_proj_{kind}"].to(device)
            assert torch.equal(got.view_as(want), want)
    assert not kept.is_quantized and not hasattr(kept.config, "quantization_config")
    with pytest.raises(RuntimeError, match="save the adapters alone"):
        kept.save_pretrained(checkpoint / "again")
    lora = FAMILIES["gpt-oss"].lora
    models = [adapt(model.train(), device, False, **lora) for model in (kept, plain)]
    for model in models:
        assert fuse(model, MLP_ON).left == {}
    got, want = (step(model, length=5) for model in models)
    assert got.functions == {"LoRA_Experts": 2}
    assert_equal(got, want)


def test_other_checkpoints_are_refused():
    for given in ({}, {"quantization_config": {"quant_method": "fp8"}}):
        with pytest.raises(ValueError, match="then call quantize_experts"):
            keep_mxfp4(AutoConfig.for_model("gpt_oss", **given))


def test_experts_that_are_not_found_are_an_error_and_not_random(checkpoint, device, monkeypatch):
    """transformers itself warns, and draws them."""
    monkeypatch.setattr(loading._Quantizer, "get_weight_conversions", lambda self: [])
    with pytest.raises(RuntimeError, match="found no experts in MXFP4 in the checkpoint: load it"):
        load(checkpoint, device, config=keep_mxfp4(AutoConfig.from_pretrained(checkpoint)))
