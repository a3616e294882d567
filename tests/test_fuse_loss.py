"""The fused loss in a model: what it leaves to transformers' own, and heads that PEFT trains."""

import pytest
import torch
import torch.nn.functional as F
from fused_case import assert_right, pair, step
from peft_models import assert_equal, ids
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from fused_lora import Fusion, loss_site, report

LOSS = Fusion(cross_entropy=True)
MODEL = "base_model.model"


@pytest.fixture
def losses(monkeypatch):
    """The loss of every call of the fused one."""
    seen = []
    function = loss_site.linear_cross_entropy

    def spy(*tensors, **options):
        seen.append(function(*tensors, **options))
        return seen[-1]

    monkeypatch.setattr(loss_site, "linear_cross_entropy", spy)
    return seen


# --- label smoothing and z-loss -------------------------------------------------------------------


def smoothed(logits, labels, vocab_size, label_smoothing=0.0, z_loss=0.0, **_):
    logits = logits[:, :-1].flatten(0, 1).float()
    loss = F.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=label_smoothing)
    return loss + z_loss * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"z_loss": 0.1}], ids=str)
@pytest.mark.parametrize("function", [ForCausalLMLoss, smoothed])
def test_label_smoothing_and_z_loss_are_left_to_the_models_own_loss(
    function, options, losses, device
):
    """Which may be one that reads them. Transformers' own does not, fused or not."""
    fused, plain, _ = pair(device, LOSS)
    for model in (fused, plain):
        model.get_submodule(MODEL).loss_function = function
    want = step(plain, **options)
    assert_equal(step(fused, **options), want)
    assert torch.equal(want["loss"], step(plain)["loss"]) == (function is ForCausalLMLoss)
    assert not losses


def test_a_loss_function_of_ones_own_is_reported_and_run(losses, device):
    fused, plain, _ = pair(device, LOSS)
    for model in (fused, plain):
        model.get_submodule(MODEL).loss_function = smoothed
    assert report(fused).left == {MODEL: "its loss_function is not transformers' own"}
    assert_equal(step(fused), step(plain))
    assert not losses


def test_the_trainers_label_smoothing_is_as_without_fusion(losses, tmp_path, device):
    """It takes the labels out of the batch and smooths the logits' loss itself."""
    tokens = ids(device)
    found = []
    for model in pair(device, LOSS)[:2]:
        arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to=[])
        trainer = Trainer(model, arguments)
        inputs = {"input_ids": tokens, "labels": tokens.clone()}
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(32))
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
    assert len(found[0]) > 1 and not losses
    assert_equal(*found)


# --- num_items_in_batch ---------------------------------------------------------------------------


def test_num_items_in_batch_may_be_an_int(losses, device):
    fused, plain, _ = pair(device, LOSS)
    assert_right(fused, plain, num_items_in_batch=77)
    assert len(losses) == 3
