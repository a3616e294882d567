"""The gate: what passes, what does not and why, and that the reference is what it says."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from batches import Batch
from bench.parity import (
    LIMIT,
    LOSS_FLOOR,
    SCALE_LIMIT,
    Reference,
    check_parity,
    judge,
    make_reference,
)
from models import Built
from variants import Settings

LOSSES = [4.0, 5.0]


def reference(gradient_error=0.01, loss_errors=(0.002, 0.002), scale=1.0):
    return Reference(
        losses=list(LOSSES),
        gradients={"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 1.0])},
        loss_errors=list(loss_errors),
        gradient_errors={"a": gradient_error, "b": gradient_error},
        gradient_scales={"a": scale, "b": scale},
    )


def gradients(a=(3.0, 4.0), b=(0.0, 1.0)):
    return {"a": torch.tensor(a), "b": torch.tensor(b)}


def test_the_truth_passes():
    parity = judge(LOSSES, gradients(), reference())
    assert parity.passed and parity.problem is None
    assert (parity.worst_ratio, parity.loss_errors) == (0.0, [0.0, 0.0])
    assert parity.worst_scale == pytest.approx(1.0)


# --- gradients ------------------------------------------------------------------------------------


def test_the_error_is_relative_to_the_norm_and_the_worst_gradient_is_named():
    # a is off by 0.05 of norm 5: 1%. b is off by 0.014 of norm 1: 1.4%, that is 1.4 x vanilla's own
    parity = judge(LOSSES, gradients(a=(3.04, 3.97), b=(0.014, 1.0)), reference())
    assert parity.passed
    assert parity.worst_gradient == "b"
    assert parity.worst_ratio == pytest.approx(1.4, rel=1e-3)
    assert parity.median_gradient_error == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_just_inside_and_just_outside_the_limit():
    inside, outside = 0.99 * LIMIT * 0.01, 1.01 * LIMIT * 0.01
    assert judge(LOSSES, gradients(b=(inside, 1.0)), reference()).passed
    failed = judge(LOSSES, gradients(b=(outside, 1.0)), reference())
    assert not failed.passed
    assert failed.problem == f"b is {1.01 * LIMIT:.2f} times as far from fp32 as vanilla PEFT's"


@pytest.mark.parametrize(
    "wrong",
    [
        (0.0, 0.0),  # never computed
        (0.0, -1.0),
        (1.0, 0.0),
        (0.0, float("nan")),
        (float("inf"), 1.0),
    ],
)
def test_a_wrong_gradient_fails_and_is_named(wrong):
    parity = judge(LOSSES, gradients(b=wrong), reference())
    assert not parity.passed
    assert parity.problem.startswith("b is ")
    assert (parity.worst_gradient, parity.worst_ratio > 90) == ("b", True)


@pytest.mark.parametrize("names", [("a",), ("b",), ("a", "b", "c"), ()])
def test_a_missing_or_an_extra_gradient_fails(names):
    found = {name: gradients().get(name, torch.ones(2)) for name in names}
    parity = judge(LOSSES, found, reference())
    assert not parity.passed
    assert parity.problem.startswith("it trains other parameters than vanilla PEFT")
    if len(names) == 1:
        assert parity.worst_gradient not in names


# --- scales ---------------------------------------------------------------------------------------


def test_a_gradient_that_is_too_long_is_caught_where_vanillas_own_error_would_hide_it():
    """A tenth too long is two thirds of an error of 15%, and all of it along the truth."""
    noisy = reference(gradient_error=0.15)
    parity = judge(LOSSES, gradients(a=(3.3, 4.4)), noisy)
    assert parity.worst_ratio == pytest.approx(0.1 / 0.15)
    assert (parity.worst_scale_gradient, parity.worst_scale) == ("a", pytest.approx(1.1))
    assert not parity.passed
    assert parity.problem == ("a is 1.100 times as long as in fp32, vanilla PEFT's 1.000 times")
    across = judge(LOSSES, gradients(a=(3.0 - 0.4, 4.0 + 0.3)), noisy)  # as far off, but across
    assert across.worst_ratio == pytest.approx(0.1 / 0.15)
    assert across.passed


@pytest.mark.parametrize("sign", [1, -1])
def test_a_scale_just_inside_and_just_outside_its_limit(sign):
    noisy = reference(gradient_error=0.15)
    inside, outside = (1 + sign * share * SCALE_LIMIT for share in (0.99, 1.01))
    assert judge(LOSSES, gradients(b=(0.0, inside)), noisy).passed
    assert not judge(LOSSES, gradients(b=(0.0, outside)), noisy).passed


def test_a_scale_is_held_against_vanillas_own():
    short = reference(gradient_error=0.15, scale=0.98)
    assert judge(LOSSES, gradients(a=(3.0, 4.0), b=(0.0, 0.96)), short).passed
    failed = judge(LOSSES, gradients(a=(3.06, 4.08), b=(0.0, 1.0)), short)
    assert failed.problem == "a is 1.020 times as long as in fp32, vanilla PEFT's 0.980 times"


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_the_loss_of_either_batch_is_held_to_vanillas_own_error(which):
    for share, passes in ((0.99, True), (1.01, False)):
        losses = list(LOSSES)
        losses[which] *= 1 + share * LIMIT * 0.002
        assert judge(losses, gradients(), reference()).passed is passes
    losses[which] = float("nan")
    assert not judge(losses, gradients(), reference()).passed


def test_each_loss_has_a_budget_of_its_own():
    uneven = reference(loss_errors=(0.01, 0.002))
    assert judge([4.0 * 1.01, 5.0], gradients(), uneven).passed
    assert not judge([4.0, 5.0 * 1.01], gradients(), uneven).passed


def test_a_loss_that_vanilla_hits_by_chance_leaves_a_share_of_one_rounding():
    lucky = reference(loss_errors=(0.0, 0.0))
    near, far = (4.0 * (1 + share * LIMIT * LOSS_FLOOR) for share in (0.99, 1.01))
    assert judge([near, 5.0], gradients(), lucky).passed
    assert not judge([far, 5.0], gradients(), lucky).passed


def test_a_second_loss_that_is_left_over_from_the_first_fails():
    parity = judge([4.0, 4.0], gradients(), reference())
    assert not parity.passed
    assert parity.problem == "losses 4.0000 and 4.0000, in fp32 4.0000 and 5.0000"
    assert parity.loss_errors == pytest.approx([0.0, 0.2])


# --- models ---------------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A frozen bf16 matrix and two fp32 adapters; its loss is a mean square."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Parameter(torch.randn(8, 8).bfloat16(), requires_grad=False)
        self.lora_A = torch.nn.Parameter(torch.randn(2, 8))
        self.lora_B = torch.nn.Parameter(torch.randn(8, 2))

    def forward(self, input_ids, labels, attention_mask):
        x = torch.sin(input_ids[..., None] * torch.arange(1.0, 9.0))
        out = x.to(self.frozen.dtype) @ self.frozen.T + x @ self.lora_A.T @ self.second().T
        return SimpleNamespace(loss=(out * labels[..., None]).float().square().mean())

    def second(self):
        return self.lora_B


class OfTheFirstBatch(Adapted):
    """Gives every batch the result of the first: a cache, or a graph that was captured once."""

    first = None

    def forward(self, input_ids, labels, attention_mask):
        self.first = self.first or (input_ids, labels)
        return super().forward(*self.first, attention_mask)


class Forgetful(Adapted):
    """Its second adapter never gets a gradient."""

    def second(self):
        return self.lora_B.detach()


def batch(*tokens):
    ids = torch.tensor([tokens])
    return Batch(ids, ids + 1, attention_mask=None)


BATCHES = (batch(1, 2, 3, 4), batch(7, 5, 6, 5))


def built(model, dtype=torch.bfloat16):
    return Built(model, autocast_dtype=dtype, settings=Settings())


@pytest.fixture(scope="module")
def of_vanilla():
    return make_reference(built(Adapted()), BATCHES)


def test_the_reference_is_fp32_and_its_gradients_are_of_the_second_batch(of_vanilla):
    model, losses = Adapted().float(), []
    for each in BATCHES:
        model.zero_grad()
        losses.append(model(each.input_ids, each.labels, None).loss)
        losses[-1].backward()
    assert of_vanilla.losses == [loss.item() for loss in losses]
    assert of_vanilla.gradients.keys() == {"lora_A", "lora_B"}
    for name, gradient in of_vanilla.gradients.items():
        assert torch.equal(gradient, getattr(model, name).grad)


def test_the_budget_is_the_error_of_bf16(of_vanilla):
    """bf16 keeps 8 bits: 0.2% a rounding."""
    for errors in (of_vanilla.loss_errors, of_vanilla.gradient_errors.values()):
        assert all(0 < error < 0.02 for error in errors)
    assert all(0 < abs(s - 1) < 0.02 for s in of_vanilla.gradient_scales.values())


def test_vanilla_itself_is_as_far_off_as_its_own_budget(of_vanilla):
    parity = check_parity(built(Adapted()), BATCHES, of_vanilla)
    assert parity.passed and parity.worst_ratio == 1.0
    assert parity.loss_errors == parity.vanilla_loss_errors == of_vanilla.loss_errors
    assert parity.median_gradient_error == parity.vanilla_median_gradient_error


def test_a_check_leaves_no_gradient_behind(of_vanilla):
    model = Adapted()
    check_parity(built(model), BATCHES, of_vanilla)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 3


def test_a_model_that_keeps_its_first_result_fails(of_vanilla):
    stale = check_parity(built(OfTheFirstBatch()), BATCHES, of_vanilla)
    assert stale.loss_errors[0] == of_vanilla.loss_errors[0]
    assert not stale.passed and stale.problem.startswith("losses ")
    assert check_parity(built(OfTheFirstBatch()), BATCHES[1:] * 2, of_vanilla).loss_errors[1] < 0.01


def test_an_adapter_without_a_gradient_fails(of_vanilla):
    parity = check_parity(built(Forgetful().float(), None), BATCHES, of_vanilla)
    assert max(parity.loss_errors) < 1e-6
    assert not parity.passed and parity.problem.startswith("lora_B is ")


def test_a_saved_reference_comes_back_the_same(tmp_path, of_vanilla):
    path = tmp_path / "reference.pt"
    of_vanilla.save(path)
    loaded = Reference.load(path)
    without = [dataclasses.replace(r, gradients={}) for r in (loaded, of_vanilla)]
    assert without[0] == without[1]
    assert loaded.gradients.keys() == of_vanilla.gradients.keys()
    for name, gradient in of_vanilla.gradients.items():
        assert torch.equal(loaded.gradients[name], gradient)
