"""Fixtures that keep these tests quick without a GPU, on one core or two."""

import gc
from functools import partial

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def short_collections():
    """Shorten garbage collection. A training step is timed after a full one, which goes through
    everything that pytest and its plugins imported: a third of a second each time."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(gc, "collect", partial(gc.collect, 0))
        yield


@pytest.fixture
def no_pictures(monkeypatch):
    """End a run without drawing pictures, which takes half a second each time."""
    monkeypatch.setattr("report.commands.draw_pictures", lambda *_: [])
