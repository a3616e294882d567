"""The SwiGLU kernels against eager PyTorch in float64."""

import pytest
import torch
import triton
from reference import assert_within_budget, random, swiglu

import fused_mlp.swiglu as module
from fused_mlp import swiglu_backward, swiglu_forward
from fused_mlp.launching import DTYPES
from fused_mlp.swiglu import BLOCK_ELEMENTS as BLOCK

OUTPUTS = ("hidden", "grad_gate", "grad_up")
LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda t: torch.cat([t, t, t], dim=-1)[..., 1 : 1 + t.shape[-1]],
    "every second row": lambda t: torch.repeat_interleave(t, 2, dim=0)[::2],
    "expanded": lambda t: t[:, :1].expand(t.shape),
}


def inputs(*shape, dtype, device):
    """grad_hidden, gate and up; gates are wide enough to reach both ends of the sigmoid."""
    scales = (1.0, 3.0, 1.0)
    return [
        random(*shape, dtype=dtype, device=device, seed=seed, scale=scale)
        for seed, scale in enumerate(scales)
    ]


def eager_backward(grad_hidden, gate, up):
    """What swiglu_backward computes, by autograd."""
    gate, up = (t.detach().clone().requires_grad_() for t in (gate, up))
    hidden = swiglu(gate, up)
    return hidden.detach(), *torch.autograd.grad(hidden, (gate, up), grad_hidden)


def assert_forward_right(gate, up):
    truth = swiglu(gate.double(), up.double())
    assert_within_budget("hidden", swiglu_forward(gate, up), swiglu(gate, up), truth)


def assert_backward_right(*tensors):
    truth = eager_backward(*(t.double() for t in tensors))
    for row in zip(
        OUTPUTS, swiglu_backward(*tensors), eager_backward(*tensors), truth, strict=True
    ):
        assert_within_budget(*row)


@pytest.mark.parametrize("shape", [(5421,), (39, 139), (3, 13, 139), (3, 1, 13, 139)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward_are_within_the_error_budget(dtype, shape, device):
    tensors = inputs(*shape, dtype=dtype, device=device)
    assert_forward_right(*tensors[1:])
    assert_backward_right(*tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_new_contiguous_tensors_of_the_inputs_shape_and_dtype(dtype, device):
    tensors = [t.transpose(0, 1) for t in inputs(7, 11, dtype=dtype, device=device)]
    results = [swiglu_forward(*tensors[1:]), *swiglu_backward(*tensors)]
    for result in results:
        assert (result.shape, result.dtype) == ((11, 7), dtype)
        assert result.device == tensors[0].device and result.is_contiguous()
    assert len({t.data_ptr() for t in (*results, *tensors)}) == 7


@pytest.mark.parametrize("size", [1, 15, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3])
def test_an_element_does_not_depend_on_the_size_around_it(size, device):
    tensors = inputs(3 * BLOCK, dtype=torch.bfloat16, device=device)
    front = [t[:size] for t in tensors]
    assert torch.equal(swiglu_forward(*front[1:]), swiglu_forward(*tensors[1:])[:size])
    for short, full in zip(swiglu_backward(*front), swiglu_backward(*tensors), strict=True):
        assert torch.equal(short, full[:size])


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0, 5)], ids=str)
def test_no_elements_give_empty_results(shape, device):
    tensors = inputs(*shape, dtype=torch.bfloat16, device=device)
    for result in (swiglu_forward(*tensors[1:]), *swiglu_backward(*tensors)):
        assert result.shape == shape


