"""Every family of the table in `families_case.py`: whose layers run whole, right, and why the
others do not. (`test_decoder_layer.py` has them in bf16, one layer at a time.)"""

import copy

import pytest
from families_case import FAMILIES
from fused_case import assert_close, assert_trains_alike, functions_of, step
from peft_models import ids

from fused_lora import Fusion, fuse, unfuse

LAYER = Fusion(layer=True)
LENGTH = 6  # tokens, more than the window of those that have one
EXPERTS = "its MLP is a mixture of experts"
NOT_READ = "its layers are not known to run as one"
NOT_WHOLE = {
    "Qwen3-MoE": EXPERTS,
    "Qwen2-MoE": EXPERTS,
    "Mixtral": EXPERTS,
    "Ministral 3": NOT_READ,
    "Gemma 2": "its attention soft-caps the scores",
    "Gemma 4": "Gemma4TextDecoderLayer is not a layer class .*",
    "Qwen3.5": NOT_READ,
    "Phi-4-mini": "its attention turns a part of each head",
    "Qwen2-VL": NOT_READ,
    "Qwen2.5-VL": NOT_READ,
    "Qwen3-VL": NOT_READ,
}
WHOLE = [name for name in FAMILIES if name not in NOT_WHOLE]


def pair(name, device, fusion=LAYER, **options):
    plain = FAMILIES[name].peft_model(device, **options).train()
    fused = copy.deepcopy(plain)
    return fused, plain, fuse(fused, fusion)


@pytest.mark.parametrize(("name", "reason"), NOT_WHOLE.items())
def test_layers_that_do_not_run_whole_say_what_they_are(name, reason):
    with pytest.raises(ValueError, match=f"layer=True fuses no module of this model: {reason};"):
        fuse(FAMILIES[name].peft_model("cpu"), LAYER)


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_run_whole_train_as_in_plain_peft(name, device):
    fused, plain, done = pair(name, device)
    assert len(done.fused["layer"]) == 2 and not done.left
    tokens = ids(device)[:, :LENGTH]
    loss = fused(input_ids=tokens, labels=tokens).loss
    assert functions_of(loss) == {"DecoderLayer": 2}
    assert_trains_alike(fused, plain, LENGTH)


# What is more than a row of the table: q and k that are not turned, multiples of what is added,
# norms of it, and these on both sides and about one, with GELU; one projection for q, k and v.
@pytest.mark.parametrize("name", ["SmolLM3", "Granite", "OLMo 2", "Gemma 3", "Phi-3"])
@pytest.mark.parametrize("policy", ["full", "offload"])
def test_layers_that_run_whole_join_the_loss_where_they_run_again(policy, name, device):
    fusion = Fusion(layer=True, rms_norm=True, cross_entropy=True, checkpoint=policy)
    fused, plain, _ = pair(name, device, fusion)
    assert_close(step(fused, length=LENGTH), step(plain, length=LENGTH), 2e-5)
    unfuse(fused)
    assert_close(step(fused, length=LENGTH), step(plain, length=LENGTH), 0.0)
