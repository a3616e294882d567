"""A rehearsal of bench.sharded."""

import os

import pytest
import torch
from cases.ranks import on_ranks

from bench.options import HERE
from bench.sharded import parsed, train_each

TINY = str(HERE / "configs" / "tiny.json")


def rehearse(rank, device):
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun does
    sizes = ["--tokens", "4", "--warm-up", "0", "--steps", "1", "--lora-rank", "2"]
    asked = parsed(["--model", TINY, *sizes])
    return train_each(asked, torch.device(device))


@pytest.mark.slow
def test_a_model_that_no_rank_holds_whole_trains_fused_as_it_does_plain():
    for losses in on_ranks(2, rehearse):
        assert losses["fused"] == pytest.approx(losses["plain"], rel=1e-2)


@pytest.mark.parametrize(("model", "words"), [("nowhere", "no such file"), (TINY, "with torchrun")])
def test_what_cannot_start_says_so(model, words, monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        parsed(["--model", model])
    assert words in capsys.readouterr().err
