"""Checks that lora.excalidraw, its figures and docs/lora_mlp.md say what the code does and what was
measured. Whoever edits the drawing may move anything anywhere inside its frame.

We trace an MLP at full size on fake tensors, which compute nothing. We count memory traffic as
reading each input of a launch once and writing each output once.
"""

import gzip
import html
import inspect
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
from cases.ranks import on_ranks
from peft import LoraConfig, get_peft_model
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from fused_lora import Fusion, fuse
from fused_lora.reading import site
from fused_mlp import swiglu, utils

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "lora_mlp.md").read_text()
LOG = (ROOT / "dev" / "LOG.md").read_text()
SMALL_UPDATES = (ROOT / "fused_lora" / "docs" / "small_adapters.md").read_text()
TOKENS, HIDDEN, INTERMEDIATE, RANK, LAYERS = 16384, 2048, 11008, 32, 36
ELEMENTS = json.loads((ROOT / "lora.excalidraw").read_text())["elements"]
FRAMES = {one["name"]: one["id"] for one in ELEMENTS if one["type"] == "frame"}
INSIDE = {n: [one for one in ELEMENTS if one["frameId"] == i] for n, i in FRAMES.items()}
TEXTS = {name: [one["text"] for one in inside if "text" in one] for name, inside in INSIDE.items()}
PANELS = {
    "PEFT": {"forward": "lora_peft", "backward": "lora_peft_backward"},
    "LoRA_MLP": {"forward": "lora_forward", "backward": "lora_backward"},
}
WORDS = {"GEMM": "GEMMs", "cast": "casts", "pass": "passes", "Triton": "Triton kernel"}
COLORS = {"#c4e8dc": "GEMM", "#e5dbff": "cast", "#f1f3f5": "pass", "#ffc2a1": "Triton"}
KINDS = dict.fromkeys(("mm", "addmm", "addmm_"), "GEMM") | dict.fromkeys(
    ("_to_copy", "_foreach_copy_"), "cast"
)
NO_WORK = {"t", "view", "_unsafe_view", "split", "split_with_sizes", "detach", "prim::device"}
NO_WORK |= {"empty", "empty_like", "new_empty"}


@pytest.mark.parametrize("name", FRAMES)
def test_a_figure_has_its_frames_words(name):
    svg = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
    shown = {html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg)}
    assert shown == {line for text in TEXTS[name] for line in text.split("\n")}, "export it again"
    assert f'<img src="figures/{name}.svg" width="420"' in PAGE


def test_the_names_and_the_grid_are_those_of_the_code():
    texts = "\n".join(text for texts in TEXTS.values() for text in texts)
    files = re.findall(r"^fused_mlp/(\w+)\.py: (.+)$", texts, re.MULTILINE)
    assert len(files) > 8
    for module, names in files:
        for name in names.split(", "):
            assert hasattr({"utils": utils, "swiglu": swiglu}[module], name), (module, name)
    grid = TOKENS * INTERMEDIATE // swiglu.BLOCK_ELEMENTS
    assert f"{swiglu._swiglu_forward_kernel.fn.__name__}[({grid},)]" in texts


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
            self.launches.append(Launch(KINDS.get(name, "pass"), moved, writes))
        return out

    def launch(self, kernel, *tensors):
        """Replace `swiglu._launch`. A kernel loads its first tensors and stores to its last."""
        source = inspect.getsource(kernel.fn)
        loads, stores = (source.count(f"tl.{verb}(") for verb in ("load", "store"))
        moved = (loads + stores) * tensors[0].nbytes
        self.launches.append(Launch("Triton", moved, list(tensors[-stores:])))


def words_in(frame):
    return " ".join(TEXTS[frame]).replace("\n", " ")


def memory(tensor):
    return tensor.untyped_storage()._cdata


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


def boxes_of_launches(name):
    """Yield first and last launch of each box, its colour, and the texts beside its label."""
    for box in INSIDE[name]:
        label, *beside = [
            one["text"]
            for one in INSIDE[name]
            if "text" in one and one["groupIds"] == box["groupIds"] != []
        ] or [""]
        numbers = re.match(r"(\d+)(?:–(\d+))?  ", label)
        if box["type"] == "rectangle" and numbers:
            yield int(numbers[1]), int(numbers[2] or numbers[1]), box["backgroundColor"], beside


def sized(count):
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


@pytest.mark.slow("LoRA_MLP")
@pytest.mark.parametrize("whose", PANELS)
def test_each_launch_has_its_bytes_and_kind_and_what_it_saves(whose):
    # a backward of fake tensors starts autograd's threads, and nothing can be forked after that
    on_ranks(1, assert_each_launch_is_drawn, whose)


