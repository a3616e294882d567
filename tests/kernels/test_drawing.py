"""Checks that lora.excalidraw says what the code does and that a person can edit it.

We compare the calls that docs/draw_lora.py lists with a trace of PEFT and of LoRA_MLP at full size.
The trace uses fake tensors, which compute nothing, so it takes a second. You may move things about
in Excalidraw, but the file has to keep the script's words and arrows.
"""

import ast
import hashlib
import html
import inspect
import json
import re
from collections import Counter
from importlib.util import find_spec
from itertools import combinations, pairwise
from math import hypot
from pathlib import Path

import call_panel
import draw_lora
import draw_triton
import excalidraw
import lora_times
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from fused_lora import Fusion, fuse
from fused_lora.adopt import site
from fused_mlp import fast_lora, swiglu, utils

ROOT = Path(__file__).resolve().parents[2]

DRAWING, PAGE = ROOT / "lora.excalidraw", (ROOT / "docs" / "lora_mlp.md").read_text()
SCENE = json.loads(DRAWING.read_text())
ELEMENTS = {element["id"]: element for element in SCENE["elements"]}
TYPES = ("rectangle", "text", "arrow", "frame")
BOXES, TEXTS, ARROWS, FRAMES = (
    [element for element in SCENE["elements"] if element["type"] == kind] for kind in TYPES
)


# --- a drawing that Excalidraw opens and a person can edit ----------------------------------------


def test_the_file_is_valid():
    assert (SCENE["type"], SCENE["version"]) == ("excalidraw", 2)
    assert len(ELEMENTS) == len(SCENE["elements"]), "ids are not unique"
    assert {element["type"] for element in SCENE["elements"]} == set(TYPES)
    for element in SCENE["elements"]:
        assert excalidraw.LOOK.keys() | excalidraw.STATE.keys() <= element.keys(), element["id"]
        assert {"groupIds", "boundElements", "seed", "versionNonce"} <= element.keys()
    assert not any(element["isDeleted"] for element in SCENE["elements"])


def test_texts_and_arrows_are_bound_both_ways():
    bound = {
        (element["id"], other["id"]) for element in BOXES for other in element["boundElements"]
    }
    expected = {(text["containerId"], text["id"]) for text in TEXTS if text["containerId"]}
    for arrow in ARROWS:
        for end in ("startBinding", "endBinding"):
            expected.add((arrow[end]["elementId"], arrow["id"]))
    assert bound == expected
    said = {container for container, _ in expected}
    assert all(box["id"] in said or box["id"].startswith("0 launch ") for box in BOXES)


def absolute_points(arrow):
    return [(arrow["x"] + x, arrow["y"] + y) for x, y in arrow["points"]]


def test_texts_are_inside_their_boxes():
    for text in TEXTS:
        lines = text["text"].split("\n")
        assert text["fontSize"] >= 14
        assert text["height"] >= len(lines) * text["fontSize"] * text["lineHeight"] - 0.01
        assert text["width"] >= max(map(len, lines)) * text["fontSize"] * 0.42, text["id"]
        if text["containerId"]:
            box = ELEMENTS[text["containerId"]]
            assert is_inside(text, box, 5), text["id"]  # Excalidraw's own padding
            assert (text["groupIds"], text["frameId"]) == (box["groupIds"], box["frameId"])


def is_inside(inner, outer, padding):
    return all(
        outer[at] + padding <= inner[at]
        and inner[at] + inner[to] <= outer[at] + outer[to] - padding
        for at, to in excalidraw.AXES
    )


def overlap(a, b, clearance=0.0):
    """Return True if they overlap. Touching does not count, unless a clearance is asked for."""
    return all(
        min(a[at] + a[to], b[at] + b[to]) - max(a[at], b[at]) > 0.01 - clearance
        for at, to in excalidraw.AXES
    )


