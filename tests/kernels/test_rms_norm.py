"""RMSNorm, alone and after an addition, against eager PyTorch in float64: values and layouts."""

import pytest
import torch
from reference import assert_within_budget
from rms_norm_case import (
    BOTH,
    EAGER,
    EPS,
    Kernel,
    assert_equal,
    assert_right,
    double,
    eager_add_rms_norm,
    eager_rms_norm,
    make,
    run,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import fused_lora.rms_norm as module
from fused_lora.rms_norm import add_rms_norm, rms_norm
from fused_mlp.launching import DTYPES

SHAPES = [(7, 52), (2, 3, 139), (1, 300), (64,), (3, 2048), (2, 2, 2, 33)]


@pytest.fixture
def case(function, device):
    return make(function, 2, 3, 139, dtype=torch.bfloat16, device=device)


# --- values ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_within_the_error_budget(dtype, shape, function, device):
    assert_right(function, *make(function, *shape, dtype=dtype, device=device))


@BOTH
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_eps_is_heeded(eps, function, device):
    assert_right(function, *make(function, 3, 52, dtype=torch.float32, device=device), eps=eps)


@BOTH
def test_a_row_may_be_a_single_element(function, device):
    """With a small eps only the sign would be left of it, and a gradient of nothing. The weight's
    gradient, one number, is that of 40 rows at a time: in one alone its error would be luck."""
    inputs, gradients = make(function, 1600, 1, dtype=torch.float32, device=device)

    def results(function, dtype):
        *rows, weight = (t.to(dtype) for t in inputs)
        parts = [
            run(
                function,
                [*(t[i : i + 40] for t in rows), weight],
                [g[i : i + 40].to(dtype) for g in gradients],
                0.3,
            )
            for i in range(0, 1600, 40)
        ]
        return [torch.cat(one) for one in zip(*parts, strict=True)]

    eager = EAGER[function]
    rows = zip(
        results(function, torch.float32),
        results(eager, torch.float32),
        results(eager, torch.float64),
        strict=True,
    )
    for number, row in enumerate(rows):
        assert_within_budget(f"result {number}", *row)


@pytest.mark.parametrize("magnitude", [1e-4, 60_000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiny_and_large_values_neither_vanish_nor_overflow(dtype, magnitude, device):
    (x, weight), gradients = make(rms_norm, 3, 139, dtype=dtype, device=device)
    x = (x.clamp(-1, 1).float() * magnitude).to(dtype)  # fp16 ends at 65,504
    # away from 0, where fp16 gradients of such an x would be: theirs are as small as it is large
    gradients = [gradient * min(magnitude, 1000.0) for gradient in gradients]
    assert_right(rms_norm, (x, weight), gradients)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_zeros_give_zeros(dtype, device):
    (x, weight), _ = make(rms_norm, 3, 52, dtype=dtype, device=device)
    assert not rms_norm(torch.zeros_like(x), weight, EPS).any()


def test_it_is_transformers_own(device):
    norm = Qwen2RMSNorm(139, eps=1e-5).to(device)
    (x, weight), gradients = make(rms_norm, 5, 139, dtype=torch.float32, device=device)
    with torch.no_grad():
        norm.weight.copy_(weight)
    x.requires_grad_()
    want, got = norm(x), rms_norm(x, norm.weight, norm.variance_epsilon)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    leaves = x, norm.weight
    for one, other in zip(
        torch.autograd.grad(got, leaves, gradients),
        torch.autograd.grad(want, leaves, gradients),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_total_is_the_sum_as_eager_rounds_it_and_y_the_norm_of_that(dtype, device):
    (x, delta, weight), _ = make(add_rms_norm, 5, 139, dtype=dtype, device=device)
    y, total = add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    assert torch.equal(y, rms_norm(x + delta, weight, EPS))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 23, 100])
def test_a_weights_gradient_over_many_rows_is_right(rows, device, monkeypatch):
    programs = []
    monkeypatch.setattr(module, "MAX_PARTIAL_SUMS", 8)
    sum_ = torch.Tensor.sum
    monkeypatch.setattr(
        torch.Tensor, "sum", lambda t, *rest: programs.append(t.shape[0]) or sum_(t, *rest)
    )
    inputs, gradients = make(rms_norm, rows, 6, dtype=torch.bfloat16, device=device)
    x, weight = (t.requires_grad_() for t in inputs)
    y = eager_rms_norm(x, weight, EPS)
    rstd = torch.rsqrt(x.detach().float().pow(2).mean(-1) + EPS)
    got = module.rms_norm_backward(*gradients, None, x.detach(), weight.detach(), rstd, True)
    assert 1 <= programs[0] <= 8
    assert all(t.dtype == torch.bfloat16 for t in got)
    budget = torch.autograd.grad(y, (x, weight), gradients)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = torch.autograd.grad(eager_rms_norm(*wide, EPS), wide, double(gradients))
    for row in zip(("x", "weight"), got, budget, truth, strict=True):
        assert_within_budget(*row)


@BOTH
@pytest.mark.parametrize("shape", [(0, 52), (2, 0, 139)], ids=str)
def test_no_rows_launch_nothing_and_give_a_weight_gradient_of_zero(
    shape, function, device, monkeypatch
):
    kernel = Kernel()
    monkeypatch.setattr(module, "_rms_norm_forward_kernel", kernel)
    monkeypatch.setattr(module, "_rms_norm_backward_kernel", kernel)
    inputs, gradients = make(function, *shape, dtype=torch.bfloat16, device=device)
    *others, grad_weight = run(function, inputs, gradients)
    assert all((t.shape, t.dtype) == (shape, torch.bfloat16) for t in others)
    assert torch.equal(grad_weight, torch.zeros_like(inputs[-1]))
    assert not kernel.launches


@BOTH
def test_repetition_is_bitwise_equal(function, case):
    assert_equal(run(function, *case), run(function, *case))


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_changes_nothing(dtype, function, device):
    inputs, gradients = make(function, 3, 52, dtype=dtype, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = run(function, inputs, gradients)
    assert_equal(got, run(function, inputs, gradients))


# --- layouts --------------------------------------------------------------------------------------

VIEWS = {  # of [2, 3, hidden], each with rows of one stride
    "within wider rows": lambda t: torch.cat([t * 0, t, t], -1)[..., t.shape[-1] : -t.shape[-1]],
    "every second row": lambda t: torch.repeat_interleave(t, 2, dim=1)[:, ::2],
    "one row for all": lambda t: t[:1, :1].expand(t.shape),
}
COPIED = {
    "batch second": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "hidden first": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "elements apart": lambda t: torch.repeat_interleave(t, 2, dim=-1)[..., ::2],
    "one number for all": lambda t: t[:1, :1, :1].expand(t.shape),
}
LAYOUTS = {**VIEWS, **COPIED}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", range(4), ids=("x", "delta", "grad_y", "grad_total"))
def test_any_layout_gives_what_a_contiguous_one_does(position, layout, device):
    options = {"dtype": torch.bfloat16, "device": device}
    (x, delta, weight), gradients = make(add_rms_norm, 2, 3, 139, **options)
    tensors = [x, delta, *gradients]
    tensors[position] = LAYOUTS[layout](tensors[position])
    assert not tensors[position].is_contiguous()
    x, delta, grad_y, grad_total = tensors
    got = run(add_rms_norm, (x, delta, weight), (grad_y, grad_total))
    alone = run(rms_norm, (x, weight), [grad_y])
    x, delta, grad_y, grad_total = (t.contiguous() for t in tensors)
    assert_equal(got, run(add_rms_norm, (x, delta, weight), (grad_y, grad_total)))
    assert_equal(alone, run(rms_norm, (x, weight), [grad_y]))


def test_a_strided_weight_gives_what_a_contiguous_one_does(device):
    (x, weight), gradients = make(rms_norm, 5, 139, dtype=torch.float32, device=device)
    apart = torch.repeat_interleave(weight, 2)[::2]
    assert not apart.is_contiguous()
    assert_equal(run(rms_norm, (x, apart), gradients), run(rms_norm, (x, weight), gradients))


@BOTH
@pytest.mark.parametrize("layout", VIEWS)
def test_one_launch_each_way_reads_strided_tensors_where_they_are(
    layout, function, case, monkeypatch
):
    forward, backward = Kernel(), Kernel()
    monkeypatch.setattr(module, "_rms_norm_forward_kernel", forward)
    monkeypatch.setattr(module, "_rms_norm_backward_kernel", backward)
    (*others, weight), gradients = case
    others, gradients = [VIEWS[layout](t) for t in others], [VIEWS[layout](t) for t in gradients]
    run(function, (*others, weight), gradients)
    ((_, forward_arguments),) = forward.launches
    ((_, backward_arguments),) = backward.launches
    for tensors, arguments in ((others, forward_arguments), (gradients, backward_arguments)):
        assert [t.data_ptr() for t in tensors] == [
            t.data_ptr() for t in arguments[:2] if t is not None
        ]


@BOTH
@pytest.mark.parametrize("layout", [torch.clone, *COPIED.values()])
def test_results_are_new_contiguous_tensors(layout, function, case):
    (*others, weight), gradients = case
    others, gradients = [layout(t) for t in others], [layout(t) for t in gradients]
    *results, grad_weight = run(function, (*others, weight), gradients)
    x = others[0]
    for result in results:
        assert (result.shape, result.dtype, result.device) == (x.shape, x.dtype, x.device)
        assert result.is_contiguous()
    assert (grad_weight.shape, grad_weight.dtype) == (weight.shape, weight.dtype)
    results = results[: len(gradients) + 1]  # grad_delta may be grad_x
    everything = (*results, *others, weight, *gradients)
    assert len({t.untyped_storage().data_ptr() for t in everything}) == len(everything)


def test_the_kernels_write_nothing_behind_the_last_element(device, monkeypatch):
    shape = 5, 139
    (x, delta, weight), gradients = make(add_rms_norm, *shape, dtype=torch.float32, device=device)
    buffers = []
    new_empty = torch.Tensor.new_empty

    def front_of_a_buffer(like, *size, **options):
        if "device" in options:  # the interpreter's own
            return new_empty(like, *size, **options)
        tensor = new_empty(like, *size, **options)
        buffers.append(torch.full((tensor.numel() + 512,), 7.0, device=device))
        return buffers[-1][: tensor.numel()].view_as(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", front_of_a_buffer)
        _, total, rstd = module.rms_norm_forward(x, delta, weight, EPS)
        module.rms_norm_backward(*gradients, total, weight, rstd, True)
    assert len(buffers) == 5  # y, total, rstd, grad_x, the partial sums
    for buffer in buffers:
        assert (buffer[:-512] != 7.0).all() and (buffer[-512:] == 7.0).all()


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("hidden", [2048, 5000, 16_384, 65_536])
def test_long_rows_are_right(hidden, function, device):
    assert_right(function, *make(function, 700, hidden, dtype=torch.bfloat16, device=device))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_is_within_the_error_budget(dtype, function, device):
    inputs, gradients = make(function, 2, 3, 139, dtype=dtype, device=device)
    compiled = torch.compile(lambda *inputs: function(*inputs))
    assert_right(compiled, inputs, gradients, EAGER[function])


@pytest.mark.gpu
@BOTH
def test_a_second_gpu_is_right(function):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    assert_right(function, *make(function, 5, 139, dtype=torch.bfloat16, device="cuda:1"))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("need_weight", [False, True])
def test_more_than_2_to_the_31_elements(need_weight, device):
    """A few rows over and over, so that eager PyTorch on those few says what is right."""
    rows, hidden, pattern = 1_050_000, 2048, 250
    assert rows * hidden > 2**31 and rows % pattern == 0
    # x, delta, two outputs, their gradients, grad_x, and room
    if torch.cuda.mem_get_info()[0] < 10 * 2 * rows * hidden:
        pytest.skip("needs 43 GB of free GPU memory")
    few = make(add_rms_norm, pattern, hidden, dtype=torch.bfloat16, device=device)
    (x, delta, weight), gradients = few
    which = torch.arange(rows, device=device) % pattern
    leaves = x[which].requires_grad_(), delta[which], weight.clone().requires_grad_(need_weight)
    outputs = add_rms_norm(*leaves, EPS)
    torch.autograd.backward(outputs, [gradient[which] for gradient in gradients])
    got = *(t.detach() for t in outputs), leaves[0].grad
    budget, truth = (
        run(eager_add_rms_norm, *tensors) for tensors in (few, [double(part) for part in few])
    )
    over = 2**31 // hidden
    for name, many, eager, exact in zip(("y", "total", "grad"), got, budget, truth, strict=False):
        for window in (slice(0, 250), slice(over - 250, over + 250), slice(-250, None)):
            at = which[window]
            assert_within_budget(name, many[window], eager[at], exact[at])
    if need_weight:
        grad_weight = leaves[2].grad.double() / (rows // pattern)
        assert_within_budget("grad_weight", grad_weight, budget[-1], truth[-1])
