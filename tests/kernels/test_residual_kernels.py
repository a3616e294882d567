"""RMSNorm into wider rows, its backward and the residual's sum, against eager in float64."""

import pytest
import torch
from reference import assert_within_budget, random
from rms_norm_case import EPS, Kernel, eager_rms_norm

from fused_lora.kernels import residual as module
from fused_lora.kernels.residual import add_adapted, residual_norm_backward, residual_norm_forward
from fused_lora.kernels.rows import empty_rows
from fused_mlp.launching import DTYPES

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


def wide(x, more=24):
    """The same in the first columns of a wider buffer."""
    rows = random(x.shape[0], x.shape[1] + more, seed=99, dtype=x.dtype, device=x.device)
    rows[:, : x.shape[1]] = x
    return rows[:, : x.shape[1]]


def random_like(size, count, dtype, device):
    return [random(*size, seed=seed, dtype=dtype, device=device) for seed in range(count)]


def norm_case(size, dtype, device):
    x, grad_y, grad_residual = random_like(SIZES[size], 3, dtype, device)
    weight = 1 + random(SIZES[size][1], seed=4, scale=0.5, dtype=dtype, device=device)
    return x, weight, grad_y, grad_residual


def fused_norm(x, weight, grad_y, grad_residual, layout=wide):
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_and_its_gradient_are_within_the_error_budget(dtype, size, device):
    case = norm_case(size, dtype, device)
    got, eager = fused_norm(*case), eager_norm(*case)
    truth = eager_norm(*(t.double() for t in case))
    for name, *row in zip(("y", "grad_x"), got, eager, truth, strict=True):
        assert_within_budget(name, *row)


def test_a_copy_of_what_is_normalised_changes_nothing_else(device):
    x, weight, *_ = norm_case("odd", torch.bfloat16, device)
    ys, copy = (torch.empty_like(x), torch.empty_like(x)), torch.empty_like(x)
    rstds = (
        residual_norm_forward(x, weight, EPS, ys[0]),
        residual_norm_forward(x, weight, EPS, ys[1], copy),
    )
    assert torch.equal(*ys) and torch.equal(*rstds) and torch.equal(copy, x)


def sum_case(size, dtype, device):
    rows, columns, rank = SUMS[size]
    residual, y = random_like((rows, columns), 2, dtype, device)
    z = random(rows, rank, seed=5, dtype=dtype, device=device)
    B = random(columns, rank, seed=6, scale=rank**-0.5, dtype=dtype, device=device)
    return residual, y, z, B


def fused_sum(*case, layout=wide):
    total, z_copy = (layout(torch.full_like(t, 7.0)) for t in (case[0], case[2]))
    add_adapted(*map(layout, case), total, z_copy)
    return total, z_copy


