"""RMSNorm into wider rows, its backward and the residual's sum: what test_launchers.py tries, and
how their rows are made."""

import torch
from reference import random
from rms_norm_case import EPS, eager_rms_norm

from fused_lora.kernels.residual import add_adapted, residual_norm_backward, residual_norm_forward
from fused_lora.kernels.rows import empty_rows

SIZES = {"odd": (7, 52), "one row": (1, 139), "one column": (3, 1), "a block": (5, 128)}
# rows, columns, rank
SUMS = {
    "odd": (13, 139, 24),
    "one row": (1, 52, 8),
    "more than a tile": (70, 133, 12),
    "rank 1": (5, 52, 1),
    "a rank of two blocks": (17, 20, 72),
    "two blocks and tiles": (35, 133, 72),
}


def random_like(size, count, dtype, device):
    return [random(*size, seed=seed, dtype=dtype, device=device) for seed in range(count)]


def norm_case(size, dtype, device):
    x, grad_y, grad_residual = random_like(SIZES[size], 3, dtype, device)
    weight = 1 + random(SIZES[size][1], seed=4, scale=0.5, dtype=dtype, device=device)
    return x, weight, grad_y, grad_residual


def fused_norm(x, weight, grad_y, grad_residual, layout=torch.clone):
    x, grad_y, grad_residual = map(layout, (x, grad_y, grad_residual))
    y, copy, grad_x = (layout(torch.full_like(x, 7.0)) for _ in range(3))
    rstd = residual_norm_forward(x, weight, EPS, y, copy)
    assert rstd.dtype == torch.float32 and torch.equal(copy, x)
    residual_norm_backward(grad_y, grad_residual, x, weight, rstd, grad_x)
    return y, grad_x


def eager_norm(x, weight, grad_y, grad_residual):
    x = x.clone().requires_grad_()
    y = eager_rms_norm(x, weight, EPS)
    return y.detach(), torch.autograd.grad(y, x, grad_y)[0] + grad_residual


def sum_case(size, dtype, device):
    rows, columns, rank = SUMS[size]
    residual, y = random_like((rows, columns), 2, dtype, device)
    z = random(rows, rank, seed=5, dtype=dtype, device=device)
    B = random(columns, rank, seed=6, scale=rank**-0.5, dtype=dtype, device=device)
    return residual, y, z, B


def fused_sum(*case, layout=torch.clone):
    total, z_copy = (layout(torch.full_like(t, 7.0)) for t in (case[0], case[2]))
    add_adapted(*map(layout, case), total, z_copy)
    return total, z_copy


def eager_sum(residual, y, z, B):
    return residual + (y + z @ B.t()), z


def test_new_rows_are_a_multiple_of_128_bytes_apart(device):
    for dtype, columns, stride in (
        (torch.float16, 2, 64), (torch.float16, 64, 64), (torch.bfloat16, 2080, 2112),
        (torch.float32, 2, 32), (torch.float32, 33, 64),
    ):  # fmt: skip
        rows = empty_rows(torch.empty(0, dtype=dtype, device=device), 3, columns)
        assert (rows.shape, rows.stride(), rows.dtype) == ((3, columns), (stride, 1), dtype)
