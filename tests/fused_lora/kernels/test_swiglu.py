"""The kernels of SwiGLU and GeGLU against eager PyTorch in float64."""

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import triton
from cases.reference import assert_within_budget, geglu, random, swiglu
from cases.refusal import narrow, on_meta
from contract import LAYOUTS

import fused_mlp.geglu
import fused_mlp.swiglu
from fused_mlp.launching import DTYPES
from fused_mlp.swiglu import BLOCK_ELEMENTS as BLOCK

OUTPUTS = ("hidden", "hidden again", "grad_gate", "grad_up")
SHAPES = {
    "one dimension": (5421,),
    "two dimensions": (39, 139),
    "three dimensions": (3, 13, 139),
    "four dimensions": (3, 1, 13, 139),
}


class Activation(NamedTuple):
    module: ModuleType
    name: str
    function: object  # eager

    def of(self, way: str):
        return getattr(self.module, f"{self.name}_{way}")

    def kernel(self, way: str):
        return getattr(self.module, f"_{self.name}_{way}_kernel")


SWIGLU = Activation(fused_mlp.swiglu, "swiglu", swiglu)
GEGLU = Activation(fused_mlp.geglu, "geglu", geglu)
BOTH = pytest.mark.parametrize("which", (SWIGLU, GEGLU), ids=("swiglu", "geglu"))


def inputs(*shape, dtype, device):
    """Return grad_hidden, gate and up. Gates reach both ends of the sigmoid."""
    scales = (1.0, 3.0, 1.0)
    return [
        random(*shape, dtype=dtype, device=device, seed=seed, scale=scale)
        for seed, scale in enumerate(scales)
    ]


def fused(which, grad_hidden, gate, up):
    """Return hidden, from the forward and from the backward, and the gradients."""
    return which.of("forward")(gate, up), *which.of("backward")(grad_hidden, gate, up)


def eager(which, grad_hidden, gate, up):
    gate, up = (t.detach().clone().requires_grad_() for t in (gate, up))
    hidden = which.function(gate, up)
    gradients = torch.autograd.grad(hidden, (gate, up), grad_hidden)
    return hidden.detach(), hidden.detach(), *gradients


def assert_right(which, *tensors, got=None):
    got = fused(which, *tensors) if got is None else got
    truth = eager(which, *(t.double() for t in tensors))
    for row in zip(OUTPUTS, got, eager(which, *tensors), truth, strict=True):
        assert_within_budget(*row)


@BOTH
@pytest.mark.parametrize("size", [1, 15, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3])
def test_an_element_does_not_depend_on_the_size_around_it(size, which, device):
    tensors = inputs(3 * BLOCK, dtype=torch.bfloat16, device=device)
    front = [t[:size] for t in tensors]
    for short, full in zip(fused(which, *front), fused(which, *tensors), strict=True):
        assert torch.equal(short, full[:size])


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", range(3), ids=("grad_hidden", "gate", "up"))
def test_strided_inputs_give_what_contiguous_ones_do_in_new_contiguous_tensors(
    position, layout, which, device
):
    tensors = inputs(2, 3, 13, 17, dtype=torch.bfloat16, device=device)
    tensors[position] = LAYOUTS[layout](tensors[position])
    assert not tensors[position].is_contiguous()
    results = fused(which, *tensors)
    assert all(map(torch.equal, results, fused(which, *(t.contiguous() for t in tensors))))
    assert all(t.is_contiguous() and t.dtype == torch.bfloat16 for t in results)
    assert len({t.data_ptr() for t in (*results, *tensors)}) == 7


@BOTH
def test_backward_gives_forwards_hidden_again_bitwise(which, device):
    tensors = inputs(39, 139, dtype=torch.bfloat16, device=device)
    assert torch.equal(which.of("backward")(*tensors)[0], which.of("forward")(*tensors[1:]))


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy, in the interpreter
@pytest.mark.parametrize("magnitude", [20.0, 100.0, 60000.0])
def test_large_gates_give_finite_and_right_values(magnitude, dtype, which, device):
    grad_hidden, _, up = inputs(2, 300, dtype=dtype, device=device)
    grad_hidden, up = grad_hidden.clamp(-1, 1), up.clamp(-1, 1)  # fp16 ends at 65,504
    gate = torch.full_like(up, magnitude)
    gate[1] = -magnitude
    got = fused(which, grad_hidden, gate, up)
    assert_right(which, grad_hidden, gate, up, got=got)  # a NaN or an inf is an infinite error
    # where the activation and its slope have died out, a norm over both rows would not see a wrong
    # value
    assert all(result[1].abs().max() < 1e-6 * magnitude for result in got)


@BOTH
def test_cpu_tensors_without_the_interpreter_are_a_value_error(which, monkeypatch):
    compiled = triton.JITFunction(SWIGLU.kernel("forward").fn)
    monkeypatch.setattr(fused_mlp.swiglu, "_swiglu_forward_kernel", compiled)
    _, gate, up = inputs(3, 5, dtype=torch.bfloat16, device="cpu")
    message = f"^{which.name}_forward got .* the CPU.*TRITON_INTERPRET=1"
    with pytest.raises(ValueError, match=message):
        which.of("forward")(gate, up)


@BOTH
@pytest.mark.parametrize("change", [narrow, torch.Tensor.half, on_meta])
def test_tensors_unlike_each_other_are_a_value_error(change, which, device):
    grad_hidden, gate, up = inputs(3, 5, dtype=torch.bfloat16, device=device)
    given = {
        "forward": [(gate, change(up)), (change(gate), up)],
        "backward": [(change(grad_hidden), gate, up), (grad_hidden, gate, change(up))],
    }
    for way, every in given.items():
        for tensors in every:
            with pytest.raises(ValueError, match=f"^{which.name}_{way} needs tensors of one shape"):
                which.of(way)(*tensors)


@BOTH
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_dtype_without_a_kernel_is_a_value_error(way, which, device):
    tensors = inputs(3, 5, dtype=torch.float64, device=device)[way == "forward" :]
    with pytest.raises(ValueError, match=f"^{which.name}_{way} computes in .*, got torch.float64"):
        which.of(way)(*tensors)
