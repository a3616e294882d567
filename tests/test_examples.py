"""The examples, each as its first lines say, on a tiny model."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUNS = {path.stem: [path] for path in EXAMPLES}
SHARDED = "train_ddp --shard-base"
RUNS[SHARDED] = [*RUNS["train_ddp"], "--shard-base"]
RUNS["train_hf --graphs"] = [*RUNS["train_hf"], "--graphs"]
TRL = ("train_trl", "train_dpo")
EXTRAS = {"train_qlora": ["examples", "qlora"]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A checkpoint of random weights, with a tokenizer that knows how to write chats."""
    folder = tmp_path_factory.mktemp("tiny")
    config = AutoConfig.from_pretrained(ROOT / "configs" / "tiny.json")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(ROOT / "data" / "tokenizer.json"))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    with (ROOT / "data" / "sft_train.jsonl").open() as chats:
        (folder / "chats.jsonl").write_text("".join(next(chats) for _ in range(12)))
    return folder


@pytest.mark.slow("train_trl", SHARDED)
@pytest.mark.parametrize("run", RUNS)
def test_an_example_trains_prints_both_speeds_and_saves(run, tiny, tmp_path, monkeypatch, capsys):
    """In this process, for the time it takes to load libraries. The one for torchrun, and all where
    there is a GPU, as they are started on a host without."""
    example, *options = RUNS[run]
    if example.stem in TRL:
        pytest.importorskip("trl", reason="wants trl, of dev/requirements/dev.txt")
    sizes = ["--warm-up", "1", "--steps", "1", "--batch-size", "1", "--tokens", "8"]
    options += ["--model", tiny, "--data", tiny / "chats.jsonl", *sizes, "--out", tmp_path]
    if started_alone := example.stem == "train_ddp" or torch.cuda.is_available():
        environment = {"PYTHONPATH": ROOT, "HOME": tmp_path, "CUDA_VISIBLE_DEVICES": ""}
        environment["OMP_NUM_THREADS"] = "1"
        if example.stem in TRL:
            environment["TRITON_INTERPRET"] = "1"  # for TRL's own kernels
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        start = torchrun if example.stem == "train_ddp" else []
        command = [sys.executable, *start, example, *options]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert ran.returncode == 0, ran.stderr[-2000:]
        printed = ran.stdout
    else:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(sys, "argv", [str(option) for option in (example, *options)])
        runpy.run_path(str(example), run_name="__main__")
        printed = capsys.readouterr().out
    interprets = example.stem in TRL or not started_alone
    second = "fused" if interprets else "not fused"
    assert ("nothing is fused" in printed) is not interprets
    assert re.search(rf"^vanilla PEFT: .* tokens/s\n(.*\n)*{second}: .* tokens/s\n", printed, re.M)
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_without_a_package_says_which_line_installs_it(example, monkeypatch):
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = EXTRAS.get(example.stem, ["examples"])
    command = f'pip install -e ".[{",".join(extras)}]"'
    special = {"train_qlora": ["bitsandbytes"], "train_trl": ["trl"], "train_dpo": ["trl"]}
    missing = ["fused_lora", "datasets", *special.get(example.stem, [])]
    packages = {re.match(r"\w+", one)[0] for name in extras for one in extra[name]}
    assert packages >= {*missing[1:], "accelerate"}
    assert f"{command}\n" in example.read_text().split('"""')[1]
    for package in missing:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(str(example), run_name="__main__")
        assert stop.value.code == f"{package} is not installed: {command}"


@pytest.mark.parametrize("name", TRL)
def test_an_example_that_needs_a_gpu_says_so_before_it_imports_trl(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    line = "TRL's loss needs an NVIDIA GPU, and none is visible\n"
    assert (stop.value.code, capsys.readouterr().err) == (2, line)


def test_examples_are_short():
    lines = {path.stem: path.read_text().splitlines() for path in EXAMPLES}
    assert lines and all(sum(map(bool, each)) < 80 for each in lines.values())


@pytest.mark.slow("False")
@pytest.mark.parametrize("nf4", [False, True])
def test_the_notebook_runs_from_top_to_bottom_and_holds_no_output(nf4, tiny, tmp_path, capsys):
    notebook = json.loads((ROOT / "examples" / "fuse_in_5_minutes.ipynb").read_text())
    settings, *cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in (settings, *cells))
    names: dict = {}
    exec("".join(settings["source"]), names)
    small = {"MODEL": tiny, "ROWS": 1, "TOKENS": 8, "STEPS": 1, "NF4": nf4, "FOLDER": tmp_path}
    assert small.keys() < names.keys()
    names.update(small)
    for cell in cells:
        exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert nf4 == any("Linear4bit" in type(module).__name__ for module in names["model"].modules())
    assert "layer: 2 of 2 layers fused" in printed
    assert re.search(r"^fused: .* times vanilla PEFT$", printed, re.M)
    assert (tmp_path / "adapter_model.safetensors").is_file()
