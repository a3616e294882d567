"""RMSNorm, alone and after an addition: everything that test_contract.py does not cover."""

import pytest
import torch
from cases.counting import saved_tensors
from cases.operands import DTYPES, FP32, Case
from cases.reference import assert_within_budget, random
from cases.rms_norm_case import EPS, Kernel
from contract import (
    OPERATIONS,
    as_tuple,
    assert_equal,
    assert_right,
    leaves_of,
    run,
    truth_of,
    with_layout,
)

import fused_lora.functions.gated_norm
from fused_lora.functions.rms_norm import add_rms_norm, rms_norm
from fused_lora.kernels import row_norm

ALONE, ADDED = (OPERATIONS[name] for name in ("rms_norm", "add_rms_norm"))
GATED = OPERATIONS["gated_rms_norm"]
BOTH = pytest.mark.parametrize("operation", (ALONE, ADDED), ids=lambda operation: operation.name)


# --- values ---------------------------------------------------------------------------------------


def in_parts(function):
    """Split into 40 calls of 8 rows with a weight each: the error of a single gradient is luck."""

    def by_parts(*inputs):
        *rows, weights, eps, zero_centered = inputs
        parts = zip(*(t.split(8) for t in rows), weights.split(1), strict=True)
        outputs = [as_tuple(function(*part, eps, zero_centered)) for part in parts]
        return [torch.cat(pieces) for pieces in zip(*outputs, strict=True)]

    return by_parts


@pytest.mark.slow("rms_norm")
@BOTH
def test_a_row_may_be_a_single_element(operation, device):
    """Use a large eps: a small one leaves just the sign, and a gradient of nearly 0."""
    case = operation.case(device, FP32, shape=(320, 1))
    weights = 1 + random(40, seed=4, scale=0.5, device=device)
    case = Case(case.inputs | {"weight": weights, "eps": 0.3}, case.gradients)
    got = run(operation, case, in_parts(operation.function))
    assert_right(operation, case, got, of=in_parts(operation.eager))


@pytest.mark.parametrize("magnitude", [1e-4, 60_000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiny_and_large_values_neither_vanish_nor_overflow(dtype, magnitude, device):
    case = ALONE.case(device, dtype, shape=(3, 139))
    x = (case.inputs["x"].clamp(-1, 1).float() * magnitude).to(dtype)  # fp16 ends at 65,504
    # away from 0, where fp16 gradients of such an x would be: theirs are as small as it is large
    gradients = [gradient * min(magnitude, 1000.0) for gradient in case.gradients]
    assert_right(ALONE, Case(case.inputs | {"x": x}, gradients))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_total_is_the_sum_as_eager_rounds_it_and_y_the_norm_of_that(dtype, device):
    x, delta, weight, eps, _ = ADDED.case(device, dtype, shape=(5, 139)).inputs.values()
    y, total = add_rms_norm(x, delta, weight, eps)
    assert torch.equal(total, x + delta)
    assert torch.equal(y, rms_norm(x + delta, weight, eps))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 23, 100])
def test_a_weights_gradient_over_many_rows_is_right(rows, device, monkeypatch):
    sum_, programs = torch.Tensor.sum, []
    monkeypatch.setattr(row_norm, "MAX_PARTIAL_SUMS", 8)
    monkeypatch.setattr(
        torch.Tensor, "sum", lambda t, *rest: programs.append(t.shape[0]) or sum_(t, *rest)
    )
    assert_right(ALONE, ALONE.case(device, shape=(rows, 52)))
    assert 1 <= programs[0] <= 8


def test_a_strided_weight_gives_what_a_contiguous_one_does(device):
    case = ALONE.case(device, FP32)
    apart = with_layout(case, ("weight",), lambda t: torch.repeat_interleave(t, 2)[::2])
    assert not apart.inputs["weight"].is_contiguous()
    assert_equal(run(ALONE, apart), run(ALONE, case))


# --- autograd -------------------------------------------------------------------------------------


@BOTH
def test_saved_are_what_was_normalised_the_weight_and_one_number_a_row(operation, device):
    leaves = leaves_of(operation, operation.case(device))
    with saved_tensors() as saved:
        outputs = as_tuple(operation.function(*leaves.values()))
    normalised, weight, rstd = saved
    if operation is ALONE:
        assert normalised is leaves["x"]
    else:
        assert normalised.data_ptr() == outputs[1].data_ptr()
    assert weight is leaves["weight"]
    want = torch.rsqrt(normalised.detach().float().pow(2).mean(-1) + EPS)
    torch.testing.assert_close(rstd.view(want.shape), want)


def test_leaves_x_and_delta_do_not_share_the_memory_of_their_gradients(device):
    case = ADDED.case(device, FP32, shape=(5, 52))
    leaves, want = leaves_of(ADDED, case, ("x", "delta")), run(ADDED, case)["gradient of x"]
    x, delta = leaves["x"], leaves["delta"]
    for repetition in (1, 2):  # the second adds to the first in place
        torch.autograd.backward(add_rms_norm(*leaves.values()), case.gradients)
        assert x.grad.data_ptr() != delta.grad.data_ptr()
        assert torch.equal(x.grad, repetition * want) and torch.equal(delta.grad, x.grad)


