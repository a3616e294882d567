"""Losses on labelled tokens alone, by themselves and in models."""

import pytest
import torch
from cases.fused_case import assert_close, step
from cases.layer_case import (
    pair,
)
from cases.peft_models import ids
from cases.reference import assert_near, random

from fused_lora import Fusion
from fused_lora.loss.cross_entropy import labelled_rows, linear_cross_entropy

WITH_LOSS = Fusion(layer=True, cross_entropy=True)
FULL = Fusion(checkpoint="full")
LENGTH = 9
# Of `step`'s tokens: a row's last has none to predict, and the next one of 3 others is -100.
TOKENS = 2 * LENGTH
LABELLED = TOKENS - 2 - 3


def test_labelled_rows(device):
    labels = torch.tensor([[-100, 5, -100, 0], [7, -100, -100, 2]], device=device)
    assert labelled_rows(labels).tolist() == [1, 3, 4, 7]
    assert labelled_rows(labels, ignore_index=0).tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert labelled_rows(labels, max_labelled=6).tolist() == [1, 3, 4, 7, 0, 2]
    assert labelled_rows(labels, max_labelled=2).tolist() == [1, 3]
    assert labelled_rows(labels, max_labelled=20).tolist() == [1, 3, 4, 7, 0, 2, 5, 6]
    assert labelled_rows(torch.full((3,), -100, device=device)).tolist() == []


@pytest.mark.parametrize("most", [None, 4, 6])
def test_a_loss_that_is_given_rows_asks_for_no_others(most, device):
    labels = torch.tensor([[-100, 5, -100, 0], [7, -100, -100, 2]], device=device)
    hidden, weight = random(2, 4, 20, device=device), random(139, 20, seed=1, device=device)
    rows = labelled_rows(labels, max_labelled=most)
    elsewhere = [i for i in range(8) if i not in rows.tolist()]
    poisoned = hidden.clone()
    poisoned.view(8, 20)[elsewhere] = float("nan")
    leaves = [t.requires_grad_() for t in (hidden, poisoned)]
    want = linear_cross_entropy(hidden, weight, labels, max_labelled=most)
    got = linear_cross_entropy(poisoned, weight, labels, max_labelled=most, rows=rows)
    assert torch.equal(got, want) and not got.isnan()
    assert torch.equal(*(torch.autograd.grad(loss, leaf)[0]
                         for loss, leaf in zip((want, got), leaves, strict=True)))  # fmt: skip


# --- in a model -----------------------------------------------------------------------------------


@pytest.mark.slow("12")
@pytest.mark.parametrize("most", [LABELLED - 1, LABELLED, TOKENS - 1])
def test_at_most_so_many_rows(most, device):
    """Too many labels make the loss nan."""
    fused, plain, _ = pair(device, WITH_LOSS)
    got = step(fused, length=LENGTH, max_labelled_tokens=most)
    if most < LABELLED:
        assert got["loss"].isnan()
    else:
        assert_close(got, step(plain, length=LENGTH))


def test_nothing_labelled_is_as_in_pytorch(device):
    fused, _, _ = pair(device, WITH_LOSS)
    tokens = ids(device)
    loss = fused(input_ids=tokens, labels=torch.full_like(tokens, -100)).loss
    loss.backward()
    assert loss.isnan()
    assert not any(p.grad.any() for p in fused.parameters() if p.grad is not None)


def test_labels_that_do_not_fit_are_refused(device):
    fused, _, _ = pair(device, WITH_LOSS)
    tokens = ids(device)[:, :3]
    for labels in (tokens.repeat(2, 1), tokens[:, 1:]):
        with pytest.raises(ValueError, match="linear_cross_entropy needs hidden"):
            fused(input_ids=tokens, labels=labels)


def test_embeddings_may_be_given(device):
    fused, plain, _ = pair(device, WITH_LOSS)
    tokens = ids(device)[:, :LENGTH]
    losses = [
        model(inputs_embeds=model.get_input_embeddings()(tokens), labels=tokens).loss
        for model in (fused, plain)
    ]
    assert_near(*losses, 1e-5)
