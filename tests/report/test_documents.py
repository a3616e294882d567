"""README.md and docs/*.md: their generated parts and the README's numbers match the data, and their
code runs."""

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
from dev.words import NOT_OWN
from fused_mlp import FrozenMLP, LoRA_MLP
from fused_mlp.swiglu import swiglu_backward, swiglu_forward
from fused_mlp.utils import cast_adapters
from report import commands, committed, fits, headline
from report.dpo_rewards import margins
from report.kernel_time import bars
from report.statistics import rows_by_variant_and_length, summarize
from report.wording import release_of
from variants import BASELINE, WITHOUT

ROOT = Path(__file__).resolve().parents[2]
H100, H200 = (ROOT / "docs" / "runs" / card for card in ("h100", "h200"))
README = (ROOT / "README.md").read_text()
GPUS = (ROOT / "docs" / "gpus.md").read_text()
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
    assert headline.measured_section({"": run}).startswith("**NVIDIA H200**, ")
    assert headline.measured_section({"": run}) in said
    assert "gzip -c runs/mine/results.json > docs/runs/nvidia-h200/quick.json.gz" in said


def beside_unsloth_in_trainers():
    """Return how many times Unsloth's labelled tokens/s graphs in SFTTrainer had on packed rows:
    the least and the most, of our runs and of somebody else's."""
    texts = [(card / "trainers.txt").read_text() for card in (H100, H200)]
    line = r"^\| SFT \| %s \| [\d,]+ \| ([\d,]+)"
    speeds = [
        [re.findall(line % run, table, re.MULTILINE) for run in ("Unsloth", "fused, in graphs")]
        for text in texts
        for table in text.split("\n\n")
    ]
    pairs = [(theirs[0], ours[0]) for theirs, ours in speeds if theirs and ours]
    other_line = r"^\| (?:on|off).* SFT, packed \| .*? \| ([\d,]+), .*? \| .*? \| ([\d,]+), "
    pairs += re.findall(other_line, texts[1], re.MULTILINE)
    ratios = [int(ours.replace(",", "")) / int(theirs.replace(",", "")) for theirs, ours in pairs]
    return min(ratios), max(ratios)


def memory_record(pattern):
    """Return the number that the newest table has."""
    *_, found = re.findall(pattern, (H200 / "memory.txt").read_text(), re.MULTILINE)
    return float(found.replace(",", ""))


def minutes(run, published):
    """Return how long an H100's run took, and how long an A100 should take."""
    stages, known = run.stages_s, committed.index()
    whatever_the_card = stages.weights + stages.start + stages.other
    by_the_card = stages.floor + stages.warm_up + stages.steps + stages.profile
    ms = headline.expected_ms(published, 512, known.cards[0], known.card("A100"))
    slower = ms["vanilla_peft"] / rows_by_variant_and_length(run)["vanilla_peft", 512].gpu_ms
    return (whatever_the_card + by_the_card) / 60, (whatever_the_card + slower * by_the_card) / 60


def test_an_h200_is_as_an_h100_predicts_within_the_margin(runs):
    """Compare vanilla PEFT's time and the speedups at 512 tokens, beside the same Unsloth."""
    known, off, speedups_off = committed.index(), [], []
    h100s = [runs[0], results.load(H100 / "experiment_2026-11-26.json.gz")]
    h200 = runs[1]
    for h100 in h100s:
        if release_of("unsloth", h100) == release_of("unsloth", h200):
            expected = headline.expected_ms(h100, 512, known.cards[0], known.card("H200"))
            rows = rows_by_variant_and_length(h200)
            over = {one: rows[one, 512].gpu_ms / ms for one, ms in expected.items()}
            base = over["vanilla_peft"]
            off.append(abs(base - 1))
            speedups_off += [base / over[one] - 1 for one in headline.ANSWERS]
    assert ceil(100 * max(off + speedups_off)) == round(100 * headline.MARGIN)
    low, high = (round(100 * end) for end in (min(speedups_off), max(speedups_off)))
    assert f"speedups are {low} to {high}% higher than estimated" in GPUS
    assert f"ranges are ±{headline.MARGIN:.0%}" in GPUS


