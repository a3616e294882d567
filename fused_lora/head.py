"""The linear layer before the loss (`cross_entropy.py`), one chunk of tokens at a time."""

import torch
from torch import Tensor

from fused_mlp.launching import cdiv
from fused_mlp.utils import scaled_matmul

from .kernels.logits import cross_entropy_

# Rows of logits start at multiples of 64 elements. Otherwise an odd vocabulary (one added token is
# enough) would cost the kernel its wide loads and the matmuls their aligned rows.
ROW_ALIGNMENT = 64


class Head:
    """A linear layer in the compute dtype. A subclass may multiply in another way.

    weight: [vocabulary, hidden]. bias: [vocabulary] or None. most: tokens of the largest chunk.
    """

    chunks = 1  # how many share the memory meant for one

    def __init__(self, weight: Tensor, bias: Tensor | None, most: int):
        self.weight, self.bias = weight, bias
        row_stride = cdiv(len(weight), ROW_ALIGNMENT) * ROW_ALIGNMENT
        self._logits = weight.new_empty(most, row_stride)[:, : len(weight)]

    @staticmethod
    def check(name: str, weight: Tensor, bias: Tensor | None) -> None:
        """Raise ValueError unless a loss can multiply these. name: the function to blame."""

    def loss(
        self, x: Tensor, labels: Tensor, ignore_index: int, grad_x: Tensor | None,
        grad_weight: Tensor | None, grad_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the sum of the losses of x [T, hidden].

        Writes its gradient into grad_x, and adds to grad_weight and grad_bias, if given.
        """
        logits = self._logits[: len(x)]
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=logits)
        is_needed = any(grad is not None for grad in (grad_x, grad_weight, grad_bias))
        losses = cross_entropy_(logits, labels, ignore_index, is_needed)
        grad_logits = logits  # in the same memory
        if grad_x is not None:
            torch.mm(grad_logits, self.weight, out=grad_x)
        if grad_weight is not None:
            # a mean until it is fp32: the sum over a chunk can exceed fp16's 65,504
            grad_weight.add_(scaled_matmul(grad_logits.t(), x, 1 / len(x)), alpha=len(x))
        if grad_bias is not None:
            grad_bias.add_(grad_logits.sum(0, dtype=torch.float32))
        return losses.sum()
