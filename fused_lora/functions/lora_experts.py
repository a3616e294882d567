"""LoRA_Experts: a mixture of gated MLPs with adapters as one autograd function.

Each token goes to its top_k experts. Its copies, sorted by expert, are the rows of the mixture.
For the rows x [rows, hidden] of expert e, its frozen W, adapters A, B with scale s, the routing
weight w of each row, and the residual x0 of each token, in the order of execution:

    z      = x A'                            [rows, r], one grouped matmul for all experts
    y      = x W' + s z B'                   [rows, 2 intermediate] = [gate, up]
    h      = w silu(gate) up                 [rows, intermediate]
    output = x0 + sum of h Wd' + sd (h Ad') Bd' over the rows of each token  [tokens, hidden]

Backward, for dy = grad_output at the token of each row:

    p   = dy Bd                              [rows, r]
    dh  = dy Wd + sd p Ad
    h, [dgate, dup], dw = routed_swiglu_backward(dh, [gate, up], w)
    dAd = sd p' h                            dBd = sd dy' (h Ad')
    q   = [dgate, dup] B                     [rows, r]
    dx  = sum of [dgate, dup] W + s q A over the rows of each token
    dA  = s q' x                             dB  = s [dgate, dup]' z

PEFT adds s B A to all W before it multiplies, and differentiates through the sum. For Qwen3-30B-A3B
that is 1.2 GB of new weights a layer, kept until backward, and as many bytes of gradients of frozen
weights. In bf16 the sum also rounds B A to the grid of W. With B near 1e-3 that changes the
adapter's output by 23%. Here no sum exists: an adapter takes matmuls of r columns. w multiplies h,
which is narrower than the output, and its gradient takes no output either.

Saved: x, [gate, up], z and h Ad'. The rows of x are copied again in backward. Matmuls are PyTorch's
grouped ones; the passes between them are `kernels/routed_rows.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_mlp.launching import check_runnable
from fused_mlp.utils import (
    check_frozen,
    compute_dtype,
    refuse_second_derivative,
    without_autocast,
)

from ..kernels.routed_rows import (
    SWIGLU,
    ClampedGate,
    RoutedBias,
    _sum_routed_kernel,
    routed_swiglu_backward,
    routed_swiglu_forward,
    sum_routed,
)

ALIGNMENT = 8  # elements: grouped matmuls read rows of a multiple of 16 bytes


class FrozenExperts(NamedTuple):
    """The frozen operands of LoRA_Experts: base weights [experts, out, in], of any strides that
    `grouped_mm` reads, and the adapters' scales.

    gate: SwiGLU, or gpt-oss's clamped gate. Then gate and up take turns in the rows of
        gate_up_weight.
    gate_up_bias, down_bias: frozen.
    output_needed: as in FrozenMLP, False for a recompute whose output nobody reads.
    write_gate_up, write_down: for a weight in memory that others write into, perhaps the other
        weight. Forward and backward call them with `Routing.ends` right before they multiply the
        weight. Experts without rows need not be written.
    """

    gate_up_weight: Tensor  # [experts, 2 intermediate, hidden]
    down_weight: Tensor  # [experts, hidden, intermediate]
    gate_up_scaling: float
    down_scaling: float
    gate: ClampedGate = SWIGLU
    gate_up_bias: Tensor | None = None  # [experts, 2 intermediate]
    down_bias: Tensor | None = None  # [experts, hidden]
    output_needed: bool = True
    write_gate_up: Callable[[Tensor], None] | None = None
    write_down: Callable[[Tensor], None] | None = None


class Routing(NamedTuple):
    """The rows of a mixture, sorted by expert, and within an expert by token.

    experts: [rows], the expert of each row. order: [rows], the index of each row in the flattened
    `chosen`. places: [..., top_k], the row of each entry of `chosen`. ends: [experts] int32, the
    end of each expert's rows.
    """

    experts: Tensor
    order: Tensor
    places: Tensor
    ends: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token [rows] of each row."""
        return self.order // self.places.shape[-1]