def test_nothing_overlaps():
    free = [text for text in TEXTS if not text["containerId"]]
    (program,) = (
        box for box in BOXES if box["backgroundColor"] == excalidraw.STYLES["a program"][0]
    )
    inside = {e["id"] for e in BOXES if is_inside(e, program, 5)}
    boxes = [box for box in BOXES if box is not program]
    assert len(inside) == 4 and not [e for e in free if overlap(e, program)]
    assert not [e for e in boxes if e["id"] not in inside and overlap(e, program)]
    for a, b in combinations(boxes + free, 2):
        assert not overlap(a, b), (a["id"], b["id"])
    lines = []
    for arrow in ARROWS:
        ends = [arrow[end]["elementId"] for end in ("startBinding", "endBinding")]
        for (x, y), (to_x, to_y) in pairwise(absolute_points(arrow)):
            assert x == to_x or y == to_y, f"{arrow['id']} is not along the axes"
            width, height = abs(x - to_x), abs(y - to_y)
            line = dict(x=min(x, to_x), y=min(y, to_y), width=width, height=height)
            lines.append((arrow["id"], line))
            for box in boxes + free:
                assert box["id"] in ends or not overlap(line, box, 5), (arrow["id"], box["id"])
    for (a, one), (b, other) in combinations(lines, 2):
        assert a == b or not overlap(one, other, 5), (a, b)


def test_each_arrow_leads_to_where_its_result_is_read():
    """Check that arrowheads are drawn whole: Excalidraw needs a last stretch of 30."""
    for arrow in ARROWS:
        (x, y), (to_x, to_y) = absolute_points(arrow)[-2:]
        assert abs(x - to_x) + abs(y - to_y) >= 30, arrow["id"]
    panels = draw_lora.draw_panels()[1]
    arrows = [e for panel in panels for e in panel.elements.values() if e["type"] == "arrow"]
    labels = {text["containerId"]: text["text"] for text in TEXTS}
    for arrow in arrows:
        result, read = (labels[arrow[end]["elementId"]] for end in ("startBinding", "endBinding"))
        assert read in re.split(r", |\n", result), arrow["id"]


def test_each_result_says_which_calls_read_it():
    """Count some by hand: far ones, and those of a tensor that is read in halves."""
    peft, forward, autograd, backward = (
        {result.box: result.read_by for result in panel.results}
        for panel in draw_lora.draw_panels()[1]
    )
    for panel, of, read_by in (
        (peft, "result", [[9], [19], [29]]), (peft, "hidden", [[21, 22]]),
        (autograd, "dx", [[35], []]), (autograd, "dadapter", [[2, 3], [15, 16], [27, 28]]),
        (forward, "A", [[3, 5, 7]]), (forward, "z", [[5, 7]]), (forward, "output", [[11], []]),
        (backward, "hidden", [[5, 6]]), (backward, "dgate", [[8, 11, 14]]),
        (backward, "dup", [[9, 12, 15]]), (backward, "dx", [[11], [12], []]),
    ):  # fmt: skip
        assert [ns for box, ns in panel.items() if box.startswith(f"{of} from")] == read_by


def test_it_opens_at_the_overview():
    """Excalidraw opens it at 100%, around the element whose middle is nearest to the origin."""
    nearest = min(
        SCENE["elements"], key=lambda e: hypot(*(e[at] + e[to] / 2 for at, to in excalidraw.AXES))
    )
    assert nearest is FRAMES[0] and nearest["name"] == "Overview"
    assert nearest["width"] <= 1200 and nearest["height"] <= 620, "more than a laptop shows"
    assert all(
        is_inside(e, nearest, 14) for e in SCENE["elements"] if e["frameId"] == nearest["id"]
    )


# --- that says what the code does -----------------------------------------------------------------


def test_the_file_is_what_the_script_draws():
    """Compare everything but positions, which a person may change."""
    elements, _ = draw_lora.draw_panels()
    drawn = {element["id"]: element for element in elements}
    assert {id: said(element) for id, element in ELEMENTS.items()} == {
        id: said(element) for id, element in drawn.items()
    }, "run python docs/draw_lora.py"


