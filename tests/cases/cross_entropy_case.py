"""Linear layer and cross entropy in eager PyTorch, and what the fused one is tried on.

A case is (hidden, weight, bias, labels).
"""

import pytest
import torch
import torch.nn.functional as F
from cases.reference import (
    BUDGET,
    assert_at_most,
    assert_within_budget,
    random,
    relative_error,
    seeded,
)

import fused_lora.kernels.logits as kernel_module
from fused_lora.loss.cross_entropy import linear_cross_entropy

HIDDEN, VOCABULARY, TOKENS = 20, 139, (3, 7)
NAMES = ("loss", "hidden", "weight", "bias")
IGNORED = -100


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """139 words are a block and a part of one; rows of 192 elements end inside the second."""
    monkeypatch.setattr(kernel_module, "BLOCK_COLUMNS", 128)


def eager(hidden, weight, labels, *, bias=None, ignore_index=IGNORED, **options):
    """What transformers computes; float64 stays float64."""
    logits = F.linear(hidden, weight, bias).reshape(-1, len(weight))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if (softcap := options.get("softcap")) is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(
        logits,
        labels.flatten().long(),
        ignore_index=ignore_index,
        reduction=options.get("reduction", "sum"),
    )
    num_items = options.get("num_items_in_batch")
    return losses / ((labels != ignore_index).sum() if num_items is None else num_items)


def inputs(*tokens, dtype, device, vocabulary=VOCABULARY, features=HIDDEN, with_bias=True, seed=0):
    """hidden, weight, bias and labels; a third ignored, the first and the last word among them."""
    hidden = random(*tokens, features, dtype=dtype, device=device, seed=seed + 1)
    options = {"dtype": dtype, "device": device, "scale": 3 * features**-0.5}
    weight = random(vocabulary, features, seed=seed + 2, **options)
    bias = random(vocabulary, seed=seed + 3, **options) if with_bias else None
    labels = torch.randint(vocabulary, tokens, generator=seeded(seed + 4))
    flat = labels.view(-1)
    flat[1::3] = IGNORED
    flat[:1], flat[-1:] = 0, vocabulary - 1
    return hidden, weight, bias, labels.to(device)


@pytest.fixture
def case(device):
    return inputs(*TOKENS, dtype=torch.bfloat16, device=device)


def double(case):
    return *(None if t is None else t.double() for t in case[:3]), case[3]


def run(function, hidden, weight, bias, labels, layout=None, grad_loss=1.0, **options):
    """Loss and gradients by name; `layout` makes another view of hidden inside the graph."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (hidden, weight, bias)]
    hidden, weight, bias = leaves
    viewed = hidden if layout is None else layout(hidden)
    loss = function(viewed, weight, labels, bias=bias, **options)
    loss.backward(torch.full_like(loss, grad_loss))
    gradients = [None if leaf is None else leaf.grad for leaf in leaves]
    return dict(zip(NAMES, (loss.detach(), *gradients), strict=True))


def assert_matches(got, case, layout=None, **options):
    """`got`, some of the loss and the gradients, has the budget of eager PyTorch's own errors."""
    rounded = run(eager, *case, layout, **options)
    truth = run(eager, *double(case), layout, **options)
    for name in got:
        if name == "loss":
            assert_loss_matches(got[name], rounded[name], truth[name], case, layout, **options)
        elif rounded[name] is None:
            assert got[name] is None
        else:
            assert got[name].dtype == rounded[name].dtype
            assert_within_budget(name, got[name], rounded[name], truth[name])


def assert_loss_matches(got, rounded, truth, case, layout=None, grad_loss=1.0, **options):
    """In one number eager's errors may happen to cancel, and so may a token's own: what they come
    to on the average is the root of the sum of their squares, each as large as that of any token on
    the average, labelled or not. fp32 itself rounds it by up to eps / 2."""
    assert (got.dtype, got.shape) == (torch.float32, ())
    ignored = case[3] == options.get("ignore_index", IGNORED)
    labels = case[3].masked_fill(ignored, len(case[1]) // 2)
    tokens = []
    for hidden, weight, bias, _ in (case, double(case)):
        viewed = hidden if layout is None else layout(hidden)
        one_item = options | {"num_items_in_batch": 1, "reduction": "none"}
        tokens.append(eager(viewed, weight, labels, bias=bias, **one_item))
    token_error = (tokens[0] - tokens[1]).square().mean().sqrt()
    labelled = (~ignored).sum()
    items = options.get("num_items_in_batch")
    expected = token_error * labelled.sqrt() / (labelled if items is None else items) / truth
    error, eager_error = relative_error(got, truth), relative_error(rounded, truth)
    allowed = BUDGET * max(expected.item(), eager_error, torch.finfo(torch.float32).eps / 2)
    assert_at_most(error, allowed, "loss")


def assert_right(*case, own=None, **options):
    """`own`: options that eager does not have."""
    got = run(linear_cross_entropy, *case, **options, **(own or {}))
    assert_matches(got, case, **options)
    return got


def assert_equal(got, want):
    for name in NAMES:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name], want[name]), name
