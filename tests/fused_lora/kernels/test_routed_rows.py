"""The kernels between a mixture's matmuls, against eager PyTorch (`test_launchers.py`)."""

import torch
from cases.experts_case import gated
from cases.reference import random, seeded

from fused_lora.kernels.routed_rows import (
    SWIGLU,
    ClampedGate,
    RoutedBias,
    routed_swiglu_backward,
    routed_swiglu_forward,
    sum_routed,
)

TOP_K, SCALING = 2, 1.5
CLAMPED = ClampedGate(1.702, 100.0)  # no value rounds across this limit
SIZES = {"odd": (26, 139), "more than one block": (4, 1030), "one column": (2, 1)}
NONE = (0, 8)


def make(size, dtype, device):
    """Two addends of [gate, up], two of a gradient of hidden, and a weight for each row."""
    rows, columns = SIZES[size]
    shapes = [(rows, 2 * columns)] * 2 + [(rows, columns)] * 2 + [(rows, 1)]
    return [
        random(*shape, dtype=dtype, device=device, seed=seed) for seed, shape in enumerate(shapes)
    ]


def places_for(rows, device):
    """Each token's rows, none of them where it was."""
    order = torch.randperm(rows, generator=seeded(2))
    return order.view(-1, TOP_K).to(device)


def beside(grad, weight):
    """Return a token's residual, and a bias of each of three experts."""
    rows, columns = grad.shape
    options = {"dtype": grad.dtype, "device": grad.device}
    expert = torch.arange(rows, device=grad.device) % 3
    bias = RoutedBias(random(3, columns, seed=8, **options), expert, weight)
    return random(rows // TOP_K, columns, seed=7, **options), bias


def fused(base, addend, grad, grad_addend, weight, layout, gate=SWIGLU):
    weight = weight.flatten()
    both = layout(base), layout(addend), SCALING
    gate_up, hidden = routed_swiglu_forward(*both, weight, gate)
    grads = layout(grad), layout(grad_addend), SCALING
    again = routed_swiglu_backward(*grads, gate_up, weight, gate)
    places, (residual, bias) = places_for(len(grad), grad.device), beside(grad, weight)
    bias = bias._replace(bias=layout(bias.bias))
    totals = sum_routed(*grads, places), sum_routed(*grads, places, layout(residual), bias)
    return gate_up, hidden, *again, *totals


def eager(base, addend, grad, grad_addend, weight, gate=SWIGLU):
    gate_up = (base + SCALING * addend).requires_grad_()
    weight = weight.flatten().requires_grad_()
    hidden = gated(gate_up, gate) * weight[:, None]
    grad = grad + SCALING * grad_addend
    gradients = torch.autograd.grad(hidden, (gate_up, weight), grad)
    places, (residual, bias) = places_for(len(grad), grad.device), beside(grad, weight)
    rows = grad + weight.detach()[:, None] * bias.bias[bias.expert]
    totals = grad[places].sum(1), residual + rows[places].sum(1)
    return gate_up.detach(), hidden.detach(), hidden.detach(), *gradients, *totals


def test_without_an_addend_it_is_one_of_zeros(device):
    base, addend, grad, grad_addend, weight = make("odd", torch.bfloat16, device)
    addend.zero_(), grad_addend.zero_()
    want = fused(base, addend, grad, grad_addend, weight, layout=torch.clone)
    weight, places = weight.flatten(), places_for(len(grad), device)
    gate_up, hidden = routed_swiglu_forward(base, None, SCALING, weight)
    again = routed_swiglu_backward(grad, None, SCALING, gate_up, weight)
    totals = [sum_routed(grad, None, SCALING, places, *more) for more in ((), beside(grad, weight))]
    assert all(map(torch.equal, (gate_up, hidden, *again, *totals), want))