def test_the_page_of_gpus_says_what_an_a100_needs(runs):
    published, known = runs[0], committed.index()
    quick, quick_a100 = minutes(results.load(H100 / "quick_2026-11-24.json.gz"), published)
    whole, whole_a100 = minutes(published, published)
    assert f"took {quick:.0f} minutes on an H100. On an A100 we expect {quick_a100:.0f}." in GPUS
    assert f"in {quick:.0f} minutes on an H100" in README
    assert f"the experiment: {whole:.0f} minutes on H100s" in README
    assert f"about {quick_a100:.0f} minutes, the whole experiment up to {whole_a100:.0f}" in README
    assert f"took {whole:.0f} minutes on H100s. On an A100 we expect up to {whole_a100:.0f}" in GPUS
    had = published.environment
    assert (
        f"PyTorch {had.packages['torch']} for CUDA {had.cuda}, and driver {had.gpu.driver}" in GPUS
    )
    ms = headline.expected_ms(published, 512, known.cards[0], known.card("A100"))
    theirs = {"vanilla_peft": 3418.91, "fused_mlp": 2437.76}  # their results.json
    mlp, vanilla = (f"{theirs[one] / ms[one] - 1:.0%}" for one in ("fused_mlp", "vanilla_peft"))
    assert f"fused MLP takes 2.4 s at 512 tokens, {mlp} longer than we expect" in GPUS
    assert f"vanilla PEFT takes 3.4 s, {vanilla} longer" in GPUS


