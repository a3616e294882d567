"""Recomputation in backward: it repeats the same forward, and keeps nothing."""

import gc
import weakref
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from cases.counting import saved_tensors
from torch.utils.checkpoint import checkpoint

from fused_lora.rerun import Keep, once, runs, saving_last
from fused_lora.step import recompute
from fused_lora.step.recompute import recomputed


@pytest.fixture
def weight(device):
    torch.manual_seed(0)
    return torch.randn(6, 6, device=device, requires_grad=True)


@pytest.fixture
def x(device):
    return torch.randn(3, 6, device=device, requires_grad=True)


def gradients(function, x, weight):
    return torch.autograd.grad(function(x).square().sum(), (x, weight))


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def is_recomputing():
    return any(run.runs_again for run in runs())


def layer(weight):
    return lambda x: x + torch.tanh(x @ weight).exp() @ weight


def test_gradients_are_those_of_the_forward_itself(x, weight):
    """Recompute alone, nested, and inside PyTorch's own checkpoint."""
    inner = layer(weight)
    once_more = partial(recomputed, inner)
    assert_equal(gradients(once_more, x, weight), gradients(inner, x, weight))

    def outer(x):
        return once_more(once_more(x))

    want = gradients(lambda x: inner(inner(x)), x, weight)
    assert_equal(gradients(partial(recomputed, outer), x, weight), want)
    assert_equal(gradients(partial(checkpoint, outer, use_reentrant=False), x, weight), want)


def test_the_second_run_stops_at_the_last_tensor_that_is_saved(x, weight):
    seen = []

    def forward(x):
        seen.append(("first half", is_recomputing()))
        y = torch.tanh(x @ weight)
        seen.append(("second half", is_recomputing()))
        return y + 1.0

    recomputed(forward, x).sum().backward()
    assert seen == [("first half", False), ("second half", False), ("first half", True)]
    assert not is_recomputing()


@pytest.mark.parametrize(
    ("after", "needed"),
    [(lambda y: y + 1, False), (lambda y: y * y, True), (lambda y: y.detach().exp() + y, False)],
    ids=("adds", "multiplies", "without a gradient"),
)
def test_an_output_that_something_after_it_saved_is_needed_again(after, needed, x, weight):
    asked = []

    def last(output_needed):
        asked.append(output_needed)
        return torch.tanh(x @ weight) * (1.0 if output_needed else float("nan"))

    def forward(x):
        return after(saving_last(last))

    (again,) = torch.autograd.grad(recomputed(forward, x).sum(), weight)
    assert asked == [True, needed]
    (want,) = torch.autograd.grad(forward(x).sum(), weight)
    assert torch.equal(again, want)


def test_nothing_but_the_inputs_is_kept(x, weight):
    found = []

    def forward(x, scale):
        y = torch.tanh(x @ weight) * scale
        found.append(weakref.ref(y))
        return y.exp()

    scale = torch.ones(6, device=x.device)
    with saved_tensors() as kept:
        total = recomputed(forward, x, scale).sum()
    gc.collect()
    assert found[0]() is None
    assert [t.data_ptr() for t in kept] == [x.data_ptr(), scale.data_ptr()]
    kept.clear()
    total.backward()
    del total
    gc.collect()
    assert len(found) == 2 and found[1]() is None


def test_what_is_computed_again_is_let_go_of_as_backward_uses_it(x, weight):
    """Free each tensor during backward: at its end all the large ones would be alive at once."""
    found, alive = [], []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 2.0)
            return x * 2.0

        @staticmethod
        def backward(ctx, grad):
            tensor = ctx.saved_tensors[0]
            alive.append(sum(one() is not None for one in found))
            found.append(weakref.ref(tensor.untyped_storage()))
            return grad * 2.0

    def forward(x):
        return Saves.apply(Saves.apply(Saves.apply(x)))

    recomputed(forward, x).sum().backward()
    assert alive == [0, 0, 0]


def test_what_the_second_run_saves_can_be_seen_together(x, weight):
    seen = []
    forward = layer(weight)
    with saved_tensors() as saved:
        forward(x)
    total = recomputed(forward, x, see=lambda found: seen.append([t.clone() for t in found])).sum()
    assert not seen
    total.backward()
    assert len(seen) == 1
    assert_equal(seen[0], saved)


def test_random_numbers_are_drawn_again_and_later_ones_are_not_touched(x, weight, monkeypatch):
    """Check every generator. A fake one stands in for a GPU's, which is the second there."""
    other = torch.Generator()
    generators_of = recompute._generators_of
    monkeypatch.setattr(recompute, "_generators_of", lambda x: (*generators_of(x), other))

    def draw():
        devices = (torch.rand(4, device=one) for one in {x.device.type, "cpu"})
        return *devices, torch.rand(4, generator=other)

    def forward(x):
        return F.dropout(x @ weight, 0.5) * torch.rand(6, generator=other).to(x.device)

    def run(function):
        torch.manual_seed(3), other.manual_seed(4)
        total = function(x).square().sum()
        drawn = draw()  # otherwise the recomputation would leave the generators as the forward did
        return *torch.autograd.grad(total, (x, weight)), *drawn, *draw()

    assert_equal(run(lambda x: recomputed(forward, x)), run(forward))
    drawn = run(lambda x: recomputed(forward, x, keep_random_state=False))
    assert not torch.equal(drawn[1], run(forward)[1])  # other elements were dropped


