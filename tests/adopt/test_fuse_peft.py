"""What PEFT and PyTorch do with a model goes on working while it is fused."""

import copy
import subprocess
import sys

import pytest
import torch
from cases import layer_case
from cases.four_bit_case import quantised
from cases.fused_case import (
    SHORT,
    assert_close,
    assert_right,
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
from cases.reference import assert_near, assert_within_budget
from peft import LoraConfig

from fused_lora import Fusion, fuse, report, unfuse

FUSIONS = {  # and what a step of two layers runs of it
    "mlp": (MLP_ON, {"LoRA_MLP": 2}),
    "attention": (Fusion(attention=True), {"LoRA_QKV": 2, "LoRA_W": 2}),
    "attention and rope": (Fusion(attention=True, rope=True), {"LoRA_Attention": 2}),
    "layer": (Fusion(layer=True), {"DecoderLayer": 2}),
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
@pytest.mark.parametrize(("fusion", "functions"), FUSIONS.values(), ids=FUSIONS)
def test_adapters_that_are_switched_and_merged_are_as_in_peft(fusion, functions, device):
    fused, plain, done = layer_case.pair(device, fusion)
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
@pytest.mark.parametrize("fusion", [MLP_ON, Fusion(layer=True)], ids=["mlp", "layer"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_is_fused_and_independent_of_the_original(duplicate, fusion, device):
    fused, _, done = layer_case.pair(device, fusion)
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


@pytest.mark.gpu
@pytest.mark.parametrize("fp32_adapters", [False, True])
def test_fused_layers_under_torch_compile_are_within_the_error_budget(fp32_adapters, device):
    options = {"dtype": torch.bfloat16, "autocast_adapter_dtype": fp32_adapters}
    fused, plain, _ = pair(device, MLP_ON, **options)
    for layer in layers(fused):
        layer.compile()
    assert_right(fused, plain, autocast=fp32_adapters)
    found = []
    for model in (fused, plain, copy.deepcopy(plain).double()):
        is_exact = model.dtype == torch.float64
        with torch.autocast(device, torch.bfloat16, enabled=fp32_adapters and not is_exact):
            found.append(logits(model))
    assert_within_budget("logits", *found)


PARTS = "_swiglu_forward", "_swiglu_backward", "_rope", "_rms_norm_backward"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fusion", "options", "kernels"),
    [
        (Fusion(mlp=True, rope=True, rms_norm=True), {}, PARTS),
        (layer_case.LAYER, {"change": quantised}, ["_dequantize_4bit"]),
        (Fusion(mlp=True, attention=True), {"change": quantised}, ["_dequantize_4bit", PARTS[0]]),
    ],
    ids=["parts", "4 bits", "parts, 4 bits"],
)
def test_compiled_layers_still_run_fused(fusion, options, kernels, device):
    """What torch.compile cannot follow might fall back to PEFT's own path, which is right too."""
    from torch.profiler import ProfilerActivity, profile

    fused = layer_case.peft_model(device, dtype=torch.bfloat16, **options)
    fuse(fused, fusion)
    for layer in layers(fused):
        layer.compile(dynamic=False)
    step(fused, autocast=True)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(fused, autocast=True)
    names = {event.name for event in profiler.events()}
    for kernel in kernels:
        assert any(kernel in name for name in names), (kernel, names)


UNTRACED = {"LoRA_MLP": 2, "LoRA_QKV": 2, "LoRA_W": 2}
COMPILED = {  # and what they run between compiled code
    # of plain parts attention alone, because the interpreter cannot be compiled
    "part": (Fusion(attention=True), {}, {}),
    "layer": (Fusion(layer=True), {}, {"DecoderLayer": 2}),
    "parts, 4 bits": (Fusion(mlp=True, attention=True), {"change": quantised}, UNTRACED),
    "parts, dropout": (Fusion(mlp=True, attention=True), {"lora_dropout": 0.3}, UNTRACED),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fusion", "options", "functions"), COMPILED.values(), ids=COMPILED)
def test_compiled_layers_share_their_code_and_run_fused(fusion, options, functions, device):
    """Each compiled by itself would reach dynamo's limit, and the rest would run uncompiled."""
    fused, _, _ = layer_case.pair(device, fusion, **options)
    fused.enable_input_require_grads()  # to the first layer nothing is another than to the second
    torch.manual_seed(0)  # of dropout
    want = step(fused)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in layers(fused):
        layer.compile(backend="aot_eager", dynamic=False)
    versions = max(len(functions), 1)  # of the code that all our forwards share
    with torch._dynamo.config.patch(recompile_limit=versions, fail_on_recompile_limit_hit=True):
        torch.manual_seed(0)
        got = step(fused)
    assert_close(got, want, 1e-4)
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"] > 0
    assert got.functions == functions
