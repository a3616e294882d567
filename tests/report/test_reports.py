"""Reports from existing results: fits and pictures."""

import json
import os
from pathlib import Path

import pytest
from cases import example_results as example

import lora_bench
from bench import results as store
from report import committed
from report.ablation_picture import ablation_figure
from report.benchmark_results import benchmark_figure
from report.kernel_time import kernel_time_figure
from report.picture import write_png
from variants import EXPERIMENT_ON_NF4

DRAWN = [ablation_figure, benchmark_figure, kernel_time_figure]
TWO = example.run(("vanilla_peft", "fused_mlp"), (512,))


@pytest.mark.slow("benchmark_figure")
@pytest.mark.parametrize("draw", DRAWN)
def test_a_picture_is_the_same_bytes_each_time_and_written_whole_or_not_at_all(
    draw, tmp_path, monkeypatch
):
    path, second = tmp_path / "picture.png", []

    def fail(written, _):
        second.append(Path(written).read_bytes())
        raise OSError(28, "No space left on device")

    assert write_png(None, path) is False and not path.exists()
    assert write_png(draw(TWO), path)
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG") and not [tag for tag in (b"tEXt", b"tIME") if tag in first]
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_png(draw(TWO), path)
    assert second == [first] == [path.read_bytes()]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("figure", [benchmark_figure, kernel_time_figure])
def test_title_and_caption_name_a_base_in_4_bits(figure):
    def said(base):
        picture = figure(example.run(EXPERIMENT_ON_NF4, (64, 512), base=base))
        return [" ".join(text.get_text().split()) for text in picture.texts]

    assert sum(" on NF4" in text for text in said("nf4")) == 2
    assert not any("NF4" in text for text in said("bf16"))


def test_fits_lists_what_trains_in_so_much_memory(tmp_path, capsys, monkeypatch):
    store.save(tmp_path / "results.json", example.run())
    assert lora_bench.main(["--fits", "12", "--out", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 512")]
    assert len(lines) == 1 and "full Unsloth" in lines[0]
    # of the published runs, also each model's newest on a base in 4 bits
    newest, older, another = in_4_bits = [example.run(base="nf4") for _ in range(3)]
    newest.started_utc, newest.environment.gpu.name = "2030", "A100"
    another.experiment.model = "7B"
    assert older.started_utc < newest.started_utc
    monkeypatch.setattr(committed, "suite_path", lambda: tmp_path / "results.json")
    monkeypatch.setattr(committed, "loaded", {"*/nf4*": dict(enumerate(in_4_bits))}.get)
    assert lora_bench.main(["--fits", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("; ")[0] for line in lines if line.endswith("over vanilla PEFT:")] == [
        "Qwen2.5-3B, batch 32, on an NVIDIA H200", "Qwen2.5-3B on NF4, batch 32, on an A100",
        "7B on NF4, batch 32, on an NVIDIA H200",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_suite_draws_what_every_part_buys(tmp_path):
    store.save(tmp_path / "results.json", example.run(("vanilla_peft", "fused_all"), (64, 128)))
    assert lora_bench.main(["--plot-only", "--out", str(tmp_path)]) == 0
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn == {"benchmark_results", "kernel_time", "ablation"}


def test_a_time_that_is_none_is_refused_in_one_line(tmp_path, capsys):
    results = example.as_json(example.run())
    results["cells"][0]["step_ms"][0] = 0.0
    (tmp_path / "results.json").write_text(json.dumps(results))
    file, here = str(tmp_path / "results.json"), ["--out", str(tmp_path)]
    for command in (["--plot-only", *here], ["--fits", "9", *here], ["--compare", file, file]):
        assert lora_bench.main(command) == 2
        line = capsys.readouterr().err
        assert "cells[0].step_ms[0]: expected `float` > 0.0" in line and line.count("\n") == 1
