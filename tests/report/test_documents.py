"""README.md and docs/*.md: their generated parts are those of the data, and so is what the README
says in words; its code runs."""

import re
import shutil
from math import ceil
from pathlib import Path
from statistics import fmean

import example_results as example
import pytest
import torch
import torch.nn.functional as F
from reference import random

from bench import results
from bench.published import SETTINGS
from bench.training_records import load_training
from fused_mlp import FrozenMLP, LoRA_MLP
from fused_mlp.swiglu import swiglu_backward, swiglu_forward
from report import commands, documents, headline
from report.fp8_training import ends
from report.gpus import expected_section, measured_section
from report.kinds import bars
from report.statistics import summarize
from variants import variant_of

ROOT = Path(__file__).resolve().parents[2]
H200 = ROOT / "docs" / "runs" / "h200"
README = (ROOT / "README.md").read_text()
GENERATED_OR_CODE = r"<!-- (\w+):begin -->.*?<!-- \1:end -->|```.*?```"
PROSE = re.sub(GENERATED_OR_CODE, "", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def runs():
    return [results.load(path) for path in (ROOT / "results.json", H200 / "suite.json.gz")]


def test_the_generated_parts_are_those_of_the_data(tmp_path, runs):
    parts = commands.generated_parts(*runs)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("runs"))
    shutil.copy(ROOT / "README.md", tmp_path)
    assert documents.update(tmp_path, parts) == []


BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"


