"""The README's tables of a suite, on made-up results: what stands where, worked out by hand."""

import ablation_case as case
import example_results as example
import pytest
from msgspec.structs import replace

from bench.records import Cell
from report import suite_tables
from report.ablation import ablation_table
from report.statistics import summarize
from variants import VARIANTS, Settings

SUITE = case.run()


def lines_of(checkpoints):
    """The cells of a table's lines, by the variant they are of; the floor's are another test's."""
    section = suite_tables.peers_section(SUITE)
    _, with_it, without = section.replace("Without checkpointing:", "With gradient").split(
        "With gradient"
    )
    text = with_it if checkpoints else without
    rows = [line.strip("|").split("|") for line in text.split("\n") if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows[2:-1]}


@pytest.mark.parametrize("checkpoints", [True, False])
def test_every_variant_stands_in_its_block_but_parts_alone_and_left_out(checkpoints):
    titles = list(lines_of(checkpoints))
    block = [v for v in VARIANTS.values() if v.checkpoints is checkpoints]
    assert "all fused" in titles and "fused MLP" in titles
    assert "fused RoPE" not in titles and "all fused but RoPE" not in titles
    of_parts = [v.plain_id for v in block if v.plain_title not in titles]
    assert len(titles) + len(of_parts) == len(block)
    parts = ("attention", "rope", "rms_norm", "cross_entropy", "checkpoint")
    assert all("_but_" in id or id.removeprefix("fused_") in parts for id in of_parts)


def test_a_line_is_the_summarys_own_and_the_fastest_is_first():
    rows = {(r.variant, r.seq_len): r for r in summarize(SUITE)}
    lines = lines_of(True)
    for seq_len, cell in zip(SUITE.experiment.seq_lens, lines["full Unsloth"], strict=False):
        row = rows["full_unsloth", seq_len]
        over = f"{row.speedup:.2f}×"
        assert cell in (
            f"{row.median_step_ms:.1f} ({over})",
            f"{row.median_step_ms:.1f} (*{over}*)",
        )
    times = [float(cells[-2].split()[0]) for cells in lines.values()]
    assert times == sorted(times)
    longest = SUITE.experiment.seq_lens[-1]
    assert lines["full Unsloth"][-1] == f"{rows['full_unsloth', longest].peak_gib:.1f}"


def test_a_single_round_is_marked_as_not_judged():
    suite = case.rounds(vanilla_peft=[200, 200], fused_all=[100], liger_peft=[160, 160])
    lines = {name: line for line in suite_tables.peers_section(suite).split("\n")
             for name in ("all fused", "Liger") if line.startswith(f"| {name} ")}  # fmt: skip
    assert "| 100.0 (2.00×)¹ |" in lines["all fused"] and "| 160.0 (1.25×) |" in lines["Liger"]


def test_what_failed_says_so_and_stands_last():
    suite = case.run(variants=("vanilla_peft", "fused_all", "liger_peft"), seq_lens=(64,))
    suite.cells = [c for c in suite.cells if c.variant != "liger_peft"]
    suite.add(Cell("liger_peft", 64, 1, "oom"))
    *_, last, floor = suite_tables.peers_section(suite).split("\n")
    assert last == "| Liger | out of memory |  |"
    assert floor == "| floor: the frozen products, attention and lm_head alone | 40.4 |  |"
    suite.floor[64].recomputation_ms = 10.04
    again = "| the same and the layers' forward again, without their last product | 50.4 |  |"
    assert suite_tables.peers_section(suite).split("\n")[-2:] == [floor, again]
    suite.floor = {}
    assert suite_tables.peers_section(suite).split("\n")[-1] == last


def test_all_fused_is_held_against_unsloths_faster_mode_of_the_same_round():
    """The modes' own checkpointing differs here; below it does not."""
    slow_host = case.rounds(
        full_unsloth=[300, 220, "oom", 240],
        unsloth_plain_checkpointing=[200, 230, "oom"],
        fused_all=[100, 200, 50, "parity_failed"],  # 2.0, 1.1, no mode, no time
        full_unsloth_no_checkpointing=[90],  # of the other block
        fused_all_no_checkpointing=[100],
    )
    steady = case.rounds(512, full_unsloth=[100, 120, 140], fused_all=[100, 100, 100])
    steady.experiment = replace(steady.experiment, rounds=3, steps=90, turn_steps=2)
    slow_host.experiment = replace(slow_host.experiment, rounds=4, steps=40)
    assert suite_tables.against_unsloth_section([slow_host, steady]).split("\n") == [
        "| Unsloth's time / all fused | 64 tokens | 512 tokens |",
        "| --- | --- | --- |",
        "| With gradient checkpointing, 10 steps a cell | 1.55× (1.10 to 2.00, 2 rounds) |  |",
        "| With gradient checkpointing, 30 steps a cell, interleaved 2 at a time |  | "
        "1.20× (1.00 to 1.40, 3 rounds) |",
        "| Without checkpointing, 10 steps a cell | 0.90× (one round) |  |",
    ]
    for cell in slow_host.cells:
        cell.settings = Settings("unsloth (plain)")
    # (300 + 200) / 2 and (220 + 230) / 2, and round 3 has none of either
    one_mode = suite_tables.against_unsloth_section([slow_host]).split("\n")[2]
    assert one_mode.endswith("| 1.81× (1.12 to 2.50, 2 rounds) |")
    without_unsloth = case.rounds(vanilla_peft=[1], fused_all=[1])
    for runs in ([], [without_unsloth]):
        assert suite_tables.against_unsloth_section(runs) == suite_tables.NOT_MEASURED


def test_effects_are_the_longest_lengths_a_table_a_block():
    plain = ("vanilla_peft", "fused_rope", "fused_all")
    variants = [*plain, *(f"{id}_no_checkpointing" for id in plain)]
    suite = case.run(variants=variants, seq_lens=(64, 512), rounds=2)
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
        "| all fused | 102.0 | 202.6 | 2,236 | 42.0 | 26.0 |",
        *("", "Without checkpointing:", "", header, rule),
        "| vanilla PEFT | 103.0 | 203.6 | 2,237 | 43.0 | 26.5 |",
        "| fused RoPE | 104.0 | 204.6 | 2,238 | 44.0 | 27.0 |",
        "| all fused | 105.0 | 205.6 | 2,239 | 45.0 | 27.5 |",
    ]
    one = case.run(variants=("vanilla_peft", "vanilla_peft_again"))
    assert suite_tables.effects_section(one) == suite_tables.NOT_MEASURED


def test_parts_are_ablations_tables():
    assert suite_tables.parts_section(SUITE).startswith(ablation_table(SUITE))


def test_without_a_suite_the_readme_says_how_to_measure_one():
    assert suite_tables.parts_section(None) == suite_tables.NOT_MEASURED
    assert suite_tables.effects_section(None) == suite_tables.NOT_MEASURED
    assert suite_tables.peers_section(None) == suite_tables.NOT_MEASURED
    assert suite_tables.peers_section(example.empty()) == suite_tables.NOT_MEASURED
