"""The table of others' published numbers beside ours in their setting, with made-up runs."""

from pathlib import Path

import pytest
from cases import example_results as example
from cases.table_case import rows_in

from bench.published import SETTINGS
from bench.records import Cell
from report import commands, published
from report.published import claims_table, setting_that_ran
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


def speeds(*runs):
    """Return the section's last table, the speed of every variant."""
    return [[*row.values()] for row in rows_in(section(*runs)) if "tokens/s" in row]


def test_each_number_of_theirs_stands_beside_the_fastest_of_ours_unsloth_and_vanilla():
    first, *others = rows_in(claims_table(published_run()))
    tokens = 4 * 2 * 2048
    assert [*first.values()] == [
        "qwen3-8b", "4 × 2 × 2,048", "Surogate, FP8: 11,600",
        f"{tokens / 1.2:,.0f} (fused layers, CUDA graph without checkpointing)",
        f"{tokens / 1.2 / 11600:.2f}",
        f"{tokens / 1.5:,.0f} (full Unsloth 2026.10.9 without checkpointing)",
        f"{tokens / 2.0:,.0f}",
        "NVIDIA H200, " + published_run().started_utc[:10],
    ]  # fmt: skip
    assert [row["they publish, tokens/s"] for row in others] == [
        "Surogate, bf16: 10,200", "Unsloth, bf16, by Surogate: 8,900",
    ]  # fmt: skip
    ratios = [row["ours / theirs"] for row in others]
    assert ratios == [f"{tokens / 1.2 / n:.2f}" for n in (10200, 8900)]


def test_a_base_in_nf4_stands_beside_theirs_in_nf4_alone():
    run = published_run("qwen3-8b-nf4", status={"fused_all": "unavailable"})
    found = [(row["model"], row["they publish, tokens/s"]) for row in rows_in(claims_table(run))]
    theirs = ["Surogate, NF4: 9,400", "Unsloth, NF4, by Surogate: 8,200"]
    assert found == [("qwen3-8b on NF4", words) for words in theirs]
    assert "| tokens/s | qwen3-8b | qwen3-8b on NF4 |" in section(published_run(), run)
    said = commands.held_against_others(run, Path("results.json"))
    assert claims_table(run) in said
    assert "> docs/runs/nvidia-h200/published-qwen3-8b-nf4.json.gz && python" in said


def test_ours_in_fp8_stand_beside_theirs_in_fp8_where_there_are_any():
    ours = "fp8_lm_head_graph_no_checkpointing"
    for name, theirs in (("qwen3-8b", ["Surogate, FP8: 11,600"]),
                         ("qwen2.5-7b", ["NeMo AutoModel (TE + Triton): 14,110"])):  # fmt: skip
        run = published_run(name, variants=(ours,))
        run.cells = [example.timed_cell(ours, SETTINGS[name].seq_len, 1, [500.0] * 3)]
        rows = rows_in(claims_table(run))
        assert [row["they publish, tokens/s"] for row in rows] == theirs
        assert speeds(run, published_run()) == speeds(published_run())


def test_every_variant_has_its_speed_in_every_run_or_says_why_not():
    run = published_run(status={"fused_all": "oom"})
    del run.cells[-1]  # cut off before the last
    other = published_run("llama3-8b")
    other.environment.packages["unsloth"] = "2026.10.7"
    table = speeds(run, other)
    titles = [title_of(id).replace("Unsloth", "Unsloth 2026.10.9 / 2026.10.7")
              for id in SUITES["published"]]  # fmt: skip
    assert [line[0] for line in table] == titles
    assert table[0][1:] == [f"{4 * 2 * 2048 / 2.0:,.0f}", f"{16 * 2 * 4096 / 2.0:,.0f}"]
    assert table[2][1] == "out of memory" and table[-1][1] == "not measured" != table[-1][2]


def test_what_ran_out_of_memory_says_so_and_the_next_fastest_stands_for_it():
    status = {id: "oom" for id in SUITES["published"] if id.endswith("_no_checkpointing")}
    status |= {"vanilla_peft": "oom", "full_unsloth": "unavailable"}
    first, *_ = rows_in(claims_table(published_run(status=status)))
    assert first["ours, tokens/s"].endswith("(fused layers, CUDA graph)")
    assert first["the fastest Unsloth here, tokens/s"] == "unavailable"
    assert first["vanilla PEFT here, with checkpointing"] == "out of memory"
    ours = {id: "oom" for id in SUITES["published"] if id.startswith("fused")}
    first, *_ = rows_in(claims_table(published_run(status=ours)))  # vanilla is none of ours
    assert (first["ours, tokens/s"], first["ours / theirs"]) == ("out of memory", "")


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
    assert said.startswith("| model | ")
    for name in ("qwen3-8b", "llama3-8b"):
        page = SETTINGS[name].page
        assert f"- [{page.name}]({page.url}), {page.date}" in said
    assert "- llama3-8b: their recipe names Llama 3.1 8B" in said
    assert len(rows_in(said)) == 3 + 1 + len(SUITES["published"])


def test_every_setting_says_who_where_and_when():
    for name, setting in SETTINGS.items():
        assert setting.name == name and setting.page.url.startswith("https://")
        assert setting.claims and setting.page.date > "2026"
