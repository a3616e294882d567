"""A rehearsal of bench.trainers."""

import pytest
from cases.rehearsal_case import WITHOUT_GPU
from cases.table_case import rows_in

from bench import trainers

pytestmark = WITHOUT_GPU
SIZES = ("--tokens", "16", "--steps", "1", "--warm-up", "1", "--batch-size", "1")


@pytest.mark.slow
def test_a_trainer_is_timed_plain_fused_and_in_graphs_with_the_same_losses(capsys):
    pytest.importorskip("trl", reason="wants trl, of dev/requirements/dev.txt")
    model = str(trainers.HERE / "configs" / "tiny.json")
    with pytest.warns(UserWarning, match="all steps run eagerly: the model is on cpu"):
        assert trainers.main(["--model", model, "--kinds", "SFT", *SIZES]) == 0
    printed = capsys.readouterr().out
    assert "layer: 2 of 2 layers fused" in printed
    rows = rows_in(printed[printed.index("| trainer") :])
    assert [row["run"] for row in rows] == [*trainers.RUNS]
    losses = [float(row["loss"]) for row in rows]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-4) and losses[0] > 1
