"""Linear layers with adapters that share an input: their matmuls, and their gradients by hand.

For x [T, in] and layers i with frozen W [out, in], bias b, adapters A [r, in] and B [out, r] and
scale s, in the order of execution:

    A   = [A1; A2; ...]                      [r of all, in], stacked
    z   = [z1, z2, ...] = x A'               [T, r of all]
    yi  = x Wi' + bi + si zi Bi'             [T, out]

Backward, for the incoming dyi:

    dz  = [s1 dy1 B1, s2 dy2 B2, ...]        [T, r of all]
    dx  = dz A + dy1 W1 + dy2 W2 + ...
    dA  = [dA1; dA2; ...] = dz' x
    dBi = si dyi' zi

So one matmul serves all A, one computes dA, and one adds all adapters to dx. A layer without an
adapter has one of rank 0, which costs nothing. Weights have the layout of `torch.nn.Linear`. All
matmuls are cuBLAS calls that accumulate in fp32.

With dropout (`dropout.py`) each adapter has its own mask m, and therefore its own matmuls:

    zi  = (x mi) Ai'
    dx  = m1 (dz1 A1) + m2 (dz2 A2) + ... + dy1 W1 + dy2 W2 + ...
    dAi = dzi' (x mi)
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dropout import Masks, add_dropped, drop


class Group(NamedTuple):
    """Layers that share an input, all tensors in the dtype of the computation."""

    weights: Sequence[Tensor]  # [out, in] of each
    A: Tensor  # [r of all, in]
    B: Sequence[Tensor]  # [out, r] of each
    scalings: Sequence[float]
    masks: Masks | None = None  # one per layer, None for a layer without; None: no dropout

    @property
    def ranks(self) -> list[int]:
        return [one.shape[1] for one in self.B]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a linear layer computes in: autocast's if it is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Switch autocast off for x's device, if it is on.

    Entering the context takes the host as long as a launch, and a layer does so four times.
    """
    device = x.device.type
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


# The gate's activations, by name.
ACTIVATIONS = {"silu": "SiLU", "gelu_tanh": "GELU by tanh (gelu_pytorch_tanh)"}


def check_activation(name: str, activation: str) -> None:
    """Raise ValueError, in the name of the public function `name`, for an unknown activation."""
    if activation not in ACTIVATIONS:
        known = " or ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{name}: activation is {activation!r}, should be {known}")