def test_a_part_goes_between_its_markers_and_nothing_else_changes(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("as it is")
    page = tmp_path / "docs" / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert documents.update(tmp_path, {"table": "new"}) == [page]
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert documents.update(tmp_path, {"table": "new"}) == []


@pytest.mark.parametrize(
    "text", ["", BEGIN, END + BEGIN, f"{BEGIN}{END}{BEGIN}{END}"],
    ids=["no place", "no end", "end first", "two places"],
)  # fmt: skip
def test_a_part_without_one_place_of_its_own_is_refused_and_nothing_written(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(ValueError, match="want <!-- table:begin --> and then <!-- table:end -->"):
        documents.update(tmp_path, {"table": "new"})
    assert (tmp_path / "README.md").read_text() == text


def test_a_quick_run_says_its_rows_and_how_to_add_them():
    run = example.run(("vanilla_peft", "fused_mlp"), (64,), rounds=3)
    said = commands.to_contribute(run, Path("runs/mine/results.json"))
    (row,) = (line for line in said.splitlines() if line.startswith("| NVIDIA H200 | 64 | "))
    assert row in measured_section([run])
    assert "gzip -c runs/mine/results.json > docs/runs/nvidia-h200/quick.json.gz" in said


def published(model, kind=""):
    """The tokens a second of our fastest variant in others' setting, and over their best number."""
    row = fastest(model, kind)
    return row.tokens_per_s, row.tokens_per_s / SETTINGS[model].claims[0].tokens_per_s


def fastest(model, kind=""):
    run = results.load(ROOT / "docs" / "runs" / "h100" / f"published-{model}{kind}.json.gz")
    rows = [row for row in summarize(run) if row.tokens_per_s and variant_of(row.variant).is_ours]
    return max(rows, key=lambda row: row.tokens_per_s)


def whole_chats():
    """The tokens a second of everything fused on documents of two data sets, and how many times as
    fast as Unsloth it is by the GPU's time, the least first."""
    speeds, times = [], []
    for name in ("dolly", "sharegpt"):
        run = results.load(ROOT / "docs" / "runs" / "h100" / f"documents-{name}.json.gz")
        rows = {row.variant: row for row in summarize(run)}
        ours = rows["fused_layer_graph_offload"]
        speeds.append(ours.tokens_per_s)
        times.append(rows["full_unsloth"].gpu_ms / ours.gpu_ms)
    return *sorted(speeds), *sorted(times)


def above_bf16():
    """How far losses of training in FP8 end above those in bf16: with FP8 layers, and lm_head."""
    training = load_training(ROOT / "docs" / "runs" / "h100" / "fp8_training.json.gz")
    return [fmean(one.apart) for one in [*ends(training)["trained"].values()][1:]]


def test_the_readmes_numbers_are_those_of_the_data(runs):
    """Every number with a unit in its words, where it says it and what it should be."""
    run, suite = runs
    rows = headline.rows_of(run)
    ms = {key: row.median_step_ms for key, row in rows.items()}
    suite_rows = headline.rows_of(suite)
    kinds = bars(run, 512)[0].kernel_ms
    vanilla, again = ms["vanilla_peft", 512], results.load(H200 / "second_run.json.gz")
    a100 = next(line for line in expected_section(run).splitlines() if "A100" in line).split("|")
    worst = max(
        abs(ms[variant, n] / summary.median_step_ms - 1)
        for summary in summarize(again)
        if (n := summary.seq_len) >= 256
        and (variant := summary.variant) != "full_unsloth"  # another release there
    )
    busy = [
        [cell.gpu_busy_ms for cell in run.cells_of(variant, n, "ok")]
        for variant in (headline.BASELINE, *headline.ANSWERS)
        for n in (64, 128)
    ]
    said = {
        r"repeats within (\d+)%": (ceil(100 * max(max(b) / min(b) - 1 for b in busy)),),
        r"takes (\d+) ms off vanilla's (\d+), all of Unsloth takes (\d+)": (
            vanilla - ms["fused_mlp", 512], vanilla, vanilla - ms["full_unsloth", 512],
        ),
        r"copies and casts are\s+(\d+) ms of its step, scaling and adding (\d+)\.": (
            kinds["copy"], kinds["adapter"],
        ),
        r"computes for (\d+) of (\d+) ms": (
            rows["vanilla_peft", 64].gpu_ms, ms["vanilla_peft", 64],
        ),
        r"make it ([\d.]+) GiB\. With a loss in chunks alone it is ([\d.]+)\.": (
            suite_rows["vanilla_peft", 512].peak_gib,
            suite_rows["fused_cross_entropy", 512].peak_gib,
        ),
        r"alone take ([\d.]+) ms .*\s+.* \(([\d.]+) GiB\), take ([\d.]+)\.": (
            suite.floor[512].floor_ms,
            suite_rows["fused_layer_graph_no_checkpointing", 512].peak_gib,
            suite_rows["fused_layer_graph_no_checkpointing", 512].median_step_ms,
        ),
        r"on whole chats at (\d+,\d+) to (\d+,\d+), \[([\d.]+) to ([\d.]+) times Unsloth's by":
            whole_chats(),
        r"are ([\d.]+)× as fast as plain PEFT at 512 tokens, in ([\d.]+) GiB": (
            suite_rows["fused_layer", 512].speedup, suite_rows["fused_layer", 512].peak_gib,
        ),
        r"Qwen2.5-7B at (\d+,\d+) tokens/s,\s+([\d.]+) times": published("qwen2.5-7b"),
        r"Qwen3-8B at (\d+,\d+), ([\d.]+) times": published("qwen3-8b"),
        r"takes ([\d.]+) of its own floor in bf16: (\d+,\d+) tokens/s .*, ([\d.]+)\s+times": (
            fastest("qwen3-8b", "-fp8").ratio_to_floor, *published("qwen3-8b", "-fp8"),
        ),
        r"the loss is ([\d.]+) above bf16's,\s+with lm_head \[([\d.]+)\]": above_bf16(),
        r"expect at most ([\d.]+)× for the MLP and ([\d.]+)×": (
            float(a100[6].strip(" ×")), float(a100[8].strip(" ×")),
        ),
        r"within (\d+)% at 256 and 512": (ceil(100 * worst),),
    }  # fmt: skip
    left = PROSE
    for pattern, values in said.items():
        found = re.search(pattern, left)
        assert found, pattern
        for number, value in zip(found.groups(), values, strict=True):
            digits = len(number.partition(".")[2])
            assert float(number.replace(",", "")) == round(value, digits), f"{found[0]}: {value}"
        left = left.replace(found[0], "")
    # what a run wants of a card, and one MLP's numbers, which test_counts and test_drawing hold
    others = {"48 GB", "80GB", "7 GB", "11.4 GB", "0.79 GB"}
    assert set(re.findall(r"\d[\d.,]* ?(?:ms|GiB|GB|×|%)", left)) == others


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def python_blocks(path, containing):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    return [block for block in blocks if containing in block]


@pytest.mark.parametrize("forward_in", ["README.md", "docs/lora_mlp.md"])
def test_the_code_that_explains_lora_mlp_computes_what_it_does(forward_in, device):
    T, hidden_size, wide, r, s = 9, 16, 24, 4, 0.5
    shapes = {"x": (T, hidden_size), "dy": (T, hidden_size), "Wg": (wide, hidden_size),
              "Wu": (wide, hidden_size), "Wd": (hidden_size, wide), "Ag": (r, hidden_size),
              "Au": (r, hidden_size), "Ad": (r, wide), "Bg": (wide, r), "Bu": (wide, r),
              "Bd": (hidden_size, r)}  # fmt: skip
    names = {
        n: random(*shape, seed=i, device=device) for i, (n, shape) in enumerate(shapes.items())
    }
    fused = dict(names)
    names |= {"r": r, "s": s, "torch": torch, "F": F, "swiglu_forward": swiglu_forward,
              "swiglu_backward": swiglu_backward}  # fmt: skip
    if forward_in == "README.md":
        (pefts,) = python_blocks("README.md", "def projection")
        theirs = dict(names)
        exec(pefts, theirs)
    (forward,) = python_blocks(forward_in, "z = x @")
    (backward,) = python_blocks("docs/lora_mlp.md", "dz =")
    exec(forward + backward, names)

    trained = ["x", "Ag", "Bg", "Au", "Bu", "Ad", "Bd"]
    leaves = [fused[name].requires_grad_() for name in trained]
    output = LoRA_MLP.apply(*leaves, FrozenMLP(fused["Wg"], fused["Wu"], fused["Wd"], s, s, s))
    torch.testing.assert_close(names["output"], output.detach())
    if forward_in == "README.md":
        torch.testing.assert_close(theirs["output"].detach(), output.detach())
    for name, gradient in zip(
        trained, torch.autograd.grad(output, leaves, fused["dy"]), strict=True
    ):
        torch.testing.assert_close(names["d" + name], gradient)
