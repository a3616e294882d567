"""What an MLP costs in kernel launches, memory traffic and saved memory, in PEFT and in LoRA_MLP.

We trace both at full size on fake tensors, which compute nothing. docs/lora_mlp.md has the table,
and test_drawing.py compares each launch with lora.excalidraw. We count memory traffic as reading
each input of a launch once and writing each output once.
"""

import gzip
import inspect
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from fused_lora import Fusion, fuse
from fused_lora.reading import site
from fused_mlp import swiglu, utils

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "lora_mlp.md").read_text()
TOKENS, HIDDEN, INTERMEDIATE, RANK, LAYERS = 16384, 2048, 11008, 32, 36
GEMM, CAST, PASS, TRITON = "GEMM", "cast", "pass", "Triton"
WORDS = {GEMM: "GEMMs", CAST: "casts", PASS: "passes", TRITON: "Triton kernel"}

# launches: forward, backward (with fp32 adapters under bf16 autocast). saved: [T, columns] of bf16.
PEFT = {
    "forward": {GEMM: 9, CAST: 12, PASS: 8},
    "backward": {GEMM: 15, CAST: 12, PASS: 10},
    "saved": {HIDDEN: 2, INTERMEDIATE: 4, RANK: 3},
}
FUSED = {
    "forward": {GEMM: 8, CAST: 2, TRITON: 1},
    "backward": {GEMM: 14, TRITON: 1},
    "saved": {HIDDEN: 1, INTERMEDIATE: 2, 2 * RANK: 1},
}
COUNTS = {"PEFT": PEFT, "LoRA_MLP": FUSED}
KINDS = dict.fromkeys(("mm", "addmm", "addmm_"), GEMM) | dict.fromkeys(
    ("_to_copy", "_foreach_copy_"), CAST
)
NO_WORK = {"t", "view", "_unsafe_view", "split", "split_with_sizes", "detach", "prim::device"}
NO_WORK |= {"empty", "empty_like", "new_empty"}


class Launch(NamedTuple):
    kind: str
    moved_bytes: int
    writes: list[torch.Tensor]


class Trace(TorchDispatchMode):
    """Every kernel launch of a forward or a backward, in order."""

    def __init__(self):
        super().__init__()
        self.launches = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten.addmm.dtype_out:
            out = kwargs["out"]  # the CPU has no such matmul, and the values are fake
        else:
            out = function(*args, **kwargs)
        name = function.name().removeprefix("aten::").split(".")[0]
        if name not in NO_WORK:
            reads, writes = [tensor for tensor in args if isinstance(tensor, torch.Tensor)], [out]
            if name == "_foreach_copy_":
                writes, reads = args[:2]
            if kwargs.get("beta") == 0:  # addmm_ does not read what it overwrites
                del reads[0]
            moved = sum(tensor.nbytes for tensor in [*reads, *writes])
            self.launches.append(Launch(KINDS.get(name, PASS), moved, writes))
        return out

    def launch(self, kernel, *tensors):
        """Replace `swiglu._launch`. A kernel loads its first tensors and stores to its last."""
        source = inspect.getsource(kernel.fn)
        loads, stores = (source.count(f"tl.{verb}(") for verb in ("load", "store"))
        moved = (loads + stores) * tensors[0].nbytes
        self.launches.append(Launch(TRITON, moved, list(tensors[-stores:])))


def memory(tensor):
    return tensor.untyped_storage()._cdata


