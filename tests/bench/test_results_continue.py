"""The same command continues where an earlier one stopped, and another run is refused."""

import re

import pytest
from cases import example_results as example
from cases.one_line import refused
from msgspec.structs import replace

from bench import results
from bench.experiment_records import Git, Tokens

LORA, ADAMW = example.experiment().lora, example.experiment().optimizer


def saved(tmp_path, document):
    results.save(tmp_path / "results.json", document)
    return tmp_path / "results.json"


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