def said(element):
    bindings = [(element.get(end) or {}).get("elementId") for end in ("startBinding", "endBinding")]
    return element.get("text"), element["backgroundColor"], element["strokeStyle"], bindings


LETTERS = {size: letter for letter, size in call_panel.DIMENSIONS.items()}
NO_WORK = {"t", "view", "_unsafe_view", "split", "split_with_sizes", "detach", "prim::device"}
NO_WORK |= {"empty", "empty_like", "new_empty"}


class Trace(TorchDispatchMode):
    """A list of (name, reads, writes) of every GPU call, in the letters of the script."""

    def __init__(self):
        super().__init__()
        self.calls, self.tensors = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.addmm.dtype_out:
            out = (kwargs or {})["out"]  # the CPU has no such matmul, and the values are fake
        else:
            out = function(*args, **(kwargs or {}))
        name = function.name().removeprefix("aten::").split(".")[0]
        if name not in NO_WORK:
            reads, writes = [tensor for tensor in args if isinstance(tensor, torch.Tensor)], [out]
            if name == "_foreach_copy_":
                writes, reads = args[:2]
            if (kwargs or {}).get("beta") == 0:  # addmm_ does not read what it overwrites
                del reads[0]
            self.record({"_to_copy": "cast"}.get(name, name), reads, writes)
        return out

    def launch(self, kernel, *tensors):
        """Replace `swiglu._launch`. The kernel's source says what it reads and writes."""
        source = inspect.getsource(kernel.fn)
        by_name = dict(zip(inspect.signature(kernel.fn).parameters, tensors, strict=False))
        read, written = (re.findall(rf"tl\.{verb}\((\w+)", source) for verb in ("load", "store"))
        self.record(kernel.fn.__name__, *([by_name[n] for n in names] for names in (read, written)))

    def record(self, name, reads, writes):
        self.calls.append((name, [letters(t) for t in reads], [letters(t) for t in writes]))
        self.tensors.append(writes)


def letters(tensor):
    rows, columns = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
    fp32 = "4" if tensor.dtype == torch.float32 else ""
    return "".join(sorted(LETTERS[rows] + LETTERS[columns])) + fp32


def memory(tensor):
    return tensor.untyped_storage()._cdata


@pytest.fixture(scope="module", params=["PEFT", "LoRA_MLP"])
def traced(request):
    """(whether it is LoRA_MLP, forward, backward, the saved activations, written last by call)"""
    fused = request.param == "LoRA_MLP"
    config = AutoConfig.for_model(**json.loads((ROOT / "configs/qwen2.5-3b.json").read_text()))
    model = torch.nn.ModuleDict({"mlp": Qwen2MLP(config).to(torch.bfloat16)})
    targets = ["gate_proj", "up_proj", "down_proj"]
    get_peft_model(model, LoraConfig(r=call_panel.DIMENSIONS["r"], target_modules=targets))
    if fused:
        fuse(model, Fusion(mlp=True))
    tokens, forward, backward, kept = call_panel.DIMENSIONS["T"], Trace(), Trace(), {}

    def keep(tensor):
        if tensor.numel() // tensor.shape[-1] == tokens:
            kept[memory(tensor)] = tensor
        return tensor

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(swiglu, "_check", lambda *args, **tensors: None)  # these are on the CPU
        patch.setattr(site, "KERNELS_WANT_A_GPU", False)
        patch.setattr(utils, "_stores_fp32", lambda a: a.dtype == torch.bfloat16)  # as on a GPU
        x = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        patch.setattr(swiglu, "_launch", forward.launch)
        with hooks, forward, torch.autocast("cpu", torch.bfloat16):
            output = model["mlp"](x)
        patch.setattr(swiglu, "_launch", backward.launch)
        trained = [x, *(weight for weight in model.parameters() if weight.requires_grad)]
        grad_output = torch.empty_like(output)
        with backward:
            torch.autograd.grad(output, trained, grad_output)
    return fused, forward, backward, kept