@BOTH
def test_a_frozen_weight_costs_no_partial_sums(operation, device, monkeypatch):
    case, kernel = operation.case(device), Kernel()
    monkeypatch.setattr(row_norm, "MAX_PARTIAL_SUMS", 2)
    monkeypatch.setattr(row_norm, "_rms_norm_backward_kernel", kernel)
    for needs in (operation.trained, operation.trained[:-1]):
        outputs = as_tuple(operation.function(*leaves_of(operation, case, needs).values()))
        torch.autograd.backward(outputs, case.gradients)
    (trained_grid, trained), (frozen_grid, frozen) = kernel.launches
    assert trained_grid == (2,) and trained[6].shape == (2, 139)
    assert frozen_grid == (6,) and frozen[6] is None  # a program for each of the 2 x 3 rows


# --- errors ---------------------------------------------------------------------------------------


NORMS, SUM, GATE = (ALONE, ADDED), (ADDED,), (GATED,)


@pytest.mark.parametrize(
    ("operations", "name", "change", "message"),
    [
        (NORMS, "weight", lambda w: w[1:], r"weight is \[138\], should be \[139\] as x is \[2, 3"),
        (NORMS, "weight", lambda w: w[None], r"weight is \[1, 139\], should be \[139\]"),
        (NORMS, "weight", lambda w: w.float(), r"weight is torch.float32 on .* and x torch.bfloat"),
        (NORMS, "weight", lambda w: w.to("meta"), r"weight is torch.bfloat16 on meta and x"),
        (NORMS, "x", lambda x: x[0, 0, 0], r"x is \[\], should be \[\.\.\., hidden\]"),
        (NORMS, "x", lambda x: x[..., :0], r"x is \[2, 3, 0\], should be .*hidden from 1 to 65536"),
        (NORMS, "x", lambda x: x.new_empty(1, 65_537), r"x is \[1, 65537\], should be .* 65536"),
        (SUM, "delta", lambda t: t[:1], r"delta is \[1, 3, 139\], should be \[2, 3, 139\]"),
        (SUM, "delta", lambda t: t.half(), r"delta is torch.float16 on .* and x torch.bfloat16"),
        (SUM, "delta", lambda t: t.to("meta"), r"delta is torch.bfloat16 on meta and x torch.bf"),
        (GATE, "gate", lambda t: t[:1], r"gate is \[1, 3, 139\], should be \[2, 3, 139\] as x is"),
        (GATE, "gate", lambda t: t.to("meta"), "gate is on meta and x on"),
        (GATE, "weight", lambda w: w[1:], r"weight is \[138\], should be \[139\] as x is \[2, 3"),
        (GATE, "x", lambda x: x[0, 0, 0], r"x is \[\], should be \[\.\.\., hidden\]"),
    ],
)
def test_inputs_that_do_not_fit_are_a_value_error(operations, name, change, message, device):
    for operation in operations:
        inputs = operation.case(device).inputs
        with pytest.raises(ValueError, match=f"^{operation.name}: {message}"):
            operation.function(**{**inputs, name: change(inputs[name])})


@pytest.mark.parametrize("rows", [1, 96, 97, 400])
def test_a_gated_weights_gradient_over_many_rows_is_right(rows, device, monkeypatch):
    monkeypatch.setattr(
        fused_lora.functions.gated_norm, "MAX_PARTIAL_SUMS", 3
    )  # and 32 rows a tile
    assert_right(GATED, GATED.case(device, shape=(rows, 52)))


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("operation", (ALONE, ADDED, GATED), ids=lambda operation: operation.name)
@pytest.mark.parametrize("hidden", [2048, 5000, 16_384, 65_536])
def test_long_rows_are_right(hidden, operation, device):
    assert_right(operation, operation.case(device, shape=(700, hidden)))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("need_weight", [False, True])
def test_more_than_2_to_the_31_elements(need_weight, device):
    """Repeat a few rows: eager PyTorch on just those gives the reference."""
    rows, hidden, pattern = 1_050_000, 2048, 250
    assert rows * hidden > 2**31 and rows % pattern == 0
    # x, delta, two outputs, their gradients, grad_x, and room
    if torch.cuda.mem_get_info()[0] < 10 * 2 * rows * hidden:
        pytest.skip("needs 43 GB of free GPU memory")
    few = ADDED.case(device, shape=(pattern, hidden))
    budget, truth = run(ADDED, few, ADDED.eager), truth_of(ADDED, few)
    which = torch.arange(rows, device=device) % pattern
    leaves = leaves_of(ADDED, few, ("weight",) if need_weight else ())
    leaves |= {"x": leaves["x"][which].requires_grad_(), "delta": leaves["delta"][which]}
    outputs = add_rms_norm(*leaves.values())
    torch.autograd.backward(outputs, [gradient[which] for gradient in few.gradients])
    got = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    over = 2**31 // hidden
    for name, many in (got | {"gradient of x": leaves["x"].grad}).items():
        for window in (slice(0, 250), slice(over - 250, over + 250), slice(-250, None)):
            at = which[window]
            assert_within_budget(name, many[window], budget[name][at], truth[name][at])
    if need_weight:
        name, gradient = "gradient of weight", leaves["weight"].grad.double() / (rows // pattern)
        assert_within_budget(name, gradient, budget[name], truth[name])
