"""The loss with lm_head's matmuls in FP8: exact except for the quantization."""

import pytest
import torch
import torch.nn.functional as F
from cases.fp8_case import nearest, quantised
from cases.reference import assert_near, random, relative_error

from fused_lora.kernels.fp8_logits import transposed
from fused_lora.kernels.fp8_rows import E4M3
from fused_lora.loss.cross_entropy import linear_cross_entropy

IGNORED = -100


def oracle(hidden, weight, labels, bias):
    """Return (loss, gradient of hidden), computed in fp64 from the same codes."""
    labelled = labels != IGNORED
    x, w = torch.mul(*quantised(hidden.double())), weight.double()
    scales = weight.float().abs().amax(1).double() / 224
    codes = nearest(w / scales[:, None])
    logits = (x @ codes.t() * scales).to(hidden.dtype)
    logits = (logits.double() + (0 if bias is None else bias.double())).to(hidden.dtype).double()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED)
    p = logits.softmax(1)
    y = labels.clamp(0)[:, None]
    c = p.gather(1, y) - 1
    others = p.scatter(1, y, 0.0) * scales
    bound = torch.minimum(p.amax(1, keepdim=True), -c).clamp(min=1e-30) * scales.max() / 448
    grad = (nearest((others / bound).clamp(max=448)) @ codes) * bound + c * w[y[:, 0]]
    return loss, grad * labelled[:, None] / labelled.sum()


@pytest.mark.slow("spread 1.0-True", "spread 30.0-False")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0], ids="spread {}".format)
def test_it_is_what_its_codes_make_it(spread, with_bias, device):
    """Check probabilities that are all alike, and some that are nearly one."""
    tokens, size, vocabulary = 13, 48, 9600
    hidden = (random(tokens, size, seed=1, device=device) * spread).requires_grad_()
    weight = random(vocabulary, size, seed=2, device=device) * size**-0.5
    bias = random(vocabulary, seed=3, device=device) if with_bias else None
    labels = torch.arange(tokens, device=device) * 700
    labels[2] = IGNORED
    best = (hidden @ weight.t()).argmax(1)
    labels[4:8] = best[4:8]  # already right, and nearly certain if the spread is large
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, fp8=True, chunk_tokens=5)
    loss.backward()
    want, grad = oracle(hidden.detach(), weight, labels, bias)
    assert_near(loss.detach(), want, 1e-5)
    assert not hidden.grad[2].any()
    for got, exact in zip(hidden.grad, grad, strict=True):
        # almost 0 where the label's probability is 1 in fp32
        assert (got - exact).norm() <= 1e-3 * exact.norm() + 1e-7
    # against exact matmuls: rounding a logit to FP8 also moves probabilities
    plain = hidden.detach().double().requires_grad_()
    logits = plain @ weight.double().t() + (0 if bias is None else bias.double())
    F.cross_entropy(logits, labels, ignore_index=IGNORED).backward()
    if spread < 10:
        assert_near(hidden.grad, plain.grad, 0.05)
        assert relative_error(oracle(hidden.detach(), weight * 1.02, labels, bias)[1], grad) > 0.01


@pytest.mark.gpu  # a CPU multiplies the codes in fp32
def test_a_sum_over_a_vocabulary_loses_nothing(device):
    """Sum 4,736 equal tiles: all words are equally likely, and all rows are 1 except the labels'.

    If the tensor cores alone accumulated this, they would truncate the last tiles."""
    vocabulary, labels = 151_552, torch.arange(3, device=device) * 50_000
    weight = torch.ones(vocabulary, 16, dtype=torch.bfloat16, device=device)
    weight[labels] = -1.0
    hidden = torch.zeros(3, 16, dtype=torch.bfloat16, device=device).requires_grad_()
    linear_cross_entropy(hidden, weight, labels, fp8=True).backward()
    exact = (vocabulary - 6) / vocabulary + 1  # the mean of the rows, less the label's
    assert_near(hidden.grad, torch.full_like(hidden.grad, exact / 3), 2**-8)


def test_words_too_unlikely_for_a_code_count_in_the_mean(device):
    """One word of 1, and 30,000 at 0.1 to 0.4 of the smallest code: all would round to 0."""
    vocabulary, tokens = 30_016, 4
    generator = torch.Generator(device).manual_seed(1)
    size = torch.rand(vocabulary, generator=generator, device=device) / 2 + 0.5
    weight = size[:, None].expand(-1, 16).bfloat16().contiguous()
    weight[0] = 1.0
    least = 2.0**-9 / 448
    likely = torch.rand(vocabulary, generator=generator, device=device) * 0.3 + 0.1
    bias = (likely * least).log()
    bias[0] = 0.0
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)
    labels[1:] = torch.arange(1, tokens, device=device)
    hidden = torch.zeros(tokens, 16, device=device).requires_grad_()
    linear_cross_entropy(hidden, weight.float(), labels, bias=bias, fp8=True).backward()
    p = bias.double().softmax(0)
    exact = p @ weight.double() - weight[labels].double()
    unlikely = p[1:] @ weight[1:].double()
    off = (hidden.grad.double() * tokens - exact).abs().amax(1)
    # the label of the first is the likely one: its others are codes with digits
    assert off[0] < 0.03 * unlikely.max() and (off[1:] < 0.05 * unlikely.max()).all()


def test_labels_outside_and_nan_stay_in_their_rows(device):
    hidden = random(4, 32, seed=1, device=device).requires_grad_()
    weight = random(64, 32, seed=2, device=device)
    labels = torch.tensor([3, 64, 5, 6], device=device)
    with torch.no_grad():
        hidden[2, 7] = float("nan")
    loss = linear_cross_entropy(hidden, weight, labels, fp8=True, check_labels=False)
    assert loss.isnan()
    loss.backward()
    assert hidden.grad[1:3].isnan().all()
    assert hidden.grad[[0, 3]].isfinite().all()


def test_no_tokens_and_no_labels(device):
    weight = random(64, 32, seed=2, device=device)
    for tokens in (0, 3):
        hidden = random(tokens, 32, seed=1, device=device).requires_grad_()
        labels = torch.full((tokens,), IGNORED, device=device)
        linear_cross_entropy(hidden, weight, labels, fp8=True, drop_ignored=False).backward()
        assert not hidden.grad.any()


@pytest.mark.parametrize("shape", [(1, 1), (16, 300), (130, 257)])
def test_transposed(shape, device):
    codes = random(*shape, seed=1, device=device).to(E4M3)
    assert torch.equal(transposed(codes).view(torch.uint8), codes.view(torch.uint8).t())


@pytest.mark.parametrize(("change", "message"), [
    (lambda w: w[:40], r"fp8 needs multiples of 16, weight is \[40, 32\]"),
    (lambda w: w.requires_grad_(), "fp8 needs a weight and a bias that are frozen"),
])  # fmt: skip
def test_what_it_cannot_take_is_said(change, message, device):
    hidden = random(4, 32, seed=1, device=device)
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    weight = change(random(64, 32, seed=2, device=device))
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, labels, fp8=True)
