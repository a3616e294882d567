"""A frozen product with its low-rank adapter, and the gradients of that adapter.

Shapes: T tokens, `in` and `out` features, r the rank. Weights lie as `torch.nn.Linear` keeps them:
W [out, in], A [r, in], B [out, r]. All products are cuBLAS calls that accumulate in fp32.
"""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a linear layer computes in: autocast's where autocast is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def matmul_lora(
    x: Tensor,
    weight: Tensor,
    A: Tensor,
    B: Tensor,
    scaling: float,
    out: Tensor | None = None,
) -> Tensor:
    """x W' + scaling (x A') B', in three products and no pass of its own over the output.

    Equivalent PyTorch: ``F.linear(x, weight) + F.linear(F.linear(x, A), B) * scaling``.
    The adapter is added by the second product's own epilogue (`addmm_` with alpha = scaling), where
    PEFT writes it, scales it and adds it in three passes over [T, out].

    x [T, in], weight [out, in], A [r, in], B [out, r], all of one dtype; returns [T, out], written
    into `out` where one is given: contiguous [..., out] of T rows in all.
    """
    rows = None if out is None else out.view(-1, weight.shape[0])
    rows = torch.mm(x, weight.t(), out=rows)
    return rows.addmm_(x @ A.t(), B.t(), alpha=scaling)


def scaled_matmul(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """scaling * (a @ b) in one call: beta = 0 makes addmm ignore what the new tensor holds."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return out.addmm_(a, b, beta=0, alpha=scaling)


def adapter_gradients(
    x: Tensor,
    grad_output: Tensor,
    grad_rank: Tensor | None,
    A: Tensor,
    scaling: float,
    need_A: bool,
    need_B: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of A and B in y = x W' + scaling (x A') B', for dy = `grad_output` [T, out].

        dA = scaling (dy B)' x      [r, in]
        dB = scaling dy' (x A')     [out, r]

    `grad_rank` is dy B [T, r]; the caller has it already, because dx needs it too. What is not
    needed is not computed and comes back as None.
    """
    grad_A = grad_B = None
    if need_A:
        assert grad_rank is not None
        grad_A = scaled_matmul(grad_rank.t(), x, scaling)
    if need_B:
        grad_B = scaled_matmul(grad_output.t(), x @ A.t(), scaling)
    return grad_A, grad_B
