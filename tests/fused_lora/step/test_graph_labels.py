"""Labels outside the vocabulary in a graphed step of a model whose loss is fused."""

import pytest
import torch
from cases.graph_case import adamw, captured, graphed
from cases.layer_case import peft_model
from cases.peft_models import ids

from fused_lora import Fusion, fuse
from fused_lora.step.graph import EAGER_CALLS

VOCABULARY = 96  # words


def step_of(device, **options):
    model = peft_model(device, config={"num_hidden_layers": 1}).train()
    fuse(model, Fusion(cross_entropy=True))
    return graphed(model, adamw(model), **options)


def batch(device, label=None):
    tokens = ids("cpu")[:, :5]
    labels = tokens.clone()
    labels[0, :2] = -100
    labels[1, 0] = VOCABULARY  # of a row's first nothing is learned
    if label is not None:
        labels[1, 3] = label
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def weights(step):
    return torch.cat([p.detach().flatten() for p in step.model.parameters() if p.requires_grad])


@pytest.mark.parametrize("label", [VOCABULARY, -1, -101])
def test_labels_on_the_cpu_are_refused_before_the_step(label, device):
    """After the eager calls, in which the loss refuses them itself."""
    step = step_of(device)
    for _ in range(EAGER_CALLS + 1 if device == "cuda" else EAGER_CALLS):
        with pytest.raises(ValueError, match=f"is {label}, outside the vocabulary of 96 words"):
            step(**batch("cpu", label))
        step(**batch("cpu"))
    before = weights(step).clone()
    with pytest.raises(ValueError, match=f"a label is {label}, outside the vocabulary of 96 words"):
        step(**batch("cpu", label))
    assert torch.equal(weights(step), before) and before.isfinite().all()
    assert captured(step) == (device == "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("most", [None, 8])
def test_labels_on_the_gpu_are_named_by_the_next_call_and_nobody_waits(most, device):
    step = step_of(device)
    options = {} if most is None else {"max_labelled_tokens": most}
    for _ in range(EAGER_CALLS + 2):
        step(**batch(device), **options)
    assert captured(step) == 1
    wrong, right = batch(device, -1), batch(device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step(**wrong, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan()
    with pytest.raises(ValueError, match=r"earlier batch is -1, outside .* of 96"):
        step(**right, **options)
