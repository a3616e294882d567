import dataclasses
import shutil
from pathlib import Path

import example_results as example
import pytest
from msgspec.structs import replace
from test_plots import RUNS

from bench import results
from bench.records import Cell, Floor, KernelRow, Kernels
from report import commands, looks, suite_tables, tables
from report.comparison import ComparedCell, compare
from report.statistics import summarize
from variants import Settings, title_of


def cells_of(markdown, *starts):
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.split("\n")]
    return next(line for line in lines if line[: len(starts)] == list(starts))


def hand_made():
    document = example.empty(variants=["vanilla_peft", "fused_mlp"], seq_lens=[64, 512])
    document.floor = {64: Floor(40.0, [40.0])}
    times = {"vanilla_peft": (200.0, 210.0, 220.0), "fused_mlp": (100.0, 100.0, 110.0)}
    for variant, rounds in times.items():
        for n, ms in enumerate(rounds, start=1):
            settings = Settings("non-reentrant", autocast="bfloat16")
            cell = example.timed_cell(
                variant, 64, n, [ms], settings=settings, peak_allocated_bytes=3 * 2**29
            )
            document.add(cell)
    settings = Settings("off", autocast="bfloat16")
    error = "CUDA out of memory. Tried to allocate 9 GiB\nmore `words`"
    cell = Cell("fused_mlp", 512, 1, "oom", error=error, settings=settings)
    document.add(cell)
    document.summary = summarize(document)
    return document


def test_the_main_table_by_hand():
    markdown = tables.results_section(hand_made())
    assert cells_of(markdown, "64", "fused MLP") == [
        *("64", "fused MLP", "100.0 (90.0 to 118.3)", "20,480", "2.00 (1.90 to 2.18)", "2.50"),
        "1.5",
    ]
    assert cells_of(markdown, "64", "vanilla PEFT")[4] == "1.00"
    assert cells_of(markdown, "512", "fused MLP")[2] == "out of memory"
    why = "- fused MLP at 512 tokens: out of memory: `CUDA out of memory. Tried to allocate 9 GiB"
    assert why in markdown
    assert "Commit abc1234." in markdown and looks.caption(hand_made()) in markdown
    parts = [block.split("\n") for block in markdown.split("\n\n") if block.startswith("|")]
    assert {len({line.count("|") for line in table}) for table in parts} == {1}  # all rectangular


def test_settings_that_change_with_the_length_are_told_by_length():
    markdown = tables.results_section(hand_made())
    found = cells_of(markdown, "fused MLP", "non-reentrant at 64; off at 512")
    assert found == [
        "fused MLP",
        "non-reentrant at 64; off at 512",
        "none",
        "bfloat16",
        "none",
        "none",
        "0",
    ]
    assert cells_of(markdown, "vanilla PEFT", "non-reentrant")


def test_that_a_step_is_one_graph_is_said_where_any_is():
    markdown = tables.results_section(RUNS["a graph"])
    assert cells_of(markdown, "variant", "checkpointing")[-2:] == ["graph", "fused modules"]
    assert cells_of(markdown, "fused layers, CUDA graph", "on")[-2:] == ["on", "36"]


def test_what_the_allocator_was_told_is_said_where_it_was_told_anything():
    run = example.run()
    for cell in run.cells:
        if cell.variant == "full_unsloth":
            cell.settings = replace(cell.settings, allocator="expandable_segments:True")
    markdown = tables.results_section(run)
    assert cells_of(markdown, "variant", "checkpointing")[-2:] == ["allocator", "fused modules"]
    assert cells_of(markdown, "full Unsloth", "on")[-2] == "expandable_segments:True"
    assert cells_of(markdown, "vanilla PEFT", "on")[-2] == "none"
    assert cells_of(markdown, "fused MLP", "on")[-2:] == ["none", "36"]
    markdown = tables.results_section(RUNS["three"])
    assert cells_of(markdown, "variant", "checkpointing")[-2:] == ["compile", "fused modules"]


def test_verdicts_stand_in_the_table_where_there_is_a_twin():
    assert "against the A/A noise" not in tables.results_section(RUNS["three"])
    markdown = tables.results_section(RUNS["with an A/A band"])
    assert cells_of(markdown, "512", "full Unsloth")[-1] == "faster"
    assert cells_of(markdown, "512", "vanilla PEFT, again")[-1] == ""


