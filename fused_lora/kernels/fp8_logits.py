"""Gradient of logits as FP8 codes (`fp8_rows.py`), and transposed codes (`fp8_head.py`).

Let p be the softmax of a token's logits x [vocabulary], and y its label. The gradient of the loss
is p - onehot(y). At the label it may be -1, and everywhere else together 1. Codes that hold the -1
have no digits left for the rest. We therefore keep the label's gradient apart, in fp32, and code
the others:

    c = p_y - 1                  codes = p s / scale, and 0 at y

with s the scales of lm_head's weight, over whose rows the gradient's matmul sums. The row's scale
is a bound: no other probability exceeds the largest, or 1 - p_y. We get both from the row's loss
and its largest logit x_max: log sum exp x = loss + x_y, and 1 - p_y = 1 - exp(-loss).

Most words have tiny probabilities, which add up to several percent of the total. Their codes lie
below 2^-6, where e4m3 numbers are 2^-9 apart. Rounded to the nearest, thousands would become the
same 0 or 2^-9, and the sum over them would be off. We round them stochastically instead: the
further a code lies above the number below, the likelier it is rounded up. The last 12 bits of its
own mantissa serve as the random number. After a little training, the part of the gradient that
comes from all words but the label was 8% off, and now it is 2% off
(docs/runs/cpu/fp8_lm_head_gradient.txt).

Traffic per logit in bf16: 2 bytes read, and 1 written. Arithmetic is fp32. Deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, is_interpreted, launch

from .fp8_rows import E4M3, LARGEST, SMALLEST, e4m3

BLOCK_COLUMNS = 8192
LEAST_NORMAL = tl.constexpr(2.0**-6)  # of e4m3
SPACING = tl.constexpr(2.0**-9)  # below it
LAST_BITS = tl.constexpr(0xFFF)
TILE = 128


@triton.jit(do_not_specialize_on_alignment=["labels_ptr", "label_gradient_ptr"])
def _logit_codes_kernel(
    logits_ptr,  # [rows, vocabulary]
    labels_ptr,  # [rows]
    losses_ptr,  # [rows]
    maxima_ptr,  # [rows]
    column_scales_ptr,  # [vocabulary]
    most_ptr,  # [], the largest of columns
    codes_ptr,  # [rows, vocabulary], written
    scales_ptr,  # [rows], written
    label_gradient_ptr,  # [rows], written
    row_stride,
    vocabulary,
    ignore_index,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    codes_ptr += row * vocabulary
    label = tl.load(labels_ptr + row)
    in_range = (label >= 0) & (label < vocabulary)
    ignored = label == ignore_index
    loss = tl.load(losses_ptr + row)  # NaN for a label outside of the vocabulary
    label_logit = tl.load(logits_ptr + label, mask=in_range, other=0.0).to(tl.float32)
    log_sum = loss + label_logit
    # 1 - exp(-loss), which would lose its digits where the loss is small
    others = tl.where(loss < 1e-3, loss, 1.0 - tl.exp(-loss))
    bound = tl.minimum(tl.exp(tl.load(maxima_ptr + row) - log_sum), others)
    largest = tl.maximum(bound * tl.load(most_ptr), SMALLEST)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        logits = tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        code = tl.exp(logits - log_sum) * (LARGEST / largest)
        code *= tl.load(column_scales_ptr + columns, mask=inside, other=0.0)
        # a code may pass the bound by rounding
        code = tl.minimum(tl.where((columns == label) | ignored, 0.0, code), LARGEST)
        code = code.to(tl.float32)
        last = (code.to(tl.uint32, bitcast=True) & LAST_BITS).to(tl.float32)
        lift = last * (SPACING / (LAST_BITS + 1)) - SPACING / 2
        code = tl.where(code < LEAST_NORMAL, code + lift, code)
        tl.store(codes_ptr + columns, e4m3(code, ROUND), mask=inside)
    not_finite = tl.where(ignored, 0.0, log_sum * 0.0)  # a minimum may lose NaN
    tl.store(scales_ptr + row, largest / LARGEST + not_finite)
    tl.store(label_gradient_ptr + row, tl.where(ignored, 0.0, not_finite - others))


@triton.jit
def _transpose_kernel(
    x_ptr,  # [rows, columns], bytes
    y_ptr,  # [columns, rows], written
    rows,
    columns,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0)
    mask = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(y_ptr + column[:, None] * rows + row[None, :], tl.trans(tile), mask=mask)


def logit_codes(
    logits: Tensor, labels: Tensor, losses: Tensor, maxima: Tensor, column_scales: Tensor,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return codes [rows, vocabulary] of the gradient of each row's loss, times column_scales, with
    0 at the label; their scales [rows, 1]; and the gradient at the label [rows]. Both are in fp32.

    Equivalent PyTorch, for labels within the vocabulary::

        p = logits.float().softmax(1)
        is_label = F.one_hot(labels, vocabulary).bool()
        label_gradient = p[is_label] - 1
        others = p.masked_fill(is_label, 0) * column_scales
        scales = torch.minimum(p.amax(1), 1 - p[is_label])[:, None] * column_scales.max() / 448
        codes = (others / scales).to(torch.float8_e4m3fn)  # below 2^-6 up or down, by chance

    losses and maxima [rows] come from `cross_entropy_`. For an ignored label, codes and gradient
    are 0. For a label outside the vocabulary, or where a logit is NaN, scale and gradient are NaN.
    """
    rows, vocabulary = logits.shape
    codes = torch.empty(rows, vocabulary, dtype=E4M3, device=logits.device)
    scales, label_gradient = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    if rows:
        launch(
            _logit_codes_kernel, (rows,),
            logits, labels, losses, maxima, column_scales, column_scales.max(), codes, scales,
            label_gradient, logits.stride(0), vocabulary, ignore_index, BLOCK_COLUMNS,
            is_interpreted(_logit_codes_kernel), num_warps=16,
        )  # fmt: skip
    return codes, scales[:, None], label_gradient


def transposed(codes: Tensor) -> Tensor:
    """``codes.t().contiguous()``, for [rows, columns] of one byte each and contiguous."""
    rows, columns = codes.shape
    result = codes.new_empty(columns, rows)
    launch(
        _transpose_kernel, (cdiv(rows, TILE), cdiv(columns, TILE)),
        codes.view(torch.uint8), result.view(torch.uint8), rows, columns, TILE, num_warps=8,
    )  # fmt: skip
    return result
