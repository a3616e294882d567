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

import torch
from torch import Tensor

from .head import Head
from .kernels.fp8_logits import logit_codes, transposed
from .kernels.fp8_products import product_of_codes
from .kernels.fp8_rows import SIZES, fp8_rows
from .kernels.logits import cross_entropy_


class Fp8Head(Head):
    """A `Head` of codes, frozen, in bf16 (or on the CPU in any dtype)."""

    chunks = 2  # codes of the weight and of the gradient lie beside logits

    def __init__(self, weight: Tensor, bias: Tensor | None, most: int):
        self.weight, self.bias = weight, bias
        self._codes, scales = fp8_rows(weight, padded=weight.shape[1])
        self._scales = scales[:, 0]
        self._codes_t = transposed(self._codes)
        self._ones = torch.ones(weight.shape[1], device=weight.device)

    @staticmethod
    def check(name: str, weight: Tensor, bias: Tensor | None) -> None:
        trained = any(one is not None and one.requires_grad for one in (weight, bias))
        if torch.is_grad_enabled() and trained:
            raise ValueError(f"{name}: fp8 needs a weight and a bias that are frozen")
        if any(size % SIZES for size in weight.shape):
            given = list(weight.shape)
            raise ValueError(f"{name}: fp8 needs multiples of {SIZES}, weight is {given}")

    def loss(
        self, x: Tensor, labels: Tensor, ignore_index: int, grad_x: Tensor | None,
        grad_weight: Tensor | None, grad_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        rows = fp8_rows(x, padded=x.shape[1])
        logits = product_of_codes(*rows, self._codes, self._scales, self.bias, x.dtype)
        maxima = torch.empty(len(x), dtype=torch.float32, device=x.device)
        losses = cross_entropy_(logits, labels, ignore_index, False, maxima)
        if grad_x is not None:
            codes, scales, of_label = logit_codes(
                logits, labels, losses, maxima, self._scales, ignore_index
            )
            grad = product_of_codes(
                codes, scales, self._codes_t, self._ones, None, logits.dtype, sums_in_fp32=True
            )
            # an ignored label, or one outside the vocabulary, takes any row, times 0 or NaN
            at_label = self.weight.index_select(0, labels.clamp(0, len(self.weight) - 1))
            grad_x.copy_(grad.addcmul_(at_label, of_label[:, None].to(grad.dtype)))
        return losses.sum()
