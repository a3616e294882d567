"""A rehearsal of bench.sharded."""

import pytest
import torch
from cases.ranks import on_ranks

from bench.options import HERE
from bench.sharded import parsed, train_each


def rehearse(rank, device):
    sizes = ["--tokens", "4", "--warm-up", "0", "--steps", "1", "--lora-rank", "2"]
    asked = parsed(["--model", str(HERE / "configs" / "tiny.json"), *sizes])
    return train_each(asked, torch.device(device))


@pytest.mark.slow
def test_a_model_that_no_rank_holds_whole_trains_fused_as_it_does_plain():
    for losses in on_ranks(2, rehearse):
        assert losses["fused"] == pytest.approx(losses["plain"], rel=1e-2)
