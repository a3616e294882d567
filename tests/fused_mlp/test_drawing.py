"""Checks that lora.excalidraw, its figures and their page say what the code does and what was
measured. Whoever edits the drawing may move anything anywhere inside its frame.
"""

import ast
import html
import inspect
import json
import re
from statistics import fmean

import pytest
from test_counts import (
    COUNTS,
    LAYERS,
    PAGE,
    ROOT,
    TOKENS,
    cells_by_round,
    memory,
    pairs_of_cells,
    published,
    traced,
)

from fused_mlp import swiglu, utils

ELEMENTS = json.loads((ROOT / "lora.excalidraw").read_text())["elements"]
FRAMES = {one["name"]: one for one in ELEMENTS if one["type"] == "frame"}
INSIDE = {
    name: [one for one in ELEMENTS if one["frameId"] == frame["id"]]
    for name, frame in FRAMES.items()
}
TEXTS = {name: [one["text"] for one in inside if "text" in one] for name, inside in INSIDE.items()}
WORDS = {name: " ".join(texts).replace("\n", " ") for name, texts in TEXTS.items()}
PANELS = {
    "PEFT": {"forward": "lora_peft", "backward": "lora_peft_backward"},
    "LoRA_MLP": {"forward": "lora_forward", "backward": "lora_backward"},
}
LOG = (ROOT / "dev" / "LOG.md").read_text()
COLORS = {"#c4e8dc": "GEMM", "#e5dbff": "cast", "#f1f3f5": "pass", "#ffc2a1": "Triton"}


@pytest.mark.parametrize("name", FRAMES)
def test_a_figure_has_its_frames_words_in_letters_that_a_phone_shows(name):
    svg = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
    shown = {html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg)}
    assert shown == {line for text in TEXTS[name] for line in text.split("\n")}, "export it again"
    assert f'<img src="figures/{name}.svg" width="420"' in PAGE
    assert FRAMES[name]["width"] == 420
    assert min(one["fontSize"] for one in INSIDE[name] if "text" in one) >= 16


def test_the_names_and_the_kernel_are_those_of_the_code():
    texts = "\n".join(text for texts in TEXTS.values() for text in texts)
    files = re.findall(r"^fused_mlp/(\w+)\.py: (.+)$", texts, re.MULTILINE)
    assert len(files) > 8
    for module, names in files:
        for name in names.split(", "):
            assert hasattr({"utils": utils, "swiglu": swiglu}[module], name), (module, name)
    launch, *code = [one["text"] for one in INSIDE["lora_triton"] if one.get("fontFamily") == 3]
    assert launch.startswith(f"{swiglu._swiglu_forward_kernel.fn.__name__}[(88064,)]")
    assert 88064 * swiglu.BLOCK_ELEMENTS == 16384 * 11008
    source = inspect.getsource(swiglu._swiglu_forward_kernel.fn)
    source = re.sub(r"\.to\((tl\.\w+|hidden_ptr\S+_ty)\)|, mask=mask", "", source)
    source = re.sub(r"BLOCK(?!:)", str(swiglu.BLOCK_ELEMENTS), source)
    shown, kernel = (
        {ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)}
        for text in ("\n".join(code), source)
    )
    assert len(shown) == 5 and shown <= kernel


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
            first, last = numbers[1], numbers[2] or numbers[1]
            yield int(first), int(last), box["backgroundColor"], beside


def sized(count):
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


