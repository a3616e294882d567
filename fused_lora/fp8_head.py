"""lm_head's products in FP8, for the loss (`cross_entropy.py`), without adapters (`layer/fp8/`).

For hidden h [T, hidden], the frozen weight W [vocabulary, hidden] as codes W8 and scales s:

    logits = codes(h) W8' s              times the scales of h's rows
    dh     = codes(p s) W8 + c W[y]      p s of all words but the label y; c = p_y - 1

What is at the label is the larger part of the gradient by far, and as exact as in bf16
(`kernels/fp8_logits.py`). The sum over the vocabulary is in fp32, every 128 words. A logit is 0.037
off, relative to their spread. The codes, as many bytes as W in bf16, are made for each loss and let
go after it: in Qwen2.5-3B of 0.62 GB of weight, which may be the embedding's, too, and change
whenever it likes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .kernels.fp8_logits import logit_codes, transposed
from .kernels.fp8_products import product_of_codes
from .kernels.fp8_rows import SIZES, fp8_rows


class Fp8Head:
    """Codes of a weight [vocabulary, hidden] in bf16 (or on the CPU in any dtype)."""

    def __init__(self, weight: Tensor):
        self._weight = weight
        self._codes, scales = fp8_rows(weight, padded=weight.shape[1])
        self._scales = scales[:, 0]
        self._codes_t = transposed(self._codes)
        self._ones = torch.ones(weight.shape[1], device=weight.device)

    def loss(
        self, x: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int,
        cross_entropy: Callable, grad_x: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the sum of the rows' losses, and write its gradient into grad_x if it is given.

        cross_entropy: `cross_entropy_` of cross_entropy.py.
        """
        logits = self.logits(x, bias)
        maxima = torch.empty(len(x), dtype=torch.float32, device=x.device)
        losses = cross_entropy(logits, labels, ignore_index, False, maxima)
        if grad_x is not None:
            grad_x.copy_(self.gradient(logits, labels, losses, maxima, ignore_index))
        return losses.sum()

    def logits(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W' + bias [T, vocabulary] of x [T, hidden]."""
        rows = fp8_rows(x, padded=x.shape[1])
        return product_of_codes(*rows, self._codes, self._scales, bias, x.dtype)

    def gradient(
        self, logits: Tensor, labels: Tensor, losses: Tensor, maxima: Tensor, ignore_index: int
    ) -> Tensor:
        """The gradient [T, hidden] of the losses' sum with regard to x."""
        codes, scales, of_label = logit_codes(
            logits, labels, losses, maxima, self._scales, ignore_index
        )
        grad = product_of_codes(
            codes, scales, self._codes_t, self._ones, None, logits.dtype, sums_in_fp32=True
        )
        # an ignored label, or one outside the vocabulary, takes any row, times 0 or NaN
        at_label = self._weight.index_select(0, labels.clamp(0, len(self._weight) - 1))
        return grad.addcmul_(at_label, of_label[:, None].to(grad.dtype))


def check_fp8_head(name: str, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless a loss can multiply this weight in FP8, in the name of a function."""
    trained = any(one is not None and one.requires_grad for one in (weight, bias))
    if torch.is_grad_enabled() and trained:
        raise ValueError(f"{name}: fp8 needs a weight and a bias that are frozen")
    if any(size % SIZES for size in weight.shape):
        raise ValueError(f"{name}: fp8 needs multiples of {SIZES}, weight is {list(weight.shape)}")
