"""What PEFT and PyTorch do with a model goes on working while it is fused."""

import copy
import subprocess
import sys

import pytest
import torch
from cases import layer_case
from cases.fused_case import (
    SHORT,
    assert_close,
    assert_same,
    batch,
    functions_of,
    pair,
    pickled,
    step,
)
from cases.peft_models import (
    MLP,
    MLP_ON,
    assert_equal,
    ids,
    layers,
    logits,
    set_weights,
)
from cases.reference import assert_near
from peft import LoraConfig

from fused_lora import Fusion, report, unfuse

FUSIONS = {  # and what a step of two layers runs of it
    "mlp": (MLP_ON, {"LoRA_MLP": 2}, {}),
    "attention": (Fusion(attention=True), {"LoRA_QKV": 2, "LoRA_W": 2}, {}),
    "attention and rope": (Fusion(attention=True, rope=True), {"LoRA_Attention": 2}, {}),
    "layer": (Fusion(layer=True), {"DecoderLayer": 2}, {}),
    "layer, DoRA": (Fusion(layer=True), {"DecoderLayer": 2}, {"use_dora": True}),
}

# --- PEFT goes on working -------------------------------------------------------------------------


def assert_left_to_peft(fused, plain, reason, most=0.0):
    found = report(fused)
    most = 2e-5 if found.fused.pop("rope", None) else most  # it knows no adapters, and still runs
    assert not any(found.fused.values()) and found.left
    assert all(reason in one for one in found.left.values())
    got, want = (model(**batch(model)) for model in (fused, plain))
    assert_near(got.logits, want.logits, most)
    assert not functions_of(got.loss)


@pytest.mark.slow("layer")
@pytest.mark.parametrize(("fusion", "functions", "lora"), FUSIONS.values(), ids=FUSIONS)
def test_adapters_that_are_switched_and_merged_are_as_in_peft(fusion, functions, lora, device):
    """The second is plain LoRA."""
    fused, plain, done = layer_case.pair(device, fusion, **lora)
    assert assert_same(fused, plain) == functions
    for model in (fused, plain):
        model.add_adapter("second", LoraConfig(r=4, lora_alpha=4, target_modules="all-linear"))
        set_weights(model, device, only=".second.")
        model.set_adapter("second")
    assert assert_same(fused, plain) == functions
    for model in (fused, plain):
        model.merge_adapter()
    # a GPU may merge into a layer's rows, which lie apart, by another kernel
    assert_left_to_peft(fused, plain, "adapters are merged", most=2e-5 if fusion.layer else 0.0)
    with fused.disable_adapter(), plain.disable_adapter():  # their forward unmerges them
        assert_near(logits(fused), logits(plain), 2e-5)
    for model in (fused, plain):
        model.set_adapter("default")
        model.delete_adapter("second")
    assert assert_same(fused, plain) == functions
    assert report(fused) == done


def test_merge_and_unload_gives_what_it_gives_without_fusing(calls, device):
    fused, plain = (model.merge_and_unload() for model in pair(device, MLP_ON)[:2])
    assert torch.equal(logits(fused), logits(plain)) and not calls
    assert unfuse(fused) == ["model", *(f"model.layers.{index}.mlp" for index in range(2))]
    assert torch.equal(logits(fused), logits(plain))


def test_a_batch_of_mixed_adapters_is_as_without_fusing(calls, device):
    fused, plain, _ = pair(device, MLP_ON)
    outputs = []
    for model in (fused, plain):
        model.add_adapter("second", LoraConfig(r=4, target_modules=[*MLP]))
        set_weights(model, device, only=".second.")
        model.eval()
        with torch.no_grad():
            outputs.append(model(ids(device), adapter_names=["default", "second"]).logits)
    assert torch.equal(*outputs) and not calls
    assert_same(fused.train(), plain.train())
    assert len(calls) == 2  # the hooks of the mixed batch are gone


@pytest.mark.slow("deepcopy-mlp", "pickled-mlp")
@pytest.mark.parametrize("name", ["mlp", "layer", "layer, DoRA"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_is_fused_and_independent_of_the_original(duplicate, name, device):
    fusion, _, lora = FUSIONS[name]
    fused, _, done = layer_case.pair(device, fusion, **lora)
    want = step(fused, length=SHORT)
    twin = duplicate(fused)
    assert report(twin) == done
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.zero_()
    unfuse(fused)
    got = step(twin, length=SHORT)
    assert got.functions == want.functions
    assert_equal(got, want)


@pytest.mark.slow
def test_importing_changes_nothing_in_transformers_peft_or_torch():
    program = """
import inspect
import sys
import peft
import torch
import transformers.models.qwen2.modeling_qwen2
import transformers.models.llama.modeling_llama

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("peft", "transformers.models.", "torch.nn", "torch.autograd")):
            for key, value in list(vars(module).items()):
                found[name, key] = id(value)
                if inspect.isclass(value):
                    found |= {(name, key, k): id(v) for k, v in list(vars(value).items())}
    return found

before = snapshot()
import fused_lora
after = snapshot()
assert len(before) > 10_000
print([key for key in before.keys() | after.keys() if before.get(key) != after.get(key)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fusion", [Fusion(mlp=True, attention=True), Fusion(layer=True)], ids=str)
def test_compiled_layers_run_fused(fusion, device):
    fused, plain, _ = layer_case.pair(device, fusion, lora_dropout=0.3)
    torch.manual_seed(0)  # of dropout
    want = step(fused)
    for layer in layers(fused):
        layer.compile(backend="aot_eager", dynamic=False)
    torch.manual_seed(0)
    got = step(fused)
    assert_close(got, want, 1e-6)
    assert got.functions == want.functions != step(plain).functions
