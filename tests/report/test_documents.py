"""README.md and docs/*.md: their generated parts and the README's numbers match the data, and their
code runs."""

import gzip
import json
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
from fused_mlp import FrozenMLP, LoRA_MLP
from fused_mlp.swiglu import swiglu_backward, swiglu_forward
from fused_mlp.utils import cast_adapters
from report import commands, committed, headline
from report.kernel_time import bars
from report.statistics import by_gpu_time, rows_by_variant_and_length, summarize
from report.wording import release_of

ROOT = Path(__file__).resolve().parents[2]
H100, H200 = (ROOT / "docs" / "runs" / card for card in ("h100", "h200"))
README = (ROOT / "README.md").read_text()
GENERATED_OR_CODE = r"<!-- (\w+):begin -->.*?<!-- \1:end -->|```.*?```"
PROSE = re.sub(GENERATED_OR_CODE, "", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def runs():
    return [results.load(path) for path in (ROOT / "results.json", H200 / "suite.json.gz")]


def test_the_generated_parts_are_those_of_the_data(tmp_path, runs):
    parts = committed.generated_parts(runs[0])
    for docs in ("docs", "fused_lora/docs"):
        shutil.copytree(ROOT / docs, tmp_path / docs, ignore=shutil.ignore_patterns("runs"))
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


def below_measured(estimated):
    """Return by how many percent an H200's estimates are below its speedups in GPU time."""
    rows = by_gpu_time(summarize(results.load(H200 / "experiment.json.gz")))
    measured = {row.variant: row.speedup for row in rows if row.seq_len == 512}
    return [100 * (1 - estimate / measured[one])
            for one, estimate in zip(headline.ANSWERS, estimated, strict=True)]  # fmt: skip


def after_small_updates():
    """Return shares of fp32's change after 8 updates, in %: the smallest and the largest, of
    compiled PEFT and of whole layers."""
    found = json.loads(gzip.decompress((H100 / "small_adapters.json.gz").read_bytes()))
    after = {"rate": 1e-6, "steps": 8, "is_dpo": False}
    along = {one["variant"]: one["along"] for one in found["seen"] if one["adapter"] == after}
    exact = along["vanilla_peft_fp32"]
    *small, compiled, layers = (
        fmean(a / b for a, b in zip(along[f"{one}_no_checkpointing"], exact, strict=True))
        for one in ("vanilla_peft", "fused_mlp", "full_unsloth", "compiled_peft", "fused_layer")
    )
    return tuple(100 * share for share in (min(small), max(small), compiled, layers))


def minutes(path):
    """Return how long an H100's run took, and how long an A100 should take."""
    run = results.load(H100 / path)
    stages, known = run.stages_s, committed.index()
    whatever_the_card = stages.weights + stages.start + stages.other
    by_the_card = stages.floor + stages.warm_up + stages.steps + stages.profile
    published = results.load(ROOT / "results.json")
    ms = headline.expected_ms(published, 512, known.cards[0], known.card("A100"))
    slower = ms["vanilla_peft"] / rows_by_variant_and_length(run)["vanilla_peft", 512].gpu_ms
    return (whatever_the_card + by_the_card) / 60, (whatever_the_card + slower * by_the_card) / 60


def estimated_speedups(run, name):
    """Return the estimates as docs/gpus.md prints them."""
    known = committed.index()
    ms = headline.expected_ms(run, 512, known.cards[0], known.card(name))
    return [round(ms["vanilla_peft"] / ms[variant], 2) for variant in headline.ANSWERS]


def test_the_readmes_numbers_are_those_of_the_data(runs):
    """Check every number with a unit in the README: where it stands, and what it should be."""
    run, suite = runs
    rows, suite_rows = rows_by_variant_and_length(run), rows_by_variant_and_length(suite)
    speedup = {key: row.speedup for key, row in rows.items()}
    ms = {key: row.median_step_ms for key, row in rows.items()}
    lengths, everything = run.experiment.seq_lens, "fused_layer_graph_offload"
    unsloth = [row.speedup for row in by_gpu_time(rows.values()) if row.variant == "full_unsloth"]
    vanilla, mlp, theirs, _ = (bar.kernel_ms for bar in bars(run, 512))
    again = results.load(H100 / "experiment_2026-11-26.json.gz")
    slower = {
        (row.variant, n): 100 * (row.median_step_ms / ms[row.variant, n] - 1)
        for row in summarize(again)
        if (n := row.seq_len) >= 256 and row.variant != "full_unsloth"  # of an older release
    }
    busy = [
        [cell.gpu_busy_ms for cell in run.cells_of(variant, n, "ok")]
        for variant in (headline.BASELINE, *headline.ANSWERS)
        for n in lengths
    ]
    floor = run.floor[512].floor_ms + run.floor[512].recomputation_ms
    reserved = [
        cell.peak_reserved_bytes for v in headline.SHOWN for cell in run.cells_of(v, 128, "ok")
    ]
    (quick, quick_a100), (whole, whole_a100) = map(
        minutes, ("quick.json.gz", "experiment_2026-11-26.json.gz")
    )
    compiled, newest = (suite_rows[v, 512] for v in ("compiled_peft", "full_unsloth"))
    said = {
        r"fused is ([\d.]+)× faster at 512 tokens and, .* up to (\d+)× at 64": (
            speedup[everything, 512], speedup[everything, 64],
        ),
        r"length: about ([\d.]+)× up to 128 tokens, ([\d.]+)× from 256 on": [
            fmean(speedup["full_unsloth", n] for n in some) for some in (lengths[:2], lengths[2:])
        ],
        r"in GPU time it stays between ([\d.]+)× and ([\d.]+)×": (min(unsloth), max(unsloth)),
        r"computes for (\d+) ms and waits for Python for (\d+)": (
            rows["vanilla_peft", 64].gpu_ms, bars(run, 64)[0].idle_ms,
        ),
        r"data sheet predicts ([\d.]+)×": estimated_speedups(run, "A100")[:1],
        r"take (\d+) of vanilla PEFT's (\d+) ms, .* about (\d+)\. The .* removes\s+(\d+) ms": (
            around(vanilla), rows["vanilla_peft", 512].gpu_ms,
            vanilla["matmul"] + vanilla["attention"] - floor, around(vanilla) - around(mlp),
        ),
        r"on an H200, both give ([\d.]+)×\. .* allocates ([\d.]+) GiB, Unsloth ([\d.]+)\.": (
            fmean((compiled.speedup, newest.speedup)), compiled.peak_gib, newest.peak_gib,
        ),
        r"everything fused takes (\d+) ms, and the GPU computes for (\d+)": (
            ms[everything, 64], rows[everything, 64].gpu_ms,
        ),
        r"the peak falls from ([\d.]+) GiB to ([\d.]+)\.": (
            suite_rows["vanilla_peft", 512].peak_gib,
            suite_rows["fused_cross_entropy", 512].peak_gib,
        ),
        r"experiment takes (\d+) minutes on an H100": (whole,),
        r"predictions for an H200 were up to (\d+)% too low": (
            max(below_measured(estimated_speedups(run, "H200"))),
        ),
        r"about (\d+) minutes, the whole experiment (\d+)": (quick_a100, whole_a100),
        r"our rows of 128, where PyTorch reserved at most ([\d.]+) GiB": (
            max(reserved) / 2**30,
        ),
        r"\((\d+) ms of vanilla PEFT's step at 512 tokens, (\d+) of Unsloth's\)": [
            kinds["norm"] + kinds["rope"] for kinds in (vanilla, theirs)
        ],
        r"GPU time repeats within (\d+)%": (
            ceil(100 * max(max(b) / min(b) - 1 for b in busy)),
        ),
        r"rate of 1e-6, .* show (\d+) to (\d+)% of fp32's change in outputs\. "
        r"Compiled PEFT overshoots: (\d+)%\.\s+Whole .* (\d+)%": after_small_updates(),
        r"On other H100s step times at 256 and 512 .* within (\d+)%, Unsloth's older": (
            ceil(max(map(abs, slower.values()))),
        ),
    }  # fmt: skip
    left = re.sub(r"^\|.*ms per step.*\n(?:\|.*\n)+", "", PROSE, flags=re.MULTILINE)
    for pattern, values in said.items():
        found = re.search(pattern, left)
        assert found, pattern
        for number, value in zip(found.groups(), values, strict=True):
            digits = len(number.partition(".")[2])
            assert float(number.replace(",", "")) == round(value, digits), f"{found[0]}: {value}"
        left = left.replace(found[0], "")
    assert "6 minutes on an H100" in README and round(quick) == 6
    assert release_of("unsloth", suite) == "2026.10.9"
    # what write-ups report for an A100; what a run wants of a card (no run), and one MLP's numbers,
    # which test_drawing holds
    others = {"1.4×", "1.34×", "1.74×"} | {"48 GB", "24 GB", "7 GB", "4.5 GB", "0.79 GB"}
    left = left.replace("8 × 1,024", "")
    assert set(re.findall(r"\d[\d.,]* ?(?:ms|GiB|GB|×|%)", left)) == others


def around(kernel_ms):
    """Return the time of casts and copies, and of scaling and adding adapters."""
    return kernel_ms["copy"] + kernel_ms["adapter"]


def test_each_row_of_trainers_on_the_results_page_is_in_a_record():
    records = [
        {*re.findall(r"\d+(?:,\d+)*", (card / "trainers.txt").read_text())} for card in (H100, H200)
    ]
    page = (ROOT / "docs" / "results.md").read_text()
    page = page[page.index("## In your own script") : page.index("Nearly all of a GRPO")]
    rows = re.findall(r"^\| <sub>.*?</sub> \|(.*\d.*)\|$", page, re.MULTILINE)
    assert len(rows) == 10
    for row in rows:
        assert any({*re.findall(r"[\d,]+", row)} <= record for record in records), row


def test_the_readme_has_the_trainers_steps_of_their_run(runs):
    printed = (H100 / "trainers.txt").read_text()
    tables = [
        re.findall(r"^\| (.*?SFT|DPO|GRPO) \| (.*?) \| ([\d,]+) \| ", table, re.MULTILINE)
        for table in printed.split("\n\n")
    ]
    kinds, runs_of = ("SFT", "padded SFT", "DPO"), ("plain PEFT", "Unsloth", "fused", "in graphs")
    first: dict[str, dict[str, str]] = {}
    for table in tables:  # later ones are of other settings
        for kind in {kind for kind, _, _ in table} - first.keys():
            first[kind] = {
                trained.removeprefix("fused, "): ms.replace(",", "")
                for of, trained, ms in table
                if of == kind
            }
    wanted = [tuple(first[kind].get(one, "") for one in runs_of) for kind in kinds]
    measured = rows_by_variant_and_length(runs[0])
    ms = [f"{measured[one, 512].median_step_ms:.0f}" for one in headline.SHOWN]
    wanted.append((ms[0], ms[2], "", ms[3]))
    table = README[README.index("ms per step") : README.index("In trainers, all but")]
    assert re.findall(r"</sub> \| (\d*) ?\| (\d*) ?\| (\d*) ?\| (\d*) ?\|", table) == wanted


def test_the_readme_is_short_and_has_few_numbers():
    text = re.sub(r"```.*?```|<!--.*?-->|<img[^>]*>", "", README, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    words = [word for line in lines for word in line.split() if re.search(r"\w", word)]
    numbers = re.findall(r"(?<![\w.])\d(?:[\d.,]*\d)?", "\n".join(lines))
    assert len(words) <= 950
    assert len(numbers) <= 0.08 * len(words)


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
