"""The README's tables of a suite, on made-up results: what stands where, worked out by hand."""

from functools import cache

import example_results as example
import pytest
from example_results import rounds
from msgspec.structs import replace

from bench.records import Floor
from report import suite_tables, wording
from report.ablation import ablation_table
from report.statistics import NOISE, summarize
from variants import VARIANTS, Settings

SUITE = example.run(example.ALL, seq_lens=(64, 512))
PARTS = ("attention", "rope", "rms_norm", "cross_entropy", "checkpoint")


@cache
def lines_of(checkpoints):
    """The cells of a table's lines, by the variant they are of; the floor's are another test's."""
    section = suite_tables.peers_section(SUITE)
    with_it, without = section.removeprefix("With").split("\n\nWithout")
    lines = (with_it if checkpoints else without).split("\n")
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows[2:-1]}


@pytest.mark.parametrize("checkpoints", [True, False])
def test_every_variant_stands_in_its_block_but_parts_alone_and_left_out(checkpoints):
    block = [v for v in VARIANTS.values() if v.suites and v.checkpoints is checkpoints]
    of_parts = {
        variant.plain_title for variant in block
        if "_but_" in variant.plain_id or variant.plain_id.removeprefix("fused_") in PARTS
    }  # fmt: skip
    titles = {wording.title_in(v.id, SUITE, title=v.plain_title) for v in block} - of_parts
    assert sorted(lines_of(checkpoints)) == sorted(titles)


def test_a_line_is_the_summarys_own_and_the_fastest_is_first():
    lines = lines_of(True)
    rows = [row for row in summarize(SUITE) if row.variant == "full_unsloth"]
    for row, cell in zip(rows, lines["full Unsloth 2026.10.9"], strict=False):
        over = f"{row.speedup:.2f}×"
        over = f"*{over}*" if row.verdict == NOISE else over
        assert cell == f"{row.median_step_ms:.1f} ({over})"
    times = [float(cells[-2].split()[0]) for cells in lines.values()]
    assert times == sorted(times)
    assert lines["full Unsloth 2026.10.9"][-1] == f"{rows[-1].peak_gib:.1f}"


def test_a_single_round_is_marked_as_not_judged():
    suite = rounds(vanilla_peft=[200, 200], fused_all=[100], liger_peft=[160, 160])
    markdown = suite_tables.peers_section(suite)
    assert "| all parts | 100.0 (2.00×)¹ |" in markdown and "| Liger | 160.0 (1.25×) |" in markdown


def test_what_failed_says_so_and_stands_last():
    suite = rounds(vanilla_peft=[200], liger_peft=["oom"], fused_all=[100])
    floor = "| floor: the frozen products, attention and lm_head alone | 40.4 |  |"
    again = "| the same and the layers' forward again, without their last product | 50.4 |  |"

    def last_two():
        return suite_tables.peers_section(suite).split("\n")[-2:]

    last = last_two()[-1]
    assert last == "| Liger | out of memory |  |"
    suite.floor = {64: Floor(40.4, [])}
    assert last_two() == [last, floor]
    suite.floor[64].recomputation_ms = 10.04
    assert last_two() == [floor, again]


