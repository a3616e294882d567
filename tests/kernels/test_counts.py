"""What an MLP costs in calls and saved memory, in PEFT and in LoRA_MLP: docs/lora_mlp.md's table.

Every call that does work on a GPU is counted (casts, products, elementwise passes), views are not.
The Triton kernel of LoRA_MLP does not pass through PyTorch's dispatcher: it is counted in its
launcher's place, and does not run. The CPU takes the GPU's path, on which a product stores
gradients in fp32. On a GPU the profiler's own count is held against the same numbers.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from fused_lora import Fusion, fuse
from fused_mlp import swiglu, utils

ROOT = Path(__file__).resolve().parents[2]
RANK, TOKENS, HIDDEN, INTERMEDIATE = 8, 24, 64, 176
KINDS = {
    "GEMM": ("mm", "addmm", "addmm_"),
    "cast": ("_to_copy", "copy_", "_foreach_copy_"),
    "pass": ("mul", "add", "add_", "silu", "silu_backward"),
}
WORK = {name: kind for kind, names in KINDS.items() for name in names}

# calls: forward, backward (with fp32 adapters under bf16 autocast). saved: [T, columns] of bf16.
PEFT = {
    "forward": {"GEMM": 9, "cast": 12, "pass": 8},
    "backward": {"GEMM": 15, "cast": 12, "pass": 10},
    "saved": {HIDDEN: 2, INTERMEDIATE: 4, RANK: 3},
}
FUSED = {
    "forward": {"GEMM": 8, "cast": 2, "triton": 1},
    "backward": {"GEMM": 14, "triton": 1},
    "saved": {HIDDEN: 1, INTERMEDIATE: 2, 2 * RANK: 1},
}


class Calls(TorchDispatchMode):
    """Counts calls by kind."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").split(".")[0]
        if name in WORK:
            self.counted[WORK[name]] += 1
        if function is torch.ops.aten.addmm.dtype_out and kwargs["out"].device.type == "cpu":
            return kwargs["out"]  # the CPU has no such product, and nobody looks at the values
        return function(*args, **(kwargs or {}))


@pytest.fixture
def mlp(device):
    config = AutoConfig.for_model(**json.loads((ROOT / "configs" / "tiny.json").read_text()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    lora = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    return model.base_model.model.model.layers[0].mlp


def count(mlp, monkeypatch):
    """{"forward", "backward", "saved"} of one call of `mlp`."""
    monkeypatch.setattr(swiglu, "_launch", lambda *_: calls.counted.update({"triton": 1}))
    device = next(mlp.parameters()).device
    x = torch.randn(2, TOKENS // 2, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    saved = {}  # by storage, so that a tensor saved twice counts once

    def keep(tensor):
        if tensor.numel() // tensor.shape[-1] == TOKENS:  # an activation, not a weight
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with saving, Calls() as calls, torch.autocast(device.type, torch.bfloat16):
        y = mlp(x)
    forward, grad = calls.counted, torch.randn_like(y)
    with Calls() as calls:
        y.backward(grad)
    return {
        "forward": dict(forward),
        "backward": dict(calls.counted),
        "saved": dict(Counter(tensor.shape[-1] for tensor in saved.values())),
    }


def fuse_mlp(mlp):
    """`fuse` wants a model around the MLP to name it in."""
    fuse(torch.nn.ModuleDict({"mlp": mlp}), Fusion(mlp=True))


def test_calls_and_saved_activations_of_peft(mlp, monkeypatch):
    assert count(mlp, monkeypatch) == PEFT


def test_calls_and_saved_activations_of_lora_mlp(mlp, monkeypatch):
    fuse_mlp(mlp)
    monkeypatch.setattr(utils, "_stores_fp32", lambda a: a.dtype == torch.bfloat16)  # as on a GPU
    assert count(mlp, monkeypatch) == FUSED


def test_the_page_says_the_same():
    words = {"GEMM": "GEMMs", "cast": "casts", "pass": "passes", "triton": "Triton kernel"}
    tokens = 16384
    # at the size of Qwen2.5-3B
    columns = {HIDDEN: 2048, INTERMEDIATE: 11008, RANK: 32, 2 * RANK: 64}
    cells = []
    for counts in (PEFT, FUSED):
        for phase in ("forward", "backward"):
            parts = ", ".join(f"{n} {words[kind]}" for kind, n in counts[phase].items())
            cells.append(f"| {sum(counts[phase].values())}: {parts} |")
        saved_bytes = sum(2 * tokens * columns[c] * n for c, n in counts["saved"].items())
        cells.append(f"| {saved_bytes / 1e9:.2f} GB: ")
    page = (ROOT / "docs" / "lora_mlp.md").read_text()
    assert [cell for cell in cells if cell not in page] == []


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_the_profiler_counts_the_same(mlp, fused):
    """A product of these shapes is one kernel; cuBLAS may add a reduction of its own to one."""
    from torch.profiler import ProfilerActivity, profile

    if fused:
        fuse_mlp(mlp)
    x = torch.randn(2, TOKENS // 2, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            y = mlp(x)
        y.backward(grad)

    grad = torch.randn_like(x)
    step()
    for parameter in (x, *mlp.parameters()):
        parameter.grad = None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    kernels = [e.name for e in profiler.events() if e.device_type == cuda]
    kernels = [name for name in kernels if not name.startswith(("Memset", "Memcpy"))]
    expected = FUSED if fused else PEFT
    calls = sum(expected["forward"].values()) + sum(expected["backward"].values())
    reductions = sum("reduce" in name.lower() for name in kernels)
    assert len(kernels) - reductions == calls, Counter(kernels)
