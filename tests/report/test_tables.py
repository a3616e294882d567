"""The tables of one run and of two."""

import pytest
from cases import example_results as example
from cases.example_results import rounds
from cases.table_case import row_of, rows_in
from msgspec.structs import replace

from bench.records import Cell, Floor
from report import tables, wording
from report.comparison import ComparedCell, Comparison, comparison_table
from report.headline import answer, headline_table, measured_section
from report.statistics import summarize
from variants import Lora, Settings, title_of


def hand_made():
    document = rounds(vanilla_peft=(200, 210, 220), fused_mlp=(100, 100, 110))
    document.experiment.seq_lens = [64, 512]
    document.floor = {64: Floor(40.0, [40.0])}
    for cell in document.cells:
        cell.settings = Settings("non-reentrant", autocast="bfloat16")
        cell.peak_allocated_bytes = 3 * 2**29
    error = "CUDA out of memory. Tried to allocate 9 GiB\nmore `words`"
    settings = Settings("off", autocast="bfloat16")
    document.add(Cell("fused_mlp", 512, 1, "oom", error=error, settings=settings))
    document.summary = summarize(document)
    return document


def test_the_main_table_by_hand():
    markdown = tables.results_section(hand_made())
    assert row_of(markdown, "64", "fused MLP") == {
        "tokens per row": "64", "variant": "fused MLP", "step, ms": "100.0 (90.0 to 118.3)",
        "tokens/s": "20,480", "speedup": "2.00 (1.90 to 2.18)", "× floor": "2.50",
        "peak allocated, GiB": "1.5", "GPU, ms": "97.0",
    }  # fmt: skip
    assert row_of(markdown, "64", "vanilla PEFT")["speedup"] == "1.00"
    failed = row_of(markdown, "512", "fused MLP")
    assert failed["step, ms"] == "out of memory" and failed["speedup"] == ""
    why = "- fused MLP at 512 tokens: out of memory: `CUDA out of memory. Tried to allocate 9 GiB"
    assert why in markdown
    assert "Commit abc1234." in markdown and wording.caption(hand_made()) in markdown
    # settings: those that change with the length, then those that all variants share
    assert row_of(markdown, "non-reentrant at 64; off at 512")["variant"] == "fused MLP"
    assert row_of(markdown, "vanilla PEFT", "non-reentrant")
    assert markdown.splitlines()[-1] == (
        "In all: adapter dtype none, autocast bfloat16, attention none, compile none, "
        "fused modules 0."
    )


@pytest.mark.parametrize(
    ("setting", "value", "said", "others"),
    [
        ("graph", True, "on", "off"),
        ("allocator", "expandable_segments:True", "expandable_segments:True", "none"),
    ],
)
def test_a_setting_that_few_variants_have_is_told_where_any_has_it(setting, value, said, others):
    run = example.run(seq_lens=(64,))
    for cell in run.cells_of("fused_mlp"):
        cell.settings = replace(cell.settings, **{setting: value})
    rows = [row for row in rows_in(tables.results_section(run)) if "fused modules" in row]
    told = [(row[setting], row["fused modules"]) for row in rows]
    assert told == [(others, "0"), (said, "36"), (others, "0")]


def test_kernels_are_told_where_there_are_any():
    document = hand_made()
    assert tables.kernels_section(document).startswith("Not measured yet")
    document.kernels = example.KERNELS
    markdown = tables.kernels_section(document)
    assert [list(one.values()) for one in rows_in(markdown)] == [example.KERNEL_IN_WORDS]
    assert "A device copy of as many bytes; the fastest: 4,303 GB/s." in markdown


def remarks(document):
    return [line for line in tables.results_section(document).split("\n") if line[:2] == "- "]


def test_a_round_that_was_disturbed_is_told():
    document = hand_made()
    before = remarks(document)
    throttled, shared, without_a_time = document.cells[4], document.cells[1], document.cells[-1]
    throttled.throttled = without_a_time.throttled = True
    throttled.clock_reasons = ["hardware thermal slowdown", "power cap"]
    shared.other_gpu_processes = 2
    document.experiment.lora = Lora(dropout=0.1)
    assert [line for line in remarks(document) if line not in before] == [
        "- Throttled: fused MLP at 64 tokens in round 2 (hardware thermal slowdown).",
        "- The GPU was shared in 1 of 6 timed cells.",
        "- Losses were not held against vanilla PEFT's: dropout masks are others in each.",
    ]


def test_a_run_that_lacks_something_for_verdicts_says_so():
    def told(rounds, *variants):
        return remarks(example.run(variants, seq_lens=(64,), rounds=rounds, steps=8 * rounds))

    twin = ("vanilla_peft", "vanilla_peft_again", "fused_mlp")
    assert told(2, *twin) == []
    assert told(1, *twin) == ["- One round gives numbers without verdicts: --rounds 4 gives both."]
    (line,) = told(2, "vanilla_peft", "fused_mlp")
    assert line.startswith("- Nothing is called faster or slower without vanilla_peft_again")


def test_the_headline_by_hand():
    """Use the GPU's time, whatever the clock says. The last row is memory."""
    run = rounds(vanilla_peft=(210, 210), fused_mlp=(105, 105), full_unsloth=(150, 150))
    for cell in run.cells:
        cell.peak_allocated_bytes = 3 * 2**30
        cell.gpu_busy_ms = 150.0 if cell.variant == "vanilla_peft" else 60.0
    times, memory = rows_in(headline_table(run))
    assert [*times] == ["tokens per row", "PEFT, ms", "MLP", "Unsloth", "all"]
    assert [*times.values()] == ["**64**", "150", "2.50", "2.50", ""]
    assert [*memory.values()] == ["peak GiB at 64", "3.0", "3.0", "3.0", ""]
    for cell in run.cells:
        cell.gpu_busy_ms = None
    assert [*rows_in(headline_table(run))[0].values()][1:] == ["", "", "", ""]