def test_the_second_run_has_the_firsts_autocast(x, weight):
    dtypes = []

    def forward(x):
        y = x @ weight
        dtypes.append(y.dtype)
        return y.exp()

    with torch.autocast(x.device.type, torch.bfloat16):
        total = recomputed(forward, x).float().sum()
    total.backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    dtypes.clear()
    total = recomputed(forward, x).sum()
    with torch.autocast(x.device.type, torch.bfloat16):
        total.backward()
    assert dtypes == [torch.float32, torch.float32]


def test_a_second_backward_through_a_retained_graph(x, weight):
    total = recomputed(layer(weight), x).sum()
    first = torch.autograd.grad(total, (x, weight), retain_graph=True)
    assert_equal(torch.autograd.grad(total, (x, weight)), first)


class Attend(torch.autograd.Function):
    """A function that keeps its first result and recomputes everything after it."""

    calls: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x):
        def dear():
            Attend.calls.append(is_recomputing())
            return x.exp(), "constant", None

        y, *constants = once(dear)
        assert constants == ["constant", None]
        ctx.save_for_backward(y)
        return y * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@pytest.fixture
def store():
    """Return a place to keep tensors in, and a list of what went out and back."""
    Attend.calls = []
    moves = []

    def out(tensor):
        moves.append("out")
        return tensor.clone()

    return Keep(out, lambda kept: moves.append("back") or kept), moves


def test_what_is_computed_once_is_kept_and_brought_back(x, weight, store):
    keep, moves = store

    def forward(x):
        return torch.tanh(Attend.apply(x @ weight))

    want = gradients(forward, x, weight)
    Attend.calls.clear()
    assert_equal(gradients(lambda x: recomputed(forward, x, keep=keep), x, weight), want)
    assert (Attend.calls, moves) == ([False], ["out", "back"])
    # each of two backwards brings it back
    total = recomputed(forward, x, keep=keep).sum()
    first = torch.autograd.grad(total, (x, weight), retain_graph=True)
    assert_equal(torch.autograd.grad(total, (x, weight)), first)
    assert (Attend.calls, moves[2:]) == ([False, False], ["out", "back", "back"])


def test_what_becomes_an_output_is_kept_without_its_graph(x, weight):
    """A graph that is dropped before its backward frees everything at once, without gc."""

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            (y,) = once(lambda: (x.exp(),))
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    def forward(x):
        return Exp.apply(x @ weight)

    keep = Keep(lambda tensor: tensor, lambda tensor: tensor)
    want = gradients(lambda x: (x @ weight).exp(), x, weight)
    assert_equal(gradients(lambda x: recomputed(forward, x, keep=keep), x, weight), want)
    gc.disable()
    try:
        total = recomputed(forward, x, keep=keep)
        output = weakref.ref(total.grad_fn)
        del total
        assert output() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_small_is_kept_as_it_is(kept, x, store, monkeypatch):
    keep, moves = store
    monkeypatch.setitem(globals(), "once", partial(once, is_small=True))
    recomputed(Attend.apply, x, keep=keep if kept else None).sum().backward()
    assert Attend.calls == [False] and not moves
    assert once(lambda: (1, 2)) == (1, 2)


def test_without_a_keep_nothing_is_computed_once(x, store):
    recomputed(Attend.apply, x).sum().backward()
    assert Attend.calls == [False, True]
    # the innermost decides
    recomputed(lambda x: recomputed(Attend.apply, x), x, keep=store[0]).sum().backward()
    assert Attend.calls == [False, True, False, True] and not store[1]
    assert once(lambda: (1, 2)) == (1, 2)


def test_without_gradients_nothing_is_kept(x, weight):
    with torch.no_grad():
        y = recomputed(layer(weight), x)
    assert not y.requires_grad


def no_more(x):
    raise MemoryError("no more")


@pytest.mark.parametrize(
    ("second", "error", "words"),
    [
        (lambda x: x.exp(), RuntimeError, "saved 2 tensors in its forward, and 1 or others"),
        (lambda x: x[:2].exp().exp(), RuntimeError, "2 tensors in its forward, and 2 or others"),
        (no_more, MemoryError, "no more"),
    ],
    ids=("fewer", "others", "fails"),
)
def test_a_second_run_that_is_another_is_refused_and_leaves_nothing_behind(second, error, words, x):
    def forward(x):
        if is_recomputing():
            torch.rand(1)
            return second(x)
        return x.exp().exp()

    total = recomputed(forward, x).sum()
    state = torch.get_rng_state()
    with pytest.raises(error, match=words):
        total.backward()
    assert torch.equal(torch.get_rng_state(), state) and not is_recomputing()