def test_all_fused_is_held_against_unsloths_faster_mode_of_the_same_round():
    """The modes' own checkpointing differs here; below it does not."""
    slow_host = rounds(
        full_unsloth=[300, 220, "oom", 240],
        unsloth_plain_checkpointing=[200, 230, "oom"],
        fused_all=[100, 200, 50, "parity_failed"],  # 2.0, 1.1, no mode, no time
        full_unsloth_no_checkpointing=[90],  # of the other block
        fused_all_no_checkpointing=[100],
    )
    steady = rounds(512, full_unsloth=[100, 120, 140], fused_all=[100, 100, 100])
    steady.experiment = replace(steady.experiment, rounds=3, steps=90, interleave=2)
    for cell in steady.cells:
        cell.turn_steps = 2
    slow_host.experiment = replace(slow_host.experiment, rounds=4, steps=40)
    slow_host.environment.packages["unsloth"] = "2026.10.7"
    assert suite_tables.against_unsloth_section([slow_host, steady]).split("\n") == [
        "| Unsloth's time / all parts | 64 tokens | 512 tokens |",
        "| --- | --- | --- |",
        "| With gradient checkpointing, 10 steps a cell, Unsloth 2026.10.7 | "
        "1.55× (1.10 to 2.00, 2 rounds) |  |",
        "| With gradient checkpointing, 30 steps a cell, interleaved 2 at a time, "
        "Unsloth 2026.10.9 |  | 1.20× (1.00 to 1.40, 3 rounds) |",
        "| Without checkpointing, 10 steps a cell, Unsloth 2026.10.7 | 0.90× (one round) |  |",
    ]
    for cell in slow_host.cells:
        cell.settings = Settings("unsloth (plain)")
    # (300 + 200) / 2 and (220 + 230) / 2, and round 3 has none of either
    one_mode = suite_tables.against_unsloth_section([slow_host]).split("\n")[2]
    assert one_mode.endswith("| 1.81× (1.12 to 2.50, 2 rounds) |")
    without_unsloth = rounds(vanilla_peft=[1], fused_all=[1])
    for runs in ([], [without_unsloth]):
        assert suite_tables.against_unsloth_section(runs) == suite_tables.NOT_MEASURED


def test_effects_are_the_longest_lengths_a_table_a_block():
    plain = ("vanilla_peft", "fused_rope", "fused_all")
    variants = [*plain, *(f"{id}_no_checkpointing" for id in plain)]
    suite = example.run(variants=variants, seq_lens=(64, 512), rounds=2)
    for cell in suite.cells:
        i = variants.index(cell.variant) if cell.seq_len == 512 else 9
        cell.forward_ms, cell.backward_ms = [100.0 + i], [200.06 + i, 201.06 + i]
        cell.peak_allocated_bytes = (40 + i) * 2**30
        # the code changed between the rounds: it is the last one's that counts
        cell.kernels_seen = {"a": 1000 * cell.round, "b": 234 + i}
        cell.peak_reserved_bytes = (50 + i) * 2**30 // cell.round
    header = (
        "| at 512 tokens | forward, ms | backward, ms | launches a step | peak allocated, GiB "
        "| reserved, GiB |"
    )
    rule = "| --- | --- | --- | --- | --- | --- |"
    assert suite_tables.effects_section(suite).split("\n") == [
        *("With gradient checkpointing:", "", header, rule),
        "| vanilla PEFT | 100.0 | 200.6 | 2,234 | 40.0 | 25.0 |",
        "| fused RoPE | 101.0 | 201.6 | 2,235 | 41.0 | 25.5 |",
        "| all parts | 102.0 | 202.6 | 2,236 | 42.0 | 26.0 |",
        *("", "Without checkpointing:", "", header, rule),
        "| vanilla PEFT | 103.0 | 203.6 | 2,237 | 43.0 | 26.5 |",
        "| fused RoPE | 104.0 | 204.6 | 2,238 | 44.0 | 27.0 |",
        "| all parts | 105.0 | 205.6 | 2,239 | 45.0 | 27.5 |",
    ]
    one = example.run(variants=("vanilla_peft", "vanilla_peft_again"))
    assert suite_tables.effects_section(one) == suite_tables.NOT_MEASURED


def test_parts_are_ablations_tables():
    suite = example.run(("vanilla_peft", "fused_mlp"), (64,))
    assert suite_tables.parts_section(suite).startswith(f"{ablation_table(suite)}\n\nNVIDIA H200")


def test_of_an_empty_suite_the_readme_says_how_to_measure_one():
    for section in ("parts", "effects", "peers"):
        write = getattr(suite_tables, f"{section}_section")
        assert write(example.empty()) == suite_tables.NOT_MEASURED