@cache
def traced(whose):
    """Return the launches by phase, and the saved activations by their memory."""
    config = AutoConfig.for_model(**json.loads((ROOT / "configs/qwen2.5-3b.json").read_text()))
    model = torch.nn.ModuleDict({"mlp": Qwen2MLP(config).to(torch.bfloat16)})
    targets = ["gate_proj", "up_proj", "down_proj"]
    get_peft_model(model, LoraConfig(r=RANK, target_modules=targets))
    if whose == "LoRA_MLP":
        fuse(model, Fusion(mlp=True))
    forward, backward, kept = Trace(), Trace(), {}

    def keep(tensor):
        if tensor.numel() // tensor.shape[-1] == TOKENS:
            kept[memory(tensor)] = tensor
        return tensor

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(swiglu, "_check", lambda *args, **tensors: None)  # these are on the CPU
        patch.setattr(site, "KERNELS_WANT_A_GPU", False)
        patch.setattr(utils, "_stores_fp32", lambda a: a.dtype == torch.bfloat16)  # as on a GPU
        x = torch.empty(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        patch.setattr(swiglu, "_launch", forward.launch)
        with hooks, forward, torch.autocast("cpu", torch.bfloat16):
            output = model["mlp"](x)
        patch.setattr(swiglu, "_launch", backward.launch)
        trained = [x, *(weight for weight in model.parameters() if weight.requires_grad)]
        grad_output = torch.empty_like(output)
        with backward:
            torch.autograd.grad(output, trained, grad_output)
    return {"forward": forward.launches, "backward": backward.launches}, kept


@pytest.mark.slow("LoRA_MLP")
@pytest.mark.parametrize("whose", COUNTS)
def test_launches_traffic_and_saved_activations(whose):
    launches, kept = traced(whose)
    found = {phase: Counter(one.kind for one in launches[phase]) for phase in launches}
    found["saved"] = Counter(tensor.shape[-1] for tensor in kept.values())
    assert found == COUNTS[whose]
    for phase in launches:
        (row,) = re.findall(rf"^\| memory traffic of a {phase}.*", PAGE, re.MULTILINE)
        said = dict(zip(COUNTS, row.split(" | ")[1:], strict=True))
        moved = sum(launch.moved_bytes for launch in launches[phase])
        assert said[whose].removesuffix(" |") == f"{moved / 1e9:.1f} GB"


def test_the_page_says_the_same():
    cells = []
    for counts in COUNTS.values():
        for phase in ("forward", "backward"):
            parts = ", ".join(f"{n} {WORDS[kind]}" for kind, n in counts[phase].items())
            cells.append(f"| {sum(counts[phase].values())}: {parts} |")
        saved_bytes = sum(2 * TOKENS * columns * n for columns, n in counts["saved"].items())
        cells.append(f"| {saved_bytes / 1e9:.2f} GB: ")
    assert [cell for cell in cells if cell not in PAGE] == []


@cache
def published(name):
    return json.loads(gzip.decompress((ROOT / "docs" / "runs" / "h200" / name).read_bytes()))


def cells_by_round(variant):
    """Return the cells of 32 x 512 tokens without checkpointing, in an H200's published suite."""
    found = {}
    for cell in published("suite.json.gz")["cells"]:
        one = cell["variant"], cell["seq_len"], cell["status"]
        if one == (f"{variant}_no_checkpointing", 512, "ok"):
            found[cell["round"]] = cell
    return found


def pairs_of_cells():
    """Return (PEFT's cell, that of LoRA_MLP) for each round that has both."""
    peft, fused = cells_by_round("vanilla_peft"), cells_by_round("fused_mlp")
    return [(peft[n], fused[n]) for n in sorted(peft.keys() & fused.keys())]


def test_the_committed_profiles_launch_as_many():
    """Compare steps of PEFT and LoRA_MLP, which differ only in the MLPs."""
    patterns = {GEMM: r"nvjet|gemm|cutlass", CAST: r"copy_kernel|multi_tensor",
                PASS: r"elementwise", TRITON: r"^_swiglu"}  # fmt: skip
    more = Counter[str]()
    for phase in ("forward", "backward"):
        more.update(PEFT[phase])
        more.subtract(FUSED[phase])
    pairs = pairs_of_cells()
    assert len(pairs) == 2
    for peft, fused in pairs:
        profile, seen = Counter(peft["kernels_seen"]), Counter[str]()
        profile.subtract(fused["kernels_seen"])
        for name, count in profile.items():
            if not re.search(r"splitKreduce|Memset", name):  # cuBLAS adds them to some matmuls
                kinds = [kind for kind, pattern in patterns.items() if re.search(pattern, name)]
                seen[kinds[0] if kinds else name] += count
        assert {kind: count / LAYERS for kind, count in seen.items() if count} == more


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
    launches = sum(expected["forward"].values()) + sum(expected["backward"].values())
    reductions = sum("reduce" in name.lower() for name in kernels)
    assert len(kernels) - reductions == launches, Counter(kernels)
