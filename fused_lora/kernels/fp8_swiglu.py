"""SwiGLU and its backward as FP8 codes (`fp8_rows.py`), without rows in bf16 in between.

    swiglu_codes              silu(gate) up; a program holds one row in registers
    guess_gradient_scales     a guess at what a row of [dgate | dup] s will not pass
    repair_gradient_codes     new codes for the rows that passed it

(or gelu, by tanh, for silu: GeGLU.) The backward's programs own columns and go down the rows
(`swiglu_products_backward.py`), so none of them knows a row's largest. e4m3 numbers are
floating-point: a scale 64 times too large costs digits only in elements below 1/450 of the row's
largest. We therefore guess the scale, from 64 times the largest of the row's first columns. An
element that still passes 448, or is no number, marks its row. A marked row is coded once more, by
its own largest.

Traffic in [rows, intermediate] tensors in bf16: the forward takes 2.5 (gate, up; codes), where h in
bf16 takes 3 and coding it another 1.5. The backward's codes take 1, where dgate and dup in bf16
take 2 and coding them another 3. Arithmetic is fp32, and rounds once to e4m3. Deterministic.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, is_interpreted, launch, next_power_of_2

from .activation import activate
from .fp8_rows import LARGEST, ROW_LARGEST, SMALLEST, e4m3, new_codes, row_codes
from .tiling import dots_in_fp32

GUESSED = tl.constexpr(64.0)
GUESS_ROWS, GUESS_COLUMNS = 16, 128
REPAIRED_ROWS = 32  # that a program looks at
# Each 16th of a program's 128 columns has its own note of whether a row has passed there. No thread
# has to ask another.
LANES = tl.constexpr(16)
LANE_COLUMNS = tl.constexpr(8)
REPAIR_BLOCK = 2048
# Registers of a thread of `swiglu_backward_products`. Coding would take 167, and a multiprocessor
# would fit one program. With 128 it fits two, and nothing spills. On an H100 that takes 0.516 ms
# instead of 0.637 at 16,384 rows, and 0.071 instead of 0.090 at 2,048.
CODED_REGISTERS = 128
# 32 elements a thread of 16 warps; what is beyond is read a second time for its codes.
MAX_BLOCK = 16_384


@triton.jit
def _swiglu_codes_kernel(
    gate_up_ptr,  # [rows, 2 intermediate]
    codes_ptr,  # [rows, padded], its first columns are written
    scales_ptr,  # [rows], written
    intermediate,
    padded,
    gate_up_stride,
    BLOCK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_GELU: tl.constexpr,
    IN_FP32: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate_up_ptr += row * gate_up_stride
    codes_ptr += row * padded
    lane = tl.arange(0, BLOCK)
    hidden = _hidden(gate_up_ptr, lane, intermediate, IS_GELU, IN_FP32)
    most = tl.abs(hidden)
    nothing = hidden * 0.0  # or NaN, which maxima and casts may lose
    if not IS_WHOLE:
        for start in range(BLOCK, intermediate, BLOCK):
            more = _hidden(gate_up_ptr, start + lane, intermediate, IS_GELU, IN_FP32)
            most = tl.maximum(most, tl.abs(more))
            nothing += more * 0.0
    largest = tl.maximum(tl.max(most, 0), SMALLEST)
    tl.store(codes_ptr + lane, row_codes(hidden, largest, ROUND), mask=lane < intermediate)
    if not IS_WHOLE:
        for start in range(BLOCK, intermediate, BLOCK):
            at = start + lane
            more = _hidden(gate_up_ptr, at, intermediate, IS_GELU, IN_FP32)
            tl.store(codes_ptr + at, row_codes(more, largest, ROUND), mask=at < intermediate)
    tl.store(scales_ptr + row, largest / ROW_LARGEST + tl.sum(nothing, 0))


@triton.jit
def _hidden(gate_up_ptr, at, intermediate, IS_GELU: tl.constexpr, IN_FP32: tl.constexpr):
    gate = tl.load(gate_up_ptr + at, mask=at < intermediate, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + intermediate + at, mask=at < intermediate, other=0.0)
    activated, _ = activate(gate, IS_GELU, IN_FP32)
    return activated * up.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _guess_kernel(
    grad_hidden_ptr,  # [rows, intermediate]
    gate_up_ptr,  # [rows, 2 intermediate]
    column_scales_ptr,  # [2 intermediate]
    scales_ptr,  # [rows], written
    passed_ptr,  # [rows, LANES] int8, written: 0
    rows,
    intermediate,
    grad_hidden_stride,
    gate_up_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_GELU: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows)[:, None] & (at < intermediate)
    dgate, dup = _scaled_gradients(
        grad_hidden_ptr + row[:, None] * grad_hidden_stride,
        gate_up_ptr + row[:, None] * gate_up_stride,
        column_scales_ptr, at, mask, intermediate, IS_GELU, IN_FP32,
    )  # fmt: skip
    largest = tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), 1)
    scale = tl.maximum(GUESSED * largest, SMALLEST) / LARGEST
    tl.store(scales_ptr + row, scale, mask=row < rows)
    lanes = row[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tl.store(passed_ptr + lanes, tl.zeros([ROWS, LANES], tl.int8), mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _repair_kernel(
    grad_hidden_ptr,
    gate_up_ptr,
    column_scales_ptr,
    codes_ptr,  # [rows, padded]
    scales_ptr,  # [rows]
    passed_ptr,  # [rows, LANES]: of rows with a 1 both are written again
    rows,
    intermediate,
    padded,
    grad_hidden_stride,
    gate_up_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
    IN_FP32: tl.constexpr,
    ROUND: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * ROWS
    lanes = first * LANES + tl.arange(0, ROWS * LANES)
    passed = tl.load(passed_ptr + lanes, mask=lanes < rows * LANES, other=0)
    if tl.max(passed, 0) != 0:
        for i in range(ROWS):
            row = first + i
            its_lanes = row * LANES + tl.arange(0, LANES)
            mask = its_lanes < rows * LANES
            if tl.max(tl.load(passed_ptr + its_lanes, mask=mask, other=0), 0) != 0:
                grad_hidden_row = grad_hidden_ptr + row * grad_hidden_stride
                gate_up_row = gate_up_ptr + row * gate_up_stride
                most = tl.zeros([BLOCK], tl.float32)
                nothing = tl.zeros([BLOCK], tl.float32)  # or NaN
                for start in range(0, intermediate, BLOCK):
                    dgate, dup = _scaled_gradients(
                        grad_hidden_row, gate_up_row, column_scales_ptr, start + lane,
                        start + lane < intermediate, intermediate, IS_GELU, IN_FP32,
                    )  # fmt: skip
                    most = tl.maximum(most, tl.maximum(tl.abs(dgate), tl.abs(dup)))
                    nothing += dgate * 0.0 + dup * 0.0
                largest = tl.maximum(tl.max(most, 0), SMALLEST)
                for start in range(0, intermediate, BLOCK):
                    at = start + lane
                    dgate, dup = _scaled_gradients(
                        grad_hidden_row, gate_up_row, column_scales_ptr, at, at < intermediate,
                        intermediate, IS_GELU, IN_FP32,
                    )  # fmt: skip
                    here = codes_ptr + row * padded + at
                    inside = at < intermediate
                    tl.store(here, row_codes(dgate, largest, ROUND), mask=inside)
                    tl.store(here + intermediate, row_codes(dup, largest, ROUND), mask=inside)
                tl.store(scales_ptr + row, largest / ROW_LARGEST + tl.sum(nothing, 0))


@triton.jit
def load_scales(coded, first, end, column, intermediate, ROWS: tl.constexpr):
    """Return the factors of dgate and dup in these columns, and the scales of the first rows."""
    gate = tl.load(coded.column_scales + column, mask=column < intermediate, other=0.0)
    up = tl.load(coded.column_scales + intermediate + column, mask=column < intermediate, other=0.0)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    return gate, up, tl.load(coded.scales + row, mask=row < end, other=1.0)


@triton.jit
def store_codes(
    coded, codes_row_stride, dgate, dup, scales, row, end, column, intermediate, mask,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Write dgate and dup [ROWS, COLUMNS] as codes, and mark rows that overflow e4m3 or hold NaN.

    Returns the scales for the next rows. Loading them only when they are needed would keep a tile
    waiting for as long as everything else in the caller takes.
    """
    tl.static_assert(COLUMNS <= LANES * LANE_COLUMNS)
    gate_scale, up_scale, row_scales = scales
    over_scale = 1.0 / row_scales
    row_scales = tl.load(coded.scales + row + ROWS, mask=row + ROWS < end, other=1.0)
    gate, up = dgate * gate_scale * over_scale, dup * up_scale * over_scale
    gate_ptr = coded.codes + row * codes_row_stride + column
    up_ptr, passed_ptr = gate_ptr + intermediate, coded.passed + row * LANES
    tl.store(gate_ptr, e4m3(gate, ROUND), mask=mask)
    tl.store(up_ptr, e4m3(up, ROUND), mask=mask)
    # NaN compares as False, and a maximum may lose it
    passed = (tl.abs(gate) <= LARGEST) & (tl.abs(up) <= LARGEST)
    passed = tl.where(passed, 0, 1)
    # over the columns of one thread, written where that thread's lane is
    some = tl.max(tl.reshape(passed, [ROWS, COLUMNS // LANE_COLUMNS, LANE_COLUMNS]), 2)
    lane = tl.arange(0, COLUMNS // LANE_COLUMNS)[None, :]
    tl.store(passed_ptr + lane, some.to(tl.int8), mask=some != 0)
    return gate_scale, up_scale, row_scales


@triton.jit
def _scaled_gradients(
    grad_hidden_ptr, gate_up_ptr, column_scales_ptr, at, mask, intermediate, IS_GELU: tl.constexpr,
    IN_FP32: tl.constexpr,
):  # fmt: skip
    """Return dgate and dup of these columns, each times its column_scales."""
    grad_hidden = tl.load(grad_hidden_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + intermediate + at, mask=mask, other=0.0).to(tl.float32)
    activated, slope = activate(gate, IS_GELU, IN_FP32)
    gate_scale = tl.load(column_scales_ptr + at, mask=at < intermediate, other=0.0)
    up_scale = tl.load(column_scales_ptr + intermediate + at, mask=at < intermediate, other=0.0)
    return grad_hidden * up * slope * gate_scale, grad_hidden * activated * up_scale


class Coded(NamedTuple):
    """Codes of the gradient of [gate | up] times column_scales, with their scales and the rows that
    passed. Codes of those rows are wrong.

    Equivalent PyTorch::

        scaled = grad_gate_up * column_scales / scales
        codes[:, : 2 * intermediate] = scaled.to(torch.float8_e4m3fn)
        passed[scaled.abs().amax(1) > 448] = 1  # in some lane; and of rows with NaN
    """

    codes: Tensor  # [rows, 2 intermediate and more], e4m3
    scales: Tensor  # [rows, 1] in fp32
    passed: Tensor  # [rows, LANES] in int8
    column_scales: Tensor  # [2 intermediate] in fp32


def swiglu_codes(gate_up: Tensor, padded: int, activation: str) -> tuple[Tensor, Tensor]:
    """Return codes [rows, padded] and scales [rows, 1] in fp32 of silu(gate) * up, for gate_up
    [rows, 2 intermediate]. Codes past its columns are left for `add_coded_border`.

    Equivalent PyTorch::

        hidden = F.silu(gate.float()) * up.float()
        scales = hidden.abs().amax(1, keepdim=True) / 224
        codes[:, :intermediate] = (hidden / scales).to(torch.float8_e4m3fn)

    The scale of a row with NaN or infinity in it is NaN.
    """
    rows, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    codes, scales = new_codes(gate_up, padded)
    if rows:
        block = min(next_power_of_2(intermediate), MAX_BLOCK)
        launch(
            _swiglu_codes_kernel, (rows,), gate_up, codes, scales, intermediate, padded,
            gate_up.stride(0), block, block >= intermediate, activation == "gelu_tanh",
            dots_in_fp32(_swiglu_codes_kernel, gate_up), is_interpreted(_swiglu_codes_kernel),
            num_warps=min(max(block // 1024, 4), 16),
        )  # fmt: skip
    return codes, scales


def guess_gradient_scales(
    grad_hidden: Tensor, gate_up: Tensor, codes: Tensor, scales: Tensor, column_scales: Tensor,
    activation: str,
) -> Coded:  # fmt: skip
    """Write a guess into scales [rows, 1]; returns what `swiglu_backward_products` writes into."""
    rows, intermediate = grad_hidden.shape
    passed = torch.empty(rows, LANES.value, dtype=torch.int8, device=codes.device)
    if rows:
        launch(
            _guess_kernel, (cdiv(rows, GUESS_ROWS),), grad_hidden, gate_up, column_scales, scales,
            passed, rows, intermediate, grad_hidden.stride(0), gate_up.stride(0), GUESS_ROWS,
            GUESS_COLUMNS, activation == "gelu_tanh", dots_in_fp32(_guess_kernel, gate_up),
            num_warps=4,
        )  # fmt: skip
    return Coded(codes, scales, passed, column_scales)


def repair_gradient_codes(
    grad_hidden: Tensor, gate_up: Tensor, coded: Coded, activation: str
) -> None:
    """Rewrite codes and scales of the rows that passed the guess, by their own largest."""
    rows, intermediate = grad_hidden.shape
    if rows == 0:
        return
    launch(
        _repair_kernel, (cdiv(rows, REPAIRED_ROWS),), grad_hidden, gate_up, coded.column_scales,
        coded.codes, coded.scales, coded.passed, rows, intermediate, coded.codes.stride(0),
        grad_hidden.stride(0), gate_up.stride(0), REPAIRED_ROWS,
        min(next_power_of_2(intermediate), REPAIR_BLOCK), activation == "gelu_tanh",
        dots_in_fp32(_repair_kernel, gate_up), is_interpreted(_repair_kernel), num_warps=4,
    )  # fmt: skip
