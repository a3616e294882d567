"""The causal convolution of a mixer, one Triton kernel each way: in front of a gated delta net with
SiLU and the split into q, k and v, in LFM2 without either.

Every channel c has its own few weights, one for each of the last taps tokens (4 in Qwen3.5, 3 in
LFM2):

    y[t, c] = silu(s[t, c]),    s[t, c] = bias[c] + sum over j of w[c, j] x[t - (taps - 1) + j, c]

with x = 0 before the first token of t's document. With d = grad_y silu'(s), and d = 0 behind the
last one,

    grad_x[t, c]    = sum over j of w[c, j] d[t + (taps - 1) - j, c]
    grad_w[c, j]    = sum over t of d[t, c] x[t - (taps - 1) + j, c]
    grad_bias[c]    = sum over t of d[t, c]

Backward recomputes s from x. A program takes a tile of tokens and channels, and reads the tokens
around its tile as well, which are in the cache.

Traffic in tensors of x's size: 2 forward (x, y), 3 backward (grad_y, x, grad_x). Where
causal-conv1d is not installed, transformers transposes, convolves by PyTorch, cuts off the last
tokens and activates, which moves 6 forward and 14 backward, and PyTorch convolves bf16 slowly.
Arithmetic is fp32 and rounds once, at the store.

In front of a gated delta net: Yang, Kautz & Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464.
LFM2: arXiv 2511.23404.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, check_runnable, launch
from fused_mlp.utils import refuse_second_derivative

from ..kernels.activation import activate
from ..kernels.rows import as_rows
from ..kernels.tiling import dots_in_fp32

# 64 channels in bf16 are a line of the L2 cache. With 32 tokens a tile, a thread of backward would
# take 222 registers instead of 128.
TOKENS, CHANNELS = 16, 64
WARPS = 4
MAX_TAPS = 8  # backward has taps^2 multiplications an element


class Conv(NamedTuple):
    """The constants of a convolution.

    sizes: how many of the channels each output has; one to three outputs.
    has_silu: SiLU follows.
    seq_idx: a number for each token's document, [batch, positions], int32 and contiguous, as
        causal_conv1d takes it: tokens of one document are neighbours, and no other document within
        the reach of its taps has the same number. None: each row is one.
    """

    sizes: tuple[int, ...]
    has_silu: bool = True
    seq_idx: Tensor | None = None


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv) -> tuple[Tensor, ...]:
    """Convolve each channel with its weights, activate by SiLU, and split, into q, k and v say.

    Equivalent PyTorch, for each document::

        taps = weight.shape[1]
        padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
        y = F.conv1d(padded, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
        (F.silu(y) if conv.has_silu else y).split(conv.sizes, 2)

    Args:
        x: [..., positions, channels], bf16, fp16 or fp32. Any strides: it is copied only if its
            rows are not evenly spaced, or their elements not contiguous.
        weight: [channels, taps], 1 to 8 taps, in any of these dtypes. Copied unless weight.t() is
            contiguous, which lets a thread load its channels' weights at once.
        bias: [channels] likewise, or None.
        conv: the sizes of the outputs, whether SiLU follows, and the documents.

    Returns:
        New contiguous tensors [..., positions, size] in x's dtype, computed in fp32.
        Gradients are new tensors in the dtypes of their inputs. Those of weight and bias are summed
        in fp32, and only if they require one.

    Saved for backward: x, weight, bias and seq_idx. It writes to no input, incoming gradient or
    saved tensor. Deterministic. Not twice differentiable. Autocast changes nothing.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or no kernel can run on them.
        RuntimeError: from backward, under create_graph=True.
    """
    return CausalConv.apply(x, weight, bias, conv)


class CausalConv(torch.autograd.Function):
    """``CausalConv.apply(x, weight, bias, conv)``; see `causal_conv`."""

    @staticmethod
    def forward(ctx, x, weight, bias, conv):
        ctx.save_for_backward(x, weight, bias, conv.seq_idx)
        ctx.conv = conv._replace(seq_idx=None)
        return causal_conv_forward(x, weight, bias, conv)

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative("causal_conv", "the unfused convolution")
        x, weight, bias, seq_idx = ctx.saved_tensors
        conv = ctx.conv._replace(seq_idx=seq_idx)
        grad_x = x.new_empty(x.shape)
        need_weights = any(ctx.needs_input_grad[1:3])
        sums = causal_conv_backward(grads, x, weight, bias, conv, as_rows(grad_x), need_weights)
        if sums is None:
            return grad_x, None, None, None
        grad_weight = sums[:-1].t().contiguous().to(weight.dtype)
        return grad_x, grad_weight, None if bias is None else sums[-1].to(bias.dtype), None


@triton.jit(do_not_specialize=["positions"])
def _causal_conv_forward_kernel(
    x_ptr,  # [batch * positions, channels]
    weight_ptr,  # [TAPS, channels], contiguous
    bias_ptr,  # [channels], or None
    seq_idx_ptr,  # [batch * positions] int32, or None
    q_ptr,  # [batch * positions, q_size], contiguous, written; k and v likewise
    k_ptr,
    v_ptr,
    x_row_stride,
    positions,
    q_size,
    k_size,
    v_size,
    TAPS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    IN_FP32: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channels = q_size + k_size + v_size
    first_row, position = _tile(positions, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    in_channels = channel < channels
    total = _bias(bias_ptr, channel, in_channels)
    for tap in tl.static_range(TAPS):
        source = position + (tap - (TAPS - 1))
        mask = _is_read(seq_idx_ptr, first_row, source, position, positions) & in_channels
        x = tl.load(x_ptr + (first_row + source) * x_row_stride + channel, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + tap * channels + channel, mask=in_channels, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)
    y = total
    if HAS_SILU:
        y, _ = activate(total, False, IN_FP32)
    y = y.to(q_ptr.dtype.element_ty)
    row, mask = first_row + position, position < positions
    k_channel, v_channel = channel - q_size, channel - q_size - k_size
    tl.store(q_ptr + row * q_size + channel, y, mask=mask & (channel < q_size))
    is_k = (k_channel >= 0) & (k_channel < k_size)
    tl.store(k_ptr + row * k_size + k_channel, y, mask=mask & is_k)
    is_v = (v_channel >= 0) & (v_channel < v_size)
    tl.store(v_ptr + row * v_size + v_channel, y, mask=mask & is_v)


@triton.jit(do_not_specialize=["positions"])
def _causal_conv_backward_kernel(
    grad_q_ptr,  # [batch * positions, q_size]; of k and v likewise
    grad_k_ptr,
    grad_v_ptr,
    x_ptr,  # [batch * positions, channels]
    weight_ptr,  # [TAPS, channels], contiguous
    bias_ptr,  # [channels], or None
    seq_idx_ptr,  # [batch * positions] int32, or None
    grad_x_ptr,  # [batch * positions, channels], written
    partial_ptr,  # [TAPS + 1, programs, channels] fp32, sums of a tile's tokens, written; or None
    grad_q_row_stride,
    grad_k_row_stride,
    grad_v_row_stride,
    x_row_stride,
    grad_x_row_stride,
    positions,
    q_size,
    k_size,
    v_size,
    TAPS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    IN_FP32: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channels = q_size + k_size + v_size
    first_row, position = _tile(positions, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    in_channels = channel < channels
    k_channel, v_channel = channel - q_size, channel - q_size - k_size
    is_k = (k_channel >= 0) & (k_channel < k_size)
    is_v = (v_channel >= 0) & (v_channel < v_size)
    grad_x = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for ahead in tl.static_range(TAPS):  # the tokens that read this one
        reader = position + ahead
        row = first_row + reader
        in_row = _is_read(seq_idx_ptr, first_row, position, reader, positions)
        # one of the three, and 0 for the others
        at = grad_q_ptr + row * grad_q_row_stride + channel
        grad = tl.load(at, mask=in_row & (channel < q_size), other=0.0).to(tl.float32)
        at = grad_k_ptr + row * grad_k_row_stride + k_channel
        grad += tl.load(at, mask=in_row & is_k, other=0.0).to(tl.float32)
        at = grad_v_ptr + row * grad_v_row_stride + v_channel
        grad += tl.load(at, mask=in_row & is_v, other=0.0).to(tl.float32)
        if HAS_SILU:
            total = _bias(bias_ptr, channel, in_channels)
            for tap in tl.static_range(TAPS):
                # ahead + tap in one number: Triton then loads equal sums once
                source = position + (ahead + tap - (TAPS - 1))
                mask = _is_read(seq_idx_ptr, first_row, source, reader, positions) & in_channels
                at = x_ptr + (first_row + source) * x_row_stride + channel
                x = tl.load(at, mask=mask, other=0.0)
                weight = tl.load(weight_ptr + tap * channels + channel, mask=in_channels, other=0.0)
                total += weight.to(tl.float32) * x.to(tl.float32)
            _, slope = activate(total, False, IN_FP32)
            grad *= slope
        tap_here = weight_ptr + (TAPS - 1 - ahead) * channels + channel
        weight = tl.load(tap_here, mask=in_channels, other=0.0)
        grad_x += weight.to(tl.float32) * grad
        if partial_ptr is not None and ahead == 0:
            partial = partial_ptr + tl.program_id(0).to(tl.int64) * channels + channel
            step = tl.num_programs(0).to(tl.int64) * channels
            for tap in tl.static_range(TAPS):
                source = position + (tap - (TAPS - 1))
                mask = _is_read(seq_idx_ptr, first_row, source, position, positions) & in_channels
                at = x_ptr + (first_row + source) * x_row_stride + channel
                x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                tap_sum = tl.sum(grad * x, axis=0)[None, :]
                tl.store(partial + tap * step, tap_sum, mask=in_channels)
            bias_sum = tl.sum(grad, axis=0)[None, :]
            tl.store(partial + TAPS * step, bias_sum, mask=in_channels)
    at = grad_x_ptr + (first_row + position) * grad_x_row_stride + channel
    mask = (position < positions) & in_channels
    tl.store(at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile(positions, TOKENS: tl.constexpr):
    """Return the first row of this program's sequence, in int64, and the tile's positions in it."""
    tiles = tl.cdiv(positions, TOKENS)
    sequence = tl.program_id(0) // tiles
    position = (tl.program_id(0) % tiles) * TOKENS + tl.arange(0, TOKENS)[:, None]
    return sequence.to(tl.int64) * positions, position


@triton.jit
def _is_read(seq_idx_ptr, first_row, source, reader, positions):
    """Return whether each token at the positions `source` is there and in its reader's document."""
    is_read = (source >= 0) & (reader < positions)
    if seq_idx_ptr is not None:
        its = tl.load(seq_idx_ptr + first_row + source, mask=is_read, other=0)
        readers = tl.load(seq_idx_ptr + first_row + reader, mask=is_read, other=0)
        is_read = is_read & (its == readers)
    return is_read


@triton.jit
def _bias(bias_ptr, channel, mask):
    """Return the bias [1, channels] in fp32, 0 without one."""
    if bias_ptr is None:
        bias = channel * 0.0
    else:
        bias = tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    return bias


def causal_conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv
) -> tuple[Tensor, ...]:
    """Return the outputs of `causal_conv`."""
    _check(x, weight, bias, conv)
    rows, positions = as_rows(x), x.shape[-2]
    outputs = [x.new_empty(*x.shape[:-1], size) for size in _three(conv.sizes)]
    if grid := _grid(rows, positions):
        kernel = _causal_conv_forward_kernel
        launch(
            kernel, grid, rows, weight.t().contiguous(),
            bias if bias is None else bias.contiguous(), conv.seq_idx, *outputs, rows.stride(0),
            positions, *_three(conv.sizes), weight.shape[1], conv.has_silu,
            dots_in_fp32(kernel, x), TOKENS, CHANNELS, num_warps=WARPS,
        )  # fmt: skip
    return tuple(outputs[: len(conv.sizes)])