def test_kernels_are_told_where_there_are_any():
    document = hand_made()
    assert "of a copy" not in tables.results_section(document)
    row = KernelRow("swiglu_forward", [16384, 11008], "bfloat16", median_us=281.24, bytes=1,
                    gb_per_s=3847.1, copy_gb_per_s=4302.6, share_of_copy=0.894)  # fmt: skip
    document.kernels = Kernels(4302.6, [row])
    markdown = tables.results_section(document)
    assert cells_of(markdown, "swiglu_forward")[1:] == [
        *("16384 × 11008", "bfloat16", "281.2", "3,847", "89%")
    ]
    assert "A device copy of as many bytes; the fastest: 4,303 GB/s." in markdown


def remarks(document):
    return [line for line in tables.results_section(document).split("\n") if line[:2] == "- "]


def test_a_throttled_round_is_told_with_variant_length_and_reason():
    document = hand_made()
    before = remarks(document)
    assert not [line for line in before if "hrottled" in line or "shared" in line]
    throttled = document.cells[4]  # fused MLP at 64 tokens, the second round
    throttled.throttled = True
    throttled.clock_reasons = ["hardware thermal slowdown", "power cap"]
    added = [line for line in remarks(document) if line not in before]
    assert added == ["- Throttled: fused MLP at 64 tokens in round 2 (hardware thermal slowdown)."]
    without_a_time = document.cells[-1]
    without_a_time.throttled, without_a_time.clock_reasons = True, ["hardware slowdown"]
    assert [line for line in remarks(document) if line not in before] == added


def test_a_gpu_that_was_shared_is_told():
    document = hand_made()
    document.cells[1].other_gpu_processes = 2
    assert "- The GPU was shared in 1 of 6 timed cells." in remarks(document)


def test_what_lacks_for_verdicts_is_told():
    def told(rounds, *variants):
        return remarks(example.run(variants, seq_lens=(64,), rounds=rounds, steps=8 * rounds))

    twin = ("vanilla_peft", "vanilla_peft_again", "fused_mlp")
    assert told(2, *twin) == []
    assert told(1, *twin) == ["- One round gives numbers without verdicts: --rounds 4 gives both."]
    (line,) = told(2, "vanilla_peft", "fused_mlp")
    assert line.startswith("- No verdicts without vanilla_peft_again among the variants")


def test_the_headline_by_hand():
    assert tables.headline_table(hand_made()) == "\n".join(
        [
            "| tokens in a sequence | vanilla PEFT | fused MLP |",
            "| --- | --- | --- |",
            "| 64 | 210 ms | 100 ms, **2.00×** |",
            "| 512 |  | out of memory |",
        ]
    )
    header = tables.headline_table(RUNS["eight"]).split("\n")[0]
    assert header == "| tokens in a sequence | vanilla PEFT | fused MLP | full Unsloth |"


def test_of_runs_in_turns_the_four_variants_are_shown_by_hand():
    names = ["full_unsloth", "fused_all", "fused_mlp", "vanilla_peft_again", "vanilla_peft"]
    document = example.empty(variants=names, seq_lens=[64], rounds=2, steps=60)
    times = {"vanilla_peft": (300.0, 220.0), "vanilla_peft_again": (303.0, 220.0)}
    times |= {
        "fused_mlp": (200.0, 150.0),
        "full_unsloth": (100.0, 110.0),
        "fused_all": (90.0, 90.0),
    }
    for variant, rounds in times.items():
        for n, ms in enumerate(rounds, start=1):
            document.add(example.timed_cell(variant, 64, n, [ms]))
    not_measured = "Not measured yet: `python lora_bench.py --turns 2`."
    assert tables.in_turns_section([document]) == not_measured
    document.experiment.turn_steps = 2
    shown = tables.in_turns_section([document])
    assert [line.split(" | ")[1] for line in shown.split("\n")[2:6]] == [
        *("vanilla PEFT", "vanilla PEFT, again", "fused MLP", "full Unsloth")
    ]
    # of 1.5 and 1.467, whose logarithms are 0.0225 apart: exp(0.3942 -+ 12.71 * 0.0225 / 2)
    assert cells_of(shown, "64", "fused MLP")[4] == "1.48 (1.29 to 1.71)"
    assert "all fused" not in shown
    assert shown.endswith(", interleaved 2 at a time · rounds: 2.")
    document.experiment.variants.remove("full_unsloth")
    assert tables.in_turns_section([document]) == not_measured


# --- two runs -------------------------------------------------------------------------------------

COMPARED = ComparedCell(
    "fused_mlp", 512, "ok", "ok", 903.44, 821.31, 1.1, [1.05, 1.152], (0.98, 1.02), "faster"
)


def test_a_row_of_a_comparison_by_hand():
    assert tables.comparison_words(COMPARED) == [
        *("512", "fused MLP", "903.4", "821.3", "1.10 (1.05 to 1.15)", "0.98 to 1.02", "faster")
    ]