@pytest.mark.parametrize("size", SUMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_within_the_error_budget(dtype, size, device):
    case = sum_case(size, dtype, device)
    residual, y, z, B = case
    truth = residual.double() + y.double() + z.double() @ B.double().t()
    total, z_copy = fused_sum(*case)
    assert_within_budget("total", total, residual + (y + z @ B.t()), truth)
    assert torch.equal(z_copy, z)


def test_z_is_copied_from_the_last_columns_of_a_product_to_rows_of_its_own(device):
    residual, y, z, B = case = sum_case("two blocks and tiles", torch.bfloat16, device)
    y, z = torch.cat((y, z), dim=1).split((y.shape[1], z.shape[1]), dim=1)
    total, z_copy = torch.empty_like(residual), z.new_empty(z.shape)
    add_adapted(residual, y, z, B, total, z_copy)
    assert z_copy.is_contiguous() and torch.equal(z_copy, z)
    assert torch.equal(total, fused_sum(*case)[0])


@pytest.mark.parametrize("function", ["norm", "sum"])
def test_rows_any_stride_apart_give_what_contiguous_ones_do(function, device):
    fused, make, size = {
        "norm": (fused_norm, norm_case, "odd"), "sum": (fused_sum, sum_case, "odd")
    }[function]  # fmt: skip
    case = make(size, torch.bfloat16, device)
    for layout in (wide, lambda t: wide(t, more=1)):
        got, want = fused(*case, layout=layout), fused(*case, layout=torch.clone)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("function", [fused_norm, fused_sum])
def test_nothing_else_is_written(function, device):
    seen = []

    def noted(t):
        copy = wide(t)
        seen.append((copy, copy._base.clone()))
        return copy

    case = (norm_case if function is fused_norm else sum_case)("odd", torch.float32, device)
    function(*case, layout=noted)
    written = 0
    for view, before in seen:
        columns = view.shape[1]
        assert torch.equal(view._base[:, columns:], before[:, columns:])
        written += not torch.equal(view, before[:, :columns])
    assert written == (3 if function is fused_norm else 2)


def test_no_rows_launch_nothing(device, monkeypatch):
    kernel = Kernel()
    for name in ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel", "_add_adapted_kernel"):
        monkeypatch.setattr(module, name, kernel)
    x, weight, z, B = (torch.empty(*size, device=device) for size in ((0, 8), (8,), (0, 4), (8, 4)))
    rstd = residual_norm_forward(x, weight, EPS, x.clone())
    residual_norm_backward(x, x, x, weight, rstd, x.clone())
    add_adapted(x, x, z, B, x.clone(), z.clone())
    assert rstd.shape == (0,) and not kernel.launches


def test_new_rows_are_a_multiple_of_128_bytes_apart(device):
    for dtype, columns, stride in (
        (torch.float16, 2, 64), (torch.float16, 64, 64), (torch.bfloat16, 2080, 2112),
        (torch.float32, 2, 32), (torch.float32, 33, 64),
    ):  # fmt: skip
        rows = empty_rows(torch.empty(0, dtype=dtype, device=device), 3, columns)
        assert (rows.shape, rows.stride(), rows.dtype) == ((3, columns), (stride, 1), dtype)


BAD = {
    "y is [3, 8], should be [4, 8]": {"y": lambda t: t[:3]},
    "y is torch.float16 on": {"y": torch.Tensor.half},
    "y has elements 4 apart": {"y": lambda t: t.t().contiguous().t()},
    "copy is [3, 8], should be [4, 8]": {"copy": lambda t: t[:3]},
    "copy is torch.float16 on": {"copy": torch.Tensor.half},
    "copy has elements 4 apart": {"copy": lambda t: t.t().contiguous().t()},
    "weight is [4], should be [8] and contiguous": {"weight": lambda t: t[:4]},
    "weight is torch.float16": {"weight": torch.Tensor.half},
    "computes in bfloat16, float16 or float32": {
        "x": torch.Tensor.double, "y": torch.Tensor.double
    },
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_a_value_error(message, device):
    tensors = {
        "x": torch.ones(4, 8, device=device),
        "weight": torch.ones(8, device=device),
        "y": torch.ones(4, 8, device=device),
        "copy": torch.ones(4, 8, device=device),
    }
    for name, change in BAD[message].items():
        tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match="residual_norm_forward") as error:
        residual_norm_forward(tensors["x"], tensors["weight"], EPS, tensors["y"], tensors["copy"])
    assert message in str(error.value)


def test_the_sums_operands_must_fit(device):
    x, z, B = (torch.ones(*size, device=device) for size in ((4, 8), (4, 2), (8, 2)))
    for bad, message in (
        ((x, x, z[:3], B, x, z), r"z is \[3, 2\], should be \[4, 2\]"),
        ((x, x, z, B[:, :1], x, z), r"B is \[8, 1\], should be \[8, 2\]"),
        ((x, x, z.half(), B, x, z), "z is torch.float16"),
        ((x, x[:, :7], z, B, x, z), r"y is \[4, 7\], should be \[4, 8\]"),
        ((x, x, z, B, x, z[:3]), r"z_copy is \[3, 2\], should be \[4, 2\]"),
        ((x, x, z, B, x, z.half()), "z_copy is torch.float16"),
        ((x, x, z, B, x, z.t().contiguous().t()), "z_copy has elements 4 apart"),
    ):
        with pytest.raises(ValueError, match=message):
            add_adapted(*bad)
