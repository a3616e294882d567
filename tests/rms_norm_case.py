"""RMSNorm, alone and after an addition, in eager PyTorch, and what the fused one is tried on."""

import pytest
import torch
from reference import assert_within_budget, random

from fused_lora.rms_norm import add_rms_norm, rms_norm

EPS = 1e-6


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
