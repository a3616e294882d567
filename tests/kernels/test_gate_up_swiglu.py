"""SwiGLU on [gate | up] against eager PyTorch in float64."""

import pytest
import torch
from reference import assert_within_budget, random, relative_error, swiglu

from fused_lora.kernels.gate_up_swiglu import SwiGLU, swiglu_backward, swiglu_forward
from fused_lora.kernels.rows import empty_rows
from fused_mlp.launching import DTYPES

SIZES = {"odd": (7, 139), "one row": (1, 52), "one column": (3, 1), "two blocks": (2, 1025)}


def make(size, dtype, device):
    rows, intermediate = SIZES[size]
    gate_up = random(rows, 2 * intermediate, seed=1, scale=2.0, dtype=dtype, device=device)
    return gate_up, random(rows, intermediate, seed=2, dtype=dtype, device=device)


def eager(gate_up, grad_hidden):
    gate_up = gate_up.clone().requires_grad_()
    hidden = swiglu(*gate_up.chunk(2, dim=1))
    return hidden.detach(), *torch.autograd.grad(hidden, gate_up, grad_hidden)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_within_the_error_budget(dtype, size, device):
    gate_up, grad_hidden = make(size, dtype, device)
    before = gate_up.clone()
    got = swiglu_forward(gate_up), swiglu_backward(grad_hidden, gate_up)
    budget, truth = eager(gate_up, grad_hidden), eager(gate_up.double(), grad_hidden.double())
    for name, *row in zip(("hidden", "grad_gate_up"), got, budget, truth, strict=True):
        assert_within_budget(name, *row)
    assert torch.equal(gate_up, before)


def test_rows_any_stride_apart_give_what_contiguous_ones_do_and_nothing_else_is_written(device):
    gate_up, grad_hidden = make("odd", torch.bfloat16, device)
    want = swiglu_forward(gate_up), swiglu_backward(grad_hidden, gate_up)
    buffers = [
        torch.full((7, columns + 9), 7.0, dtype=torch.bfloat16, device=device)
        for columns in (278, 139, 139)
    ]
    gate_up, grad_hidden = (
        buffer[:, :-9].copy_(t) for buffer, t in zip(buffers, (gate_up, grad_hidden), strict=False)
    )
    got = swiglu_forward(gate_up, buffers[2][:, :-9]), swiglu_backward(grad_hidden, gate_up)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert all((buffer[:, -9:] == 7.0).all() for buffer in buffers)


@pytest.mark.parametrize("layout", [torch.clone, lambda t: t.mT.contiguous().mT])
def test_the_autograd_function_is_right_and_writes_nothing(layout, device):
    gate_up, grad = (layout(t.view(1, *t.shape)) for t in make("odd", torch.float32, device))
    before = [t.clone() for t in (gate_up, grad)]
    leaf = gate_up.detach().requires_grad_()
    hidden = SwiGLU.apply(leaf)
    first = torch.autograd.grad(hidden, leaf, grad, retain_graph=True)
    second = torch.autograd.grad(hidden, leaf, grad)
    want = eager(gate_up[0].double(), grad[0].double())
    assert relative_error(hidden[0], want[0]) < 1e-6 and relative_error(first[0][0], want[1]) < 1e-6
    assert torch.equal(*first, *second)
    assert all(torch.equal(*pair) for pair in zip((gate_up, grad), before, strict=True))
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        torch.autograd.grad(SwiGLU.apply(leaf), leaf, grad, create_graph=True)
    changed = SwiGLU.apply(leaf).mul_(2)
    assert torch.equal(torch.autograd.grad(changed, leaf, grad)[0], 2 * first[0])


def test_no_rows_are_no_error(device):
    gate_up = empty_rows(torch.empty(0, device=device), 0, 20)
    assert swiglu_forward(gate_up).shape == (0, 10)
    assert swiglu_backward(gate_up[:, :10], gate_up).shape == (0, 20)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    """A few rows over and over, so that the same few say what is right."""
    rows, intermediate, pattern = 98_000, 11_008, 16
    if torch.cuda.mem_get_info()[0] < 4 * 2 * 2 * rows * intermediate:
        pytest.skip("needs 18 GB of free GPU memory")
    few = random(pattern, 2 * intermediate, dtype=torch.bfloat16, device=device)
    gate_up = few.repeat(rows // pattern, 1)
    assert gate_up.numel() > 2**31
    want = swiglu_forward(few)
    assert torch.equal(swiglu_forward(gate_up)[-pattern:], want)
    hidden = want.repeat(rows // pattern, 1)
    few_grad = swiglu_backward(want, few)
    assert torch.equal(swiglu_backward(hidden, gate_up)[-pattern:], few_grad)


def test_what_does_not_fit_is_a_value_error(device):
    gate_up, grad_hidden = make("odd", torch.float32, device)
    for bad, message in (
        ((grad_hidden[:, :10], gate_up), r"grad_hidden is \[7, 10\], should be \[7, 139\]"),
        ((grad_hidden.half(), gate_up), "grad_hidden is torch.float16"),
        ((grad_hidden, gate_up.t().contiguous().t()), "has elements 7 apart"),
        ((grad_hidden, gate_up[:, :277]), r"\[7, 277\], should be \[rows, 2 intermediate\]"),
        ((grad_hidden, gate_up[0]), r"gate_up is \[278\], should be \[rows, columns\]"),
    ):
        with pytest.raises(ValueError, match=message):
            swiglu_backward(*bad)
    with pytest.raises(ValueError, match=r"hidden is \[6, 139\], should be \[7, 139\]"):
        swiglu_forward(gate_up, grad_hidden[:6])
    with pytest.raises(ValueError, match="computes in bfloat16"):
        swiglu_forward(gate_up.double())
