"""Tables and a picture of how much of small adapters each variant shows."""

import pytest

from bench.experiment_records import Environment
from bench.small_adapter_records import Seen, SmallAdapters, TrainedAdapter
from report.small_adapters import (
    small_adapters_caption,
    small_adapters_figure,
    small_adapters_section,
)
from variants import IN_FP32, Lora

SMALL, LARGE, DPO = (
    TrainedAdapter(1e-6, 1),
    TrainedAdapter(1e-4, 64),
    TrainedAdapter(5e-6, 1, is_dpo=True),
)
PLAIN, LAYERS = "vanilla_peft_no_checkpointing", "fused_layer_no_checkpointing"


def seen(variant, adapter, share, loss_share):
    """Make two batches in which fp32's change is 2 and 4, and that of its loss -1 and -3."""
    along = [2.0 * share, 4.0 * share]
    losses = [-1.0 * loss_share, -3.0 * loss_share]
    return Seen(variant, adapter, along, losses, [share, 0.0], [-share, 0.0])


@pytest.fixture
def found():
    environment = Environment(None, "a CPU", "Linux", "3.12", {"torch": "2.11.0"}, None, None)
    shares = {IN_FP32: (1.0, 1.0), PLAIN: (0.25, 0.5), LAYERS: (1.0, 0.75)}
    every = [
        seen(variant, adapter, *share)
        for variant, share in shares.items()
        for adapter in (SMALL, LARGE, DPO)
    ]
    return SmallAdapters(
        "2026-11-26", environment, "a model", "random, seed 0", Lora(), 2, 64, 2,
        [SMALL, LARGE, DPO], every, {"full_unsloth": "not installed"},
    )  # fmt: skip


def test_tables_have_a_row_for_each_adapter_and_a_column_for_each_variant(found):
    lines = small_adapters_section([found]).splitlines()
    assert "| learning rate | updates | vanilla PEFT | fused layers |" in lines
    assert "| 1e-6 | 1 | 0.25 | 1.00 |" in lines and "| 1e-4 | 64 | 0.25 | 1.00 |" in lines
    # losses of batches differ: half of the interval of -1 and -3 over -2
    assert "| 1e-6 | 1 | 0.50 ± 3.18 | 0.75 ± 4.76 |" in lines
    assert "| updates | fp32 | vanilla PEFT | fused layers |" in lines
    assert "| 1 | +0.50 / -0.50 | +0.12 / -0.12 | +0.50 / -0.50 |" in lines
    assert "could not run: full Unsloth" in small_adapters_caption(found)
    assert small_adapters_section([]) == "Not measured yet."


def test_lines_of_the_picture_are_named_and_one_learning_rate_is_no_way_to_the_next(found):
    (axes,) = small_adapters_figure(found).axes
    words = [text.get_text() for text in axes.texts]
    assert {"vanilla PEFT", "fused layers", "learning rate 1e-6"} <= set(words)
    drawn = [[*line.get_ydata()] for line in axes.lines if line.get_marker() in ("o", "P")]
    assert drawn == [[0.25], [0.25], [1.0], [1.0]]
    found.seen[:] = [one for one in found.seen if one.variant == PLAIN or one.variant == IN_FP32]
    found.seen += [seen("fused_mlp", one, 0.3, 0.5) for one in (SMALL, LARGE, DPO)]
    (axes,) = small_adapters_figure(found).axes
    assert "vanilla PEFT,\nfused MLP" in [text.get_text() for text in axes.texts]
