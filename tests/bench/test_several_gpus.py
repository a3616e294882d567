"""The command on several GPUs, rehearsed by real processes on the CPU that average through gloo."""

import pytest
from cases.rehearsal_case import WITHOUT_GPU, small

import lora_bench
from bench import processes as isolated
from bench import results as store

pytestmark = [WITHOUT_GPU]


@pytest.mark.slow
def test_a_rehearsal_on_two_is_timed_every_way_and_is_not_repeated(tmp_path, monkeypatch, capsys):
    asked = small(tmp_path, "--gpus", "2", "--variants", "vanilla_peft", "--seq-lens", "16",
                  "--steps", "2", "--accumulate", "2")  # fmt: skip
    assert lora_bench.main(asked) == 0
    run = store.load(tmp_path / "results.json")
    (cell,), (row,) = run.cells, run.summary
    assert run.experiment.gpus == len(cell.gpus) == 2 and not run.floor
    assert (cell.status, cell.step_ms) == ("ok", cell.gpus[0].step_ms)
    assert [len(gpu.unsynchronised_ms) for gpu in cell.gpus] == [2, 2]
    assert [len(gpu.alone_ms) for gpu in cell.gpus] == [2, 0]
    assert row.tokens_per_s == pytest.approx(2 * 2 * 4 * 16 / row.median_step_ms * 1000, 1e-4)
    assert f"efficiency {cell.efficiency:.1%}" in capsys.readouterr().out
    monkeypatch.setattr(isolated, "run_at_once", None)
    assert lora_bench.main(asked) == 0
    assert lora_bench.main([*asked, "--gpus", "3"]) == 2
    assert "gpus 2 there, 3 here" in capsys.readouterr().err
