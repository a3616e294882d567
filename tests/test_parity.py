"""The gate: what passes, what does not, and that the reference is what it says."""

import dataclasses

import pytest
import torch

from parity import LIMIT, LOSS_FLOOR, Reference, judge


def reference(gradient_error=0.01, loss_error=0.002):
    return Reference(
        loss=4.0,
        gradients={"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 1.0])},
        loss_error=loss_error,
        gradient_errors={"a": gradient_error, "b": gradient_error},
    )


def gradients(a=(3.0, 4.0), b=(0.0, 1.0)):
    return {"a": torch.tensor(a), "b": torch.tensor(b)}


def test_the_truth_passes():
    parity = judge(4.0, gradients(), reference())
    assert parity.passed and parity.worst_ratio == 0.0 and parity.loss_error == 0.0


def test_the_error_is_relative_to_the_norm_and_the_worst_gradient_is_named():
    # a is off by 0.05 of norm 5: 1%. b is off by 0.015 of norm 1: 1.5%, that is 1.5 x vanilla's own
    parity = judge(4.0, gradients(a=(3.05, 4.0), b=(0.015, 1.0)), reference())
    assert parity.passed
    assert parity.worst_gradient == "b"
    assert parity.worst_ratio == pytest.approx(1.5)
    assert parity.median_gradient_error == pytest.approx(0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        gradients(a=(3.3, 4.4)),  # scaled by 1.1
        gradients(b=(0.0, 0.0)),  # never computed
        gradients(b=(0.0, -1.0)),
        gradients(a=(float("nan"), 4.0)),
        gradients(a=(float("inf"), 4.0)),
        {"a": torch.tensor([3.0, 4.0])},  # missing
    ],
)
def test_a_wrong_gradient_fails(wrong):
    assert not judge(4.0, wrong, reference()).passed


def test_a_gradient_just_inside_and_just_outside_the_limit():
    inside, outside = 0.99 * LIMIT * 0.01, 1.01 * LIMIT * 0.01
    assert judge(4.0, gradients(b=(inside, 1.0)), reference()).passed
    assert not judge(4.0, gradients(b=(outside, 1.0)), reference()).passed


def test_the_loss_is_held_to_vanillas_own_error():
    assert judge(4.0 * (1 + 0.0039), gradients(), reference(loss_error=0.002)).passed
    assert not judge(4.0 * (1 + 0.0041), gradients(), reference(loss_error=0.002)).passed
    assert not judge(float("nan"), gradients(), reference()).passed


def test_a_loss_that_vanilla_hits_by_chance_leaves_one_rounding():
    lucky = reference(loss_error=0.0)
    assert judge(4.0 * (1 + 1.9 * LOSS_FLOOR), gradients(), lucky).passed
    assert not judge(4.0 * (1 + 2.1 * LOSS_FLOOR), gradients(), lucky).passed


def test_a_saved_reference_comes_back_the_same(tmp_path):
    path = tmp_path / "reference.pt"
    reference().save(path)
    loaded = Reference.load(path)
    assert dataclasses.replace(loaded, gradients={}) == dataclasses.replace(
        reference(), gradients={}
    )
    assert torch.equal(loaded.gradients["a"], torch.tensor([3.0, 4.0]))
