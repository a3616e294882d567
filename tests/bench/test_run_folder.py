"""A run's folder is named after its settings: any command works after any other."""

import re
import shlex

import pytest
from cases import example_results as example
from cases.rehearsal_case import ROOT
from test_command_line import GIVEN, words_for

from batches import sha256_of
from bench import machine, options, planning, run_folder, weights
from bench import results as store
from bench.weights import materialize, resolve

README = (ROOT / "README.md").read_text()
COMMANDS = ["", *re.findall(r"^python lora_bench\.py ([^#\n]+)", README, re.MULTILINE)]
GPU = "nvidia-h100"
TINY = (ROOT / "configs" / "tiny.json").read_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    source = resolve(str(ROOT / "configs" / "tiny.json"), tmp_path_factory.mktemp("hub"), 0)
    materialize(source, 0, "cpu")
    return source.folder


@pytest.fixture
def plan(request, tmp_path, monkeypatch, checkpoint):
    """Return a function that plans a command in a temporary checkout. It returns the run, its file,
    and whether that file existed."""
    on_gpu = getattr(request, "param", "cpu") == "cuda"
    monkeypatch.setattr(machine, "has_gpu", lambda: on_gpu)
    for module in (options, run_folder):
        monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(weights, "_download", lambda name: checkpoint)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name, count in (("data/sft_train.jsonl", 300), ("my_chats.jsonl", 200)):  # quickly read
        with (ROOT / "data" / "sft_train.jsonl").open() as published:
            (tmp_path / name).write_text("".join(published.readline() for _ in range(count)))
    if on_gpu:
        environment = example.environment()
        monkeypatch.setattr(machine, "environment", lambda: environment)
        monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA H100")
        monkeypatch.setattr(machine, "other_processes", lambda own, gpus=1: 0)
        monkeypatch.setattr(machine, "visible_gpus", lambda: list("0123"))

    def planned(*words, save=True):
        asked = options.parse([*words, "--cache", str(tmp_path / "cache")], "")
        with planning.planned(asked, ["lora_bench.py", *words]) as (_, run, path):
            there = path.exists()
            if save:
                store.save(path, run)
        return run, path, there

    planned.here = f"runs/{GPU}" if on_gpu else "rehearsal"
    planned.usual = options.EXPERIMENT if on_gpu else options.REHEARSAL
    return planned


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["cpu", "cuda"], indirect=True)
def test_each_command_of_the_readme_works_after_any_other(plan, tmp_path):
    """Try all of them, then all in reverse order."""
    folders = []
    for command in COMMANDS:
        _, path, _ = plan(*shlex.split(command))
        folders.append(str(path.parent.relative_to(tmp_path)))
    for command in COMMANDS[::-1]:
        _, _, there = plan(*shlex.split(command))
        assert there
    names = [name.removeprefix(plan.here) for name in folders]
    data = next(name for name in names if "my_chats" in name)
    assert re.fullmatch(r"-my_chats-[0-9a-f]{8}-documents", data)
    steps = "-10-steps-a-round"
    assert names == ["", "-quick", "-quick-batch-size-8", "", "-Qwen--Qwen2.5-3B-Instruct", data,
                     "-rank-16-q_proj+v_proj", "-base-nf4", steps, "-2-gpus"]  # fmt: skip


@pytest.mark.slow
def test_no_setting_that_keeps_runs_apart_is_lost(plan, tmp_path):
    usual_lens = ["--seq-lens", "512"]  # padded rows of 16 tokens train nothing
    first, usual, _ = plan(*usual_lens)
    (tmp_path / "x.jsonl").write_text((tmp_path / "my_chats.jsonl").read_text())
    (tmp_path / "x.json").write_text(TINY + "\n")
    asked_for = [
        words_for(name)
        for name in GIVEN
        if name in options.READS[""] and name not in ("out", "cache")
    ]
    steps = ["--rounds", "1", "--steps", str(plan.usual["steps"] // plan.usual["rounds"])]
    asked_for += [["--data", "data/sft_train.jsonl"], steps, ["--gpus", "2"]]
    for words in asked_for:
        if words[0] in ("--device", "--allow-shared-gpu"):
            continue
        run, path, _ = plan(*usual_lens, *words, save=False)
        assert (path != usual) == bool(store._differences(first, run)), words
    # another file of the same name is another model
    _, path, _ = plan("--model", "x.json", save=False)
    (tmp_path / "x.json").write_text(TINY)
    _, other, _ = plan("--model", "x.json", save=False)
    assert other != path
    _, path, _ = plan("--model", "Qwen/" + "x" * 200, save=False)
    assert len(path.parent.name) < 140


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", ""),
        ("--accumulate 2", "-accumulate-2"),
        ("--batch-size 2 --lora-dropout 0.1", "-batch-size-2-lora-dropout-0.1"),
        ("--seed 3 --padded --interleave 2", "-padded-interleave-2-seed-3"),
        ("--quick --rank 8", "-quick-rank-8"),
        ("--gpus 2 --rank 8", "-2-gpus-rank-8"),
        ("--targets v_proj q_proj --base nf4", "-base-nf4-q_proj+v_proj"),
        ("--rounds 2", "-2-steps-a-round"),
        ("--rounds 2 --steps 8 --seq-lens 64 --variants fused_mlp", ""),
    ],
)
def test_a_folder_is_named_after_what_keeps_runs_apart(words, name, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    asked = options.fill_in(options.parse(shlex.split(words), ""))
    data = tmp_path / f"{sha256_of(asked.data)[:12]}.jsonl"
    folder = run_folder.run_folder(asked, resolve(str(asked.model), tmp_path, 0), data)
    assert folder.name == f"rehearsal{name}"
