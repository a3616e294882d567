"""The tables of others' published speeds and of ours in their settings, with made-up runs."""

from pathlib import Path

import pytest
from cases import example_results as example
from cases.table_case import rows_in

from bench.published import SETTINGS
from bench.records import Cell
from report import commands, published
from report.published import setting_that_ran
from report.wording import title_in
from variants import SUITES, Lora, title_of


def published_run(name="qwen3-8b", status=None, **changed):
    """Make a run of every variant of the suite. Vanilla takes 2 s, each later one 0.1 s less."""
    setting = SETTINGS[name]
    asked = {
        "model": setting.model, "base": setting.base,
        "batch_size": setting.batch_size, "accumulate": setting.accumulate,
        "seq_lens": [setting.seq_len], "lora": Lora(rank=setting.rank, alpha=2 * setting.rank),
        "variants": SUITES["published"], "rounds": 1, "steps": 3,
    }  # fmt: skip
    run = example.empty(**asked | changed)
    for place, variant in enumerate(SUITES["published"]):
        if state := (status or {}).get(variant):
            run.add(Cell(variant, setting.seq_len, 1, state, "made up for a test"))
        else:
            times = [2000.0 - 100 * place] * 3
            run.add(example.timed_cell(variant, setting.seq_len, 1, times))
    return run


def section(*runs):
    return published.published_section(runs)


def test_each_number_has_a_row_that_says_where_it_is_from_and_the_fastest_is_first():
    said = section(published_run(status={"fused_all": "oom"}))
    assert said.startswith("**qwen3-8b, 4 × 2 × 2,048 tokens a step:**\n\n| variant | ")
    rows = [[*row.values()] for row in rows_in(said)]
    tokens, here = 4 * 2 * 2048, f"H200, measured {published_run().started_utc[:10]}"
    there = "one H100, published 2026-05-15"
    speeds = {
        title_in(id, published_run()): tokens / (2.0 - place / 10)
        for place, id in enumerate(SUITES["published"])
        if id != "fused_all"
    }
    wanted = [(speed, [title, f"{speed:,.0f}", here]) for title, speed in speeds.items()]
    wanted += [(speed, [by, f"{speed:,}", there])
               for by, speed in (("Surogate, FP8", 11600), ("Surogate, bf16", 10200),
                                 ("Unsloth, bf16, by Surogate", 8900))]  # fmt: skip
    assert rows == [line for _, line in sorted(wanted, reverse=True)] + [
        ["all parts", "out of memory", here]
    ]


def test_unsloth_stands_there_only_with_the_newest_release_of_all_runs():
    older, newer = published_run(), published_run("qwen3-8b-nf4")
    for run, release in ((older, "2026.9.30"), (newer, "2026.10.2")):
        run.environment.packages["unsloth"] = release
    of_older, of_newer = section(older, newer).split("on NF4")
    assert "full Unsloth" not in of_older and "full Unsloth 2026.10.2 |" in of_newer
    assert "full Unsloth 2026.9.30 |" in section(older)


def test_runs_of_one_setting_share_a_table_and_a_base_in_nf4_has_its_own():
    ours = "fp8_lm_head_graph_no_checkpointing"
    in_fp8 = published_run(variants=(ours,))
    in_fp8.cells = [example.timed_cell(ours, 2048, 1, [500.0] * 3)]
    in_nf4 = published_run("qwen3-8b-nf4")
    first, _ = section(in_fp8, in_nf4, published_run()).split("**qwen3-8b on NF4, ")
    second = section(in_nf4)
    assert rows_in(first)[0]["variant"] == title_of(ours)
    assert len(rows_in(first)) == 3 + 1 + len(SUITES["published"])
    assert {"Surogate, NF4", "Unsloth, NF4, by Surogate"} < {
        row["variant"] for row in rows_in(second)
    }
    said = commands.held_against_others(in_nf4, Path("results.json"))
    assert second in said
    assert "> docs/runs/nvidia-h200/published-qwen3-8b-nf4.json.gz && python" in said


@pytest.mark.parametrize(
    "changed",
    [{"batch_size": 1}, {"accumulate": 1}, {"lora": Lora(rank=32)}, {"padded": True},
     {"documents": True},
     {"lora": Lora(rank=16, alpha=32, dropout=0.1)},
     {"lora": Lora(rank=16, alpha=32, targets=("q_proj",))}],
)  # fmt: skip
def test_a_run_of_another_setting_is_not_held_against_theirs(changed):
    assert setting_that_ran(published_run()) is SETTINGS["qwen3-8b"]
    assert setting_that_ran(published_run(**changed)) is None
    assert section(published_run(**changed)) == ""


def test_the_section_has_its_sources_and_dates_and_is_not_there_without_a_run():
    assert section() == ""
    said = section(published_run(), published_run("llama3-8b"))
    for name in ("qwen3-8b", "llama3-8b"):
        page = SETTINGS[name].page
        assert f"- [{page.name}]({page.url}), {page.date}" in said
    assert "- llama3-8b: their recipe names Llama 3.1 8B" in said
    assert len(rows_in(said)) == 3 + 1 + 2 * len(SUITES["published"])


def test_every_setting_says_who_where_and_when():
    for name, setting in SETTINGS.items():
        assert setting.name == name and setting.page.url.startswith("https://")
        assert setting.claims and setting.page.date > "2026"
