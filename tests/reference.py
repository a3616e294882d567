"""Eager PyTorch, as plain as it can be written: the oracles that the fused code is held against.

Given float64 tensors these are the truth; given bf16 tensors they are eager bf16, whose own error
against the truth is the budget that a fused kernel gets (`assert_within_budget`).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ADAPTER_NAMES = ("gate_A", "gate_B", "up_A", "up_B", "down_A", "down_B")
BUDGET = 2.0
CHECKPOINTS = ("reentrant", "non-reentrant", "nested")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def adapted_linear(x: Tensor, weight: Tensor, A: Tensor, B: Tensor, scaling: float) -> Tensor:
    """As PEFT computes it, its casts for adapters of another dtype than x included."""
    result = F.linear(x, weight)
    return (result + F.linear(F.linear(x.to(A.dtype), A), B) * scaling).to(result.dtype)


def lora_mlp(x, gate_A, gate_B, up_A, up_B, down_A, down_B, frozen) -> Tensor:
    gate = adapted_linear(x, frozen.gate_weight, gate_A, gate_B, frozen.gate_scaling)
    up = adapted_linear(x, frozen.up_weight, up_A, up_B, frozen.up_scaling)
    return adapted_linear(swiglu(gate, up), frozen.down_weight, down_A, down_B, frozen.down_scaling)


def random(*shape: int, dtype=torch.float32, device="cpu", seed=0, scale=1.0) -> Tensor:
    """Gaussian, and the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def relative_error(got: Tensor, truth: Tensor) -> float:
    """||got - truth|| / ||truth||, in float64; NaN or inf anywhere counts as infinite."""
    got, truth = got.double(), truth.double()
    assert got.shape == truth.shape, f"{list(got.shape)} is not {list(truth.shape)}"
    if got.numel() == 0:
        return 0.0
    error = torch.linalg.vector_norm(got - truth) / torch.linalg.vector_norm(truth)
    return error.item() if error.isfinite() else float("inf")


def assert_within_budget(name: str, fused: Tensor, eager: Tensor, truth: Tensor) -> None:
    """The fused error is at most BUDGET times the error eager makes in the same dtype."""
    fused_error, eager_error = relative_error(fused, truth), relative_error(eager, truth)
    # eager can be exact by chance on a handful of elements: one rounding is always due, which is
    # off by eps / 5 in the mean (eps / (2 sqrt 3) where a binade begins, half that where it ends)
    allowed = BUDGET * max(eager_error, torch.finfo(eager.dtype).eps / 5)
    assert fused_error <= allowed, (
        f"{name}: relative error {fused_error:.2e}, eager {eager_error:.2e}, allowed {allowed:.2e}"
    )


def use_poisoned_memory(monkeypatch):
    """New memory, as it may be at its worst."""

    def poisoned(allocate):
        def allocate_and_fill(*size, **options):
            new = allocate(*size, **options)
            if new.is_floating_point():
                new.detach().fill_(torch.nan)
            return new

        return allocate_and_fill

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def checkpointed(function, kind: str):
    """`function` under PyTorch's own checkpointing, of one of the CHECKPOINTS."""
    once = partial(checkpoint, function, use_reentrant=kind == "reentrant")
    return partial(checkpoint, once, use_reentrant=False) if kind == "nested" else once