def test_a_gpus_lines_by_hand():
    """Show the GPU's own time where it is busy for less than 95% of vanilla's step."""
    run = rounds(vanilla_peft=(200, 200), fused_mlp=(100, 100), full_unsloth=("oom",))
    section = measured_section({"runs/a": run})  # no peak is measured
    origin = f"[{run.started_utc[:10]}](runs/a), 2 steps, Unsloth 2026.10.9"
    assert section.startswith(f"**NVIDIA H200**, {origin}:\n")
    (by_clock,) = rows_in(section)
    assert [*by_clock.values()] == ["**64**", "200 ms", "2.00×", "out of memory", ""]
    for cell in run.cells[:4]:
        cell.peak_allocated_bytes = 3 * 2**29
        cell.gpu_busy_ms = 188.0 if cell.variant == "vanilla_peft" else 75.0
    _, gpu_time, peaks = ([*row.values()] for row in rows_in(measured_section({"": run})))
    assert gpu_time == ["GPU time", "188 ms", "2.51×", "", ""]
    assert peaks == ["GiB", "1.5", "1.5", "", ""]


@pytest.mark.parametrize(
    ("mlp_ms", "saved", "speedup"),
    [
        ((76, 74), "about half of the GPU time that Unsloth saves: 26", "1.3× to 1.4×"),
        ((75, 75), "about half of the GPU time that Unsloth saves: 25", "a steady 1.33×"),
        ((80, 65), "70% of the GPU time that Unsloth saves: 35", "1.2× to 1.5×"),
        ((75, 80), "40% of the GPU time that Unsloth saves: 20", "1.2× to 1.3×"),
    ],
)
def test_the_answer_by_hand(mlp_ms, saved, speedup):
    gpu_ms = {"vanilla_peft": (100, 100), "fused_mlp": mlp_ms, "full_unsloth": (50, 50),
              "fused_layer_graph_offload": (40, 25)}  # fmt: skip
    gib = dict(zip(gpu_ms, (36, 36, 12, 9), strict=True))
    run = example.run(tuple(gpu_ms), (64, 512), rounds=1)
    for cell in run.cells:
        cell.gpu_busy_ms = float(gpu_ms[cell.variant][cell.seq_len == 512])
        cell.peak_allocated_bytes = gib[cell.variant] * 2**30
    assert (
        f"**Our fused MLP alone saves {saved} of 50 ms at 512 tokens per row. That is {speedup} "
        "speedup. All of Unsloth gives a steady 2.00×, everything fused 2.5× to 4.0×; these "
        "two need a third and a quarter of vanilla PEFT's memory.** (NVIDIA H200, 32 rows a step, "
        "Unsloth 2026.10.9)"
    ) in answer(run)


def test_steps_beside_the_floor_by_hand():
    """Compare FP8 with bf16, and checkpointing with the floor plus the recomputation."""
    graph, offload = "fused_layer_graph_no_checkpointing", "fused_layer_graph_offload"
    fp8, peak = "fp8_lm_head_graph_no_checkpointing", 3 * 2**30
    run = example.empty(variants=[graph, fp8, offload], seq_lens=[512])
    for variant, ms in ((graph, 400.0), (fp8, 250.0)):
        run.add(example.timed_cell(variant, 512, 1, [ms] * 4, peak_allocated_bytes=peak))
    run.add(Cell(offload, 512, 1, "oom", error="made up for a test"))
    run.floor = {512: Floor(320.0, [320.0], recomputation_ms=80.0)}
    run.other_floors = {"fp8_lm_head": {512: Floor(160.0, [160.0])}}
    in_bf16, in_fp8, failed = rows_in(tables.beside_floor_section([run]))
    assert [*in_bf16.values()] == ["512", title_of(graph), "400.0", "", "1.25", "3.0"]
    over = "× floor and recomputation"
    assert (in_fp8["× bf16's speed"], in_fp8[over]) == ("1.60", "1.56")
    assert (failed["step, ms"], failed[over]) == ("out of memory", "")
    run.add(example.timed_cell(offload, 512, 1, [500.0] * 4))
    row = row_of(tables.beside_floor_section([run]), "everything fused")
    assert row[over] == "1.25"
    assert tables.beside_floor_section([]) == "Not measured yet."


# --- two runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({}, ["903.4", "821.3", "1.10 (1.05 to 1.15)", "0.98 to 1.02", "faster"]),
        ({"ci95": None, "verdict": None}, ["903.4", "821.3", "1.10", "0.98 to 1.02", ""]),
        (
            {"new": "oom", "new_ms": None, "verdict": "no time any more", "speedup": None},
            ["903.4", "out of memory", "", "", "no time any more"],
        ),
        (
            {"old": "parity_failed", "old_ms": None, "new": "oom", "new_ms": None, "verdict": None,
             "speedup": None},
            ["failed parity", "out of memory", "", "", ""],
        ),
    ],
)  # fmt: skip
def test_a_row_of_a_comparison_by_hand(measured, words):
    cell = {
        "old": "ok",
        "new": "ok",
        "old_ms": 903.44,
        "new_ms": 821.31,
        "speedup": 1.1,
        "ci95": (1.05, 1.152),
        "band": (0.98, 1.02),
        "verdict": "faster",
        **measured,
    }
    if cell["speedup"] is None:
        cell |= {"ci95": None, "band": None}
    row = ComparedCell("fused_mlp", "fused MLP", 512, **cell)
    (told,) = rows_in(comparison_table(Comparison([row], [])))
    assert [*told.values()] == ["512", "fused MLP", *words]