def route(chosen: Tensor, experts: int) -> Routing:
    """Sort the copies of tokens by their experts `chosen` [..., top_k]. Waits for no GPU."""
    in_order, order = torch.sort(chosen.reshape(-1), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(experts, dtype=in_order.dtype, device=order.device)
    ends = torch.searchsorted(in_order, every, right=True, out_int32=True)
    return Routing(in_order, order, places.view(chosen.shape), ends)


class LoRA_Experts(torch.autograd.Function):
    """``LoRA_Experts.apply(x, weights, gate_up_A, gate_up_B, down_A, down_B, residual, chosen,
    frozen)``.

    Equivalent PyTorch, for tokens x [tokens, hidden]::

        def adapted(x, weight, A, B, scaling):
            return F.linear(x, weight) + F.linear(F.linear(x, A), B) * scaling

        f, output = frozen, torch.zeros_like(x) if residual is None else residual.clone()
        for e in range(len(f.gate_up_weight)):
            token, choice = torch.where(chosen == e)
            gate_up = adapted(x[token], f.gate_up_weight[e], gate_up_A[e], gate_up_B[e],
                              f.gate_up_scaling) + f.gate_up_bias[e]
            gate, up = gate_up.chunk(2, dim=-1)
            expert = adapted(F.silu(gate) * up, f.down_weight[e], down_A[e], down_B[e],
                             f.down_scaling) + f.down_bias[e]
            output.index_add_(0, token, expert * weights[token, choice, None])

    Args:
        x: [..., hidden], bf16, fp16 or fp32, of any strides.
        weights: [..., top_k], the routing weights, of any of these dtypes.
        gate_up_A, down_A: [experts, r, in]. gate_up_B, down_B: [experts, out, r]. Any r, strides
            and dtypes. Both None: no adapter.
        residual: like x, fp32 or in the dtype of the computation, or None.
        chosen: [..., top_k] int64, the experts of each token, all from 0 to experts - 1.
        frozen: base weights in x's dtype (or any, under autocast) and the scales. All sizes but r
            are multiples of 8.

    Returns:
        [..., hidden] in the residual's dtype; without one in that of the computation, autocast's
        if it is on, else x's. The sum is rounded once. Each gradient has the dtype of its tensor.
        An expert without tokens gets gradients of zero.

    Saves for backward: x, gate and up [rows, 2 intermediate], z and h Ad' [rows, r], the adapters
    and the weights in the dtype of the computation. Writes to no input. Deterministic. Not twice
    differentiable. Waits for no GPU in bf16; in fp16 and fp32 PyTorch's grouped matmuls do.

    Raises:
        ValueError: shapes or dtypes do not fit, or a base weight requires a gradient.
        RuntimeError: from backward, under create_graph=True.
    """

    @staticmethod
    def forward(ctx, x, weights, *operands):
        *given, residual, chosen, frozen = operands
        dtype = compute_dtype(x)
        _check(x, dtype, weights, given, chosen, frozen)
        _check_residual(x, dtype, residual)
        ctx.dtype_of_x, ctx.dtype_of_weights = x.dtype, weights.dtype
        ctx.likes = [None if one is None else (one.shape, one.dtype) for one in given]
        ctx.gate, ctx.writes = frozen.gate, (frozen.write_gate_up, frozen.write_down)
        ctx.scalings = gate_up_scaling, down_scaling = frozen.gate_up_scaling, frozen.down_scaling
        x = x.to(dtype)
        check_runnable("LoRA_Experts", _sum_routed_kernel, x)
        adapters: list[Any] = [
            None if one is None else _aligned(one, by, dtype)
            for one, by in zip(given, (1, 2, 1, 2), strict=True)
        ]
        gate_up_A, gate_up_B, down_A, down_B = adapters

        routing = route(chosen, len(frozen.down_weight))
        gate_up_weight = frozen.gate_up_weight.to(dtype)
        down_weight = frozen.down_weight.to(dtype)
        weight = weights.reshape(-1)[routing.order]
        rows = x.reshape(-1, x.shape[-1])[routing.tokens]
        z = None if gate_up_A is None else _grouped(rows, gate_up_A, routing.ends)
        addend = None if z is None else _grouped(z, gate_up_B, routing.ends)
        base = _grouped(rows, gate_up_weight, routing.ends, frozen.write_gate_up)
        del rows  # [rows, hidden]
        gate_up, hidden = routed_swiglu_forward(
            base, addend, gate_up_scaling, weight, frozen.gate, frozen.gate_up_bias, routing.experts
        )
        del base, addend
        z_down = None if down_A is None else _grouped(hidden, down_A, routing.ends)
        if frozen.output_needed:
            addend = None if z_down is None else _grouped(z_down, down_B, routing.ends)
            base = _grouped(hidden, down_weight, routing.ends, frozen.write_down)
            bias = frozen.down_bias
            bias = None if bias is None else RoutedBias(bias, routing.experts, weight)
            output = sum_routed(base, addend, down_scaling, routing.places, residual, bias)
        else:
            output = (x if residual is None else residual).new_zeros(1).expand(x.shape)
        need_A = ctx.needs_input_grad[2]
        ctx.save_for_backward(
            x if need_A else None, weight, gate_up, z, z_down, *adapters, gate_up_weight,
            down_weight, frozen.down_bias, chosen, *routing,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("LoRA_Experts", "the unfused experts")
        x, weight, gate_up, z, z_down, *others = ctx.saved_tensors
        gate_up_A, gate_up_B, down_A, down_B, *others = others
        gate_up_weight, down_weight, down_bias, chosen, *routed = others
        routing = Routing(*routed)
        ends, (gate_up_scaling, down_scaling) = routing.ends, ctx.scalings
        write_gate_up, write_down = ctx.writes
        need_x, need_weights, need_A, need_B, need_down_A, need_down_B, *_ = ctx.needs_input_grad
        tokens = routing.tokens
        grad_x = grad_weights = grad_A = grad_B = grad_down_A = grad_down_B = None
        like_A, like_B, like_down_A, like_down_B = ctx.likes

        # output = sum of h Wd' + sd (h Ad') Bd'
        by_token = grad_output.reshape(-1, grad_output.shape[-1]).to(gate_up.dtype)
        grad = by_token[tokens]
        p = None if down_A is None else _grouped(grad, down_B.mT, ends)
        addend = None if p is None else _grouped(p, down_A.mT, ends)
        base = _grouped(grad, down_weight.mT, ends, write_down)
        if need_down_B:
            grad_down_B = _like(like_down_B, _by_expert(grad, z_down, ends), down_scaling)
        del grad  # [rows, hidden]
        hidden, grad_gate_up, grad_weight = routed_swiglu_backward(
            base, addend, down_scaling, gate_up, weight, ctx.gate, need_down_A
        )
        del base, addend
        if need_weights:
            grad_weights = grad_weight[routing.places]
            if down_bias is not None:
                with without_autocast(by_token):
                    by_expert = by_token @ down_bias.to(by_token.dtype).t()
                grad_weights += by_expert.gather(1, _flat(chosen)).view(chosen.shape)
            grad_weights = grad_weights.to(ctx.dtype_of_weights)
        if hidden is not None and p is not None:
            grad_down_A = _like(like_down_A, _by_expert(p, hidden, ends), down_scaling)
        del hidden

        # [gate, up] = x W' + s z B'
        if need_B:
            grad_B = _like(like_B, _by_expert(grad_gate_up, z, ends), gate_up_scaling)
        q = rows = None
        if gate_up_B is not None and (need_x or need_A):
            q = _grouped(grad_gate_up, gate_up_B.mT, ends)
        if need_A and q is not None:
            rows = x.reshape(-1, x.shape[-1])[tokens]
            grad_A = _like(like_A, _by_expert(q, rows, ends), gate_up_scaling)
            del rows
        if need_x:
            addend = None if q is None else _grouped(q, gate_up_A.mT, ends)
            base = _grouped(grad_gate_up, gate_up_weight.mT, ends, write_gate_up)
            summed = sum_routed(base, addend, gate_up_scaling, routing.places)
            grad_x = summed.to(ctx.dtype_of_x)
        grad_residual = grad_output if ctx.needs_input_grad[6] else None
        adapters = grad_A, grad_B, grad_down_A, grad_down_B
        return grad_x, grad_weights, *adapters, grad_residual, None, None


def _grouped(
    rows: Tensor, weights: Tensor, ends: Tensor, write: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Return each expert's rows [rows, in] times its weight's transpose [experts, out, in]. write:
    as in `FrozenExperts`."""
    if write is not None:
        write(ends)
    if not rows.shape[0]:  # len() of a tensor is a call in Python
        return rows.new_zeros(0, weights.shape[1])
    return F.grouped_mm(rows, weights.mT, offs=ends)


def _by_expert(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return left' right [experts, m, n] over each expert's rows, for [rows, m] and [rows, n]."""
    if not left.shape[0]:
        return left.new_zeros(len(ends), left.shape[1], right.shape[1])
    return F.grouped_mm(left.t(), right, offs=ends)  # zeros for an expert without rows


def _flat(chosen: Tensor) -> Tensor:
    return chosen.reshape(-1, chosen.shape[-1])


def _aligned(adapter: Tensor, by: int, dtype: torch.dtype) -> Tensor:
    """Return an adapter in `dtype`, contiguous, with its rank (dimension `by`) filled up with zeros
    to what grouped matmuls read."""
    rank = adapter.shape[by]
    if not (missing := -rank % ALIGNMENT if rank else ALIGNMENT):
        return adapter.to(dtype, memory_format=torch.contiguous_format).contiguous()
    shape = list(adapter.shape)
    shape[by] = rank + missing
    filled = adapter.new_zeros(shape, dtype=dtype)
    filled.narrow(by, 0, rank).copy_(adapter)
    return filled


def _like(like: tuple[torch.Size, torch.dtype], gradient: Tensor, scaling: float) -> Tensor:
    """Return the scaled gradient of an adapter without what `_aligned` filled up, in its dtype."""
    (_, rows, columns), dtype = like
    return gradient[:, :rows, :columns].to(dtype).mul_(scaling)


def _check(
    x: Tensor,
    dtype: torch.dtype,
    weights: Tensor,
    adapters: list[Tensor | None],
    chosen: Tensor,
    frozen: FrozenExperts,
) -> None:
    """Raise ValueError, naming the tensor, if shapes or dtypes do not fit together."""
    name, shapes = "LoRA_Experts", [tuple(one.shape) for one in frozen[:2]]
    experts, hidden, intermediate = shapes[1]
    if shapes[0] != (experts, 2 * intermediate, hidden):
        raise ValueError(
            f"{name}: gate_up_weight is {list(shapes[0])}, should be "
            f"{[experts, 2 * intermediate, hidden]} for a down_weight of {list(shapes[1])}"
        )
    if (reason := why_not_sizes(hidden, intermediate)) is not None:
        raise ValueError(f"{name}: {reason}")
    if x.ndim == 0 or x.shape[-1] != hidden:
        raise ValueError(f"{name}: x is {list(x.shape)}, its last dimension should be {hidden}")
    if chosen.shape != weights.shape or chosen.shape[:-1] != x.shape[:-1] or not chosen.ndim:
        raise ValueError(
            f"{name}: chosen is {list(chosen.shape)} and weights {list(weights.shape)}, both "
            f"should be {[*x.shape[:-1], 'top_k']}"
        )
    sizes = ("gate_up_", hidden, 2 * intermediate), ("down_", intermediate, hidden)
    for (prefix, features, outputs), A, B in zip(sizes, adapters[::2], adapters[1::2], strict=True):
        shape_A, shape_B = (None if one is None else list(one.shape) for one in (A, B))
        r = shape_A[1] if shape_A and len(shape_A) == 3 else 0
        if A is not B and (shape_A, shape_B) != ([experts, r, features], [experts, outputs, r]):
            raise ValueError(
                f"{name}: {prefix}A is {shape_A} and {prefix}B {shape_B}, should be "
                f"[{experts}, r, {features}] and [{experts}, {outputs}, r] of one r"
            )
    for key, features in (("gate_up_bias", 2 * intermediate), ("down_bias", hidden)):
        bias = getattr(frozen, key)
        if bias is not None and bias.shape != (experts, features):
            raise ValueError(
                f"{name}: {key} is {list(bias.shape)}, should be {[experts, features]}"
            )
    for key in ("gate_up_weight", "down_weight", "gate_up_bias", "down_bias"):
        if (tensor := getattr(frozen, key)) is not None:
            check_frozen(name, key, tensor, x, dtype, "the unfused experts")


def _check_residual(x: Tensor, dtype: torch.dtype, residual: Tensor | None) -> None:
    if residual is None:
        return
    if residual.shape != x.shape or residual.dtype not in (dtype, torch.float32):
        raise ValueError(
            f"LoRA_Experts: residual is {list(residual.shape)} in {residual.dtype}, should be "
            f"{list(x.shape)} in {dtype} or float32"
        )


def why_not_sizes(*sizes: int) -> str | None:
    """Return the reason if grouped matmuls cannot read weights of these sizes."""
    if all(size % ALIGNMENT == 0 for size in sizes):
        return None
    return f"its sizes are {' and '.join(map(str, sizes))}, not multiples of {ALIGNMENT}"
