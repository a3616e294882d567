"""Losses of rows of logits, and their gradient over them. Equations: `cross_entropy.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import launch

# 8,192 logits over 16 warps: 16 bf16 values, two 16-byte loads, per thread.
BLOCK_COLUMNS = 8192
_NUM_WARPS = 16
VECTOR = 8


@triton.jit
def _exp(x):
    """Compute tl.exp, flushing results below 2^-126 to 0: that saves 3 of its 5 instructions."""
    return tl.exp2(x * 1.4426950408889634)  # log2(e)


@triton.jit(do_not_specialize_on_alignment=["labels_ptr"])
def _cross_entropy_kernel(
    logits_ptr,  # [rows, row_stride], overwritten by their gradient if WRITE_GRADIENT
    labels_ptr,  # [rows]
    losses_ptr,  # [rows], written
    maxima_ptr,  # [rows], written, or None
    row_stride,
    vocabulary,
    ignore_index,
    WRITE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # 16,384 rows of 151,936 logits are more than 2^31
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    in_range = (label >= 0) & (label < vocabulary)
    # read here, with the barriers of the reductions between it and the gradient written over it
    label_logit = tl.load(logits_ptr + label, mask=in_range, other=0.0).to(tl.float32)

    # A maximum and a sum for every VECTOR words, which belong to one thread. With a single one for
    # a whole block, all threads would wait for each other twice a block.
    maximum = tl.full([BLOCK // VECTOR], -float("inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK // VECTOR], tl.float32)
    lane = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for start in range(0, vocabulary, BLOCK):
        columns = start + lane
        # the mask ends with the row's memory and not with its words, to stay a multiple of 64
        logits = tl.load(logits_ptr + columns, mask=columns < row_stride).to(tl.float32)
        logits = tl.where(columns < vocabulary, logits, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        # as long as all logits are -inf, -inf - -inf would make a NaN out of nothing
        shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        exp_sum = exp_sum * _exp(maximum - shift) + tl.sum(_exp(logits - shift[:, None]), axis=1)
        maximum = new_maximum
    shift = tl.max(maximum, axis=0)
    shift = tl.where(shift == -float("inf"), 0.0, shift)
    exp_sum = tl.sum(exp_sum * _exp(maximum - shift), axis=0)
    maximum = tl.max(maximum, axis=0)

    # a label outside the vocabulary makes the row's loss and gradient NaN (label_check.py tells)
    exp_sum = tl.where(in_range, exp_sum, float("nan"))
    ignored = label == ignore_index
    loss = tl.where(ignored, 0.0, tl.log(exp_sum) + (maximum - label_logit))
    tl.store(losses_ptr + row, loss)
    if maxima_ptr is not None:
        tl.store(maxima_ptr + row, maximum)

    if WRITE_GRADIENT:
        inverse = 1.0 / exp_sum
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + columns, mask=columns < row_stride).to(tl.float32)
            logits = tl.where(columns < vocabulary, logits, -float("inf"))
            softmax = _exp(logits - maximum) * inverse
            gradient = tl.where(columns == label, softmax - 1.0, softmax)
            gradient = tl.where(ignored, 0.0, gradient).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + columns, gradient, mask=columns < row_stride)


def cross_entropy_(
    logits: Tensor, labels: Tensor, ignore_index: int, write_gradient: bool,
    maxima: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``F.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="none")``, but
    NaN for a label outside the vocabulary. If `write_gradient`, the gradient of the losses' sum
    overwrites `logits`, and the memory between its rows. Each row's largest is written to maxima.

    logits [rows, vocabulary], bf16, fp16 or fp32, rows in one piece each; labels [rows],
    contiguous. Returns [rows] in fp32.
    """
    rows, vocabulary = logits.shape
    row_stride = logits.stride(0) if rows > 1 else vocabulary  # of one row it may be anything
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    launch(
        _cross_entropy_kernel, (rows,),
        logits, labels, losses, maxima, row_stride, vocabulary, ignore_index,
        write_gradient, BLOCK_COLUMNS, VECTOR, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return losses
