"""The rehearsal is the command without a GPU, and its tests are the same ones on every machine."""

from functools import partial
from pathlib import Path

import pytest
import torch

from bench import options, planning
from bench import processes as isolated

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_without_gpu.py runs this file with the GPU hidden"
)


def small(folder, *arguments):
    """A command of a few chats, for every process turns all that there are into tokens."""
    chats = folder / "chats.jsonl"
    with (ROOT / "data" / "sft_train.jsonl").open() as published:
        chats.write_text("".join(published.readline() for _ in range(60)))
    return ["--device", "cpu", "--data", str(chats), "--cache", str(folder / "cache"),
            "--out", str(folder), *arguments]  # fmt: skip


def plan_of(folder, *arguments):
    """The plan of a small command."""
    with planning.planned(options.parse(small(folder, *arguments), ""), []) as (plan, *_):
        return plan


def in_this_process(function, *arguments, on_message, silence_limit_s=None):
    """`isolated.run` without the process, which would import everything anew."""
    function(on_message, *arguments)
    return isolated.Ended(None, "")


def one_after_the_other(function, each, on_message, silence_limit_s=None):
    """`isolated.run_in_turns` without the processes, of which each has all its turns at once."""
    for index, arguments in enumerate(each):
        function(partial(on_message, index), *arguments, wait_for_turn=lambda stage: 1)
    return [isolated.Ended(None, "")] * len(each)
