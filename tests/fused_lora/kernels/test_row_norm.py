"""RMSNorm into wider rows, its backward, the residual's sum and [x | x A']: cases for
test_launchers.py."""

import torch
from cases.reference import random
from cases.rms_norm_case import EPS, eager_rms_norm

from fused_lora.kernels.extend_rows import extend_rows
from fused_lora.kernels.row_norm import add_normed, rms_norm_backward, rms_norm_forward
from fused_lora.kernels.rows import empty_rows

SIZES = {"odd": (7, 52), "one row": (1, 139), "one column": (3, 1), "a block": (5, 128)}
# rows, columns, rank
EXTENDED = {
    "odd": (13, 139, 24),
    "one row": (1, 52, 8),
    "more than a tile": (70, 300, 12),
    "rank 1": (5, 52, 1),
    "two blocks and tiles": (35, 270, 72),
}


def random_like(size, count, dtype, device):
    return [random(*size, seed=seed, dtype=dtype, device=device) for seed in range(count)]


def norm_case(size, dtype, device):
    x, grad_y, grad_residual = random_like(SIZES[size], 3, dtype, device)
    weight = 1 + random(SIZES[size][1], seed=4, scale=0.5, dtype=dtype, device=device)
    return x, weight, grad_y, grad_residual


def fused_norm(x, weight, grad_y, grad_residual, layout=torch.clone, zero_centered=False):
    x, grad_y, grad_residual = map(layout, (x, grad_y, grad_residual))
    y, copy, grad_x = (layout(torch.full_like(x, 7.0)) for _ in range(3))
    rstd = rms_norm_forward(x, weight, EPS, y, copy, zero_centered)
    assert rstd.dtype == torch.float32 and torch.equal(copy, x)
    grad_weight = torch.full_like(weight, 7.0, dtype=torch.float32)
    rms_norm_backward(grad_y, grad_residual, x, weight, rstd, grad_x, zero_centered, grad_weight)
    return y, grad_x, grad_weight


def eager_norm(x, weight, grad_y, grad_residual, zero_centered=False):
    x, weight = (t.clone().requires_grad_() for t in (x, weight))
    y = eager_rms_norm(x, weight, EPS, zero_centered)
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad_y)
    return y.detach(), grad_x + grad_residual, grad_weight


def extended_case(size, dtype, device):
    rows, columns, rank = EXTENDED[size]
    A = random(rank, columns, seed=1, scale=columns**-0.5, dtype=dtype, device=device)
    return random(rows, columns, dtype=dtype, device=device), A


def fused_extension(x, A, layout=torch.clone):
    """Extend an x that lies elsewhere, then one in place."""
    found = []
    for is_in_place in (False, True):
        extended, z = (
            layout(x.new_full((len(x), columns), 7.0)) for columns in (x.shape[1] + len(A), len(A))
        )
        first = extended[:, : x.shape[1]]
        extend_rows(first.copy_(x) if is_in_place else layout(x), layout(A), extended, z)
        found += [extended, z]
    return found


def eager_extension(x, A):
    z = x @ A.t()
    return 2 * [torch.cat((x, z), 1), z]


def normed_sum_case(size, dtype, device):
    x, residual, grad = random_like(SIZES.get(size, (0, 8)), 3, dtype, device)
    if x.shape[1] == 1:
        x = x * EPS**0.5  # else the norm is 1 or -1, and its gradient just rounding error
    weight = 1 + random(x.shape[1], seed=4, scale=0.5, dtype=dtype, device=device)
    return x, residual, weight, grad


def fused_normed_sum(x, residual, weight, grad, layout=torch.clone, zero_centered=False):
    """Return total and the gradient of x, which has no other use."""
    x, total, grad_x = layout(x), *(layout(torch.full_like(x, 7.0)) for _ in range(2))
    rstd = add_normed(layout(residual), x, weight, EPS, total, zero_centered)
    rms_norm_backward(layout(grad), None, x, weight, rstd, grad_x, zero_centered)
    return total, grad_x


def eager_normed_sum(x, residual, weight, grad, zero_centered=False):
    leaf = x.detach().requires_grad_()
    total = residual + eager_rms_norm(leaf, weight, EPS, zero_centered)
    return total.detach(), torch.autograd.grad(total, leaf, grad)[0]


def test_the_residual_may_be_fp32_beside_operands_of_matmuls_in_bf16(device):
    x, weight, grad_y, grad_residual = norm_case("odd", torch.float32, device)
    exact, rounded = {}, {}
    for found, dtype in ((exact, torch.float32), (rounded, torch.bfloat16)):
        y, grad_x = (torch.full_like(x, 7.0, dtype=dtype) for _ in range(2))
        rstd = rms_norm_forward(x, weight, EPS, y)
        grad = grad_y.bfloat16().to(dtype)
        rms_norm_backward(grad, grad_residual, x, weight, rstd, grad_x)
        found |= {"y": y.bfloat16(), "grad_x": grad_x.bfloat16()}
    assert all(torch.equal(rounded[name], exact[name]) for name in exact)


def test_the_sum_with_a_norm_rounds_once(device):
    """Be stricter than the error budget, which allows eager's extra rounding of the norm."""
    case = normed_sum_case("a block", torch.bfloat16, device)
    exact, _ = eager_normed_sum(*(t.double() for t in case))
    assert (fused_normed_sum(*case)[0] != exact.bfloat16()).double().mean() < 0.01


def test_new_rows_are_a_multiple_of_128_bytes_apart(device):
    for dtype, columns, stride in (
        (torch.float16, 2, 64), (torch.float16, 64, 64), (torch.bfloat16, 2080, 2112),
        (torch.float32, 2, 32), (torch.float32, 33, 64),
    ):  # fmt: skip
        rows = empty_rows(torch.empty(0, dtype=dtype, device=device), 3, columns)
        assert (rows.shape, rows.stride(), rows.dtype) == ((3, columns), (stride, 1), dtype)
