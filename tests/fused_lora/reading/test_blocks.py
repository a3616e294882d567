"""A layer's two blocks are read one by one: what keeps one from running keeps no other."""

from dataclasses import replace

import pytest
from cases.families_case import FAMILIES
from cases.layer_case import layer_of, peft_model
from cases.reasons import MODULES

from fused_lora.forwards.layer_reading import read_blocks
from fused_lora.reading.refusal import Refusal
from fused_lora.weights.default_border import DefaultBorder

ONE = {"num_hidden_layers": 1}
# In front of the first colon: the block that a row of MODULES is about. Dtypes are all modules'.
BLOCKS = {"self_attn": 0, "input_layernorm": 0, "mlp": 1}
ROWS = [row for row in MODULES if row[1].partition(".")[0] in BLOCKS and "are torch" not in row[3]]


@pytest.mark.parametrize("row", ROWS, ids=[f"{at}-{said}" for _, at, _, said in ROWS])
def test_what_keeps_one_block_from_running_keeps_no_other(row, device):
    _, at, change, said = row
    family = "Qwen3" if at.endswith(("q_norm", "k_norm")) else "Qwen2"
    layer = layer_of(peft_model(device, family, config=ONE))
    change(layer.get_submodule(at))
    blocks = read_blocks(layer, DefaultBorder)
    kept = blocks[BLOCKS[at.partition(".")[0]]]
    (other,) = (block for block in blocks if block is not kept)
    assert said in kept.reason and not kept.reads
    assert not other.reason and len(other.reads) == 2


def test_a_mixture_of_experts_is_a_block_without_projections(device):
    family = FAMILIES["Qwen3-MoE"]
    config = family.config | ONE | {"attn_implementation": "sdpa"}
    layer = layer_of(replace(family, config=config).peft_model(device))
    attention, mlp = read_blocks(layer, DefaultBorder)
    assert not attention.reason and len(attention.reads) == 2
    assert mlp.mixture is not None and not mlp.reason and not mlp.reads


def test_a_layer_that_adds_a_mixture_to_its_mlp_runs_no_block(device):
    layer = layer_of(FAMILIES["Gemma 4, mixture"].peft_model(device))
    with pytest.raises(Refusal, match="it adds a mixture of experts to its MLP"):
        read_blocks(layer, DefaultBorder)
