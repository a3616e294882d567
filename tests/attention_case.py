"""Adapted linear layers to try LoRA_W and LoRA_QKV on, and what their results are held against.

A case is (x, adapters, frozen, grad_outputs): of one layer for LoRA_W, of three for LoRA_QKV.
"""

import torch
import torch.nn.functional as F
from reference import assert_within_budget, random
from torch.utils._python_dispatch import TorchDispatchMode

from fused_lora.lora_linear import FrozenLinear, FrozenQKV

IN, OUT = 52, (71, 23, 37)  # multiples of nothing
SCALINGS = (2.0, 0.5, 1.5)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANKS = (1, 4, 8, 12, 32, 64)
KINDS = {"mm": "GEMM", "addmm": "GEMM", "addmm_": "GEMM", "_to_copy": "cast"}
LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1),
    "sliced": lambda t: torch.cat([t, t, t], dim=-1)[..., 1 : 1 + t.shape[-1]],
    "every second token": lambda t: torch.repeat_interleave(t, 2, dim=1)[:, ::2],
    "expanded": lambda t: t[:1].expand(5, *t.shape[1:]),
    "features first": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
}


def adapted_linear(x, weight, bias, A, B, scaling):
    """As PEFT computes it, its casts for adapters of another dtype than x included."""
    result = F.linear(x, weight, bias)
    return (result + F.linear(F.linear(x.to(A.dtype), A), B) * scaling).to(result.dtype)


def lora_w(x, A, B, frozen):
    return adapted_linear(x, frozen.weight, frozen.bias, A, B, frozen.scaling)


def lora_qkv(x, q_A, q_B, k_A, k_B, v_A, v_B, frozen):
    return (
        adapted_linear(x, frozen.q_weight, frozen.q_bias, q_A, q_B, frozen.q_scaling),
        adapted_linear(x, frozen.k_weight, frozen.k_bias, k_A, k_B, frozen.k_scaling),
        adapted_linear(x, frozen.v_weight, frozen.v_bias, v_A, v_B, frozen.v_scaling),
    )


def make_case(
    *shape, layers=3, dtype=torch.bfloat16, device, r=(8, 8, 8), bias=True, adapter_dtypes=None,
    frozen_dtype=None,
):  # fmt: skip
    """x of `shape` tokens, adapters (no B zero), frozen weights, and an incoming gradient each."""
    adapter_dtypes = adapter_dtypes or (dtype,) * 6
    options = {"dtype": frozen_dtype or dtype, "device": device}
    adapters, weights, biases, grad_outputs = [], [], [], []
    for i, (rank, out) in enumerate(zip(r[:layers], OUT, strict=False)):
        dtype_A, dtype_B = adapter_dtypes[2 * i : 2 * i + 2]
        adapters.append(random(rank, IN, seed=10 + i, scale=IN**-0.5, device=device, dtype=dtype_A))
        adapters.append(
            random(out, rank, seed=20 + i, scale=rank**-0.5, device=device, dtype=dtype_B)
        )
        weights.append(random(out, IN, seed=30 + i, scale=IN**-0.5, **options))
        biases.append(random(out, seed=40 + i, **options) if bias else None)
        grad_outputs.append(random(*shape, out, seed=50 + i, device=device, dtype=dtype))
    x = random(*shape, IN, seed=1, device=device, dtype=dtype)
    if layers == 1:
        return x, adapters, FrozenLinear(weights[0], biases[0], SCALINGS[0]), grad_outputs
    return x, adapters, FrozenQKV(*weights, *biases, *SCALINGS), grad_outputs


def names_of(adapters):
    """Of the outputs, and of the inputs that may require a gradient."""
    if len(adapters) == 2:
        return ("output",), ("x", "A", "B")
    return ("q", "k", "v"), ("x", "q_A", "q_B", "k_A", "k_B", "v_A", "v_B")


def as_tuple(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs


def run(function, x, adapters, frozen, grad_outputs, layout=None):
    """Outputs and gradients by name; `layout` makes another view of x inside the graph. An output
    whose incoming gradient is None takes part in no loss."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *adapters)]
    x, *adapters = leaves
    outputs = as_tuple(function(x if layout is None else layout(x), *adapters, frozen))
    used = [
        (output, grad.to(output.dtype))
        for output, grad in zip(outputs, grad_outputs, strict=True)
        if grad is not None
    ]
    torch.autograd.backward(*zip(*used, strict=True))
    output_names, input_names = names_of(adapters)
    results = dict(zip(output_names, (output.detach() for output in outputs), strict=True))
    return results | dict(zip(input_names, (leaf.grad for leaf in leaves), strict=True))


@torch.no_grad()
def raw_gradients(outputs, grad_outputs):
    """What the function's backward itself returns for x and the adapters."""
    *gradients, of_frozen = as_tuple(outputs)[0].grad_fn.apply(*grad_outputs)
    assert of_frozen is None
    return gradients


def doubled(*tensors):
    return [t.double() if isinstance(t, torch.Tensor) else t for t in tensors]


def truth_of(eager, x, adapters, frozen, grad_outputs, layout=None):
    frozen = type(frozen)(*doubled(*frozen))
    return run(eager, x.double(), doubled(*adapters), frozen, doubled(*grad_outputs), layout)


def assert_all_within_budget(got, want, truth):
    """Values within the budget, dtypes and missing gradients as eager has them."""
    assert got.keys() == want.keys() == truth.keys()
    for name in want:
        if want[name] is None:
            assert got[name] is None, name
        else:
            assert got[name].dtype == want[name].dtype, name
            assert_within_budget(name, got[name], want[name], truth[name])


def assert_right(fused, eager, *case, layout=None):
    got, want = run(fused, *case, layout), run(eager, *case, layout)
    assert_all_within_budget(got, want, truth_of(eager, *case, layout))


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name], want[name]), name


class Calls(TorchDispatchMode):
    """Counts what launches a kernel on a GPU, by kind: all but views and new memory."""

    def __init__(self):
        super().__init__()
        self.counted = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and name not in ("empty", "empty_like", "new_empty"):
            kind = KINDS.get(name, name)
            self.counted[kind] = self.counted.get(kind, 0) + 1
        return function(*args, **(kwargs or {}))


def saved_for_backward(function, x, adapters, frozen):
    """The activations that autograd keeps alive, each storage once."""
    saved = {}
    parameters = {t.data_ptr() for t in (*adapters, *frozen) if isinstance(t, torch.Tensor)}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = function(x, *adapters, frozen)
    return list(saved.values()), outputs
