"""RMSNorm, alone and after an addition, against eager PyTorch in float64; and in autograd."""

from itertools import product

import pytest
import torch
import triton
from reference import assert_within_budget, random
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import fused_lora.rms_norm as module
from fused_lora.launching import DTYPES
from fused_lora.rms_norm import AddRMSNorm, RMSNorm, add_rms_norm, rms_norm

EPS = 1e-6
SHAPES = [(7, 52), (2, 3, 139), (1, 300), (64,), (3, 2048), (2, 2, 2, 33)]


def eager_rms_norm(x, weight, eps):
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def eager_add_rms_norm(x, delta, weight, eps):
    total = x + delta
    return eager_rms_norm(total, weight, eps), total


EAGER = {rms_norm: eager_rms_norm, add_rms_norm: eager_add_rms_norm}
BOTH = pytest.mark.parametrize("function", EAGER)


def make(function, *shape, dtype, device):
    """Inputs (x and weight, or x, delta and weight) and one gradient for each output."""
    options = {"dtype": dtype, "device": device}
    x, delta, *gradients = (random(*shape, seed=seed, **options) for seed in range(4))
    weight = 1 + random(shape[-1], seed=4, scale=0.5, **options)
    if function is rms_norm:
        return (x, weight), gradients[:1]
    return (x, delta, weight), gradients


@pytest.fixture
def case(function, device):
    return make(function, 2, 3, 139, dtype=torch.bfloat16, device=device)


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def run(function, inputs, gradients, eps=EPS):
    """Outputs, then the gradients of all inputs, which keep their layouts."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = as_tuple(function(*leaves, eps))
    return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, leaves, gradients)


def double(tensors):
    return [t.double() for t in tensors]


def assert_right(function, inputs, gradients, eager=None, eps=EPS):
    eager = eager or EAGER[function]
    truth = run(eager, double(inputs), double(gradients), eps)
    got, budget = run(function, inputs, gradients, eps), run(eager, inputs, gradients, eps)
    for number, row in enumerate(zip(got, budget, truth, strict=True)):
        assert_within_budget(f"result {number} of {len(got)}", *row)


def assert_equal(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


class Kernel:
    """In a kernel's place: notes the arguments of every launch, and does nothing."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launches.append((grid, arguments))


# --- values ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_within_the_error_budget(dtype, shape, function, device):
    assert_right(function, *make(function, *shape, dtype=dtype, device=device))


@BOTH
@pytest.mark.parametrize(
    ("eps", "shape"),
    # of a single element with a small eps only the sign is left, and a gradient of nothing
    [(0.0, (3, 52)), (1e-5, (3, 52)), (0.3, (3, 52)), (0.3, (9, 1))],
    ids=str,
)
def test_eps_is_heeded(eps, shape, function, device):
    assert_right(function, *make(function, *shape, dtype=torch.float32, device=device), eps=eps)


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


# --- autograd -------------------------------------------------------------------------------------


@BOTH
def test_nothing_that_came_in_or_was_saved_is_written(function, case):
    inputs, gradients = case
    leaves = [t.requires_grad_() for t in inputs]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = as_tuple(function(*leaves, EPS))
    everything = [*leaves, *gradients, *saved, *outputs]
    before = [t.detach().clone() for t in everything]
    torch.autograd.backward(outputs, gradients)
    assert_equal(everything, before)


@BOTH
def test_saved_are_what_was_normalised_the_weight_and_one_number_a_row(function, case):
    leaves = [t.requires_grad_() for t in case[0]]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = as_tuple(function(*leaves, EPS))
    normalised, weight, rstd = saved
    if function is rms_norm:
        assert normalised is leaves[0]
    else:
        assert normalised.data_ptr() == outputs[1].data_ptr()
    assert weight is leaves[-1]
    want = torch.rsqrt(normalised.detach().float().pow(2).mean(-1) + EPS)
    torch.testing.assert_close(rstd.view(want.shape), want)


@BOTH
def test_a_second_backward_through_a_retained_graph_gives_the_same(function, case):
    inputs, gradients = case
    leaves = [t.requires_grad_() for t in inputs]
    outputs = function(*leaves, EPS)
    first = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)
    assert_equal(torch.autograd.grad(outputs, leaves, gradients), first)


@BOTH
def test_differentiating_twice_is_a_clear_error(function, case):
    inputs, gradients = case
    outputs = function(*(t.requires_grad_() for t in inputs), EPS)
    with pytest.raises(RuntimeError, match=f"^{function.__name__} is not twice differentiable"):
        torch.autograd.grad(outputs, inputs[0], gradients, create_graph=True)


