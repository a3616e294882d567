"""RMSNorm, alone, after an addition and with a gate, in eager PyTorch, and what the fused one is
tried on."""

import torch
import torch.nn.functional as F
from cases.reference import random

from fused_lora.functions.rms_norm import rms_norm

EPS = 1e-6


def eager_rms_norm(x, weight, eps, zero_centered=False):
    """Llama's, or Gemma's, which multiplies before it rounds."""
    wide = x if x.dtype == torch.float64 else x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if zero_centered:
        return ((1.0 + weight.to(wide.dtype)) * normalised).to(x.dtype)
    return weight * normalised.to(x.dtype)


def eager_add_rms_norm(x, delta, weight, eps, zero_centered=False):
    total = x + delta
    return eager_rms_norm(total, weight, eps, zero_centered), total


def eager_gated_rms_norm(x, gate, weight, eps):
    """As behind Qwen3.5's gated delta net."""
    gate = gate if gate.dtype == torch.float64 else gate.float()
    return (eager_rms_norm(x, weight, eps) * F.silu(gate)).to(x.dtype)


def make(function, *shape, dtype, device):
    """Inputs (x and weight, or x, delta and weight) and one gradient for each output."""
    options = {"dtype": dtype, "device": device}
    x, delta, *gradients = (random(*shape, seed=seed, **options) for seed in range(4))
    weight = 1 + random(shape[-1], seed=4, scale=0.5, **options)
    if function is rms_norm:
        return (x, weight), gradients[:1]
    return (x, delta, weight), gradients


class Kernel:
    """In a kernel's place: notes the arguments of every launch, and does nothing."""

    params = ()  # it specialises every integer

    def __init__(self):
        self.launches = []

    def run(self, *arguments, grid, warmup, **constants):
        self.launches.append((grid, arguments))
