"""The rows of a mixture of experts between its matmuls: SwiGLU with a weight for each row, and the
sum of a token's rows.

A mixture copies each token once for each of its experts and sorts the copies by expert: these are
its rows. A matmul of theirs leaves two results, that of the base weights and that of the adapters.
The kernels here add the second to the first as they read both, which saves the pass that adds them:

    y      = base + scaling addend
    hidden = w silu(gate) up,      [gate, up] = y and w the weight of the row

With s = sigmoid(gate), f = gate s and t = base + scaling addend, the gradient of hidden:

    grad_gate = w t up (s + f (1 - s)),   grad_up = w t f,   grad_w = sum over the row of t f up

Arithmetic is fp32 and rounds once, at the store. Sums run in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_mlp.launching import cdiv, check_runnable, launch, next_power_of_2

MAX_BLOCK = 1024


@triton.jit
def _routed_swiglu_forward_kernel(
    base_ptr,  # [rows, 2 columns]
    addend_ptr,  # [rows, 2 columns], if HAS_ADDEND
    weight_ptr,  # [rows]
    gate_up_ptr,  # [rows, 2 columns], written if HAS_ADDEND
    hidden_ptr,  # [rows, columns], written
    scaling,
    columns,
    BLOCK: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    at_gate = row * 2 * columns + column
    at_up = at_gate + columns
    gate = tl.load(base_ptr + at_gate, mask=mask).to(tl.float32)
    up = tl.load(base_ptr + at_up, mask=mask).to(tl.float32)
    if HAS_ADDEND:
        gate += scaling * tl.load(addend_ptr + at_gate, mask=mask).to(tl.float32)
        up += scaling * tl.load(addend_ptr + at_up, mask=mask).to(tl.float32)
        tl.store(gate_up_ptr + at_gate, gate.to(gate_up_ptr.dtype.element_ty), mask=mask)
        tl.store(gate_up_ptr + at_up, up.to(gate_up_ptr.dtype.element_ty), mask=mask)
    weight = tl.load(weight_ptr + row).to(tl.float32)
    hidden = weight * (gate * tl.sigmoid(gate) * up)
    dtype = hidden_ptr.dtype.element_ty
    tl.store(hidden_ptr + row * columns + column, hidden.to(dtype), mask=mask)


@triton.jit
def _routed_swiglu_backward_kernel(
    base_ptr,  # [rows, columns]
    addend_ptr,  # [rows, columns], if HAS_ADDEND
    gate_up_ptr,  # [rows, 2 columns]
    weight_ptr,  # [rows]
    hidden_ptr,  # [rows, columns], written
    grad_gate_up_ptr,  # [rows, 2 columns], written
    grad_weight_ptr,  # [rows] fp32, written
    scaling,
    columns,
    BLOCK: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row).to(tl.float32)
    dtype = hidden_ptr.dtype.element_ty
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = column < columns
        at = row * columns + column
        at_gate = row * 2 * columns + column
        at_up = at_gate + columns
        grad = tl.load(base_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_ADDEND:
            grad += scaling * tl.load(addend_ptr + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + at_gate, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + at_up, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        grad_silu = sigmoid + silu * (1.0 - sigmoid)
        sums += grad * (silu * up)
        grad *= weight
        tl.store(hidden_ptr + at, (weight * (silu * up)).to(dtype), mask=mask)
        tl.store(grad_gate_up_ptr + at_gate, (grad * up * grad_silu).to(dtype), mask=mask)
        tl.store(grad_gate_up_ptr + at_up, (grad * silu).to(dtype), mask=mask)
    tl.store(grad_weight_ptr + row, tl.sum(sums))


@triton.jit
def _sum_routed_kernel(
    base_ptr,  # [rows, columns]
    addend_ptr,  # [rows, columns], if HAS_ADDEND
    places_ptr,  # [tokens, TOP_K] int64
    out_ptr,  # [tokens, columns], written
    scaling,
    columns,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        at = tl.load(places_ptr + token * TOP_K + choice) * columns + column
        total += tl.load(base_ptr + at, mask=mask).to(tl.float32)
        if HAS_ADDEND:
            total += scaling * tl.load(addend_ptr + at, mask=mask).to(tl.float32)
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), mask=mask)


def routed_swiglu_forward(
    base: Tensor, addend: Tensor | None, scaling: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the inputs of SwiGLU and its weighted output.

    Equivalent PyTorch::

        gate_up = base if addend is None else base + scaling * addend
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = weight[:, None] * F.silu(gate) * up

    Args:
        base, addend: [rows, 2 columns], bf16, fp16 or fp32, on a GPU, or on the CPU in Triton's
            interpreter. Any strides: a non-contiguous tensor is copied first.
        weight: [rows], of any of these dtypes.

    Returns:
        (gate_up [rows, 2 columns], hidden [rows, columns]) in the dtype of base. Without an addend
        gate_up is base.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or no kernel can run on them.
    """
    _check("routed_swiglu_forward", base, addend, weight)
    rows, columns = base.shape[0], base.shape[1] // 2
    base, addend, weight = base.contiguous(), _contiguous(addend), weight.contiguous()
    gate_up = base if addend is None else torch.empty_like(base)
    hidden = base.new_empty(rows, columns)
    block = min(MAX_BLOCK, next_power_of_2(columns))
    if hidden.numel():
        launch(
            _routed_swiglu_forward_kernel, (rows, cdiv(columns, block)), base,
            base if addend is None else addend, weight, gate_up, hidden, scaling, columns, block,
            addend is not None, num_warps=4,
        )  # fmt: skip
    return gate_up, hidden


