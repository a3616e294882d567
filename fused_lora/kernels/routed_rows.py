"""The rows of a mixture of experts between its matmuls: SwiGLU with a weight for each row, and the
sum of a token's rows.

A mixture copies each token once for each of its experts and sorts the copies by expert: these are
its rows. A matmul of theirs leaves two results, that of the base weights and that of the adapters.
The kernels here add the second to the first as they read both, which saves the pass that adds them:

    y      = base + scaling addend + bias of the row's expert
    hidden = w silu(gate) up,      [gate, up] = y and w the weight of the row

With s = sigmoid(gate), f = gate s and t = base + scaling addend, the gradient of hidden:

    grad_gate = w t up (s + f (1 - s)),   grad_up = w t f,   grad_w = sum over the row of t f up

gpt-oss has another gate (`ClampedGate`). gate and up take turns in the columns of y, and hidden is

    w (u + 1) g sigmoid(alpha g),      g = min(gate, limit), u = up between -limit and limit

The sum of a token's rows takes its residual as well, and each row's bias w bias[expert].

Arithmetic is fp32 and rounds once, at the store. Sums run in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, launch, next_power_of_2

TILE, MAX_BLOCK = 2048, 1024  # elements of a program's tile, and of one of its rows


class ClampedGate(NamedTuple):
    """The constants of gpt-oss's gate. A limit of 0 is no such gate, but silu(gate) up."""

    alpha: float = 1.0
    limit: float = 0.0


SWIGLU = ClampedGate()


@triton.jit
def _gated(gate, up, alpha, limit, IS_CLAMPED: tl.constexpr):
    """Return hidden without its weight, and its derivatives by gate and by up."""
    grad_gate = 1.0
    grad_up = 1.0
    if IS_CLAMPED:
        grad_gate = tl.where(gate <= limit, 1.0, 0.0)
        grad_up = tl.where((up >= -limit) & (up <= limit), 1.0, 0.0)
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
        sigmoid = tl.sigmoid(alpha * gate)
    else:
        sigmoid = tl.sigmoid(gate)
    glu = gate * sigmoid
    if IS_CLAMPED:
        slope = sigmoid + alpha * glu * (1.0 - sigmoid)
    else:
        slope = sigmoid + glu * (1.0 - sigmoid)
    return glu * up, up * slope * grad_gate, glu * grad_up