def as_traced(call):
    def normal(tensor):
        return "".join(sorted(tensor[:2])) + "4" * ("4" in tensor)

    return call.name, [normal(t) for t in call.reads], [normal(t) for t in call.writes]


@pytest.mark.slow("LoRA_MLP")
def test_every_call_is_drawn_with_what_it_reads_and_writes(traced):
    fused, forward, backward, _ = traced
    peft, lora_forward, peft_backward, lora_backward = draw_lora.draw_panels()[1]
    panels = (lora_forward, lora_backward) if fused else (peft, peft_backward)
    for panel, trace in zip(panels, (forward, backward), strict=True):
        drawn = {number: as_traced(call) for number, call in panel.calls.items()}
        assert drawn == dict(enumerate(trace.calls, 1))


def test_what_is_drawn_as_saved_is_saved(traced):
    fused, forward, _, kept = traced
    panel = draw_lora.draw_panels()[1][int(fused)]
    last = {memory(tensor): n for n, writes in enumerate(forward.tensors, 1) for tensor in writes}
    written = {last[key] for key in kept if key in last}
    assert {n for n, call in panel.calls.items() if "*" in "".join(call.writes)} == written
    assert sorted(size for _, size in panel.kept) == sorted(t.nbytes for t in kept.values())


def saved_names():
    """Return the names that LoRA_MLP.backward gives its saved tensors: x, gate, up, z, A, ...
    down_weight."""
    tree, names = ast.parse(inspect.getsource(fast_lora)), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            targets = [getattr(name, "id", None) for name in node.targets[0].elts]
            names.setdefault(ast.unparse(node.value), targets)
    return [name for name in names["ctx.saved_tensors"] + names["weights"] if name]


def test_every_saved_tensor_is_named():
    frames = dict(zip(draw_lora.FIGURES, FRAMES, strict=True))
    for panel in ("lora_forward", "lora_backward"):  # one saves it, the other reads it
        frame = frames[panel]["id"]
        titles = {text["text"].split("\n")[0] for text in TEXTS if text["frameId"] == frame}
        names = saved_names()
        assert names[:4] == ["x", "gate", "up", "z"] and len(names) == 12
        assert {f"{name}, saved" for name in names[:4]} <= titles
        assert set(names[4:]) <= {name for title in titles for name in title.split(", ")}


def test_the_overview_has_the_counts_of_the_trace(traced):
    """Check 29 launches and 11 launches."""
    fused, forward, backward, _ = traced
    whose = "LoRA_MLP" if fused else "PEFT"
    said = " ".join(text["text"] for text in TEXTS if text["frameId"] == FRAMES[0]["id"])
    assert f"{whose} {len(forward.calls)} launches" in said
    for phase, trace in (("forward", forward), ("backward", backward)):
        assert f"{whose}, {phase}: {len(trace.calls)}" in said
        colors = [excalidraw.STYLES[call_panel.Call(*call).kind][0] for call in trace.calls]
        name = f"0 launch {whose}, {phase} "
        squares = [box for box in BOXES if box["id"].startswith(name)]
        assert [box["backgroundColor"] for box in squares] == colors


KERNELS = dict(
    zip(
        excalidraw.CALL_KINDS,
        (r"nvjet|gemm|cutlass", r"copy_kernel|multi_tensor", r"elementwise", r"^_swiglu"),
        strict=True,
    )
)
NOT_DRAWN = r"splitKreduce|Memset"  # what cuBLAS adds to a matmul


