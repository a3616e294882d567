"""Log-probabilities and their statistics in eager PyTorch, and what the fused ones are tried on.

A case is (hidden, weight, bias, A, B, labels).
"""

import torch
import torch.nn.functional as F
from cases.cross_entropy_case import HIDDEN, IGNORED, VOCABULARY, inputs
from cases.reference import random

RANK, SCALING = 3, 2.0
FIELDS = ("log_probs", "entropy", "is_top1", "log_sum_sq_probs", "mean_logits")


def eager(
    hidden, weight, labels, *, bias=None, adapter=None, temperature=1.0, softcap=None,
    logit_scale=1.0, num_items_in_batch=None,
):  # fmt: skip
    """Return the fields and the loss; float64 stays float64."""
    logits = F.linear(hidden, weight, bias)
    if adapter is not None:
        logits = logits + F.linear(F.linear(hidden, adapter.A), adapter.B) * adapter.scaling
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    is_labelled, log_p = labels != IGNORED, logits.log_softmax(-1)
    label = labels.clamp(min=0).long()
    found = (
        log_p.gather(-1, label[..., None])[..., 0],
        -(log_p.exp() * log_p).sum(-1),
        logits.argmax(-1) == label,
        (2 * log_p).logsumexp(-1),
        logits.mean(-1),
    )
    found = [one.masked_fill(~is_labelled, 0) for one in found]
    items = is_labelled.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return *found, -found[0].sum() / items


def make(*tokens, dtype, device, vocabulary=VOCABULARY, features=HIDDEN):
    sizes = {"vocabulary": vocabulary, "features": features}
    hidden, weight, bias, labels = inputs(*tokens, dtype=dtype, device=device, **sizes)
    options = {"dtype": dtype, "device": device, "scale": 0.5}
    A = random(RANK, features, seed=21, **options)
    B = random(vocabulary, RANK, seed=22, **options)
    return hidden, weight, bias, A, B, labels


def by_operand(function, count, **options):
    """Return the first outputs as a function of the operands in contract.py's table."""

    def called(x, weight, bias, labels):
        return function(x, weight, labels, bias=bias, **options)[:count]

    return called
