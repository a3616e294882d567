"""The kernel of cross entropy alone: losses and gradients of rows of logits."""

import pytest
import torch
import torch.nn.functional as F
from cases.cross_entropy_case import (
    IGNORED,
    VOCABULARY,
    small_blocks,
)
from cases.reference import assert_within_budget, random

import fused_lora.kernels.logits as module
from fused_lora.kernels.logits import cross_entropy_
from fused_mlp.launching import DTYPES

fixtures = (small_blocks,)  # pytest finds them in this module


def rows_of_logits(rows, vocabulary, dtype, device):
    logits = random(rows, vocabulary, dtype=dtype, device=device, seed=5, scale=3.0)
    labels = torch.arange(rows, device=device) * 7 % vocabulary
    labels[-1] = vocabulary - 1
    return logits, labels


def eager_rows(logits, labels):
    """Return the losses of the rows and the gradient of their sum."""
    logits = logits.detach().clone().requires_grad_()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


def assert_rows_right(logits, labels):
    rounded, truth = eager_rows(logits, labels), eager_rows(logits.double(), labels)
    losses = cross_entropy_(logits, labels, IGNORED, True)
    assert (losses.dtype, losses.shape) == (torch.float32, labels.shape)
    assert_within_budget("losses", losses, rounded[0], truth[0])
    assert_within_budget("gradient", logits, rounded[1], truth[1])


@pytest.mark.thinned
@pytest.mark.parametrize("vocabulary", [2, 127, 128, 129, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_within_the_error_budget(dtype, vocabulary, device):
    assert_rows_right(*rows_of_logits(32, vocabulary, dtype, device))


def test_the_block_for_real_vocabularies_is_right(monkeypatch, device):
    monkeypatch.undo()
    assert module.BLOCK_COLUMNS == 8192
    assert_rows_right(*rows_of_logits(3, 2 * 8192 + 77, torch.bfloat16, device))


def test_without_a_gradient_the_losses_are_the_same_and_logits_are_not_written(device):
    logits, labels = rows_of_logits(5, VOCABULARY, torch.bfloat16, device)
    before = logits.clone()
    losses = cross_entropy_(logits, labels, IGNORED, False)
    assert torch.equal(logits, before)
    assert torch.equal(losses, cross_entropy_(logits, labels, IGNORED, True))
    assert not torch.equal(logits, before)


@pytest.mark.parametrize("label", [VOCABULARY, 150, 2**40, -1, -(2**40)])
def test_a_label_outside_the_vocabulary_makes_its_row_nan_and_no_other(label, device):
    logits, labels = rows_of_logits(3, VOCABULARY, torch.bfloat16, device)
    want = logits.clone()
    losses = cross_entropy_(want, labels, IGNORED, True)
    labels[1] = label
    got = cross_entropy_(logits, labels, IGNORED, True)
    assert got[1].isnan() and logits[1].isnan().all()
    for row in (0, 2):
        assert got[row] == losses[row] and torch.equal(logits[row], want[row])


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy, in the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_an_ignored_row_is_zero_whatever_its_logits(device):
    logits, labels = rows_of_logits(4, VOCABULARY, torch.bfloat16, device)
    logits[0], logits[1], logits[2, 3] = torch.inf, torch.nan, -torch.inf
    labels[:3] = IGNORED
    losses = cross_entropy_(logits, labels, IGNORED, True)
    assert (losses[:3] == 0).all() and (logits[:3] == 0).all()
    assert losses[3] > 0 and (logits[3] != 0).any()


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [100.0, 1e4, 6e4])
def test_large_logits_do_not_overflow(magnitude, dtype, device):
    logits, labels = rows_of_logits(16, 300, dtype, device)
    assert_rows_right((logits.float() / logits.abs().max() * magnitude).to(dtype), labels)


@pytest.mark.parametrize("masked", [slice(0, 140), slice(200, 300), slice(0, 300, 2)], ids=str)
def test_logits_of_minus_infinity_are_words_that_cannot_be(masked, device):
    """Rule out all words of the first block, and more, in the first case."""
    logits, _ = rows_of_logits(32, 300, torch.float32, device)
    logits[:, masked] = -torch.inf
    assert_rows_right(logits, 141 + 2 * torch.arange(32, device=device) % 58)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy, in the interpreter
@pytest.mark.filterwarnings("ignore:divide by zero encountered")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_what_has_no_softmax_is_infinite_or_nan_as_in_pytorch(device):
    logits, labels = rows_of_logits(5, 300, torch.float32, device)
    logits[0, labels[0]] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    logits[3, 299] = torch.nan
    want = eager_rows(logits, labels)
    losses = cross_entropy_(logits, labels, IGNORED, True)
    assert losses[0] == torch.inf and losses[1:4].isnan().all() and losses[4].isfinite()
    assert torch.equal(losses.isnan(), want[0].isnan())
    assert torch.equal(logits.isnan(), want[1].isnan())
    assert logits[0, labels[0]] == want[1][0, labels[0]] == -1
