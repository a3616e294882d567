"""README.md and docs/*.md: their generated parts are those of the data, and so is what the README
says in words; its code runs."""

import re
import shutil
from math import ceil
from pathlib import Path
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F
from cases import example_results as example
from cases.reference import random

from bench import results
from bench.published import SETTINGS
from fused_mlp import FrozenMLP, LoRA_MLP
from fused_mlp.swiglu import swiglu_backward, swiglu_forward
from fused_mlp.utils import cast_adapters
from report import commands, committed, headline
from report.fp8_training import ends
from report.kernel_time import bars
from report.padding import own_ms
from report.small_adapters import shares
from report.statistics import rows_by_variant_and_length, summarize
from report.wording import release_of
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
    parts = committed.generated_parts(runs[0])
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("runs"))
    shutil.copy(ROOT / "README.md", tmp_path)
    assert committed.update_pages(tmp_path, parts) == []


BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"


def test_a_part_goes_between_its_markers_and_nothing_else_changes(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("as it is")
    page = tmp_path / "docs" / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert committed.update_pages(tmp_path, {"table": "new"}) == [page]
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert committed.update_pages(tmp_path, {"table": "new"}) == []


@pytest.mark.parametrize(
    "text", ["", BEGIN, END + BEGIN, f"{BEGIN}{END}{BEGIN}{END}"],
    ids=["no place", "no end", "end first", "two places"],
)  # fmt: skip
def test_a_part_without_one_place_of_its_own_is_refused_and_nothing_written(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(ValueError, match="want <!-- table:begin --> and then <!-- table:end -->"):
        committed.update_pages(tmp_path, {"table": "new"})
    assert (tmp_path / "README.md").read_text() == text


def test_a_quick_run_says_its_rows_and_how_to_add_them():
    run = example.run(("vanilla_peft", "fused_mlp"), (64,), rounds=3)
    said = commands.to_contribute(run, Path("runs/mine/results.json"))
    (row,) = (line for line in said.splitlines() if line.startswith("| NVIDIA H200 | **64** | "))
    assert row in headline.measured_section({"": run})
    assert "gzip -c runs/mine/results.json > docs/runs/nvidia-h200/quick.json.gz" in said


def over_published(model):
    """Our fastest variant in bf16, in others' setting, over their best number in bf16."""
    run = results.load(ROOT / "docs" / "runs" / "h100" / f"published-{model}.json.gz")
    rows = [row for row in summarize(run) if row.tokens_per_s and variant_of(row.variant).is_ours]
    claims = [claim for claim in SETTINGS[model].claims if "FP8" not in claim.by]
    theirs = max(claim.tokens_per_s for claim in claims)
    return max(row.tokens_per_s for row in rows) / theirs


def whole_chats():
    """The least and the most percent of padding, how many times as many tokens a second as vanilla
    PEFT in padded rows it and everything fused train as documents, and how many times as many as
    Unsloth by the GPU's time."""
    shares, packed, over_padded, over_unsloth = [], [], [], []
    for group in committed.chat_groups():
        ours = group.documents["fused_layer_graph_offload"]
        over_unsloth.append(own_ms(group.documents["full_unsloth"]) / own_ms(ours))
        if group.padded:
            padded = group.padded["vanilla_peft"].tokens_per_s
            shares.append(100 * group.padding)
            packed.append(group.documents["vanilla_peft_varlen"].tokens_per_s / padded)
            over_padded.append(ours.tokens_per_s / padded)
    found = shares, packed, over_padded, over_unsloth
    return [end(one) for one in found for end in (min, max)]


def over_the_floor():
    """Steps of 512 tokens without checkpointing in bf16 and in FP8."""
    rows = rows_by_variant_and_length(results.load(H200 / "fp8_lengths.json.gz"))
    kinds = "fused_layer_graph_no_checkpointing", "fp8_lm_head_graph_no_checkpointing"
    return [rows[kind, 512].ratio_to_floor for kind in kinds]


def above_measured(estimated):
    """By how many percent an H100's estimates lie above what was measured there."""
    rows = rows_by_variant_and_length(
        results.load(ROOT / "docs" / "runs" / "h100" / "experiment.json.gz")
    )
    measured = [rows[variant, 512].speedup for variant in headline.ANSWERS]
    off = [100 * (ours / real - 1) for ours, real in zip(estimated, measured, strict=True)]
    return min(off), max(off)


def above_bf16():
    """How far losses of training in FP8, lm_head too, end above those in bf16."""
    return (ends(committed.loaded_training())["trained"][-1].above_first,)


def after_small_updates():
    """Shares of fp32's change after 8 updates: the least and the most in %, compiled
    PEFT's, and whole layers' in %."""
    found = committed.loaded_small_adapters()[0]
    (adapter,) = (one for one in found.adapters if (one.rate, one.steps) == (1e-6, 8))
    variants = ("vanilla_peft", "fused_mlp", "full_unsloth", "compiled_peft", "fused_layer")
    means = [fmean(shares(found, f"{one}_no_checkpointing", adapter)) for one in variants]
    *small, compiled, layers = means
    return 100 * min(small), 100 * max(small), compiled, 100 * layers


def test_the_readmes_numbers_are_those_of_the_data(runs):
    """Every number with a unit in its words, where it says it and what it should be."""
    run, suite = runs
    rows = rows_by_variant_and_length(run)
    ms = {key: row.median_step_ms for key, row in rows.items()}
    suite_rows = rows_by_variant_and_length(suite)
    kinds = bars(run, 512)[0].kernel_ms
    vanilla, again = ms["vanilla_peft", 512], results.load(H200 / "experiment_2026-11-24.json.gz")
    lengths = run.experiment.seq_lens
    mlp = [rows["vanilla_peft", n].gpu_ms / rows["fused_mlp", n].gpu_ms for n in lengths]
    estimated = {
        card: [float(cell.strip(" ×")) for cell in line.split("|")[6:9]]
        for card in ("A100", "H100")
        for line in headline.expected_section(run, *committed.index().cards).splitlines()
        if card in line
    }
    worst = max(
        abs(ms[summary.variant, n] / summary.median_step_ms - 1)
        for summary in summarize(again)
        if (n := summary.seq_len) >= 256
    )
    busy = [
        [cell.gpu_busy_ms for cell in run.cells_of(variant, n, "ok")]
        for variant in (headline.BASELINE, *headline.ANSWERS)
        for n in (64, 128)
    ]
    said = {
        r"repeats within (\d+)%": (ceil(100 * max(max(b) / min(b) - 1 for b in busy)),),
        r"takes (\d+) ms off vanilla PEFT's (\d+); all of Unsloth takes (\d+)": (
            vanilla - ms["fused_mlp", 512], vanilla, vanilla - ms["full_unsloth", 512],
        ),
        r"of (\d+) ms, (\d+) are copies and casts, and (\d+) scale .*\s.* take another (\d+)": (
            vanilla, kinds["copy"], kinds["adapter"], kinds["rope"] + kinds["norm"],
        ),
        r"computes for (\d+) of (\d+) ms": (
            rows["vanilla_peft", 64].gpu_ms, ms["vanilla_peft", 64],
        ),
        r"the peak to ([\d.]+) GiB; with the loss in chunks, .* it is ([\d.]+)\.": (
            suite_rows["vanilla_peft", 512].peak_gib,
            suite_rows["fused_cross_entropy", 512].peak_gib,
        ),
        r"the fused MLP gains ([\d.]+) to ([\d.]+)× at every length": (min(mlp), max(mlp)),
        r"lm_head take (\d+) ms .* takes ([\d.]+) times\s+that": (
            run.floor[512].floor_ms, rows["fused_layer_graph_offload", 512].ratio_to_floor,
        ),
        r"without it ([\d.]+) times.* takes ([\d.]+) of that floor": over_the_floor(),
        r"Where (\d+) to (\d+)% .* ([\d.]+) to ([\d.]+) times .* ([\d.]+) to ([\d.]+) times"
        r".*\s+.* is ([\d.]+) to ([\d.]+) times as fast": whole_chats(),
        r"is ([\d.]+)× as fast as vanilla PEFT at 512 tokens, in ([\d.]+) GiB": (
            suite_rows["fused_layer", 512].speedup, suite_rows["fused_layer", 512].peak_gib,
        ),
        r"graph: ([\d.]+) times the tokens .*, ([\d.]+) times what Surogate": (
            over_published("qwen2.5-7b"), over_published("qwen3-8b"),
        ),
        r"loss ends ([\d.]+) above": above_bf16(),
        r"the fused MLP gives ([\d.]+)×, everything fused ([\d.]+)×": estimated["A100"][::2],
        r"such speedups were estimated (\d+) to (\d+)% too high": above_measured(estimated["H100"]),
        r"rate of 1e-6, .* show (\d+) to (\d+)% of what fp32 .* "
        r"compiled PEFT ([\d.]+) times as much\.\s+Whole .* (\d+)%": after_small_updates(),
        r"On other H200s .* within (\d+)%, at 256 and 512": (ceil(100 * worst),),
    }  # fmt: skip
    left = PROSE
    for pattern, values in said.items():
        found = re.search(pattern, left)
        assert found, pattern
        for number, value in zip(found.groups(), values, strict=True):
            digits = len(number.partition(".")[2])
            assert float(number.replace(",", "")) == round(value, digits), f"{found[0]}: {value}"
        left = left.replace(found[0], "")
    # what a run wants of a card, what an environment takes (no run), and one MLP's numbers, which
    # test_counts and test_drawing hold
    others = {"48 GB", "5.4 GB", "80GB", "7 GB", "4.5 GB", "0.79 GB", "95%"}
    assert set(re.findall(r"\d[\d.,]* ?(?:ms|GiB|GB|×|%)", left)) == others


def test_the_results_page_names_releases_and_times_of_its_runs(runs):
    run, suite = runs
    earlier = results.load(H200 / "experiment_2026-11-20.json.gz")
    page = (ROOT / "docs" / "results.md").read_text()
    for pattern, measured in (
        (r"In this run (\S+) takes (\d+) ms and ([\d.]+) GiB", run),
        (r"(\S+) took \[(\d+) ms and ([\d.]+) GiB\]\(runs/h200/experiment_2026-11-20", earlier),
    ):
        row = rows_by_variant_and_length(measured)["full_unsloth", 512]
        values = release_of("unsloth", measured), f"{row.median_step_ms:.0f}", f"{row.peak_gib:.1f}"
        assert re.findall(pattern, page) == [values]
    assert f"from the suite, with Unsloth {release_of('unsloth', suite)}:" in page


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
              "swiglu_backward": swiglu_backward, "cast_adapters": cast_adapters,
              "A": torch.cat([names["Ag"], names["Au"]])}  # fmt: skip
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
