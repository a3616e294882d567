"""A batch with a new number of tokens compiles nothing."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import triton
from cases.fused_case import ALL
from cases.lengths_case import LENGTHS
from cases.peft_models import adapt, base_model

from fused_lora import Fusion, fuse
from fused_mlp import launching

HERE = Path(__file__).resolve().parents[2]
LAYER = {"layer": True, "rms_norm": True, "cross_entropy": True}
# sizes with which all kernels run, as those of real models
SIZES = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "attn_implementation": "sdpa",
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """Forget our compiled kernels, and record the names of those that Triton compiles."""
    names: list[str] = []

    def note(*, fn, **_):
        if fn.module.startswith("fused_"):
            names.append(fn.name)
        return False  # compile

    for name, module in list(sys.modules.items()):
        if name.startswith("fused_"):
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction):
                    fresh = defaultdict(value.create_binder)
                    monkeypatch.setattr(value, "device_caches", fresh)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    return names


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "fusion", "dropout", "is_packed"),
    [
        ("Llama", Fusion(**LAYER, checkpoint="full"), 0.0, False),
        ("Qwen3", Fusion(**LAYER), 0.05, False),
        ("Llama", Fusion(**LAYER), 0.0, True),
        ("Qwen2", Fusion(**ALL), 0.05, False),
        ("Llama", Fusion(**LAYER, fp8=True, fp8_lm_head=True), 0.0, False),
    ],
    ids=("layer", "layer with norms of heads and dropout", "packed", "parts", "fp8"),
)
def test_fifty_lengths_compile_what_the_first_compiles(
    family, fusion, dropout, is_packed, compiled
):
    if fusion.fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89")
    model = base_model("cuda", family, torch.bfloat16, **SIZES)
    model.config.use_cache = False
    model = adapt(model, "cuda", lora_dropout=dropout).train()
    fuse(model, fusion)
    for length in LENGTHS:
        tokens = torch.randint(SIZES["vocab_size"], (2, length), device="cuda")
        labels = tokens.masked_fill(tokens % 3 == 0, -100)  # other numbers of rows in the loss
        packed = {}
        if is_packed:
            packed["position_ids"] = torch.arange(length, device="cuda").expand(2, -1) % 60
        model(input_ids=tokens, labels=labels, **packed).loss.backward()
        if length == LENGTHS[0]:
            first = sorted(compiled)
    assert len(first) >= 10
    assert sorted(compiled) == first


@pytest.mark.slow
def test_fifty_lengths_ask_for_the_kernels_of_the_first():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{HERE.parent}:{HERE}"
    program = [sys.executable, str(HERE / "cases" / "lengths_case.py")]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    others = json.loads(done.stdout)
    assert len(others) == 50
    assert not any(others.values()), others
