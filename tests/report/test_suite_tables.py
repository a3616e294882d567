"""Tables of a suite with made-up results, worked out by hand."""

from cases import example_results as example
from cases.example_results import rounds
from cases.table_case import rows_in

from bench.records import Floor
from report import suite_tables


def test_a_single_round_is_marked_as_not_judged_and_the_fastest_is_first():
    suite = rounds(vanilla_peft=[200, 200], fused_all=[100], liger_peft=[160, 160])
    rows = rows_in(suite_tables.peers_section(suite))
    assert [(row["speedup at 64"], row["step at 64, ms"]) for row in rows] == [
        ("2.00¹", "100.0"), ("1.25", "160.0"), ("1.00", "200.0")
    ]  # fmt: skip


def test_a_variant_that_failed_says_so_and_stands_last():
    suite = rounds(vanilla_peft=[200], liger_peft=["oom"], fused_all=[100])
    last = rows_in(suite_tables.peers_section(suite))[-1]
    assert [last[name] for name in ("variant", "speedup at 64", "step at 64, ms")] == [
        "Liger", "out of memory", "out of memory"
    ]  # fmt: skip


def test_the_floor_of_the_longest_length_is_below_the_table():
    suite = rounds(vanilla_peft=[200], fused_all=[100])
    assert "Floor" not in suite_tables.peers_section(suite)
    suite.floor = {64: Floor(40.4, [])}
    assert suite_tables.peers_section(suite).endswith("|\n\nFloor at 64: 40.4 ms.")
    suite.floor[64].recomputation_ms = 10.04
    said = suite_tables.peers_section(suite)
    assert said.endswith("Floor at 64: 40.4 ms; floor and recomputation: 50.4 ms.")


def test_effects_are_the_longest_lengths_a_table_a_block():
    plain = ("vanilla_peft", "fused_rope", "fused_all")
    variants = [*plain, *(f"{id}_no_checkpointing" for id in plain)]
    suite = example.run(variants=variants, seq_lens=(64, 512), rounds=2)
    for cell in suite.cells:
        i = variants.index(cell.variant) if cell.seq_len == 512 else 9
        cell.forward_ms, cell.backward_ms = [100.0 + i], [200.06 + i, 201.06 + i]
        cell.peak_allocated_bytes = (40 + i) * 2**30
        # the code changed between the rounds: the last one's counts
        cell.kernels_seen = {"a": 1000 * cell.round, "b": 234 + i}
        cell.peak_reserved_bytes = (50 + i) * 2**30 // cell.round
    said = suite_tables.effects_section(suite)
    assert rows_in(said) == [
        {"at 512 tokens": title, "forward, ms": f"{100 + i}.0", "backward, ms": f"{200.6 + i:.1f}",
         "kernel launches per step": f"2,{234 + i}", "peak allocated, GiB": f"{40 + i}.0",
         "reserved, GiB": f"{25 + i / 2:.1f}"}
        for i, title in enumerate(["vanilla PEFT", "fused RoPE", "all parts"] * 2)
    ]  # fmt: skip
    for cell in suite.cells_of(round=2):  # a process that was profiled in an earlier round
        cell.kernels_seen, cell.peak_reserved_bytes = {}, None
    first, *_ = rows_in(suite_tables.effects_section(suite))
    assert (first["kernel launches per step"], first["reserved, GiB"]) == ("1,234", "")
    assert said.startswith("With gradient checkpointing:\n\n| ") and "\n\nWithout check" in said
    one = example.run(variants=("vanilla_peft", "vanilla_peft_again"))
    assert suite_tables.effects_section(one) == suite_tables.NOT_MEASURED


def test_an_empty_suite_says_how_to_measure_one():
    for section in ("parts", "effects", "peers"):
        write = getattr(suite_tables, f"{section}_section")
        assert write(example.empty()) == suite_tables.NOT_MEASURED
