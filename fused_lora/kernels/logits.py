"""Losses of rows of logits, and their gradient over them. Equations: `cross_entropy.py`,
`log_probs.py`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.geglu import sigmoids
from fused_mlp.launching import cdiv, launch

# 8,192 logits over 16 warps: 16 bf16 values, two 16-byte loads, per thread.
BLOCK_COLUMNS = 8192
_NUM_WARPS = 16
VECTOR = 8
# exp of this is 0 in fp32. Its product with 0 is 0, unlike that of -inf.
LEAST = tl.constexpr(-200.0)


class LogitScaling(NamedTuple):
    """The function applied to each logit x, as numbers for the kernels.

    softcap None: x * scale, and scale None: x. Otherwise softcap * tanh(x * scale).
    """

    scale: float | None = None
    softcap: float | None = None


class Statistics(NamedTuple):
    """Numbers of each row to write beside its loss: [rows], fp32, or None to leave one out.

    With z the scaled logits and p their softmax: the maximum of z, log sum exp(z - maximum), the
    entropy, log sum p^2, the mean of z, and whether the label is the first of the largest (int8).
    """

    maxima: Tensor | None = None
    log_sums: Tensor | None = None
    entropies: Tensor | None = None
    log_sums_of_squares: Tensor | None = None
    means: Tensor | None = None
    is_top1: Tensor | None = None


NOT_SCALED, NO_STATISTICS = LogitScaling(), Statistics()


@triton.jit
def _exp(x):
    """Compute tl.exp, flushing results below 2^-126 to 0: that saves 3 of its 5 instructions."""
    return tl.exp2(x * 1.4426950408889634)  # log2(e)


@triton.jit
def _scaled_logits(logits, scale, softcap):
    """Return the scaled logits, and the slope of that function (`LogitScaling`)."""
    slope = 1.0
    if scale is not None:
        logits = logits * scale
        slope = scale
    if softcap is not None:
        share, rest = sigmoids(2.0 * logits)
        logits = softcap * (share - rest)  # tanh
        slope = softcap * scale * 4.0 * share * rest
    return logits, slope


@triton.jit(do_not_specialize_on_alignment=["labels_ptr"])
def _cross_entropy_kernel(
    logits_ptr,  # [rows, row_stride], overwritten by their gradient if WRITE_GRADIENT
    labels_ptr,  # [rows]
    losses_ptr,  # [rows], written
    # of `Statistics`, each [rows], written, or None
    maxima_ptr,
    log_sums_ptr,
    entropies_ptr,
    log_sums_of_squares_ptr,
    means_ptr,
    is_top1_ptr,
    row_stride,
    vocabulary,
    ignore_index,
    scale,  # of `LogitScaling`
    softcap,
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
    label_logit, _label_slope = _scaled_logits(label_logit, scale, softcap)
    label_column = tl.where(in_range, label, -1).to(tl.int32)  # quicker to compare with

    # A maximum and a sum for every VECTOR words, which belong to one thread. With a single one for
    # a whole block, all threads would wait for each other twice a block.
    maximum = tl.full([BLOCK // VECTOR], -float("inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK // VECTOR], tl.float32)
    offset_sum = tl.zeros([BLOCK // VECTOR], tl.float32)  # of exp(offset) * offset
    square_sum = tl.zeros([BLOCK // VECTOR], tl.float32)
    logit_sum = tl.zeros([BLOCK // VECTOR], tl.float32)
    before_label = tl.full([BLOCK // VECTOR], -float("inf"), tl.float32)
    lane = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for start in range(0, vocabulary, BLOCK):
        columns = start + lane
        # the mask ends with the row's memory and not with its words, to stay a multiple of 64
        logits = tl.load(logits_ptr + columns, mask=columns < row_stride).to(tl.float32)
        logits, slope = _scaled_logits(logits, scale, softcap)
        if means_ptr is not None:
            logit_sum += tl.sum(tl.where(columns < vocabulary, logits, 0.0), axis=1)
        logits = tl.where(columns < vocabulary, logits, -float("inf"))
        if is_top1_ptr is not None:
            earlier = tl.where(columns < label_column, logits, -float("inf"))
            before_label = tl.maximum(before_label, tl.max(earlier, axis=1))
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        # as long as all logits are -inf, -inf - -inf would make a NaN out of nothing
        shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        offsets, factor = logits - shift[:, None], _exp(maximum - shift)
        exps = _exp(offsets)
        if entropies_ptr is not None:
            # the offsets so far all move by this
            moved = offset_sum + exp_sum * tl.maximum(maximum - shift, LEAST)
            offset_sum = moved * factor + tl.sum(exps * tl.maximum(offsets, LEAST), axis=1)
        if log_sums_of_squares_ptr is not None:
            square_sum = square_sum * factor * factor + tl.sum(exps * exps, axis=1)
        exp_sum = exp_sum * factor + tl.sum(exps, axis=1)
        maximum = new_maximum
    shift = tl.max(maximum, axis=0)
    shift = tl.where(shift == -float("inf"), 0.0, shift)
    factor = _exp(maximum - shift)
    offset_sum += exp_sum * tl.maximum(maximum - shift, LEAST)
    offset_sum = tl.sum(offset_sum * factor, axis=0)
    square_sum = tl.sum(square_sum * factor * factor, axis=0)
    exp_sum = tl.sum(exp_sum * factor, axis=0)
    maximum = tl.max(maximum, axis=0)

    # a label outside the vocabulary makes the row's loss and gradient NaN (label_check.py tells)
    exp_sum = tl.where(in_range, exp_sum, float("nan"))
    ignored = label == ignore_index
    log_sum = tl.log(exp_sum)
    loss = tl.where(ignored, 0.0, log_sum + (maximum - label_logit))
    tl.store(losses_ptr + row, loss)
    if maxima_ptr is not None:
        tl.store(maxima_ptr + row, maximum)
    if log_sums_ptr is not None:
        tl.store(log_sums_ptr + row, tl.where(ignored, 0.0, log_sum))
    if entropies_ptr is not None:
        entropy = log_sum - offset_sum / exp_sum
        tl.store(entropies_ptr + row, tl.where(ignored, 0.0, entropy))
    if log_sums_of_squares_ptr is not None:
        log_sum_of_squares = tl.log(square_sum) - 2.0 * log_sum
        tl.store(log_sums_of_squares_ptr + row, tl.where(ignored, 0.0, log_sum_of_squares))
    if means_ptr is not None:
        mean = tl.sum(logit_sum, axis=0) / vocabulary
        tl.store(means_ptr + row, tl.where(ignored, 0.0, mean))
    if is_top1_ptr is not None:
        # among equals the first is the largest, as in argmax
        is_first = (label_logit == maximum) & (tl.max(before_label, axis=0) < label_logit)
        tl.store(is_top1_ptr + row, (is_first & in_range & (label != ignore_index)).to(tl.int8))

    if WRITE_GRADIENT:
        inverse = 1.0 / exp_sum
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + columns, mask=columns < row_stride).to(tl.float32)
            logits, slope = _scaled_logits(logits, scale, softcap)
            logits = tl.where(columns < vocabulary, logits, -float("inf"))
            softmax = _exp(logits - maximum) * inverse
            gradient = tl.where(columns == label, softmax - 1.0, softmax) * slope
            keep = (columns < vocabulary) & (label != ignore_index)
            gradient = tl.where(keep, gradient, 0.0).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + columns, gradient, mask=columns < row_stride)


@triton.jit(do_not_specialize_on_alignment=["labels_ptr"])
def _log_probs_gradient_kernel(
    logits_ptr,  # [rows, row_stride], overwritten by the gradient
    labels_ptr,  # [rows], as all below
    maxima_ptr,
    log_sums_ptr,
    entropies_ptr,  # or None, with grad_entropies_ptr
    grad_log_probs_ptr,  # or None
    grad_entropies_ptr,
    row_stride,
    vocabulary,
    ignore_index,
    scale,  # of `LogitScaling`
    softcap,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    maximum, log_sum = tl.load(maxima_ptr + row), tl.load(log_sums_ptr + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + columns, mask=columns < row_stride).to(tl.float32)
    logits, slope = _scaled_logits(logits, scale, softcap)
    logits = tl.where(columns < vocabulary, logits, -float("inf"))
    log_softmax = (logits - maximum) - log_sum
    softmax = _exp(log_softmax)
    gradient = tl.zeros([BLOCK], tl.float32)
    if grad_log_probs_ptr is not None:
        label_part = tl.where(columns == label, 1.0 - softmax, -softmax)
        gradient += tl.load(grad_log_probs_ptr + row) * label_part
    if grad_entropies_ptr is not None:
        surprise = tl.maximum(log_softmax, LEAST) + tl.load(entropies_ptr + row)
        gradient -= tl.load(grad_entropies_ptr + row) * softmax * surprise
    keep = (columns < vocabulary) & (label != ignore_index)
    gradient = tl.where(keep, gradient * slope, 0.0).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + columns, gradient, mask=columns < row_stride)


def cross_entropy_(
    logits: Tensor, labels: Tensor, ignore_index: int, write_gradient: bool,
    statistics: Statistics = NO_STATISTICS, scaling: LogitScaling = NOT_SCALED,
) -> Tensor:  # fmt: skip
    """``F.cross_entropy(scaling(logits.float()), labels, ignore_index=ignore_index,
    reduction="none")``, but NaN for a label outside the vocabulary. If `write_gradient`, the
    gradient of the losses' sum overwrites `logits`, and the memory between its rows.

    logits [rows, vocabulary], bf16, fp16 or fp32, rows in one piece each; labels [rows],
    contiguous. Writes the statistics that are not None; all but maxima are 0 for ignored labels.
    Returns [rows] in fp32.
    """
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    launch(
        _cross_entropy_kernel, (rows,),
        logits, labels, losses, *statistics, _row_stride(logits), vocabulary, ignore_index,
        *scaling, write_gradient, BLOCK_COLUMNS, VECTOR, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return losses


def log_probs_gradient_(
    logits: Tensor, labels: Tensor, ignore_index: int, statistics: Statistics,
    grad_log_probs: Tensor | None, grad_entropies: Tensor | None,
    scaling: LogitScaling = NOT_SCALED,
) -> None:  # fmt: skip
    """Overwrite logits [rows, vocabulary] with the gradient of
    ``(log_probs * grad_log_probs + entropies * grad_entropies).sum()``, and the memory between its
    rows.

    statistics: of `cross_entropy_` on the same logits, labels and scaling: maxima, log_sums, and
    entropies if they have a gradient. Gradients [rows], contiguous, fp32. None: 0.
    """
    rows, vocabulary = logits.shape
    row_stride, entropies = _row_stride(logits), statistics.entropies
    launch(
        _log_probs_gradient_kernel, (rows, cdiv(row_stride, BLOCK_COLUMNS)),
        logits, labels, statistics.maxima, statistics.log_sums,
        None if grad_entropies is None else entropies, grad_log_probs, grad_entropies,
        row_stride, vocabulary, ignore_index, *scaling, BLOCK_COLUMNS, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _row_stride(logits: Tensor) -> int:
    return logits.stride(0) if len(logits) > 1 else logits.shape[1]  # one row may have any