def test_the_readmes_numbers_are_those_of_the_data(runs):
    """Check every number with a unit in the README: where it stands, and what it should be."""
    run, suite = runs
    rows, suite_rows = rows_by_variant_and_length(run), rows_by_variant_and_length(suite)
    speedup = {key: row.speedup for key, row in rows.items()}
    ms = {key: row.median_step_ms for key, row in rows.items()}
    lengths, everything = run.experiment.seq_lens, "fused_layer_graph_offload"
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
    compiled, newest = (suite_rows[v, 512] for v in ("compiled_peft", "full_unsloth"))
    said = {
        r"([\d.]+)× to ([\d.]+)× Unsloth's speed": beside_unsloth_in_trainers(),
        r"reserves ([\d.]+) GiB, with Unsloth ([\d.]+); on NF4 ([\d.]+), with Unsloth ([\d.]+) ": [
            memory_record(rf"^{base}SFT 8 x 1024 +[^|\n]*{run} (\d\.\d)(?:,|$)")
            for base in ("", "NF4 ") for run in ("graphs", "Unsloth")
        ],
        r"trains ([\d,]+) tokens \[in (\d+) GiB\].* with Unsloth ([\d,]+) \|": (
            memory_record(r"fused \| 24 \| ([\d,]+) \| trained"), 24,
            memory_record(r"unsloth \| 24 \| ([\d,]+) \| trained"),
        ),
        r"fused is ([\d.]+)× faster at 512 tokens, and ([\d.]+)× at 64": (
            speedup[everything, 512], speedup[everything, 64],
        ),
        r"length: about ([\d.]+)× up to 128 tokens, ([\d.]+)× from 256 on": [
            fmean(speedup["full_unsloth", n] for n in some) for some in (lengths[:2], lengths[2:])
        ],
        r"computes for (\d+) ms and waits for Python for (\d+)": (
            rows["vanilla_peft", 64].gpu_ms, bars(run, 64)[0].idle_ms,
        ),
        r"spends (\d+) of (\d+) ms .* about (\d+) ms\. .* removes (\d+) ms of the passes and "
        r"(\d+) ms .* take (\d+) ms more": (
            around(vanilla), rows["vanilla_peft", 512].gpu_ms,
            vanilla["matmul"] + vanilla["attention"] - floor, around(vanilla) - around(mlp),
            vanilla["activation"] - mlp["activation"], mlp["matmul"] - vanilla["matmul"],
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
        r"as many tokens reserved ([\d.]+) GiB here": (
            max(reserved) / 2**30,
        ),
        r"\((\d+) ms of vanilla PEFT's step at 512 tokens, (\d+) of Unsloth's\)": [
            kinds["norm"] + kinds["rope"] for kinds in (vanilla, theirs)
        ],
        r"GPU time repeats within (\d+)%": (
            ceil(100 * max(max(b) / min(b) - 1 for b in busy)),
        ),
        r"near 0 while fp32's reaches ([\d.]+)\. `fuse` runs .* \[reach ([\d.]+)\]": [
            margins(committed.small_adapters())[one][-1]
            for one in ("vanilla_peft_fp32", "fused_layer_no_checkpointing")
        ],
        r"On other H100s step times at 256 and 512 .* within (\d+)%, Unsloth's older": (
            ceil(max(map(abs, slower.values()))),
        ),
    }  # fmt: skip
    left = PROSE.replace("8 × 1,024", "")
    for pattern, values in said.items():
        found = re.search(pattern, left)
        assert found, pattern
        for number, value in zip(found.groups(), values, strict=True):
            digits = len(number.partition(".")[2])
            assert float(number.replace(",", "")) == round(value, digits), f"{found[0]}: {value}"
        left = left.replace(found[0], "")
    assert release_of("unsloth", suite) == "2026.10.9"
    # the write-up's for an A100; what a run wants of a card (no run), and one MLP's numbers, which
    # test_drawing holds
    others = {"1.4×"} | {"48 GB", "24 GB", "16 GB", "7 GB", "4.5 GB"}
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


def test_the_readme_is_short_and_has_few_numbers():
    text = NOT_OWN.sub(" ", README)
    words, numbers = text.split(), re.findall(r"(?<![\w.,-])\d", text)
    assert len(words) <= 850
    assert len(numbers) <= 0.07 * len(words)


def test_the_memory_page_has_the_numbers_of_its_records(runs):
    """Check its three tables: of the suite, and twice of memory.txt."""
    page = (ROOT / "fused_lora" / "docs" / "memory.md").read_text()
    record = (H200 / "memory.txt").read_text()
    rows = rows_by_variant_and_length(runs[1])
    reserved = {point.variant: point.peak_gib for point in fits.points_of(runs[1], 512)}
    ids = (
        BASELINE + WITHOUT, BASELINE, "fused_cross_entropy", "fused_layer" + WITHOUT,
        "fused_layer", "fused_layer_graph", "fused_layer_graph_offload", "full_unsloth",
    )  # fmt: skip
    wanted = [(f"{rows[one, 512].peak_gib:.1f}", f"{reserved[one]:.1f}") for one in ids]
    assert re.findall(r"^\|[^|]+\| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE) == wanted
    long_rows = re.findall(r"\| ([\d,]+) \| trained(?:, .*?)? \|(.*)", record)
    shown = re.findall(r"^\| ([\d,]+\d).* \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    for tokens, *numbers in shown:  # s a step, reserved, on the host
        found = [cells.split(" | ") for n, cells in long_rows if n == tokens]
        assert any(about(numbers, [one[0], *one[3:5]]) for one in found), tokens
    trainers = re.findall(r"^\| (.*SFT|DPO), (\d) \w+ \| (.*) \|$", page, re.MULTILINE)
    for kind, count, listed in trainers:
        lines = re.findall(rf"^{kind} {count} .*?1024 +(.*)", record, re.MULTILINE)
        today = re.sub(r"before: graphs \S+ ", "", " ".join(lines))
        measured = dict(re.findall(r"(\w+) (\d\.\d+)", today.replace("plain", "PEFT")))
        given = dict(re.findall(r"(\w+) ([\d.]+)", listed))
        assert given.keys() == measured.keys()
        assert about(given.values(), [measured[one] for one in given])
    assert (len(shown), len(trainers)) == (7, 4)


def about(rounded, measured):
    return all(abs(float(a) - float(b)) < 0.051 for a, b in zip(rounded, measured, strict=True))


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
