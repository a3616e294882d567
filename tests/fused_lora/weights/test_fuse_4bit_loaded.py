"""Models in 4 bits as users come by them: prepared by PEFT, read from a checkpoint, or quantised
when they move to a GPU. Without bitsandbytes the others train."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from cases.four_bit_case import dequantised, prepared, quantised
from cases.fused_case import SHORT, assert_right, step
from cases.layer_case import EVERYTHING, LAYER, layer_of, peft_model
from cases.peft_models import assert_equal
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fused_lora import Fusion, fuse, report
from fused_lora.forwards import layer as adopt_layer
from fused_lora.reading import four_bit as reading

# --- prepared -------------------------------------------------------------------------------------


@pytest.mark.slow("Qwen2-offload")
@pytest.mark.parametrize(
    ("family", "policy"),
    [("Qwen2", "offload"), ("Qwen3", "none"), ("Gemma3Text", "offload"), ("Olmo2", "none")],
)
def test_a_prepared_model_is_within_the_error_budget_of_autocast(family, policy, device):
    made = {"family": family, "dtype": torch.bfloat16}
    plain = peft_model(device, change=prepared, **made)
    truth = peft_model(device, change=lambda base: dequantised(quantised(base)), **made).double()
    fused = copy.deepcopy(plain)
    fuse(fused, Fusion(layer=True, rms_norm=True, cross_entropy=True, checkpoint=policy))
    assert step(fused, autocast=True, length=SHORT).functions["DecoderLayer"] == 2
    assert_right(fused, plain, True, truth, length=9)


def test_a_prepared_model_without_autocast_steps_aside(device):
    fused = peft_model(device, dtype=torch.bfloat16, change=prepared)
    fuse(fused, LAYER)
    with pytest.warns(UserWarning, match="computation torch.float32: give all one dtype"):
        assert step(fused, length=SHORT).functions == {}


# --- from a checkpoint, and moved -----------------------------------------------------------------


def assert_runs_as_dequantised(model, base_of, device):
    """Check that a fused model's layers run whole, as those do on what its weights stand for."""
    want = peft_model(device, dtype=torch.bfloat16, change=lambda base: dequantised(base_of(base)))
    fuse(want, EVERYTHING)
    got = step(model, length=SHORT)
    assert got.functions["DecoderLayer"] == 2
    assert_equal(got, step(want, length=SHORT))


def test_a_checkpoint_with_modules_in_bf16_runs_whole(tmp_path, device):
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "down_proj", "model.layers.1.self_attn"],
    )  # fmt: skip

    def reloaded(base):
        base.save_pretrained(tmp_path / "in bf16")
        for source, target, options in (
            ("in bf16", "in 4 bits", {"quantization_config": config}), ("in 4 bits", "", {}),
        ):  # fmt: skip
            base = AutoModelForCausalLM.from_pretrained(
                tmp_path / source, device_map={"": device}, dtype=torch.bfloat16, **options
            )
            if target:
                base.save_pretrained(tmp_path / target)
        base.config.use_cache = False
        return base

    model = peft_model(device, dtype=torch.bfloat16, change=reloaded)
    in_4_bits = [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    assert len(in_4_bits) == 6 + 2
    assert not fuse(model, EVERYTHING).left
    assert_runs_as_dequantised(model, reloaded, device)


def test_a_model_that_is_quantised_when_it_moves_runs_whole(device, monkeypatch):
    """Without a GPU we pretend that layers wait for one: a move to the CPU quantises as well."""
    if device == "cpu":
        monkeypatch.setattr(reading, "KERNELS_WANT_A_GPU", True)
        monkeypatch.setattr(adopt_layer, "_waits", lambda *_: True)
    model = peft_model(
        None, dtype=torch.bfloat16, change=lambda base: quantised(base, is_moved=False)
    )
    assert layer_of(model).mlp.up_proj.base_layer.weight.dtype == torch.bfloat16
    fuse(model, EVERYTHING)
    assert_runs_as_dequantised(model.to(device), quantised, device)
    assert not report(model).left


# --- without bitsandbytes -------------------------------------------------------------------------


@pytest.mark.slow
def test_without_bitsandbytes_other_models_train(device):
    program = f"""
import sys
sys.modules["bitsandbytes"] = None
from cases.fused_case import SHORT, step
from cases.layer_case import EVERYTHING, peft_model
from fused_lora import fuse
model = peft_model("{device}")
assert not fuse(model, EVERYTHING).left
assert step(model, length=SHORT).functions["DecoderLayer"] == 2
"""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | path
    )
    assert done.returncode == 0, done.stderr
