"""What an MLP costs in calls and saved memory, in PEFT and in LoRA_MLP: docs/lora_mlp.md's table,
against what test_drawing traces. On a GPU the profiler's own count is held to the same numbers.
"""

import json
from collections import Counter

import pytest
import torch
from call_panel import DIMENSIONS, Call
from excalidraw import CALL_KINDS
from peft import LoraConfig, get_peft_model
from test_drawing import PAGE, ROOT, traced
from transformers import AutoConfig, AutoModelForCausalLM

from fused_lora import Fusion, fuse

fixtures = (traced,)  # pytest finds it in this module
TOKENS, HIDDEN, INTERMEDIATE, RANK, TWO_RANKS = DIMENSIONS.values()
GEMM, CAST, PASS, TRITON = CALL_KINDS

# calls: forward, backward (with fp32 adapters under bf16 autocast). saved: [T, columns] of bf16.
PEFT = {
    "forward": {GEMM: 9, CAST: 12, PASS: 8},
    "backward": {GEMM: 15, CAST: 12, PASS: 10},
    "saved": {HIDDEN: 2, INTERMEDIATE: 4, RANK: 3},
}
FUSED = {
    "forward": {GEMM: 8, CAST: 2, TRITON: 1},
    "backward": {GEMM: 14, TRITON: 1},
    "saved": {HIDDEN: 1, INTERMEDIATE: 2, TWO_RANKS: 1},
}


@pytest.mark.slow("LoRA_MLP")
def test_calls_and_saved_activations(traced):
    fused, *traces, kept = traced
    forward, backward = (Counter(Call(*call).kind for call in trace.calls) for trace in traces)
    saved = Counter(tensor.shape[-1] for tensor in kept.values())
    assert {"forward": forward, "backward": backward, "saved": saved} == (FUSED if fused else PEFT)


def test_the_page_says_the_same():
    words = {GEMM: "GEMMs", CAST: "casts", PASS: "passes", TRITON: "Triton kernel"}
    cells = []
    for counts in (PEFT, FUSED):
        for phase in ("forward", "backward"):
            parts = ", ".join(f"{n} {words[kind]}" for kind, n in counts[phase].items())
            cells.append(f"| {sum(counts[phase].values())}: {parts} |")
        saved_bytes = sum(2 * TOKENS * columns * n for columns, n in counts["saved"].items())
        cells.append(f"| {saved_bytes / 1e9:.2f} GB: ")
    assert [cell for cell in cells if cell not in PAGE] == []


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_the_profiler_counts_the_same(fused):
    """Count one kernel per matmul at these shapes. cuBLAS may add a reduction to some."""
    from torch.profiler import ProfilerActivity, profile

    config = AutoConfig.for_model(**json.loads((ROOT / "configs" / "tiny.json").read_text()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    mlp = get_peft_model(model, lora).base_model.model.model.layers[0].mlp
    if fused:  # `fuse` needs a parent that gives the MLP a name
        fuse(torch.nn.ModuleDict({"mlp": mlp}), Fusion(mlp=True))
    x = torch.randn(2, 12, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)

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