def test_the_committed_profiles_launch_as_many():
    """Compare steps of PEFT and LoRA_MLP. They differ only in the MLPs, and by these calls."""
    cells, panels = lora_times.cells(), draw_lora.draw_panels()[1]
    peft, lora_mlp = (
        Counter(call.kind for panel in both for call in panel.calls.values())
        for both in (panels[::2], panels[1::2])
    )
    more = {kind: peft[kind] - lora_mlp[kind] for kind in excalidraw.CALL_KINDS}
    pairs = cells[lora_times.PEFT], cells[lora_times.LORA_MLP]
    assert len(pairs[0].keys() & pairs[1].keys()) == 2
    for n in pairs[0].keys() & pairs[1].keys():
        profile = Counter(pairs[0][n]["kernels_seen"])
        profile.subtract(pairs[1][n]["kernels_seen"])
        seen = Counter()
        for name, count in profile.items():
            if not re.search(NOT_DRAWN, name):
                kinds = [kind for kind, pattern in KERNELS.items() if re.search(pattern, name)]
                seen[kinds[0] if kinds else name] += count
        assert {kind: count / lora_times.LAYERS for kind, count in seen.items() if count} == more


def test_each_file_has_what_the_drawing_says_is_in_it():
    found = set()
    for text in TEXTS:
        joined = text["text"].replace(":\n", ": ").replace(",\n", ", ")
        for path, names in re.findall(r"^([\w/]+\.py): ([\w., ]+)$", joined, re.MULTILINE):
            if not path.startswith("unsloth/"):  # not installed where there is no GPU
                folder = ROOT if (ROOT / path).exists() else package_of(path)
                source = (folder / path).read_text()
                for name in re.split(r", |\.", names):
                    assert re.search(rf"(def|class) {name}\b", source), (path, name)
                    found.add((path, name))
    assert len(found) >= 12


def package_of(path):
    return Path(find_spec(path.split("/")[0]).origin).parents[1]


def test_the_readme_has_the_totals():
    peft, forward, autograd, backward = (
        call_panel.totals(panel.calls) for panel in draw_lora.draw_panels()[1]
    )
    rows = []
    for phase, ours, theirs in (("forward", forward, peft), ("backward", backward, autograd)):
        cells = zip(theirs.split("\n"), ours.split("\n"), strict=True)
        (peft_calls, lora_calls), (peft_traffic, lora_traffic) = cells
        rows.append(f"| calls in a {phase} | {peft_calls} | {lora_calls} |")
        name = f"memory traffic of a {phase} at {call_panel.DIMENSIONS['T']:,} tokens"
        rows.append(f"| {name} | {peft_traffic} | {lora_traffic} |")
    assert [row for row in rows if row not in PAGE] == []


def test_the_code_beside_the_boxes_is_that_of_the_page_and_the_kernel():
    """Compare the code with the page, which test_documents runs."""
    page = "".join(re.sub(r"#.*", "", PAGE).split())
    for code, *_ in draw_lora.FORWARD + draw_lora.BACKWARD:
        assert "".join(code.split()) in page, code
    kernel = swiglu._swiglu_forward_kernel.fn
    source = inspect.getsource(kernel).replace("* BLOCK", "* 2048").replace("0, BLOCK", "0, 2048")
    source = re.sub(r"\.to\((tl\.\w+|hidden_ptr\S+_ty)\)|, mask=mask", "", source)
    (function,) = ast.parse(source).body
    for code, _ in draw_triton.STEPS:
        assert statements(ast.parse(code)) <= statements(function), code
    assert draw_triton.LAUNCH.startswith(f"{kernel.__name__}[({draw_triton.PROGRAMS},)]")
    assert draw_triton.TILE == swiglu.BLOCK_ELEMENTS == 2048


def statements(tree):
    return set(map(ast.unparse, tree.body))


@pytest.mark.parametrize("figure, frame", [*zip(draw_lora.FIGURES, FRAMES, strict=True)])
def test_each_svg_is_made_from_its_panel(figure, frame):
    assert f"](figures/{figure}.svg)" in PAGE
    svg = (ROOT / "docs" / "figures" / f"{figure}.svg").read_text()
    stamp = hashlib.sha256(DRAWING.read_bytes()).hexdigest()
    assert f"<!-- lora.excalidraw sha256 {stamp} -->" in svg, "export it again: see draw_lora.py"
    texts = [text["text"] for text in TEXTS if text["frameId"] == frame["id"]]
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {line for text in texts for line in text.split("\n")} <= set(map(html.unescape, shown))
