"""lm_head's matmuls in FP8, for the loss (`cross_entropy.py`). Layers' are in `layer/fp8/`.

For hidden h [T, hidden], the frozen weight W [vocabulary, hidden] as codes W8 and scales s:

    logits = codes(h) W8' s              times the scales of h's rows
    dh     = codes(p s) W8 + c W[y]      p s of all words except the label y; c = p_y - 1

The label's term is by far the largest part of the gradient, and stays as exact as in bf16
(`kernels/fp8_logits.py`). The sum over the vocabulary goes to fp32 every 128 words. Logits are off
by 0.037 of their spread. The codes take as many bytes as W in bf16: 0.62 GB in Qwen2.5-3B. We make
them for each loss and free them after it, because W may be tied to the embedding and change at any
time.
"""

import torch
from torch import Tensor

from ..kernels.fp8_logits import logit_codes, transposed
from ..kernels.fp8_products import product_of_codes
from ..kernels.fp8_rows import SIZES, fp8_rows
from ..kernels.logits import LogitScaling, Statistics, cross_entropy_
from .head import Head


class Fp8Head(Head):
    """A frozen `Head` in FP8 codes, for bf16 (on the CPU, any dtype)."""

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
        self, x: Tensor, labels: Tensor, ignore_index: int, scaling: LogitScaling,
        grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        rows = fp8_rows(x, padded=x.shape[1])
        logits = product_of_codes(*rows, self._codes, self._scales, self.bias, x.dtype)
        maxima = torch.empty(len(x), dtype=torch.float32, device=x.device)
        losses = cross_entropy_(logits, labels, ignore_index, False, Statistics(maxima))
        if grad_x is not None:
            codes, scales, label_gradient = logit_codes(
                logits, labels, losses, maxima, self._scales, ignore_index
            )
            grad = product_of_codes(
                codes, scales, self._codes_t, self._ones, None, logits.dtype, sums_in_fp32=True
            )
            # an ignored or out-of-vocabulary label may take any row: it is multiplied by 0 or NaN
            at_label = self.weight.index_select(0, labels.clamp(0, len(self.weight) - 1))
            grad_x.copy_(grad.addcmul_(at_label, label_gradient[:, None].to(grad.dtype)))
        return losses.sum()
