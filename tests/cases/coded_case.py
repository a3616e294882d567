"""The kernels that give codes of FP8, as the table of launchers has them: what their codes stand
for. How near each code is, `test_fp8_rows.py` and `test_fp8_codes.py` say."""

import torch
from cases.reference import GATED, random
from cases.rms_norm_case import EPS

from fused_lora.kernels.fp8_norm import norm_backward_codes, norm_codes
from fused_lora.kernels.fp8_rows import E4M3, fp8_rows
from fused_lora.kernels.fp8_swiglu import swiglu_codes

SIZES = {"odd": (39, 139), "a row": (1, 300), "columns of a border": (3, 40)}
NONE = (0, 8)
MORE = 24  # columns of codes, which nobody writes


def quantised(x):
    """x as its codes have it, in fp32; in fp64 x itself."""
    if x.dtype == torch.float64:
        return x
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 224
    return (x.float() / scales).to(E4M3).float() * scales


def stand_for(codes, scales):
    return codes[:, :-MORE].float() * scales


def of_columns(x):
    return random(x.shape[1], seed=9, device=x.device).abs() + 0.1


def rows_case(size, dtype, device):
    return [random(*SIZES[size], seed=1, dtype=dtype, device=device)]


def fused_rows(x, layout=torch.clone):
    return [stand_for(*fp8_rows(layout(x), x.shape[1] + MORE, of_columns(x)))]


def eager_rows(x):
    return [quantised(x * of_columns(x))]


def norm_case(size, dtype, device):
    rows, hidden = SIZES[size]
    x, grad_y, residual = (
        random(rows, hidden, seed=i, dtype=dtype, device=device) for i in (1, 2, 3)
    )
    return x, random(hidden, seed=4, dtype=dtype, device=device), grad_y, residual


def fused_norm(x, weight, grad_y, residual, layout=torch.clone):
    """What codes of the norm and of its gradient stand for, and the gradient."""
    padded, x = x.shape[1] + MORE, layout(x)
    codes, scales, rstd = norm_codes(x, weight, EPS, padded)
    grad = layout(torch.full_like(grad_y, 7.0))
    coded = norm_backward_codes(
        layout(grad_y), layout(residual), x, weight, rstd, grad, of_columns(x), padded
    )
    return stand_for(codes, scales), stand_for(*coded), grad


def eager_norm(x, weight, grad_y, residual):
    x = x.detach().requires_grad_()
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.to(wide.dtype)
    (grad,) = torch.autograd.grad(y, x, grad_y.to(y.dtype))
    grad = (grad + residual).detach()
    return quantised(y.detach()), quantised(grad * of_columns(grad)), grad


def swiglu_case(size, dtype, device):
    rows, intermediate = SIZES[size]
    return [random(rows, 2 * intermediate, seed=1, scale=2.0, dtype=dtype, device=device)]


def fused_swiglu(gate_up, activation, layout=torch.clone):
    return [stand_for(*swiglu_codes(layout(gate_up), gate_up.shape[1] // 2 + MORE, activation))]


def eager_swiglu(gate_up, activation):
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    return [quantised(GATED[activation](*wide.chunk(2, dim=1)))]
