"""An MLP with adapters to try LoRA_MLP on, and what its results are held against."""

import torch
from reference import ADAPTER_NAMES, assert_within_budget, lora_mlp, random

from fused_mlp import FrozenMLP, LoRA_MLP

HIDDEN, INTERMEDIATE = 52, 139  # multiples of nothing
NAMES = ("output", "x", *ADAPTER_NAMES)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
fused = LoRA_MLP.apply


def mlp(
    dtype, device, *, r=(8, 8, 8), adapter_dtype=None, hidden=HIDDEN, intermediate=INTERMEDIATE
):
    """Six adapters, no B zero, and three frozen weights with three different scales."""
    sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    adapters, weights = [], []
    for seed, (rank, (rows, columns)) in enumerate(zip(r, sizes, strict=True)):
        options = {"dtype": adapter_dtype or dtype, "device": device}
        adapters.append(random(rank, columns, seed=10 + seed, scale=columns**-0.5, **options))
        adapters.append(random(rows, rank, seed=20 + seed, scale=rank**-0.5, **options))
        options["dtype"] = dtype
        weights.append(random(rows, columns, seed=30 + seed, scale=columns**-0.5, **options))
    return adapters, FrozenMLP(*weights, 2.0, 0.5, 1.5)


def tokens(*shape, dtype, device):
    """x and an incoming gradient."""
    return [random(*shape, HIDDEN, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]


def double(frozen):
    return FrozenMLP(*(weight.double() for weight in frozen[:3]), *frozen[3:])


def run(function, x, adapters, frozen, grad_output, layout=None):
    """Output and gradients by name; `layout` makes another view of x inside the graph."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *adapters)]
    x, *adapters = leaves
    output = function(x if layout is None else layout(x), *adapters, frozen)
    output.backward(grad_output.to(output.dtype))
    return dict(zip(NAMES, (output.detach(), *(t.grad for t in leaves)), strict=True))


@torch.no_grad()
def raw_gradients(output, grad_output):
    """What LoRA_MLP.backward itself returns for x and the adapters."""
    *gradients, of_frozen = output.grad_fn.apply(grad_output)
    assert of_frozen is None
    return gradients


def truth_of(x, adapters, frozen, grad_output, layout=None):
    adapters = [t.double() for t in adapters]
    return run(lora_mlp, x.double(), adapters, double(frozen), grad_output.double(), layout)


def assert_right(*case, layout=None):
    got, eager = run(fused, *case, layout), run(lora_mlp, *case, layout)
    truth = truth_of(*case, layout)
    for name in NAMES:
        assert_within_budget(name, got[name], eager[name], truth[name])


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name], want[name]), name
