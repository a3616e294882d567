"""generate() of a fused model: PEFT's own path, so the same launches and the same tokens."""

import pytest
import torch
from cases import layer_case
from cases.counting import Calls
from cases.four_bit_case import EXPERTS, quantised
from cases.fused_case import ALL, SHORT, step
from cases.layer_case import EVERYTHING, LAYER, operands_of_calls
from cases.peft_models import MLP_ON, assert_equal, ids
from transformers import DynamicCache

from fused_lora import Fusion

FUSIONS = {
    "mlp": (MLP_ON, {}),
    "parts": (Fusion(**ALL), {}),
    "layer": (LAYER, {}),
    "everything": (EVERYTHING, {}),
    "everything, 4 bits": (EVERYTHING, {"change": quantised}),
    "parts, experts in 4 bits": (Fusion(**ALL), EXPERTS),
}
GREEDY = {"do_sample": False}
WAYS = {
    "greedy": GREEDY,
    "left padding": GREEDY,
    "beams": GREEDY | {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "static cache": GREEDY | {"cache_implementation": "static", "disable_compile": True},
    "no cache": GREEDY | {"use_cache": False},
}


def generated(model, way, tokens, **options):
    """Return a way's tokens."""
    mask = torch.ones_like(tokens)
    if way == "left padding":
        mask[0, :3] = 0
    torch.manual_seed(0)
    return model.generate(
        input_ids=tokens, attention_mask=mask, pad_token_id=0, eos_token_id=95,
        **{"max_new_tokens": 5} | WAYS[way] | options,
    )  # fmt: skip


@pytest.mark.thinned
@pytest.mark.filterwarnings("error:a fused ")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("fusion", "options"), FUSIONS.values(), ids=FUSIONS)
def test_it_picks_the_tokens_of_plain_peft(fusion, options, way, device, monkeypatch):
    fused, plain, _ = layer_case.pair(device, fusion, **options)
    before = step(fused, length=SHORT)
    ran = operands_of_calls(monkeypatch)
    for model in (fused, plain):
        model.eval()
    got, want = (generated(model, way, ids(device)) for model in (fused, plain))
    assert torch.equal(got, want) and len(want.unique()) > 10
    assert bool(ran) is (way == "no cache" and fusion.layer)
    after = step(fused.train(), length=SHORT)  # whole layers again
    assert after.functions == before.functions
    assert_equal(after, before)


@torch.no_grad()
def test_a_prompt_and_a_token_launch_what_plain_peft_launches(device):
    counted = []
    for model in layer_case.pair(device, EVERYTHING)[:2]:
        tokens, cache = ids(device), DynamicCache()  # generate() brings one
        with Calls() as prompt:
            model.eval()(input_ids=tokens, past_key_values=cache, use_cache=True)
        with Calls() as token:
            model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
        counted.append((prompt.counted, token.counted))
    assert counted[0] == counted[1]