def cast_adapters(adapters: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return the stacked A of a group, and each B, in `dtype`. One call makes all copies.

    Equivalent PyTorch, for A1, B1, A2, B2, ...:
    ``torch.cat(adapters[::2]).to(dtype), [B.to(dtype) for B in adapters[1::2]]``
    """
    A, B = adapters[::2], adapters[1::2]
    stacked, cast = A[0], list(B)
    sources: list[Tensor] = []
    copies: list[Tensor] = []
    for i, one in enumerate(B):
        if one.dtype != dtype:
            cast[i] = torch.empty_like(one, dtype=dtype)
            if one.shape[1]:
                sources.append(one)
                copies.append(cast[i])
    if len(A) > 1 or stacked.dtype != dtype:
        A = [one for one in A if len(one)] or A[:1]
        ranks = [len(one) for one in A]
        stacked = A[0].new_empty(sum(ranks), A[0].shape[1], dtype=dtype)
        if sum(ranks):
            sources += A
            copies += stacked.split_with_sizes(ranks)
    if copies:
        torch._foreach_copy_(copies, sources)
    return stacked, cast


def matmul_A(x: Tensor, A: Tensor, ranks: Sequence[int], masks: Masks | None) -> Tensor:
    """Return z = x A' [T, r of all], for x [T, in] and A [r of all, in].

    `ranks` are those of the layers. Layers with a mask see a masked x.
    """
    if masks is None:
        return x @ A.t()
    z = x.new_empty(x.shape[0], A.shape[0])
    for columns, one_A, mask in zip(
        z.split_with_sizes(ranks, 1), A.split_with_sizes(ranks), masks, strict=True
    ):  # beta = 0 makes addmm ignore what the new tensor holds
        columns.addmm_(x if mask is None else drop(x, mask), one_A.t(), beta=0)
    return z


def matmul_lora(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    B: Tensor,
    scaling: float,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x W' + bias + scaling z B' for z = x A': a frozen matmul with its adapter added.

    Equivalent PyTorch: ``F.linear(x, weight, bias) + F.linear(z, B) * scaling``.
    The second matmul's epilogue adds the adapter (`addmm_` with alpha = scaling). PEFT writes,
    scales and adds it in three passes over [T, out].

    x [T, in], weight [out, in], z [T, r], B [out, r], bias [out], all of one dtype. Returns
    [T, out], written to `out` if that is given: contiguous [..., out] with T rows in all.
    """
    rows = None if out is None else out.view(-1, weight.shape[0])
    if bias is None:
        rows = torch.mm(x, weight.t(), out=rows)
    else:
        rows = torch.addmm(bias, x, weight.t(), out=rows)
    # at rank 0 addmm_ would still pass over all rows
    return rows.addmm_(z, B.t(), alpha=scaling) if B.shape[1] else rows


def input_gradient(
    group: Group, grads: Sequence[Tensor | None], need_x: bool, need_A: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dx, dz) for the dy [T, out] of each layer of a group. A dy of None is zero.

    dx [T, in] is None unless need_x. dz [T, r of all] goes to `adapter_gradients`. It is None if
    neither dx nor any dA needs it.
    """
    wanted = [grad if need_x or need else None for grad, need in zip(grads, need_A, strict=True)]
    if all(grad is None for grad in wanted):
        return None, None
    tokens = next(grad.shape[0] for grad in grads if grad is not None)
    ranks = group.ranks
    grad_z = group.A.new_empty(tokens, sum(ranks))
    for grad, B, scaling, columns in zip(
        wanted, group.B, group.scalings, grad_z.split_with_sizes(ranks, 1), strict=True
    ):
        if grad is None:
            columns.zero_()
        else:  # beta = 0 makes addmm ignore what the new tensor holds
            columns.addmm_(grad, B, beta=0, alpha=scaling)
    if not need_x:
        return None, grad_z
    grad_x = grad_z @ group.A if sum(ranks) and group.masks is None else None
    for grad, weight in zip(grads, group.weights, strict=True):
        if grad is not None:
            grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
    if group.masks is not None:
        assert grad_x is not None
        _add_by_adapter(grad_x, grad_z, group)
    return grad_x, grad_z


def _add_by_adapter(grad_x: Tensor, grad_z: Tensor, group: Group) -> None:
    """Add dzi Ai of each adapter to grad_x in place, with the mask of its x."""
    assert group.masks is not None
    ranks = group.ranks
    for columns, A, mask in zip(
        grad_z.split_with_sizes(ranks, 1), group.A.split_with_sizes(ranks), group.masks, strict=True
    ):
        if mask is not None:
            add_dropped(grad_x, columns @ A, mask)
        elif len(A):
            grad_x.addmm_(columns, A)


def adapter_gradients(
    group: Group,
    x: Tensor | None,
    z: Tensor | None,
    grads: Sequence[Tensor | None],
    grad_z: Tensor | None,
    needs: Sequence[bool],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor | None]:
    """Return [dA1, dB1, dA2, dB2, ...] of a group in `dtypes`, with None for those not needed.

    x [T, in] is None if no dA is needed, z = x A' if no dB is. grads and grad_z are as in
    `input_gradient`. One matmul computes all dA into one storage, needed or not. With dropout each
    has its own. A layer whose dy is None has no gradients.
    """
    gradients: list[Tensor | None] = [None] * len(needs)
    ranks = group.ranks
    need_A = [need and grad is not None for need, grad in zip(needs[::2], grads, strict=True)]
    if any(need_A) and group.masks is not None:
        assert x is not None and grad_z is not None
        for i, (columns, mask) in enumerate(
            zip(grad_z.split_with_sizes(ranks, 1), group.masks, strict=True)
        ):
            if need_A[i]:
                kept = x if mask is None else drop(x, mask)
                gradients[2 * i] = scaled_matmul(columns.t(), kept, 1.0, dtypes[2 * i])
    elif any(need_A):
        assert x is not None and grad_z is not None
        # the widest of their dtypes loses nothing
        widest = max(dtypes[::2], key=lambda dtype: dtype.itemsize)
        stacked = scaled_matmul(grad_z.t(), x, 1.0, widest).split_with_sizes(ranks)
        for i, (needed, grad_A) in enumerate(zip(need_A, stacked, strict=True)):
            gradients[2 * i] = grad_A.to(dtypes[2 * i]) if needed else None
    if z is not None:
        for i, (grad, columns) in enumerate(zip(grads, z.split_with_sizes(ranks, 1), strict=True)):
            if needs[2 * i + 1] and grad is not None:
                scaling, dtype = group.scalings[i], dtypes[2 * i + 1]
                gradients[2 * i + 1] = scaled_matmul(grad.t(), columns, scaling, dtype)
    return gradients


def bias_gradients(
    grads: Sequence[Tensor | None], needs: Sequence[bool], dtypes: Sequence[torch.dtype]
) -> list[Tensor | None]:
    """Return the gradient of each layer's bias in `dtypes`: its dy [T, out] summed over tokens.

    None for those not needed. Empty `needs` (no bias is trained) give an empty list.
    """
    return [
        # bf16 is summed in fp32 and rounded to the dtype asked for
        grad.sum(0, dtype=torch.promote_types(grad.dtype, dtype)).to(dtype)
        if need and grad is not None
        else None
        for grad, need, dtype in zip(grads, needs, dtypes, strict=bool(needs))
    ]


def scaled_matmul(a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return scaling * (a @ b) in `dtype`, by default that of a and b.

    For fp32 cuBLAS stores its fp32 sums directly, if it can. Otherwise they are rounded to the
    dtype of a and b and then cast. beta = 0 makes addmm ignore what the new tensor holds.
    """
    rows, columns, dtype = a.shape[0], b.shape[1], dtype or a.dtype
    if dtype is torch.float32 and _stores_fp32(a):
        out = a.new_empty(rows, columns, dtype=dtype)
        return torch.addmm(out, a, b, out_dtype=dtype, beta=0, alpha=scaling, out=out)
    return a.new_empty(rows, columns).addmm_(a, b, beta=0, alpha=scaling).to(dtype)


def _stores_fp32(a: Tensor) -> bool:
    """Return True if a matmul of half-precision tensors can be stored in fp32: eagerly on CUDA.
    Compiled code fuses the cast."""
    half = a.dtype in (torch.bfloat16, torch.float16)
    return a.is_cuda and half and not torch.compiler.is_compiling()


def refuse_second_derivative(name: str, instead: str) -> None:
    """Raise RuntimeError if autograd should differentiate through a backward.

    Only then are gradients enabled during a backward. PyTorch's once_differentiable would silently
    treat the backward as a constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} is not twice differentiable: call backward without create_graph=True, or use "
            f"{instead}"
        )


# The checks raise ValueError in the name of the function that was called.


def split_frozen(name: str, operands: tuple, kind: type) -> tuple[list[Any], Any]:
    """Return the tensors in front of the frozen operands, and these, which a call ends with."""
    *tensors, frozen = operands or (None,)
    if not isinstance(frozen, kind):
        given = "missing" if frozen is None else f"a {type(frozen).__name__}"
        raise ValueError(
            f"{name}: frozen is {given}, should be a {kind.__name__}: give it as the last operand"
        )
    return tensors, frozen


def check_adapter(
    name: str, prefix: str, A: Tensor, B: Tensor, in_features: int, out_features: int
) -> None:
    r = A.shape[0]
    if A.shape != (r, in_features) or B.shape != (out_features, r):
        raise ValueError(
            f"{name}: {prefix}A is {list(A.shape)} and {prefix}B {list(B.shape)}, "
            f"should be [r, {in_features}] and [{out_features}, r] of one r"
        )


def check_bias(name: str, key: str, bias: Tensor | None, out_features: int) -> None:
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"{name}: {key} is {list(bias.shape)}, should be {[out_features]}")


def check_frozen(
    name: str, key: str, tensor: Tensor, x: Tensor, dtype: torch.dtype, instead: str
) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"{name}: {key} requires a gradient, which it would not get: freeze it with "
            f"requires_grad_(False), or use {instead}"
        )
    if tensor.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"{name}: {key} is {tensor.dtype} and x {x.dtype}: give both one dtype, or run under "
            "torch.autocast"
        )
