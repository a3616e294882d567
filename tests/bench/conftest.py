"""What makes the benchmark's own tests quick without a GPU, where they share one core or two."""

import gc
import multiprocessing
from functools import partial

import pytest
import torch

from bench import processes as isolated


@pytest.fixture(autouse=True)
def short_collections(monkeypatch):
    """A training step is timed after a full collection, which looks through all that pytest and
    its plugins have imported: a third of a second each time."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(gc, "collect", partial(gc.collect, 0))


@pytest.fixture(scope="module")
def warm_processes():
    """Processes of `isolated` come from one that has imported what each would import for 5 seconds.
    That they are fresh without it, too, is what test_isolated.py and the command as a user starts
    it are about; a GPU wants them fresh in any case."""
    if torch.cuda.is_available():
        yield
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["bench.cells", "bench.parity", "peft", "transformers.models.qwen2.modeling_qwen2"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated.multiprocessing, "get_context", lambda kind: context)
        yield