def test_a_comparison_of_single_rounds_has_neither_interval_nor_verdict():
    row = dataclasses.replace(COMPARED, ci95=None, verdict=None)
    assert tables.comparison_words(row)[4:] == ["1.10", "0.98 to 1.02", ""]


def test_a_comparison_says_why_there_is_no_time():
    unknown = {"speedup": None, "ci95": None, "band": None}
    lost = dataclasses.replace(
        COMPARED, new="oom", new_ms=None, verdict="no time any more", **unknown
    )
    assert tables.comparison_words(lost)[2:] == [
        *("903.4", "out of memory", "", "", "no time any more")
    ]
    neither = dataclasses.replace(lost, old="parity_failed", old_ms=None, verdict=None)
    assert tables.comparison_words(neither)[2:] == ["failed parity", "out of memory", "", "", ""]


def test_names_for_people():
    assert title_of("full_unsloth") == "full Unsloth"
    assert title_of("bordered_step") == "bordered_step"


README = """# Title
<!-- headline:begin -->
old headline
<!-- headline:end -->
between
<!-- in turns:begin --><!-- in turns:end -->
<!-- results:begin --><!-- results:end -->
<!-- parts:begin --><!-- parts:end -->
<!-- effects:begin --><!-- effects:end -->
<!-- unsloth:begin --><!-- unsloth:end -->
<!-- peers:begin --><!-- peers:end -->
<!-- second run:begin --> old <!-- second run:end -->
the end"""


def test_the_readme_gets_its_tables_and_nothing_else_changes(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(README)
    document, second = hand_made(), hand_made()
    for cell in second.cells:
        cell.step_ms = [1.5 * ms for ms in cell.step_ms]
    assert tables.update_readme(path, document, second) is True
    written = path.read_text()
    assert written == (
        f"# Title\n<!-- headline:begin -->\n\n{tables.headline_table(document)}\n\n"
        "<!-- headline:end -->\nbetween\n"
        "<!-- in turns:begin -->\n\nNot measured yet: `python lora_bench.py --turns 2`.\n\n"
        "<!-- in turns:end -->\n"
        f"<!-- results:begin -->\n\n{tables.results_section(document)}\n\n"
        "<!-- results:end -->\n"
        f"<!-- parts:begin -->\n\n{suite_tables.NOT_MEASURED}\n\n<!-- parts:end -->\n"
        f"<!-- effects:begin -->\n\n{suite_tables.NOT_MEASURED}\n\n<!-- effects:end -->\n"
        f"<!-- unsloth:begin -->\n\n{suite_tables.NOT_MEASURED}\n\n<!-- unsloth:end -->\n"
        f"<!-- peers:begin -->\n\n{suite_tables.NOT_MEASURED}\n\n<!-- peers:end -->\n"
        "<!-- second run:begin -->\n\n"
        f"{tables.comparison_table(compare(document, second))}\n\n"
        "<!-- second run:end -->\nthe end"
    )
    assert cells_of(written, "64", "fused MLP", "100.0", "150.0")[-1] == "slower"
    assert tables.update_readme(path, document, second) is False
    assert path.read_text() == written
    assert tables.update_readme(path, RUNS["three"], RUNS["three"]) is True
    assert "slower" not in path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        README.replace("<!-- results:end -->", ""),
        README.replace("<!-- headline:begin -->", ""),
        README.replace("<!-- second run:begin -->", ""),
        README + "<!-- results:begin -->",
        "<!-- headline:end --> <!-- headline:begin -->" + README.split("between")[1],
        "",
    ],
)  # fmt: skip
def test_a_readme_without_its_markers_is_refused_and_left_alone(text, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"README\.md wants <!-- .*:begin --> and then") as caught:
        tables.update_readme(path, hand_made(), hand_made())
    assert "\n" not in str(caught.value)
    assert path.read_text() == text


# --- the published tables -------------------------------------------------------------------------


def test_the_readme_is_written_from_the_published_results(tmp_path):
    """`python lora_bench.py --plot-only` was run after the last change of results.json."""
    root = Path(__file__).resolve().parents[2]
    shutil.copy(root / "README.md", tmp_path)
    runs = [results.load(root / "results.json")]
    runs += [results.load(path) for path in (commands.SECOND_RUN, commands.SUITE)]
    beside_unsloth = [
        results.load(path) for path in sorted(commands.BESIDE_UNSLOTH.glob("*.json.gz"))
    ]
    assert len(beside_unsloth) == 3
    assert tables.update_readme(tmp_path / "README.md", *runs, beside_unsloth) is False
