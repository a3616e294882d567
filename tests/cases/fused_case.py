"""Models with fused parts beside vanilla PEFT's, and what the fused ones are held against."""

import copy
import io
import re

import torch
from cases.peft_models import ids, peft_model
from cases.reference import BUDGET, assert_near, assert_within_budget, over_draws, relative_error

from fused_lora import Fusion, fuse
from fused_lora.adopt.switches import SWITCHES

BOOLEAN_PARTS = tuple(part for part in SWITCHES if part not in ("layer", "fp8_lm_head"))
SHORT = 5  # tokens
ALL = dict.fromkeys(BOOLEAN_PARTS, True)
FUSIONS = {
    **{part: Fusion(**{part: True}) for part in BOOLEAN_PARTS},
    "checkpoint full": Fusion(checkpoint="full"),
    "checkpoint selective": Fusion(checkpoint="selective", checkpoint_gib=80e3 / 2**30),
    "all": Fusion(**ALL),
    "all, checkpointed": Fusion(**ALL, checkpoint="full"),
}


def batch(model, length=SHORT, seed=3):
    """Two short sequences, as inputs and labels: in Triton's interpreter a step takes as long as it
    has tokens, and for all but an error budget these are enough."""
    tokens = ids(next(model.parameters()).device, seed)[:, :length]
    return {"input_ids": tokens, "labels": tokens}


def loss_of(model, inputs=None):
    return model(**(inputs or batch(model))).loss


class Values(dict):
    """The loss and every gradient, by name. functions: of ours, how often each made the loss."""

    functions: dict[str, int]


def values_of(model, loss):
    """After its backward."""
    model.zero_grad()
    functions = functions_of(loss)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    values = Values(loss=loss.detach(), **gradients)
    values.functions = functions
    return values


def step(model, autocast=False, seed=3, length=17, **inputs):
    device = next(model.parameters()).device
    tokens = ids(device, seed)[:, :length]
    labels = tokens.clone()
    labels[0, : length // 3 + 1] = -100
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=labels, **inputs).loss
    return values_of(model, loss)


def assert_right(fused, plain, autocast=False, exact=None, **inputs):
    """exact: a model in float64, by default the plain one. Returns how often each model ran."""
    exact = copy.deepcopy(plain).double() if exact is None else exact

    def check():
        got, eager = (step(model, autocast, **inputs) for model in (fused, plain))
        truth = step(exact, **inputs)
        assert got.keys() == eager.keys() == truth.keys() and len(truth) > 1
        for name in truth:
            assert got[name].dtype == eager[name].dtype, name
            alike = re.sub(r"layers\.\d+", "layers", name)  # in every layer
            assert_within_budget(alike, got[name], eager[name], truth[name])

    return over_draws(check)


def assert_close(got, want, most=2e-5):
    assert got.keys() == want.keys() and len(want) > 1
    for name in want:
        assert_near(got[name], want[name], most, name)


def assert_same(fused, plain, length=SHORT, most=2e-5, **inputs):
    """In fp32, where a budget would be about nothing but the order in which a GEMM sums. Inputs
    may amplify that (Gemma 4: from 1e-5 to 3e-4): a fused result may be off by BUDGET times as much
    as plain PEFT's, to the other side. Returns the functions that the fused one ran."""
    got, want = (step(model, length=length, **inputs) for model in (fused, plain))
    if most and any(relative_error(got[name], want[name]) > most for name in want):
        truth = step(copy.deepcopy(plain).double(), length=length, **inputs)
        own = max(relative_error(want[name], truth[name]) for name in truth)
        most = max(most, (1 + BUDGET) * own)
    assert_close(got, want, most)
    return got.functions


def assert_trains_alike(fused, plain, length=SHORT):
    """The first gradients and the weights after two steps of SGD. Returns the functions that the
    fused one ran."""
    first, weights = [], []
    for model in (fused, plain):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=0.1)
        found = []
        for seed in (3, 4):
            found.append(step(model, seed=seed, length=length))
            optimizer.step()
        first.append(found[0])
        weights.append({name: p.detach() for name, p in trained.items()})
    assert_close(*first, 2e-4)
    assert_close(*weights, 1e-3)
    return first[0].functions


def functions_of(loss):
    """How often each of our autograd functions stands in the graph of a loss, by name."""
    counted: dict[str, int] = {}
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            function = getattr(node, "_forward_cls", None)
            if function is not None and function.__module__.startswith("fused_"):
                counted[function.__name__] = counted.get(function.__name__, 0) + 1
            todo += [following for following, _ in node.next_functions]
    return counted


def beside(plain, fusion=None, **options):
    """Return a fused copy of a model, the model, and the report."""
    fused = copy.deepcopy(plain)
    return fused, plain, fuse(fused, fusion, **options)


def pair(device, fusion, **options):
    return beside(peft_model(device, **options).train(), fusion)


def pickled(model):
    """As torch.save and torch.load bring it back."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