def causal_conv_backward(
    grads: Sequence[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv,
    grad_x: Tensor, need_weights: bool,
) -> Tensor | None:  # fmt: skip
    """Write the gradient of x into grad_x [batch * positions, channels], given the outputs'.

    Return the gradients of weight and bias as rows [taps + 1, channels] in fp32, the bias last.
    None if they are not needed.
    """
    rows, positions = as_rows(x), x.shape[-2]
    channels, taps = weight.shape
    grad_rows = [as_rows(grad) for grad in grads]
    grad_rows += [rows.new_empty(len(rows), 0)] * (3 - len(grads))
    grid = _grid(rows, positions)
    partial = None
    if need_weights:
        programs = grid[0] if grid else 0
        partial = rows.new_empty(taps + 1, programs, channels, dtype=torch.float32)
    if grid:
        kernel = _causal_conv_backward_kernel
        launch(
            kernel, grid, *grad_rows, rows, weight.t().contiguous(),
            bias if bias is None else bias.contiguous(), conv.seq_idx, grad_x, partial,
            *(grad.stride(0) for grad in grad_rows), rows.stride(0), grad_x.stride(0), positions,
            *_three(conv.sizes), taps, conv.has_silu, dots_in_fp32(kernel, x), TOKENS, CHANNELS,
            num_warps=WARPS,
        )  # fmt: skip
    return None if partial is None else partial.sum(1)


def _three(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes for three outputs, filled up with 0."""
    return (*sizes, 0, 0)[:3]


def _grid(rows: Tensor, positions: int) -> tuple[int, ...]:
    """Return the programs by tokens and by channels, () for none: an empty grid is an error."""
    if rows.numel() == 0:
        return ()
    return len(rows) // positions * cdiv(positions, TOKENS), cdiv(rows.shape[1], CHANNELS)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv) -> None:
    """Raise ValueError where shapes, dtypes or devices do not fit together, naming the tensor."""
    sizes, seq_idx = conv.sizes, conv.seq_idx
    channels = sum(sizes)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(
            f"causal_conv: sizes are {list(sizes)}, should be one to three, 1 or more each"
        )
    if x.ndim < 2 or x.shape[-1] != channels:
        raise ValueError(
            f"causal_conv: x is {list(x.shape)}, should be [..., positions, {channels}] as sizes "
            f"are {list(sizes)}"
        )
    if weight.ndim != 2 or len(weight) != channels or not 1 <= weight.shape[1] <= MAX_TAPS:
        raise ValueError(
            f"causal_conv: weight is {list(weight.shape)}, should be [{channels}, 1 to {MAX_TAPS}]"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"causal_conv: bias is {list(bias.shape)}, should be [{channels}]")
    if seq_idx is not None and (
        seq_idx.shape != x.shape[:-1] or seq_idx.dtype != torch.int32 or not seq_idx.is_contiguous()
    ):
        raise ValueError(
            f"causal_conv: seq_idx is {list(seq_idx.shape)} {seq_idx.dtype}, should be contiguous "
            f"{list(x.shape[:-1])} torch.int32"
        )
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias), ("seq_idx", seq_idx)):
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(
                f"causal_conv: {name} is on {tensor.device} and x on {x.device}: give both one"
            )
        if tensor is not seq_idx:
            check_runnable("causal_conv", _causal_conv_forward_kernel, tensor)