def test_a_sum_beside_the_norm_keeps_the_gradient_that_both_share(case_of_two):
    """z = norm(x) + w: the norm must not write its own into the tensor that w gets as well."""
    (x, weight), gradients = case_of_two

    def block(norm):
        def with_other(x, weight, eps):
            other = x * 3
            return norm(x, weight, eps) + other + x

        return with_other

    assert_right(block(rms_norm), (x, weight), gradients, block(eager_rms_norm))
    leaves = [t.clone().requires_grad_() for t in (x, weight, x)]
    (rms_norm(*leaves[:2], EPS) + leaves[2]).backward(gradients[0])
    assert torch.equal(leaves[2].grad, gradients[0])


@pytest.fixture
def case_of_two(device):
    return make(rms_norm, 2, 3, 139, dtype=torch.bfloat16, device=device)


def residual_blocks(add_norm):
    """Two in a row as a decoder has them: total goes on beside y, and to the next addition."""

    def blocks(x, delta, weight, eps):
        y, total = add_norm(x, delta, weight, eps)
        y, total = add_norm(total, y * 0.5 + delta, weight, eps)
        return y + total, total

    return blocks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_stream_through_two_norms_is_right(dtype, device):
    inputs, gradients = make(add_rms_norm, 2, 3, 139, dtype=dtype, device=device)
    fused, eager = residual_blocks(add_rms_norm), residual_blocks(eager_add_rms_norm)
    assert_right(fused, inputs, gradients, eager)


def test_leaves_x_and_delta_do_not_share_the_memory_of_their_gradients(device):
    (*tensors, weight), gradients = make(add_rms_norm, 5, 52, dtype=torch.float32, device=device)
    x, delta = (t.requires_grad_() for t in tensors)
    for repetition in (1, 2):  # the second adds in place to the first
        torch.autograd.backward(add_rms_norm(x, delta, weight, EPS), gradients)
        assert x.grad.data_ptr() != delta.grad.data_ptr()
        want, _, _ = run(add_rms_norm, (x, delta, weight), gradients)[2:]
        assert torch.equal(x.grad, repetition * want) and torch.equal(delta.grad, x.grad)


@pytest.mark.parametrize("used", [0, 1], ids=["y", "total"])
def test_an_output_that_nobody_uses_counts_as_one_with_a_gradient_of_zero(used, device):
    inputs, gradients = make(add_rms_norm, 5, 52, dtype=torch.bfloat16, device=device)
    leaves = [t.requires_grad_() for t in inputs]
    got = torch.autograd.grad(add_rms_norm(*leaves, EPS)[used], leaves, gradients[used])
    gradients[1 - used] = torch.zeros_like(gradients[1 - used])
    assert_equal(got, run(add_rms_norm, inputs, gradients)[2:])
    if used == 1:
        assert torch.equal(got[0], gradients[1]) and not got[2].any()


@BOTH
def test_every_subset_of_inputs_may_need_a_gradient(function, case):
    inputs, gradients = case
    full = run(function, inputs, gradients)[len(gradients) :]
    for needs in product((False, True), repeat=len(inputs)):
        leaves = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
        outputs = as_tuple(function(*leaves, EPS))
        assert all(output.requires_grad == any(needs) for output in outputs)
        if not any(needs):
            continue
        torch.autograd.backward(outputs, gradients)
        for leaf, need, want in zip(leaves, needs, full, strict=True):
            if need:
                assert torch.equal(leaf.grad, want), needs
            else:
                assert leaf.grad is None, needs


@BOTH
def test_a_frozen_weight_costs_no_partial_sums(function, case, monkeypatch):
    inputs, gradients = case
    kernel = Kernel()
    monkeypatch.setattr(module, "MAX_PARTIAL_SUMS", 2)
    monkeypatch.setattr(module, "_rms_norm_backward_kernel", kernel)
    for need in (True, False):
        *leaves, weight = (t.clone().requires_grad_() for t in inputs)
        outputs = function(*leaves, weight.requires_grad_(need), EPS)
        torch.autograd.backward(outputs, gradients)
    (trained_grid, trained), (frozen_grid, frozen) = kernel.launches
    assert trained_grid == (2,) and trained[6].shape == (2, 139)
    assert frozen_grid == (6,) and frozen[6] is None  # a program for each of the 2 x 3 rows


