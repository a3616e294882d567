"""The SwiGLU kernels against eager PyTorch in float64."""

import pytest
import torch
import triton
from contract import LAYOUTS
from reference import assert_within_budget, random, swiglu

import fused_mlp.swiglu as module
from fused_mlp import swiglu_backward, swiglu_forward
from fused_mlp.launching import DTYPES
from fused_mlp.swiglu import BLOCK_ELEMENTS as BLOCK

OUTPUTS = ("hidden", "hidden again", "grad_gate", "grad_up")
SHAPES = {
    "one dimension": (5421,),
    "two dimensions": (39, 139),
    "three dimensions": (3, 13, 139),
    "four dimensions": (3, 1, 13, 139),
}


def inputs(*shape, dtype, device):
    """grad_hidden, gate and up; gates are wide enough to reach both ends of the sigmoid."""
    scales = (1.0, 3.0, 1.0)
    return [
        random(*shape, dtype=dtype, device=device, seed=seed, scale=scale)
        for seed, scale in enumerate(scales)
    ]


def fused(grad_hidden, gate, up):
    """hidden, from the forward and from the backward, and the gradients."""
    return swiglu_forward(gate, up), *swiglu_backward(grad_hidden, gate, up)


def eager(grad_hidden, gate, up):
    gate, up = (t.detach().clone().requires_grad_() for t in (gate, up))
    hidden = swiglu(gate, up)
    gradients = torch.autograd.grad(hidden, (gate, up), grad_hidden)
    return hidden.detach(), hidden.detach(), *gradients


def assert_right(*tensors, got=None):
    got = fused(*tensors) if got is None else got
    truth = eager(*(t.double() for t in tensors))
    for row in zip(OUTPUTS, got, eager(*tensors), truth, strict=True):
        assert_within_budget(*row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_new_contiguous_tensors_of_the_inputs_shape_and_dtype(dtype, device):
    tensors = [t.transpose(0, 1) for t in inputs(7, 11, dtype=dtype, device=device)]
    results = fused(*tensors)
    for result in results:
        assert (result.shape, result.dtype) == ((11, 7), dtype)
        assert result.device == tensors[0].device and result.is_contiguous()
    assert len({t.data_ptr() for t in (*results, *tensors)}) == 7


@pytest.mark.parametrize("size", [1, 15, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3])
def test_an_element_does_not_depend_on_the_size_around_it(size, device):
    tensors = inputs(3 * BLOCK, dtype=torch.bfloat16, device=device)
    front = [t[:size] for t in tensors]
    for short, full in zip(fused(*front), fused(*tensors), strict=True):
        assert torch.equal(short, full[:size])


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
    tensors = inputs(2, 3, 13, 17, dtype=torch.bfloat16, device=device)
    tensors[position] = LAYOUTS[layout](tensors[position])
    assert not tensors[position].is_contiguous()
    contiguous = [t.contiguous() for t in tensors]
    assert all(map(torch.equal, fused(*tensors), fused(*contiguous)))


def test_backward_gives_forwards_hidden_again_bitwise(device):
    tensors = inputs(39, 139, dtype=torch.bfloat16, device=device)
    assert torch.equal(swiglu_backward(*tensors)[0], swiglu_forward(*tensors[1:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy, in the interpreter
@pytest.mark.parametrize("magnitude", [20.0, 100.0, 60000.0])
def test_large_gates_give_finite_and_right_values(magnitude, dtype, device):
    grad_hidden, _, up = inputs(2, 300, dtype=dtype, device=device)
    grad_hidden, up = grad_hidden.clamp(-1, 1), up.clamp(-1, 1)  # fp16 ends at 65,504
    gate = torch.full_like(up, magnitude)
    gate[1] = -magnitude
    got = fused(grad_hidden, gate, up)
    assert_right(grad_hidden, gate, up, got=got)  # a NaN or an inf is an infinite error
    # where silu and its slope have died out, a norm over both rows would not see a wrong value
    assert all(result[1].abs().max() < 1e-6 * magnitude for result in got)


def test_cpu_tensors_without_the_interpreter_are_a_value_error(monkeypatch):
    compiled = triton.JITFunction(module._swiglu_forward_kernel.fn)
    monkeypatch.setattr(module, "_swiglu_forward_kernel", compiled)
    _, gate, up = inputs(3, 5, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match=r"^swiglu_forward got .* the CPU.*TRITON_INTERPRET=1"):
        swiglu_forward(gate, up)
