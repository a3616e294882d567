"""Code of transformers, PEFT or torch that somebody has patched runs, and not ours in its place."""

import re
import sys
from functools import wraps

import pytest
import torch
from cases.changes import PATCHES, qwen2
from cases.layer_case import pair, peft_model
from cases.peft_models import ids
from torch import nn

from fused_lora import Fusion, fuse, report
from fused_lora.foreign.originals import why_not

OWN = {"transformers": "transformers'", "peft": "peft's", "torch": "torch's"}


def loss(model):
    tokens = ids(next(model.parameters()).device)
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.slow("mlp", "cross_entropy", "layer-Qwen2RMSNorm-forward")
@pytest.mark.parametrize("part, place, name", PATCHES)
def test_a_patch_runs_whether_it_came_before_fuse_or_after(part, place, name, monkeypatch, device):
    calls = []
    own = getattr(place, name)

    def patched(*inputs, **options):
        calls.append(name)
        return own(*inputs, **options)

    fusion = Fusion(**{part: True})
    fused, plain, done = pair(device, fusion)
    want = loss(plain)
    assert torch.allclose(loss(fused), want, rtol=1e-5) and done.fused[part]
    monkeypatch.setattr(place, name, patched)
    library = OWN[own.__module__.partition(".")[0]]
    reason = f"{name} is (test_fuse_patched.*patched, )?not {library} own: undo that patch"
    try:
        left = fuse(peft_model(device), fusion).left.values()
    except ValueError as error:
        left = [str(error)]
    assert left and all(re.search(reason, one) for one in left)
    assert len(report(fused).fused[part]) == (2 if part == "attention" else 0)  # o by itself
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(loss(fused), want)
    count = len(calls)
    assert torch.equal(loss(plain), want) and count == len(calls) - count > 0
    monkeypatch.undo()
    assert report(fused) == done


def test_eager_attention_that_is_patched_runs_between_fused_parts(monkeypatch, device):
    fused, _, done = pair(
        device, Fusion(attention=True, rope=True), config={"attn_implementation": "eager"}
    )
    calls, own = [], qwen2.eager_attention_forward
    monkeypatch.setattr(
        qwen2, "eager_attention_forward", lambda *a, **o: calls.append(0) or own(*a, **o)
    )
    assert report(fused) == done and loss(fused).isfinite() and len(calls) == 2


def test_a_wrapper_with_the_name_of_what_it_wraps_is_found():
    own = qwen2.Qwen2MLP.forward

    @wraps(own)
    def wrapper(self, x):
        return own(self, x)

    place = own.__module__, own.__qualname__
    assert why_not(own, *place) is None
    assert f"is wrapped by {__file__}:" in why_not(wrapper, *place)
    assert "is an object of builtins.int" in why_not(3, *place)


def test_what_the_package_kernels_makes_of_a_function_is_seen_through(monkeypatch):
    """A module that calls it, which it may replace in a model."""
    func = qwen2.rotate_half

    class Func(nn.Module):
        def forward(self, *inputs):
            return func(*inputs)

    made = Func()
    place = func.__module__, func.__qualname__
    assert "is an object of" in why_not(made, *place)
    monkeypatch.setattr(Func.forward, "__module__", "kernels.layer.func")
    assert why_not(Func(), *place) is None
    made.forward = func
    assert "is an object of" in why_not(made, *place)
    assert sys.modules[place[0]].rotate_half is func