@pytest.mark.slow("LoRA_MLP")
@pytest.mark.parametrize("whose", COUNTS)
def test_each_launch_has_its_bytes_and_kind_and_what_it_saves(whose):
    phases, kept = traced(whose)
    for phase, launches in phases.items():
        panel, numbers, saved = PANELS[whose][phase], [], set()
        for first, last, color, beside in boxes_of_launches(panel):
            assert sized(sum(one.moved_bytes for one in launches[first - 1 : last])) in beside
            assert first != last or COLORS[color] == launches[first - 1].kind
            numbers += range(first, last + 1)
            saved |= {first} if "kept" in beside else set()
        assert sorted(numbers) == [*range(1, len(launches) + 1)]
        total = f"{len(launches)} launches, {sum(one.moved_bytes for one in launches) / 1e9:.1f} GB"
        assert total in TEXTS[panel]
        assert whose == "PEFT" or total.replace(", ", "\n") in TEXTS["lora_unsloth"]
        row = f"{whose}, {phase}: {len(launches)}"
        assert row in TEXTS["lora_overview"]
        squares = [one for one in INSIDE["lora_overview"] if f"launch {row} " in one["id"]]
        assert [COLORS[one["backgroundColor"]] for one in squares] == [one.kind for one in launches]
        if phase == "forward":
            writers = {memory(t): n for n, one in enumerate(launches, 1) for t in one.writes}
            written = {writers[key] for key in kept if key in writers}
            assert saved == (written if whose == "LoRA_MLP" else written & {*range(1, 11)})
            assert f"Kept: {sum(t.nbytes for t in kept.values()) / 1e9:.2f} GB" in WORDS[panel]


def test_the_times_are_those_of_the_records():
    """Compare GPU time of steps on an H200 that differ only in the MLP, and of kernels alone."""
    peft, fused = zip(*pairs_of_cells(), strict=True)
    unsloth = cells_by_round("full_unsloth").values()

    def ms(cells, kind):
        return fmean(cell["kernel_ms"].get(kind, cell["gpu_busy_ms"]) for cell in cells)

    kinds = "copy", "adapter", "activation", "matmul", "all"
    less = [f"{(ms(peft, kind) - ms(fused, kind)) / LAYERS:.1f}" for kind in kinds]
    before, after = (
        [f"{ms(cells, 'all'):.0f}", f"{cells[0]['peak_allocated_bytes'] / 2**30:.1f}"]
        for cells in (peft, fused)
    )
    alone = {
        row["kernel"]: f"{row['median_us'] / 1e3:.2f} ms on an H200"
        for row in published("experiment_2026-11-20.json.gz")["kernels"]["rows"]
        if row["shape"][0] == TOKENS
    }
    page = [
        f"{less[4]} ms of GPU time a layer: a step of {LAYERS} layers takes {after[0]} ms "
        f"instead of {before[0]}. Casts are {less[0]} ms of that, scaling and adding {less[1]}, "
        f"silu and the product {less[2]}.",
        f"The GEMMs take {less[3].strip('-')} ms more",
        f"from {before[1]} GiB to {after[1]}",
    ]
    picture = [
        f"casts {less[0]} scaling, adding {less[1]} silu, product {less[2]} "
        f"GEMMs {less[3].strip('-')} less",
        f"{less[4]} ms a layer",
        f"{after[0]} ms for a step instead of {before[0]}",
    ]
    both = [f"{ms(cells, 'activation') / LAYERS:.2f} ms a layer" for cells in (unsloth, fused)]
    assert [words for words in page if words not in PAGE] == []
    assert [words for words in picture if words not in WORDS["lora_time"]] == []
    assert [words for words in both if words not in WORDS["lora_unsloth"]] == []
    assert alone["swiglu_forward"] in WORDS["lora_forward"]
    assert alone["swiglu_backward"] in WORDS["lora_backward"]
    (row,) = re.findall(r"^\| SwiGLU in the epilogue.*", LOG, re.MULTILINE)
    tried = re.findall(r"\d[\d.,]+\d", row)
    assert len(tried) == 4 and [number for number in tried if number not in PAGE] == []


def test_the_pages_example_runs(device):
    (example,) = re.findall(r"```python\n(import torch\n.*?)```", PAGE, re.DOTALL)
    small = example.replace("11008", "24").replace("2048", "16").replace('"cuda"', repr(device))
    names = {}
    exec(small, names)
    assert names["y"].shape == (4, 512, 16)
    adapters = names["gate"] + names["up"] + names["down"]
    assert all(adapter.grad.any() for adapter in adapters)
