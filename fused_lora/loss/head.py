"""The linear layer before the loss (`cross_entropy.py`), one chunk of tokens at a time."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_mlp.launching import cdiv
from fused_mlp.utils import scaled_matmul

from ..kernels.logits import LogitScaling, cross_entropy_

# Rows of logits start at multiples of 64 elements. Otherwise an odd vocabulary (one added token is
# enough) would cost the kernel its wide loads and the matmuls their aligned rows.
ROW_ALIGNMENT = 64


class Head:
    """A linear layer in the compute dtype. A subclass may multiply in another way.

    weight: [vocabulary, hidden]. bias: [vocabulary] or None. most: tokens of the largest chunk.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, most: int):
        self.weight, self.bias = weight, bias
        row_stride = cdiv(len(weight), ROW_ALIGNMENT) * ROW_ALIGNMENT
        self._logits = weight.new_empty(most, row_stride)[:, : len(weight)]

    @staticmethod
    def check(name: str, weight: Tensor, bias: Tensor | None) -> None:
        """Raise ValueError unless a loss can multiply these. name: the function to blame."""

    def loss(
        self, x: Tensor, labels: Tensor, ignore_index: int, scaling: LogitScaling,
        grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the sum of the losses of x [T, hidden], whose logits are scaled.

        Writes its gradient into grad_x, and adds to grad_weight and grad_bias, if given.
        """
        logits = self.logits(x)
        is_needed = any(grad is not None for grad in (grad_x, grad_weight, grad_bias))
        losses = cross_entropy_(logits, labels, ignore_index, is_needed, scaling=scaling)
        grad_logits = logits  # in the same memory
        add_gradients(grad_logits, x, self.weight, grad_x, grad_weight)
        if grad_bias is not None:
            grad_bias.add_(grad_logits.sum(0, dtype=torch.float32))
        return losses.sum()

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of x [T, hidden], in memory that the next chunk overwrites."""
        logits = self._logits[: len(x)]
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=logits)
        return torch.addmm(self.bias, x, self.weight.t(), out=logits)


def add_gradients(
    grad_logits: Tensor, x: Tensor, weight: Tensor, grad_x: Tensor | None,
    grad_weight: Tensor | None,
) -> None:  # fmt: skip
    """Write grad_logits @ weight into grad_x, and add grad_logits' @ x to grad_weight, in fp32, if
    given."""
    if grad_x is not None:
        torch.mm(grad_logits, weight, out=grad_x)
    if grad_weight is not None:
        # a mean until it is fp32: the sum over a chunk can exceed fp16's 65,504
        grad_weight.add_(scaled_matmul(grad_logits.t(), x, 1 / len(x)), alpha=len(x))


class HeadOperands(NamedTuple):
    """The tensors of `LinearLogProbs`. The first five may have gradients."""

    hidden: Tensor  # [..., hidden]
    weight: Tensor  # [vocabulary, hidden]
    bias: Tensor | None  # [vocabulary]
    z: Tensor | None  # [..., r]: scaling h A' of an adapter
    B: Tensor | None  # [vocabulary, r]
    labels: Tensor  # [...]
    rows: Tensor | None  # [n], from `labelled_rows`; None: all


class HeadChunk(NamedTuple):
    """A chunk of tokens, in the compute dtype. part: its place among the rows."""

    part: slice
    labels: Tensor
    x: Tensor  # [T, hidden]
    z: Tensor | None  # [T, r]
    logits: Tensor  # [T, vocabulary]


class HeadChunks:
    """The rows of a call, one chunk at a time. The logits of all chunks share their memory."""

    def __init__(self, operands: HeadOperands, dtype: torch.dtype, chunk_tokens: int):
        self._rows, self._dtype, self._chunk_tokens = operands.rows, dtype, chunk_tokens
        self._hidden, self._z = _flat(operands.hidden), _flat(operands.z)
        self._tokens = operands.labels.shape.numel()
        self._labels = picked(operands.labels.reshape(-1), operands.rows).contiguous()
        self.count = len(self._labels)
        self.weight = operands.weight.to(dtype)
        self.B = None if operands.B is None else operands.B.to(dtype)
        bias = None if operands.bias is None else operands.bias.to(dtype)
        self._head = Head(self.weight, bias, min(self.count, chunk_tokens))

    def __iter__(self) -> Iterator[HeadChunk]:
        for start in range(0, self.count, self._chunk_tokens):
            part = slice(start, start + self._chunk_tokens)
            x, z = self._in_chunk(self._hidden, part), None
            logits = self._head.logits(x)
            if self._z is not None and self.B is not None:
                z = self._in_chunk(self._z, part)
                logits.addmm_(z, self.B.t())
            yield HeadChunk(part, self._labels[part], x, z, logits)

    def _in_chunk(self, tokens: Tensor, part: slice) -> Tensor:
        rows = self._rows
        return (tokens[part] if rows is None else picked(tokens, rows[part])).to(self._dtype)

    def new_rows(self, like: Any) -> Tensor:
        return self.weight.new_empty(self.count, like.shape[-1])

    def in_full(self, numbers: Tensor) -> Tensor:
        """Return the numbers [n] of the rows as those of all tokens, 0 elsewhere."""
        return placed(numbers, self._rows, torch.Size((self._tokens,)))


def _flat(tokens: Any) -> Any:
    return None if tokens is None else tokens.reshape(-1, tokens.shape[-1])


def picked(tokens: Tensor, rows: Tensor | None) -> Tensor:
    return tokens if rows is None else tokens.index_select(0, rows)


def placed(values: Tensor, rows: Tensor | None, shape: torch.Size) -> Tensor:
    """Return zeros of this shape with values in these rows; rows None: the values."""
    return values if rows is None else values.new_zeros(shape).index_copy_(0, rows, values)
