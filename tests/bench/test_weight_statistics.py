"""A rehearsal of dev/measure/weight_statistics.py."""

import json
from math import isfinite

import pytest
import torch
from cases.rehearsal_case import WITHOUT_GPU

from bench.options import HERE
from dev.measure import weight_statistics
from dev.measure.weight_statistics import LARGE_CHANNELS, heavy_tailed, large_channels

pytestmark = WITHOUT_GPU


@pytest.mark.slow
def test_both_kinds_of_weights_are_timed_on_the_same_model(tmp_path):
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(512, 256)
    heavy, larger = heavy_tailed(weight), large_channels(torch.ones(64)).sort().values
    assert heavy.std() == pytest.approx(weight.std().item(), rel=1e-3)
    assert heavy.abs().max() > 3 * weight.abs().max()
    assert larger[-LARGE_CHANNELS].item() == pytest.approx(20) and larger[-1] == 100
    assert larger[-LARGE_CHANNELS - 1] == 1

    out, variants = tmp_path / "found" / "record.json", ["vanilla_peft", "fused_layer"]
    asked = ["--model", str(HERE / "configs" / "tiny.json"), "--cache", str(tmp_path), "--seq-len",
             "32", "--batch-size", "1", "--rounds", "1", "--steps", "1"]  # fmt: skip
    assert (
        weight_statistics.main([str(out), *asked, "--variants", *variants, "fused_all_graph"]) == 0
    )
    found = json.loads(out.read_text())
    assert [*found["measured"]] == ["64 x 64 x 64", "gate and up", *variants]
    vanilla, fused = (found["measured"][variant] for variant in variants)
    assert [row["kind"] for row in vanilla] == ["random", "trained"]
    random, trained = (row["losses"][0] for row in vanilla)  # later ones differ by Adam's steps
    assert random != trained
    for row, loss in zip(fused, (random, trained), strict=True):
        assert row["losses"][0] == pytest.approx(loss, rel=2e-3)
    assert all(isfinite(kind["over_random"]) for kind in found["compared"]["fused_layer"].values())