@BOTH
def test_outputs_may_be_changed_in_place(function, device):
    inputs, gradients = make(function, 5, 52, dtype=torch.float32, device=device)

    def scaled(*inputs):
        y, *rest = as_tuple(function(*inputs))
        return y.mul_(0.5), *rest

    def eager_scaled(*inputs):
        y, *rest = as_tuple(EAGER[function](*inputs))
        return y * 0.5, *rest

    assert_right(scaled, inputs, gradients, eager_scaled)


@BOTH
@pytest.mark.parametrize("changed", ["normalised", "weight"])
def test_what_is_saved_changed_in_place_before_backward_is_autograds_error(changed, function, case):
    (x, *rest), gradients = case
    x = x.requires_grad_() * 1
    outputs = as_tuple(function(x, *rest, EPS))
    normalised = x if function is rms_norm else outputs[1]
    with torch.no_grad():
        {"normalised": normalised, "weight": rest[-1]}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, gradients)


@BOTH
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_bitwise_equal(reentrant, function, case):
    def checkpointed(*inputs):
        return checkpoint(function, *inputs, use_reentrant=reentrant)

    def backward(function):  # a reentrant checkpoint allows backward() alone
        leaves = [t.clone().requires_grad_() for t in case[0]]
        outputs = as_tuple(function(*leaves, EPS))
        torch.autograd.backward(outputs, case[1])
        return *outputs, *(t.grad for t in leaves)

    assert_equal(backward(checkpointed), backward(function))


@BOTH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_outputs_are_the_same(mode, function, case):
    leaves = [t.requires_grad_() for t in case[0]]
    want = as_tuple(function(*leaves, EPS))
    with mode():
        got = as_tuple(function(*leaves, EPS))
    assert_equal(got, want)
    assert not any(t.requires_grad for t in got)


# --- errors ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": lambda w: w[1:]}, r"weight is \[138\], should be \[139\] as x is \[2, 3, 139"),
        ({"weight": lambda w: w[None]}, r"weight is \[1, 139\], should be \[139\]"),
        ({"weight": lambda w: w.float()}, r"weight is torch.float32 on .* and x torch.bfloat16"),
        ({"weight": lambda w: w.to("meta")}, r"weight is torch.bfloat16 on meta and x"),
        ({"x": lambda x: x[0, 0, 0]}, r"x is \[\], should be \[\.\.\., hidden\]"),
        ({"x": lambda x: x[..., :0]}, r"x is \[2, 3, 0\], should be .*hidden from 1 to 65536"),
        ({"x": lambda x: x.new_empty(1, 65_537)}, r"x is \[1, 65537\], should be .* 65536"),
    ],
)
def test_what_does_not_fit_is_a_value_error(changed, message, function, case):
    inputs = dict(zip(("x", "delta", "weight")[:: 4 - len(case[0])], case[0], strict=True))
    for name, change in changed.items():
        inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
        function(**inputs, eps=EPS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:1], r"delta is \[1, 3, 139\], should be \[2, 3, 139\]"),
        (lambda t: t.half(), r"delta is torch.float16 on .* and x torch.bfloat16"),
        (lambda t: t.to("meta"), r"delta is torch.bfloat16 on meta and x torch.bfloat16"),
    ],
    ids=("shape", "dtype", "device"),
)
def test_a_delta_that_does_not_fit_is_a_value_error(change, message, device):
    options = {"dtype": torch.bfloat16, "device": device}
    (x, delta, weight), _ = make(add_rms_norm, 2, 3, 139, **options)
    with pytest.raises(ValueError, match=f"^add_rms_norm: {message}"):
        add_rms_norm(x, change(delta), weight, EPS)


@BOTH
def test_a_dtype_without_a_kernel_is_a_value_error(function, device):
    inputs, _ = make(function, 3, 52, dtype=torch.float64, device=device)
    message = f"^{function.__name__} computes in bfloat16, float16 or float32, got torch.float64"
    with pytest.raises(ValueError, match=message):
        function(*inputs, EPS)


@pytest.mark.parametrize("autograd", [RMSNorm, AddRMSNorm])
def test_cpu_tensors_without_the_interpreter_are_a_value_error(autograd, monkeypatch):
    compiled = triton.JITFunction(module._rms_norm_forward_kernel.fn)
    monkeypatch.setattr(module, "_rms_norm_forward_kernel", compiled)
    function = rms_norm if autograd is RMSNorm else add_rms_norm
    inputs, _ = make(function, 3, 52, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match=r"rms_norm got tensors on the CPU.*TRITON_INTERPRET=1"):
        autograd.apply(*inputs, EPS)


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