@triton.jit
def _load_gate_up(ptr, row, is_row, first, columns, BLOCK: tl.constexpr, TAKE_TURNS: tl.constexpr):
    """Return gate and up of these rows, in fp32, from their column `first` on.

    Where they take turns we load both as one tile and split it in registers: a GPU loads 16 bytes
    at a time from columns that are adjacent, but only 2 from every second one.
    """
    if TAKE_TURNS:
        column = 2 * first + tl.arange(0, 2 * BLOCK)[None, :]
        mask = is_row & (column < 2 * columns)
        both = tl.load(ptr + row * 2 * columns + column, mask=mask, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, row.shape[0], BLOCK, 2))
    else:
        column = first + tl.arange(0, BLOCK)[None, :]
        mask = is_row & (column < columns)
        at = row * 2 * columns + column
        gate = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(ptr + at + columns, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _store_gate_up(
    ptr, gate, up, row, is_row, first, columns, BLOCK: tl.constexpr, TAKE_TURNS: tl.constexpr
):
    """Write gate and up to where `_load_gate_up` finds them."""
    gate, up = gate.to(ptr.dtype.element_ty), up.to(ptr.dtype.element_ty)
    if TAKE_TURNS:
        column = 2 * first + tl.arange(0, 2 * BLOCK)[None, :]
        mask = is_row & (column < 2 * columns)
        both = tl.reshape(tl.join(gate, up), row.shape[0], 2 * BLOCK)
        tl.store(ptr + row * 2 * columns + column, both, mask=mask)
    else:
        column = first + tl.arange(0, BLOCK)[None, :]
        mask = is_row & (column < columns)
        at = row * 2 * columns + column
        tl.store(ptr + at, gate, mask=mask)
        tl.store(ptr + at + columns, up, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _routed_swiglu_forward_kernel(
    base_ptr,  # [rows, 2 columns]
    addend_ptr,  # [rows, 2 columns], if HAS_ADDEND
    bias_ptr,  # [experts, 2 columns], if HAS_BIAS
    expert_ptr,  # [rows] int64, if HAS_BIAS
    weight_ptr,  # [rows]
    gate_up_ptr,  # [rows, 2 columns], written if HAS_ADDEND or HAS_BIAS
    hidden_ptr,  # [rows, columns], written
    scaling,
    alpha,
    limit,
    rows,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row, first = row < rows, tl.program_id(1) * BLOCK
    gate, up = _load_gate_up(base_ptr, row, is_row, first, columns, BLOCK, IS_CLAMPED)
    if HAS_ADDEND:
        more, more_up = _load_gate_up(addend_ptr, row, is_row, first, columns, BLOCK, IS_CLAMPED)
        gate += scaling * more
        up += scaling * more_up
    if HAS_BIAS:
        expert = tl.load(expert_ptr + row, mask=is_row, other=0)
        more, more_up = _load_gate_up(bias_ptr, expert, is_row, first, columns, BLOCK, IS_CLAMPED)
        gate += more
        up += more_up
    if HAS_ADDEND or HAS_BIAS:
        _store_gate_up(gate_up_ptr, gate, up, row, is_row, first, columns, BLOCK, IS_CLAMPED)
    weight = tl.load(weight_ptr + row, mask=is_row).to(tl.float32)
    hidden, _, _ = _gated(gate, up, alpha, limit, IS_CLAMPED)
    hidden *= weight
    dtype = hidden_ptr.dtype.element_ty
    column = first + tl.arange(0, BLOCK)[None, :]
    mask = is_row & (column < columns)
    tl.store(hidden_ptr + row * columns + column, hidden.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _routed_swiglu_backward_kernel(
    base_ptr,  # [rows, columns]
    addend_ptr,  # [rows, columns], if HAS_ADDEND
    gate_up_ptr,  # [rows, 2 columns]
    weight_ptr,  # [rows]
    hidden_ptr,  # [rows, columns], written if HIDDEN_NEEDED
    grad_gate_up_ptr,  # [rows, 2 columns], written
    grad_weight_ptr,  # [rows] fp32, written
    scaling,
    alpha,
    limit,
    rows,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    HIDDEN_NEEDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = row < rows
    weight = tl.load(weight_ptr + row, mask=is_row).to(tl.float32)
    dtype = grad_gate_up_ptr.dtype.element_ty
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        column = (first + tl.arange(0, BLOCK))[None, :]
        mask = is_row & (column < columns)
        at = row * columns + column
        grad = tl.load(base_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_ADDEND:
            grad += scaling * tl.load(addend_ptr + at, mask=mask, other=0.0).to(tl.float32)
        gate, up = _load_gate_up(gate_up_ptr, row, is_row, first, columns, BLOCK, IS_CLAMPED)
        hidden, by_gate, by_up = _gated(gate, up, alpha, limit, IS_CLAMPED)
        sums += grad * hidden
        grad *= weight
        if HIDDEN_NEEDED:
            tl.store(hidden_ptr + at, (weight * hidden).to(dtype), mask=mask)
        _store_gate_up(
            grad_gate_up_ptr, grad * by_gate, grad * by_up, row, is_row, first, columns, BLOCK,
            IS_CLAMPED,
        )  # fmt: skip
    tl.store(grad_weight_ptr + row, tl.sum(sums, 1)[:, None], mask=is_row)


@triton.jit(do_not_specialize=["tokens"])
def _sum_routed_kernel(
    base_ptr,  # [rows, columns]
    addend_ptr,  # [rows, columns], if HAS_ADDEND
    places_ptr,  # [tokens, TOP_K] int64
    residual_ptr,  # [tokens, columns], if HAS_RESIDUAL
    bias_ptr,  # [experts, columns], if HAS_BIAS
    expert_ptr,  # [rows] int64, if HAS_BIAS
    weight_ptr,  # [rows], if HAS_BIAS
    out_ptr,  # [tokens, columns], written
    scaling,
    tokens,
    columns,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (token < tokens) & (column < columns)
    at_token = token * columns + column
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at_token, mask=mask).to(tl.float32)
    for choice in range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + choice, mask=token < tokens, other=0)
        at = place * columns + column
        total += tl.load(base_ptr + at, mask=mask).to(tl.float32)
        if HAS_ADDEND:
            total += scaling * tl.load(addend_ptr + at, mask=mask).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(expert_ptr + place, mask=token < tokens, other=0)
            weight = tl.load(weight_ptr + place, mask=token < tokens, other=0.0).to(tl.float32)
            at_bias = expert * columns + column
            total += weight * tl.load(bias_ptr + at_bias, mask=mask).to(tl.float32)
    tl.store(out_ptr + at_token, total.to(out_ptr.dtype.element_ty), mask=mask)


def routed_swiglu_forward(
    base: Tensor,
    addend: Tensor | None,
    scaling: float,
    weight: Tensor,
    gate: ClampedGate = SWIGLU,
    bias: Tensor | None = None,
    expert: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the inputs of SwiGLU and its weighted output.

    Equivalent PyTorch::

        gate_up = base if addend is None else base + scaling * addend
        gate_up = gate_up if bias is None else gate_up + bias[expert]
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = weight[:, None] * F.silu(gate) * up

    With a clamped gate::

        g, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
        hidden = weight[:, None] * (up + 1) * g * torch.sigmoid(alpha * g)

    Args:
        base, addend: [rows, 2 columns], bf16, fp16 or fp32, on a GPU, or on the CPU in Triton's
            interpreter. Any strides: a non-contiguous tensor is copied first.
        weight: [rows], of any of these dtypes.
        bias: [experts, 2 columns], of any of these dtypes. expert: [rows] int64, the expert of each
            row. Both None: no bias.

    Returns:
        (gate_up [rows, 2 columns], hidden [rows, columns]) in the dtype of base. Without addend and
        bias gate_up is base.
    """
    rows, columns = base.shape[0], base.shape[1] // 2
    base, addend, weight = base.contiguous(), _contiguous(addend), weight.contiguous()
    is_base = addend is None and bias is None
    gate_up = base if is_base else torch.empty_like(base)
    hidden = base.new_empty(rows, columns)
    per_program, block, warps = _tile(columns, gate)
    if hidden.numel():
        launch(
            _routed_swiglu_forward_kernel, (cdiv(rows, per_program), cdiv(columns, block)), base,
            base if addend is None else addend, base if bias is None else bias.contiguous(),
            base if expert is None else expert, weight, gate_up, hidden, scaling, *gate, rows,
            columns, per_program, block, addend is not None, bias is not None, gate.limit > 0,
            num_warps=warps,
        )  # fmt: skip
    return gate_up, hidden


def routed_swiglu_backward(
    base: Tensor,
    addend: Tensor | None,
    scaling: float,
    gate_up: Tensor,
    weight: Tensor,
    gate: ClampedGate = SWIGLU,
    hidden_needed: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the output of `routed_swiglu_forward` and its gradients for grad = base + scaling
    addend.

    Equivalent PyTorch, for hidden from there::

        grads = torch.autograd.grad(hidden, (gate_up, weight), base + scaling * addend)

    Args:
        base, addend: [rows, columns], as for the forward. gate_up, weight: its result and operand.

    Returns:
        (hidden [rows, columns] or None if it is not needed, grad_gate_up [rows, 2 columns],
        grad_weight [rows] in fp32).
    """
    rows, columns = base.shape
    base, addend, weight = base.contiguous(), _contiguous(addend), weight.contiguous()
    gate_up = gate_up.contiguous()
    hidden = torch.empty_like(base) if hidden_needed else None
    grad_gate_up = torch.empty_like(gate_up)
    grad_weight = base.new_empty(rows, dtype=torch.float32)
    per_program, block, warps = _tile(columns, gate)
    if base.numel():
        launch(
            _routed_swiglu_backward_kernel, (cdiv(rows, per_program),), base,
            base if addend is None else addend, gate_up, weight,
            grad_gate_up if hidden is None else hidden, grad_gate_up, grad_weight,
            scaling, *gate, rows, columns, per_program, block, addend is not None, gate.limit > 0,
            hidden_needed, num_warps=warps,
        )  # fmt: skip
    return hidden, grad_gate_up, grad_weight


class RoutedBias(NamedTuple):
    """A bias of each expert, which a row gets times its weight."""

    bias: Tensor  # [experts, columns]
    expert: Tensor  # [rows] int64, the expert of each row
    weight: Tensor  # [rows]


def sum_routed(
    base: Tensor,
    addend: Tensor | None,
    scaling: float,
    places: Tensor,
    residual: Tensor | None = None,
    bias: RoutedBias | None = None,
) -> Tensor:
    """Return the sum of each token's rows [..., columns], and of its residual, in the dtype of that
    or else of base.

    Equivalent PyTorch::

        rows = base if addend is None else base + scaling * addend
        rows = rows if bias is None else rows + bias.weight[:, None] * bias.bias[bias.expert]
        total = rows[places].sum(-2)
        total = total if residual is None else residual + total

    Args:
        base, addend: [rows, columns], as for `routed_swiglu_forward`.
        places: [..., top_k] int64, the rows of each token.
        residual: [..., columns], and the tensors of bias: of any of these dtypes.
    """
    columns, top_k = base.shape[1], places.shape[-1]
    base, addend, places = base.contiguous(), _contiguous(addend), places.contiguous()
    residual = _contiguous(residual)
    out = (base if residual is None else residual).new_empty(*places.shape[:-1], columns)
    its_bias = (base,) * 3 if bias is None else [one.contiguous() for one in bias]
    per_program, block, warps = _tile(columns)
    if tokens := out.numel() // columns:
        launch(
            _sum_routed_kernel, (cdiv(tokens, per_program), cdiv(columns, block)), base,
            base if addend is None else addend, places, base if residual is None else residual,
            *its_bias, out, scaling, tokens, columns, top_k, per_program, block,
            addend is not None, residual is not None, bias is not None, num_warps=warps,
        )  # fmt: skip
    return out


def _tile(columns: int, gate: ClampedGate = SWIGLU) -> tuple[int, int, int]:
    """Return the rows and columns of a program's tile, and its warps.

    A thread has 16 columns. Where gate and up take turns it has 4: with both that is one load of 16
    bytes. With more, threads exchange elements, and the backward computes the gate twice.
    """
    tile, warps = (TILE // 2, 8) if gate.limit > 0 else (TILE, 4)
    block = min(MAX_BLOCK, next_power_of_2(columns))
    return tile // block, block, warps


def _contiguous(addend: Tensor | None) -> Tensor | None:
    return None if addend is None else addend.contiguous()
