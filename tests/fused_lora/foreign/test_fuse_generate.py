"""generate() of a fused model: PEFT's own path, so the same tokens, in the same time."""

import time

import pytest
import torch
from cases import layer_case
from cases.counting import Calls
from cases.four_bit_case import quantised
from cases.fused_case import ALL, SHORT, step
from cases.layer_case import EVERYTHING, LAYER, operands_of_calls
from cases.peft_models import MLP_ON, assert_equal, ids

from fused_lora import Fusion, fuse

FUSIONS = {
    "mlp": (MLP_ON, {}),
    "parts": (Fusion(**ALL), {}),
    "layer": (LAYER, {}),
    "everything": (EVERYTHING, {}),
    "everything, 4 bits": (EVERYTHING, {"change": quantised}),
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


def decoded(model, tokens):
    """Return a function that decodes one more token."""
    cache = model(input_ids=tokens, use_cache=True).past_key_values
    return lambda: model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)


@torch.no_grad()
def test_decoding_launches_what_plain_peft_launches(device):
    counted = []
    for model in layer_case.pair(device, EVERYTHING)[:2]:
        decode = decoded(model.eval(), ids(device))
        with Calls() as calls:
            decode()
        counted.append(calls.counted)
    assert counted[0] == counted[1]


# --- on the GPU -----------------------------------------------------------------------------------

SIZES = {  # Qwen2.5-3B's, in a third of its layers
    "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 12,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("change", [None, quantised], ids=["bf16", "4 bits"])
def test_prefill_and_decoding_take_no_longer_than_with_plain_peft(change, device):
    """Print milliseconds, the best of five runs that take turns."""
    options = {} if change is None else {"change": change}
    plain = layer_case.peft_model(device, dtype=torch.bfloat16, config=SIZES, r=32, **options)
    fused = layer_case.peft_model(device, dtype=torch.bfloat16, config=SIZES, r=32, **options)
    fuse(fused, EVERYTHING)
    prompt = torch.randint(96, (4, 512), device=device)
    best: dict[tuple[str, str], float] = {}
    for _ in range(6):
        for name, model in (("plain", plain.eval()), ("fused", fused.eval())):
            for what, new in (("prefill", 1), ("prefill and 32 tokens", 33)):
                torch.cuda.synchronize()
                start = time.perf_counter()
                generated(model, "greedy", prompt, max_new_tokens=new, min_new_tokens=new)
                torch.cuda.synchronize()
                took = 1e3 * (time.perf_counter() - start)
                best[what, name] = min(took, best.get((what, name), took))
    print({" ".join(key): round(took, 1) for key, took in best.items()})
    for what in ("prefill", "prefill and 32 tokens"):
        assert best[what, "fused"] < 1.05 * best[what, "plain"]


@pytest.mark.gpu
def test_in_bf16_at_real_size_it_picks_the_tokens_of_plain_peft(device):
    options = {"dtype": torch.bfloat16, "config": SIZES, "r": 32}
    fused, plain, _ = layer_case.pair(device, EVERYTHING, **options)
    prompt = torch.randint(96, (4, 128), device=device)
    for way in ("greedy", "left padding"):
        got, want = (
            generated(model.eval(), way, prompt, max_new_tokens=64) for model in (fused, plain)
        )
        assert torch.equal(got, want)