def test_kernels_write_nothing_behind_the_last_element(device):
    size = BLOCK + 5
    grad_hidden, gate, up = inputs(size, dtype=torch.float32, device=device)
    buffers = [torch.full((3 * BLOCK,), 7.0, device=device) for _ in range(4)]
    fronts = [buffer[:size] for buffer in buffers]
    module._launch(module._swiglu_forward_kernel, gate, up, fronts[0])
    module._launch(module._swiglu_backward_kernel, grad_hidden, gate, up, *fronts[1:])
    for buffer in buffers:
        assert (buffer[:size] != 7.0).all() and (buffer[size:] == 7.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", range(3), ids=("grad_hidden", "gate", "up"))
def test_strided_inputs_give_what_contiguous_ones_do(position, layout, device):
    tensors = inputs(13, 17, dtype=torch.bfloat16, device=device)
    tensors[position] = LAYOUTS[layout](tensors[position])
    assert not tensors[position].is_contiguous()
    contiguous = [t.contiguous() for t in tensors]
    assert torch.equal(swiglu_forward(*tensors[1:]), swiglu_forward(*contiguous[1:]))
    for got, want in zip(swiglu_backward(*tensors), swiglu_backward(*contiguous), strict=True):
        assert torch.equal(got, want)


def test_inputs_are_not_written(device):
    tensors = inputs(39, 139, dtype=torch.bfloat16, device=device)
    before = [t.clone() for t in tensors]
    swiglu_forward(*tensors[1:])
    swiglu_backward(*tensors)
    assert all(torch.equal(t, old) for t, old in zip(tensors, before, strict=True))


def test_backward_gives_forwards_hidden_again_bitwise(device):
    tensors = inputs(39, 139, dtype=torch.bfloat16, device=device)
    assert torch.equal(swiglu_backward(*tensors)[0], swiglu_forward(*tensors[1:]))


def test_repetition_is_bitwise_equal(device):
    tensors = inputs(39, 139, dtype=torch.float32, device=device)
    for first, second in zip(swiglu_backward(*tensors), swiglu_backward(*tensors), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy, in the interpreter
@pytest.mark.parametrize("magnitude", [20.0, 100.0, 60000.0])
def test_large_gates_give_finite_and_right_values(magnitude, dtype, device):
    grad_hidden, _, up = inputs(2, 300, dtype=dtype, device=device)
    grad_hidden, up = grad_hidden.clamp(-1, 1), up.clamp(-1, 1)  # fp16 ends at 65,504
    gate = torch.full_like(up, magnitude)
    gate[1] = -magnitude
    assert_forward_right(gate, up)  # a NaN or an inf is an infinite error
    assert_backward_right(grad_hidden, gate, up)
    # where silu and its slope have died out, a norm over both rows would not see a wrong value
    for value in (
        swiglu_forward(gate, up)[1],
        *(t[1] for t in swiglu_backward(grad_hidden, gate, up)),
    ):
        assert value.abs().max() < 1e-6 * magnitude


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda t: t[:, 1:], r"one shape, dtype and device.* up \[3, 4\]"),
        (lambda t: t.half(), r"one shape, dtype and device.* up .*torch.float16"),
        (lambda t: t.to("meta"), r"one shape, dtype and device.* up .* on meta"),
    ],
    ids=("shape", "dtype", "device"),
)
def test_inputs_that_differ_are_a_value_error(changed, message, device):
    grad_hidden, gate, up = inputs(3, 5, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="swiglu_forward wants tensors of " + message):
        swiglu_forward(gate, changed(up))
    with pytest.raises(ValueError, match="swiglu_backward wants tensors of " + message):
        swiglu_backward(grad_hidden, gate, changed(up))
    with pytest.raises(ValueError, match=r"swiglu_backward wants tensors of .* grad_hidden"):
        swiglu_backward(changed(grad_hidden), gate, up)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64], ids=str)
def test_a_dtype_without_a_kernel_is_a_value_error(dtype, device):
    tensors = inputs(3, 5, dtype=dtype, device=device)
    message = f"computes in bfloat16, float16 or float32, got {dtype}: cast first"
    with pytest.raises(ValueError, match="swiglu_forward " + message):
        swiglu_forward(*tensors[1:])
    with pytest.raises(ValueError, match="swiglu_backward " + message):
        swiglu_backward(*tensors)


def test_cpu_tensors_without_the_interpreter_are_a_value_error(monkeypatch):
    compiled = triton.JITFunction(module._swiglu_forward_kernel.fn)
    monkeypatch.setattr(module, "_swiglu_forward_kernel", compiled)
    tensors = inputs(3, 5, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(
        ValueError, match=r"swiglu_forward got tensors on the CPU.*TRITON_INTERPRET=1"
    ):
        swiglu_forward(*tensors[1:])
    with pytest.raises(ValueError, match="swiglu_backward got tensors on the CPU"):
        swiglu_backward(*tensors)


def poison(count, size, device):
    """Leave NaN in the memory that the next `count` tensors of this size will be given."""
    blocks = [
        torch.full((size,), torch.nan, dtype=torch.bfloat16, device=device) for _ in range(count)
    ]
    del blocks


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    size = 2**31 + 2 * BLOCK + 5
    if torch.cuda.mem_get_info()[0] < 8 * 2 * size:
        pytest.skip("needs 35 GB of free GPU memory")
    tensors = [torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(3)]
    windows = [slice(0, 5000), slice(2**31 - 5000, 2**31 + 4000), slice(size - 5000, size)]
    poison(1, size, device)
    hidden = swiglu_forward(*tensors[1:])
    assert not hidden.isnan().any()
    for window in windows:
        gate, up = (t[window] for t in tensors[1:])
        truth = swiglu(gate.double(), up.double())
        assert_within_budget("hidden", hidden[window], swiglu(gate, up), truth)
    del hidden
    poison(3, size, device)
    results = swiglu_backward(*tensors)
    assert not any(result.isnan().any() for result in results)
    for window in windows:
        parts = [t[window] for t in tensors]
        eager, truth = eager_backward(*parts), eager_backward(*(t.double() for t in parts))
        for name, result, *others in zip(OUTPUTS, results, eager, truth, strict=True):
            assert_within_budget(name, result[window], *others)


@pytest.mark.gpu
def test_tensors_on_a_second_gpu_are_computed_there():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = inputs(39, 139, dtype=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_forward_right(*tensors[1:])
    assert_backward_right(*tensors)
    assert torch.cuda.current_device() == 0