def routed_swiglu_backward(
    base: Tensor, addend: Tensor | None, scaling: float, gate_up: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of `routed_swiglu_forward` and its gradients for grad = base + scaling
    addend.

    Equivalent PyTorch::

        gate, up = gate_up.chunk(2, dim=-1)
        hidden = weight[:, None] * F.silu(gate) * up
        grads = torch.autograd.grad(hidden, (gate_up, weight), base + scaling * addend)

    Args:
        base, addend: [rows, columns], as for the forward. gate_up, weight: its result and operand.

    Returns:
        (hidden [rows, columns], grad_gate_up [rows, 2 columns], grad_weight [rows] in fp32).

    Raises:
        ValueError: as the forward.
    """
    _check("routed_swiglu_backward", base, addend, weight)
    rows, columns = base.shape
    if (gate_up.shape, gate_up.dtype) != ((rows, 2 * columns), base.dtype):
        raise ValueError(
            f"routed_swiglu_backward: gate_up is {list(gate_up.shape)} in {gate_up.dtype}, should "
            f"be {[rows, 2 * columns]} in {base.dtype}"
        )
    base, addend, weight = base.contiguous(), _contiguous(addend), weight.contiguous()
    gate_up = gate_up.contiguous()
    hidden, grad_gate_up = torch.empty_like(base), torch.empty_like(gate_up)
    grad_weight = base.new_empty(rows, dtype=torch.float32)
    block = min(MAX_BLOCK, next_power_of_2(columns))
    if hidden.numel():
        launch(
            _routed_swiglu_backward_kernel, (rows,), base, base if addend is None else addend,
            gate_up, weight, hidden, grad_gate_up, grad_weight, scaling, columns, block,
            addend is not None, num_warps=4,
        )  # fmt: skip
    return hidden, grad_gate_up, grad_weight


def sum_routed(base: Tensor, addend: Tensor | None, scaling: float, places: Tensor) -> Tensor:
    """Return the sum of each token's rows [..., columns], in the dtype of base.

    Equivalent PyTorch: ``(base + scaling * addend)[places].sum(-2)``.

    Args:
        base, addend: [rows, columns], as for `routed_swiglu_forward`.
        places: [..., top_k] int64, the rows of each token.

    Raises:
        ValueError: as there.
    """
    _check("sum_routed", base, addend)
    if places.dtype != torch.int64:
        raise ValueError(f"sum_routed: places are {places.dtype}, should be torch.int64")
    columns, top_k = base.shape[1], places.shape[-1]
    base, addend, places = base.contiguous(), _contiguous(addend), places.contiguous()
    out = base.new_empty(*places.shape[:-1], columns)
    block = min(MAX_BLOCK, next_power_of_2(columns))
    if out.numel():
        launch(
            _sum_routed_kernel, (out.numel() // columns, cdiv(columns, block)), base,
            base if addend is None else addend, places, out, scaling, columns, top_k, block,
            addend is not None, num_warps=4,
        )  # fmt: skip
    return out


def _contiguous(addend: Tensor | None) -> Tensor | None:
    return None if addend is None else addend.contiguous()


def _check(name: str, base: Tensor, addend: Tensor | None, weight: Tensor | None = None) -> None:
    """Raise ValueError unless the operands fit together and a kernel can run on them."""
    check_runnable(name, _sum_routed_kernel, base)
    like = base.shape, base.dtype, base.device
    if base.ndim != 2 or (
        addend is not None and (addend.shape, addend.dtype, addend.device) != like
    ):
        given = "none" if addend is None else f"{list(addend.shape)} in {addend.dtype}"
        raise ValueError(
            f"{name}: base is {list(base.shape)} in {base.dtype} and addend {given}, should be two "
            "[rows, columns] alike on one device"
        )
    if weight is not None and weight.shape != base.shape[:1]:
        raise ValueError(f"{name}: weight is {list(weight.shape)}, should be {[len(base)]}")
