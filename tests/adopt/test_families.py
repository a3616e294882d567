"""Every family of the table in `families_case.py`: the modules that each part fuses in it, and that
it trains and generates as plain PEFT has it."""

import copy
import statistics

import pytest
import torch
from families_case import FAMILIES, UNKNOWN
from fused_case import ALL, functions_of
from peft_models import ids
from reference import BUDGET, random, relative_error

from fused_lora import Fusion, fuse

EVERY = pytest.mark.parametrize("name", FAMILIES)
OF_ATTENTION = ("LoRA_Attention", "LoRA_QKV", "LoRA_W", "RoPE")


def pair(name, device, **options):
    plain = FAMILIES[name].peft_model(device, **options).train()
    fused = copy.deepcopy(plain)
    return fused, plain, fuse(fused, Fusion(**ALL), strict=False)


def inputs_of(model, name, seed=3):
    """Six tokens, more than the window of those that have one, of which five are labelled."""
    tokens = ids(next(model.parameters()).device, seed)[:1, :6]
    labels = tokens.clone()
    labels[0, :2] = -100
    others: dict[str, torch.Tensor] = {}
    if "mrope_section" in FAMILIES[name].config.get("rope_parameters", {}):  # as of an image
        rows = torch.tensor([[0, 1, 2, 2, 2, 5], [0, 1, 2, 2, 3, 5], [0, 1, 2, 3, 2, 5]])
        others["position_ids"] = rows[:, None].to(tokens.device)
    if (token := FAMILIES[name].image_token) is not None:
        tokens[0, 1:5] = token
        others["pixel_values"] = random(1, 3, 28, 28, dtype=model.dtype, device=tokens.device)
    return {"input_ids": tokens, "labels": labels, **others}


def step(model, name, seed=3):
    """The loss and every gradient, by name."""
    model.zero_grad()
    loss = model(**inputs_of(model, name, seed)).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in trained(model).items()}}


def trained(model):
    """What took part in the last step: of a vision tower nothing."""
    return {n: p for n, p in model.named_parameters() if p.grad is not None}


def errors_of(got, want):
    assert got.keys() == want.keys() and len(want) > 10
    return {name: relative_error(got[name], want[name]) for name in want}


@EVERY
def test_each_part_fuses_these_modules_and_no_others(name, device):
    fused, _, done = pair(name, device)
    family = FAMILIES[name]
    assert {part: sorted(names) for part, names in done.fused.items()} == family.fused_modules()
    assert done.left.keys() == family.left.keys()
    assert all(reason in done.left[where] for where, reason in family.left.items())
    seen = functions_of(fused(**inputs_of(fused, name)).loss)
    assert {f: seen[f] for f in OF_ATTENTION if f in seen} == family.functions


@EVERY
def test_it_trains_and_generates_as_plain_peft_does(name, device):
    fused, plain, _ = pair(name, device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in (fused, plain)]
    for seed in (3, 4, 5):
        errors = errors_of(*(step(model, name, seed) for model in (fused, plain)))
        assert all(error <= 2e-4 for error in errors.values()), (seed, errors)
        for optimizer in optimizers:
            optimizer.step()
    errors = errors_of(*(trained(model) for model in (fused, plain)))
    assert all(error <= 1e-3 for error in errors.values()), errors
    tokens = ids(device)[:1, :6]
    with torch.no_grad():
        logits = [model.eval()(input_ids=tokens).logits for model in (fused, plain)]
        written = [
            m.generate(input_ids=tokens, max_new_tokens=2, do_sample=False, use_cache=True)
            for m in (fused, plain)
        ]
    assert relative_error(*logits) < 2e-5
    assert torch.equal(*written)


@EVERY
def test_it_is_within_the_error_budget_in_bf16(name, device):
    """All gradients together: how far rounding puts one alone, of six tokens, from the truth is
    luck, for eager and fused alike."""
    fused, plain, _ = pair(name, device, dtype=torch.bfloat16)
    exact = copy.deepcopy(plain).double()
    got, eager = [], []
    for seed in (3, 4):
        truth = step(exact, name, seed)
        for model, errors in ((fused, got), (plain, eager)):
            errors += errors_of(step(model, name, seed), truth).values()
    assert statistics.mean(got) <= BUDGET * statistics.mean(eager)


def test_a_family_in_no_list_is_refused_by_name(device):
    model = UNKNOWN.peft_model(device)
    plain = copy.deepcopy(model)
    done = fuse(model, Fusion(**ALL), strict=False)
    assert {part: sorted(names) for part, names in done.fused.items()} == UNKNOWN.fused_modules()
    assert done.left.keys() == UNKNOWN.left.keys()
    assert all(reason in done.left[where] for where, reason in UNKNOWN.left.items())
    tokens = ids(device)[:1, :6]
    got, want = (one(input_ids=tokens).logits for one in (model, plain))
    assert relative_error(got, want) < 2e-5
