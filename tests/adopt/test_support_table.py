"""docs/api.md's table of what works with what, filled by asking `fuse` and `report`.

When it differs, the failure shows the table as it should stand there.
"""

from pathlib import Path

import pytest
import torch
from families_case import FAMILIES as OTHERS
from layer_case import peft_model
from peft_models import ATTENTION, FAMILIES, MLP
from projection_case import add_active, replace_weight

from fused_lora import Fusion, fuse, unfuse

OTHERS = {name: one for name, one in OTHERS.items() if name not in FAMILIES}
PARTS = ("mlp", "attention", "rope", "rms_norm", "cross_entropy", "layer")


def each_projection(change):
    def make(device):
        model = peft_model(device)
        for name, module in list(model.named_modules()):
            if name.endswith("_proj"):
                change(module)
        return model

    return make


def with_peft(**lora):
    return lambda device: peft_model(device, **lora)


def merged(device):
    model = peft_model(device)
    model.merge_adapter()
    return model


CASES = {
    **{f"{family}, all seven projections": with_peft(family=family) for family in FAMILIES},
    **{name: family.peft_model for name, family in OTHERS.items()},
    "fp16 base weights": with_peft(dtype=torch.float16),
    "bf16 adapters": with_peft(dtype=torch.bfloat16, autocast_adapter_dtype=False),
    "rsLoRA": with_peft(use_rslora=True),
    "other ranks by projection": with_peft(rank_pattern={"q_proj": 4, "down_proj": 16}),
    "some layers only (`layers_to_transform`)": with_peft(layers_to_transform=[1]),
    "attention's projections only": with_peft(target_modules=list(ATTENTION)),
    "the MLP's projections only": with_peft(target_modules=list(MLP)),
    "`q_proj` and `v_proj` only": with_peft(target_modules=["q_proj", "v_proj"]),
    "`lora_dropout` > 0": with_peft(lora_dropout=0.25),
    "`lora_bias`": with_peft(lora_bias=True),
    '`bias="all"`': with_peft(bias="all"),
    "DoRA": with_peft(use_dora=True),
    "several adapters active": each_projection(add_active),
    "quantised base weights": each_projection(replace_weight),
    "merged": merged,
}


def outcome(model, part):
    """How many of the part's modules run fused: all, some, or none of them."""
    try:
        found = fuse(model, Fusion(**{part: True}))
    except ValueError:
        return "–"
    unfuse(model)
    return "some" if found.left else "fused"


@pytest.mark.parametrize("name", CASES)
def test_the_table_of_what_works_with_what(name, device):
    model = CASES[name](device)
    row = f"| {name} | {' | '.join(outcome(model, part) for part in PARTS)} |"
    text = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    assert row in text.splitlines(), f"docs/api.md should have this row:\n{row}"