def assert_each_launch_is_drawn(rank, device, whose):
    phases, kept = traced(whose)
    saved_gb = f"{sum(t.nbytes for t in kept.values()) / 1e9:.2f} GB"
    assert f"| {saved_gb}: " in PAGE
    for phase, launches in phases.items():
        panel, numbers, saved = PANELS[whose][phase], [], set()
        for first, last, color, beside in boxes_of_launches(panel):
            assert sized(sum(launch.moved_bytes for launch in launches[first - 1 : last])) in beside
            assert first != last or COLORS[color] == launches[first - 1].kind
            numbers += range(first, last + 1)
            saved |= {first} if "kept" in beside else set()
        assert sorted(numbers) == [*range(1, len(launches) + 1)]
        moved_gb = f"{sum(launch.moved_bytes for launch in launches) / 1e9:.1f} GB"
        assert f"{len(launches)} launches, {moved_gb}" in TEXTS[panel]
        assert whose == "PEFT" or f"{len(launches)} launches\n{moved_gb}" in TEXTS["lora_unsloth"]
        counts = Counter(launch.kind for launch in launches)
        parts = ", ".join(f"{counts[kind]} {WORDS[kind]}" for kind in WORDS if counts[kind])
        assert f"| {len(launches)}: {parts} |" in PAGE
        (row,) = re.findall(rf"^\| memory traffic of a {phase}.*", PAGE, re.MULTILINE)
        assert f"| {moved_gb} |" in row
        row = f"{whose}, {phase}: {len(launches)}"
        assert row in TEXTS["lora_overview"]
        squares = [one for one in INSIDE["lora_overview"] if f"launch {row} " in one["id"]]
        assert [COLORS[square["backgroundColor"]] for square in squares] == [
            launch.kind for launch in launches
        ]
        if phase == "forward":
            writers = {memory(t): n for n, one in enumerate(launches, 1) for t in one.writes}
            written = {writers[key] for key in kept if key in writers}
            assert saved == (written if whose == "LoRA_MLP" else written & {*range(1, 11)})
            assert f"Kept: {saved_gb}" in words_in(panel)


@cache
def published(name):
    return json.loads(gzip.decompress((ROOT / "docs" / "runs" / "h200" / name).read_bytes()))


def cells_by_round(variant, suffix="_no_checkpointing"):
    """Return a variant's cells of 32 x 512 tokens in an H200's published suite."""
    found = {}
    for cell in published("suite.json.gz")["cells"]:
        one = cell["variant"], cell["seq_len"], cell["status"]
        if one == (f"{variant}{suffix}", 512, "ok"):
            found[cell["round"]] = cell
    return found


def test_the_times_are_those_of_the_records():
    """Compare GPU time of steps on an H200 that differ only in the MLP, and of kernels alone."""

    def paired(suffix):
        peft, fused = (cells_by_round(name, suffix) for name in ("vanilla_peft", "fused_mlp"))
        rounds = peft.keys() & fused.keys()
        return ([cells[number] for number in rounds] for cells in (peft, fused))

    def ms(cells, kind):
        return fmean(cell["kernel_ms"].get(kind, cell["gpu_busy_ms"]) for cell in cells)

    peft, fused, *checkpointed = *paired("_no_checkpointing"), *paired("")
    kinds = "copy", "adapter", "activation", "matmul", "all"
    less = [f"{(ms(peft, kind) - ms(fused, kind)) / LAYERS:.1f}".strip("-") for kind in kinds]
    before, after = (f"{ms(cells, 'all'):.0f} ms" for cells in (peft, fused))
    gib = [
        f"{cells[0]['peak_allocated_bytes'] / 2**30:.1f} GiB"
        for cells in (peft, fused, *checkpointed)
    ]
    assert gib[2] == gib[3]
    twice = (ms(checkpointed[0], "all") - ms(checkpointed[1], "all")) / LAYERS
    unsloth = cells_by_round("full_unsloth").values()
    said = {
        PAGE: [
            f"{less[4]} ms of GPU time a layer: a step of {LAYERS} layers takes {after} "
            f"instead of {before.removesuffix(' ms')}. Casts are {less[0]} ms of that, scaling "
            f"and adding {less[1]}. The two Triton kernels save the least, {less[2]} ms.",
            f"The GEMMs take {less[3]} ms more",
            f"runs twice: it saves {twice:.1f} ms a layer",
            f"from {gib[0]} to {gib[1].removesuffix(' GiB')}",
            f"stays at {gib[2]}",
        ],
        words_in("lora_time"): [
            f"casts {less[0]} scaling, adding {less[1]} silu, product {less[2]} GEMMs −{less[3]}:",
            f"{less[4]} ms a layer",
            f"{after} for a step instead of {before.removesuffix(' ms')}",
        ],
        words_in("lora_unsloth"): [
            f"{ms(cells, 'activation') / LAYERS:.2f} ms a layer" for cells in (unsloth, fused)
        ],
    }
    for row in published("experiment_2026-11-20.json.gz")["kernels"]["rows"]:
        if row["shape"][0] == TOKENS and row["kernel"].startswith("swiglu_"):
            panel = row["kernel"].replace("swiglu", "lora")
            said[words_in(panel)] = [f"{row['median_us'] / 1e3:.2f} ms on an H200"]
    assert [words for page, every in said.items() for words in every if words not in page] == []
    tried = re.findall(r"^\| (?:SwiGLU in the epilogue|RMSNorm and the).*", LOG, re.MULTILINE)
    assert [n for n in re.findall(r"\d[\d.,]*\d", " ".join(tried)) if n not in PAGE] == []
    seen = re.findall(r"^\| 1e-6 \| 8 \|(?:[^|]+\|){3} (0\.\d+)", SMALL_UPDATES, re.MULTILINE)[0]
    assert f"a learning rate of 1e-6 you see {float(seen):.0%} of what fp32 shows" in PAGE


def test_the_pages_example_runs(device):
    (example,) = re.findall(r"```python\n(import torch\n.*?)```", PAGE, re.DOTALL)
    small = example.replace("11008", "24").replace("2048", "16").replace('"cuda"', repr(device))
    names = {}
    exec(small, names)
    assert names["y"].shape == (4, 512, 16)
    assert all(names[adapter].grad.any() for adapter in ("Ag", "Bg", "Au", "Bu", "Ad", "Bd"))
