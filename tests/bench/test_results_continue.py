"""The same command continues where an earlier one stopped, and another run is refused."""

import copy
import re

import pytest
from cases import example_results as example
from cases.one_line import refused
from msgspec.structs import replace

from bench import results
from bench.experiment_records import Git, Tokens
from bench.records import Floor
from report.statistics import summarize

LORA, ADAMW = example.experiment().lora, example.experiment().optimizer


def saved(tmp_path, document):
    results.save(tmp_path / "results.json", document)
    return tmp_path / "results.json"


def test_without_a_file_the_run_is_fresh(tmp_path):
    fresh = example.empty()
    assert results.continue_from(tmp_path / "results.json", fresh) is fresh


def test_the_same_run_goes_on_wider(tmp_path):
    tokens = example.experiment().tokens
    earlier = example.run(("vanilla_peft", "fused_mlp"), (64, 128))
    earlier.experiment.tokens = {n: tokens[n] for n in (64, 128)}
    path = saved(tmp_path, earlier)
    fresh = example.empty(
        variants=["full_unsloth", "vanilla_peft"], seq_lens=[512, 64], rounds=4, steps=32
    )
    fresh.experiment.tokens = {n: tokens[n] for n in (512, 64)}
    fresh.argv = ["lora_bench.py", "--again"]
    document = results.continue_from(path, fresh)
    experiment = document.experiment
    assert experiment.variants == ["vanilla_peft", "fused_mlp", "full_unsloth"]
    assert experiment.seq_lens == [64, 128, 512]
    assert experiment.tokens == {n: tokens[n] for n in (64, 128, 512)}
    assert (experiment.rounds, experiment.steps) == (4, 32)
    assert (document.argv, document.finished_utc) == (["lora_bench.py", "--again"], None)
    assert document.is_done("fused_mlp", 128, 3)
    assert not document.is_done("fused_mlp", 128, 4)
    results.save(path, document)
    fewer = example.empty(seq_lens=[64], rounds=1, steps=8, tokens={64: tokens[64]})
    narrower = results.continue_from(path, fewer)
    assert narrower.experiment == experiment
    assert narrower.cells == document.cells


def with_packages(**changed):
    document = example.empty()
    document.environment.packages.update(changed)
    return document


def with_gpu(**changed):
    document = example.empty()
    document.environment.gpu = replace(document.environment.gpu, **changed)
    return document


@pytest.mark.parametrize(
    ("fresh", "difference"),
    [
        (example.empty(batch_size=16), "batch_size 32 there, 16 here"),
        (example.empty(checkpointing="off"), "checkpointing on there, off here"),
        (example.empty(padded=True), "padded no there, yes here"),
        (example.empty(base="nf4"), "base bf16 there, nf4 here"),
        (example.empty(model="tiny"), "model Qwen2.5-3B there, tiny here"),
        (example.empty(weights="random, seed 1"), "weights random, seed 0 there"),
        (example.empty(seed=1), "seed 0 there, 1 here"),
        (example.empty(data_sha256="f" * 64), "data_sha256 0{64} there, f{64} here"),
        (example.empty(lora=replace(LORA, rank=8)), r"lora\.rank 32 there, 8 here"),
        (example.empty(lora=replace(LORA, dropout=0.1)), r"lora\.dropout 0\.0 there, 0\.1 here"),
        (example.empty(lora=replace(LORA, targets=("v_proj",))),
         "targets q_proj, .* there, v_proj"),
        (example.empty(accumulate=4), "accumulate 1 there, 4 here"),
        (example.empty(optimizer=replace(ADAMW, name="SGD")),
         r"optimizer\.name AdamW there, SGD here"),
        (example.empty(steps=30), "steps a round 8 there, 10 here"),
        (example.empty(tokens={64: Tokens(0.1, 0.7)}),
         "share labelled at 64 0.75 there, 0.7 here|share padding at 64 0.0 there, 0.1 here"),
        (with_gpu(name="NVIDIA H100"), "gpu NVIDIA H200 there, NVIDIA H100 here"),
        (with_gpu(power_limit_w=350.0), "power_limit_w 700.0 there, 350.0 here"),
        (replace(example.empty(), rehearsal=True), "rehearsal no there, yes here"),
        (with_packages(torch="2.13.0"), r"torch 2\.11\.0\+cu130 there, 2\.13\.0 here"),
        (with_packages(triton="9"), r"triton 3\.6\.0 there, 9 here"),
        (with_packages(transformers="9"), "transformers .* 9 here"),
        (with_packages(peft="9"), "peft .* 9 here"),
        (with_packages(unsloth="9"), "unsloth .* 9 here"),
    ],
)  # fmt: skip
def test_another_run_is_refused_in_one_line_that_names_what_differs(fresh, difference, tmp_path):
    path = saved(tmp_path, example.empty())
    before = path.read_bytes()
    message = refused(results.continue_from, path, fresh)
    assert message.startswith(f"{path} holds another run: ") and re.search(difference, message)
    assert message.endswith(" here; give another --out") and path.read_bytes() == before


def test_many_differences_are_not_all_listed(tmp_path):
    path = saved(tmp_path, example.empty())
    fresh = example.empty(batch_size=16, seed=1, padded=True, dtype="float32", model="tiny")
    message = refused(results.continue_from, path, fresh)
    assert message.count(" there, ") == 3 and "and 2 more" in message


def test_a_package_installed_since_is_no_difference_and_is_tried(tmp_path):
    statuses = {("full_unsloth", 64): "unavailable", ("fused_mlp", 64): "oom"}
    before = example.run(seq_lens=(64,), status=statuses)
    before.environment.packages["unsloth"] = None
    path = saved(tmp_path, before)
    document = results.continue_from(path, example.empty(seq_lens=[64]))
    assert document.environment.packages["unsloth"] == "2026.10.9"
    assert not document.is_done("full_unsloth", 64, 1)
    assert document.is_done("fused_mlp", 64, 1)
    # The other way round, what was measured with the package stays, and its version with it.
    gone = with_packages(unsloth=None)
    document = results.continue_from(saved(tmp_path, example.run()), gone)
    assert document.is_done("full_unsloth", 64, 1)
    assert document.environment.packages["unsloth"] == "2026.10.9"


def test_another_commit_may_go_on_but_both_are_named(tmp_path):
    path = saved(tmp_path, example.empty())
    fresh = example.empty()
    fresh.environment.git = Git("def5678", True)
    for _ in range(2):
        document = results.continue_from(path, fresh)
        results.save(path, document)
        assert document.environment.git == Git("abc1234 then def5678", True)


# --- one run of several ---------------------------------------------------------------------------


def test_the_rounds_of_every_run_are_rounds_of_the_merged_one(tmp_path):
    """Merge two GPUs of a node. Each measured vanilla PEFT and one more variant."""
    one = example.run(("vanilla_peft", "fused_mlp"), (64,), rounds=2, steps=16)
    two = example.run(("vanilla_peft", "full_unsloth"), (64,), rounds=3, steps=24, visit=1)
    two.floor[64].samples_ms, one.floor[64].samples_ms = [50.0, 60.0], [40.0]
    one.floor[64].floor_ms, two.floor[64].floor_ms = 40.0, 55.0
    two.floor[64].recomputation_samples_ms = [10.0, 12.0]  # one is of before there was any
    two.other_floors = {"fp8": {64: Floor(30.0, [30.0])}}
    for run in (one, two):
        run.summary = summarize(run)
    two.started_utc, one.finished_utc = "2020-01-01T00:00:00+00:00", None
    two.finished_utc = "2020-01-01T01:00:00+00:00"
    before = [copy.deepcopy(run) for run in (one, two)]
    merged = results.merge([one, two])
    assert [one, two] == before
    assert results.load(saved(tmp_path, merged)) == merged
    merged.summary = summarize(merged)
    rounds = {}
    for cell in merged.cells:
        rounds.setdefault(cell.variant, []).append(cell.round)
    assert rounds == {
        "vanilla_peft": [1, 2, 3, 4, 5], "fused_mlp": [1, 2], "full_unsloth": [3, 4, 5],
    }  # fmt: skip
    assert merged.experiment.variants == ["vanilla_peft", "fused_mlp", "full_unsloth"]
    assert (merged.experiment.rounds, merged.experiment.steps) == (5, 40)
    assert merged.floor[64].floor_ms == 50.0
    assert merged.floor[64].recomputation_ms == 11.0
    assert merged.floor[64].ms_by_round == {1: 40.0, 2: 40.0, 3: 55.0, 4: 55.0, 5: 55.0}
    assert merged.other_floors["fp8"][64].ms_by_round == {3: 30.0, 4: 30.0, 5: 30.0}
    assert merged.started_utc == "2020-01-01T00:00:00+00:00"
    assert merged.finished_utc is None
    # paired on the GPU that measured both, over its own floor, as in each run
    for run, variant in ((one, "fused_mlp"), (two, "full_unsloth")):
        alone = next(row for row in run.summary if row.variant == variant)
        together = next(row for row in merged.summary if row.variant == variant)
        assert together.speedup == alone.speedup
        assert together.ratio_to_floor == alone.ratio_to_floor


def test_no_measurement_is_merged_twice():
    """Refuse it: it would count twice, and two identical rounds make any noise look small."""
    one, two = (example.run(rounds=2, steps=16, visit=n) for n in range(2))
    some = copy.deepcopy(one)  # like a run that was copied before it finished
    some.cells = [c for c in some.cells if c.seq_len == 64]
    both = results.merge([one, two])
    for runs, number, count in (
        ([one, one], 2, 24), ([two, one, some], 3, 6), ([some, both], 2, 6), ([both, two], 2, 24),
    ):  # fmt: skip
        equal_steps = [replace(run, experiment=one.experiment) for run in runs]
        said = f"run {number} of these overlaps an earlier one (measurements in both: {count})"
        assert refused(results.merge, equal_steps).startswith(said)
    untimed = example.run(status={(v, n): "oom" for v in example.THREE for n in example.SEQ_LENS})
    assert "give each run once" in refused(results.merge, [untimed, untimed])


def test_runs_of_two_experiments_are_not_merged_and_differences_are_written_for_people():
    """Write words and numbers, not Python's."""
    there = example.run(rounds=1, steps=8)
    here = example.run(rounds=1, steps=8, visit=1)
    there.experiment.lora = replace(LORA, targets=("q_proj",))
    lora = replace(LORA, targets=("q_proj", "k_proj"))
    here.experiment = replace(here.experiment, padded=True, interleave=2, lora=lora)
    assert refused(results.merge, [there, here]) == (
        "run 2 of these is not of the first one's experiment: padded no there, yes here; "
        "lora.targets q_proj there, q_proj, k_proj here; give runs of one command"
        # its cells say where variants were interleaved
    )
