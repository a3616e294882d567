"""Eager PyTorch, as plain as it can be written: the oracles that the fused code is held against.

Given float64 tensors these are the truth; given bf16 tensors they are eager bf16, whose own error
against the truth is the budget that a fused kernel gets (`assert_within_budget`).
"""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fused_mlp.dropout import Mask, draw_masks

ADAPTER_NAMES = ("gate_A", "gate_B", "up_A", "up_B", "down_A", "down_B")
BUDGET = 2.0
DRAWS = 24
CHECKPOINTS = ("reentrant", "non-reentrant", "nested")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


GATED = {"silu": swiglu, "gelu_tanh": geglu}


def unpacked(mask: Mask, rows: int) -> Tensor:
    """A mask's factors [rows, columns]: 0, or its scale."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.bits.device)[None, :, None]
    kept = (mask.bits[:, None, :] >> bits) & 1
    return kept.flatten(0, 1)[:rows].double() * mask.scale


def mask_of(rows: int, columns: int, device, dropout=0.3, stream=0, seed=5) -> Mask:
    dropouts = [0.0] * stream + [dropout]
    sizes = [rows] * len(dropouts), [columns] * len(dropouts)
    masks = draw_masks("mask_of", torch.tensor([seed], device=device), dropouts, *sizes)
    assert masks is not None and masks[stream] is not None
    return masks[stream]


def dropped(x: Tensor, dropout: float) -> Tensor:
    """x [rows, columns] after dropout with `mask_of` it."""
    if not dropout:
        return x
    return (x * unpacked(mask_of(*x.shape, x.device, dropout), len(x))).to(x.dtype)


def masked(x: Tensor, dropout: float, seed: Tensor | None, stream: int) -> Tensor:
    """x after the dropout of a function's projection: what nn.Dropout does, with that mask."""
    rows = x.reshape(-1, x.shape[-1])
    dropouts = [dropout if i == stream else 0.0 for i in range(8)]
    masks = draw_masks("masked", seed, dropouts, [len(rows)] * 8, [x.shape[-1]] * 8)
    if masks is None:
        return x
    return (x * unpacked(masks[stream], len(rows)).view(x.shape)).to(x.dtype)


def masks_drawn(*dropouts: float | None) -> list[tuple[float, int]]:
    """The dropout and the stream of each projection's mask: of None those of the one before."""
    found: list[tuple[float, int]] = []
    for stream, dropout in enumerate(dropouts):
        found.append(found[-1] if dropout is None else (dropout, stream))
    return found


def adapted_linear(
    x: Tensor, weight: Tensor, A: Tensor, B: Tensor, scaling: float, bias=None, *dropout
) -> Tensor:
    """As PEFT computes it, its casts for adapters of another dtype than x included. dropout: as
    `masked` takes it."""
    result = F.linear(x, weight, bias)
    x = x.to(A.dtype)
    z = F.linear(masked(x, *dropout) if dropout else x, A)
    return (result + F.linear(z, B) * scaling).to(result.dtype)


def lora_mlp(x, gate_A, gate_B, up_A, up_B, down_A, down_B, *rest) -> Tensor:
    *biases, f = rest
    gate_bias, up_bias, down_bias = (
        None if bias is None else bias.to(f.gate_weight.dtype) for bias in biases or [None] * 3
    )
    gate_drawn, up_drawn, down_drawn = (
        (dropout, f.seed, stream)
        for dropout, stream in masks_drawn(f.gate_dropout, f.up_dropout, f.down_dropout)
    )
    gate = adapted_linear(x, f.gate_weight, gate_A, gate_B, f.gate_scaling, gate_bias, *gate_drawn)
    up = adapted_linear(x, f.up_weight, up_A, up_B, f.up_scaling, up_bias, *up_drawn)
    hidden = GATED[f.activation](gate, up)
    return adapted_linear(
        hidden, f.down_weight, down_A, down_B, f.down_scaling, down_bias, *down_drawn
    )


def _seed() -> int:
    return int(os.environ.get("TEST_SEED", "0"))


def seeded(seed: int) -> torch.Generator:
    """Return the generator of a test's inputs. Another TEST_SEED draws others."""
    return torch.Generator().manual_seed(seed + 1000 * _seed())


def random(*shape: int, dtype=torch.float32, device="cpu", seed=0, scale=1.0) -> Tensor:
    """Gaussian, and the same numbers on every device."""
    return (torch.randn(shape, generator=seeded(seed)) * scale).to(device, dtype)


def relative_error(got: Tensor, truth: Tensor) -> float:
    """||got - truth|| / ||truth||, in float64; NaN or inf anywhere counts as infinite."""
    assert got.shape == truth.shape, f"{list(got.shape)} is not {list(truth.shape)}"
    if not truth.to(got.dtype).any():  # zeros, or empty
        return math.inf if got.any() else 0.0
    got, truth = got.double(), truth.double()
    error = torch.linalg.vector_norm(got - truth) / torch.linalg.vector_norm(truth)
    return error.item() if error.isfinite() else math.inf


_pool: dict[str, list[tuple[float, float]]] | None = None  # while `over_draws` draws


def assert_at_most(error: float, allowed: float, name: str) -> None:
    """Check an error, or leave it to `over_draws`."""
    if _pool is not None:
        _pool.setdefault(name, []).append((error, allowed))
        return
    if (file := os.environ.get("SHARES")) and error > 0:  # for dev/hosts.py
        test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
        with Path(file).open("a") as lines:
            lines.write(f"{error / allowed if allowed else math.inf}\t{test}\t{name}\n")
    is_right = error <= allowed and error < math.inf
    assert is_right, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


def assert_near(got: Tensor, want: Tensor, most: float, name: str = "result") -> None:
    assert_at_most(relative_error(got, want), most, name)


def assert_within_budget(name: str, fused: Tensor, eager: Tensor, truth: Tensor) -> None:
    """The fused error is at most BUDGET times the error eager makes in the same dtype, and what
    one more rounding in fp32 may cost.

    Both add up in fp32, whatever the dtype, eager in an order that the host's BLAS chooses. That
    order moves eager's own error, and so the bound (attention in fp32: from 9.5e-7 to 1.1e-6). One
    rounding to nearest moves every element by at most eps / 2 of itself, and so by that the norm of
    them all: 6e-8, which only a result in fp32 notices. Where there are few elements, or few
    numbers that decide them, all this is luck: take `over_draws`.
    """
    # eager can be exact by chance on a handful of elements: one rounding is always due, which is
    # off by eps / 5 in the mean (eps / (2 sqrt 3) where a binade begins, half that where it ends)
    due = torch.finfo(eager.dtype).eps / 5
    allowed = BUDGET * max(relative_error(eager, truth), due) + torch.finfo(torch.float32).eps / 2
    assert_at_most(relative_error(fused, truth), allowed, name)


def over_draws(check: Callable[[], None], first: int = 3) -> int:
    """Run `check` on several inputs, and return on how many. Of each name, the root mean square of
    its errors is at most that of what is allowed.

    In one draw, how far rounding moves a small gradient from the truth is luck, for eager and fused
    alike, and the host's BLAS draws the lot. Over three draws of ten tokens in fp32, one gradient
    of a fused layer was 3.3 times as far off as eager's, over 24 as far. If the `first` draws are
    over their bounds, all DRAWS decide.
    """
    pool: dict[str, list[tuple[float, float]]] = {}
    for draw in range(DRAWS):
        seed = patch.dict(os.environ, TEST_SEED=str(_seed() + draw))
        with seed, patch(f"{__name__}._pool", pool):
            check()
        means = {
            name: [math.hypot(*one) / len(found) ** 0.5 for one in zip(*found, strict=True)]
            for name, found in pool.items()
        }
        if draw + 1 == first and all(error <= allowed for error, allowed in means.values()):
            break
    assert means
    for name, (error, allowed) in means.items():
        assert_at_most(error, allowed, f"{name} of {draw + 1} draws")
    return draw + 1


def assert_as_one_within_budget(fused, eager, truth) -> None:
    """Pool the errors of all results, where each alone is luck even over many draws."""
    assert fused.keys() == eager.keys() == truth.keys() and len(truth) > 1
    for name in truth:
        assert_within_budget("all results", fused[name], eager[name], truth[name])


def use_poisoned_memory(monkeypatch) -> list[Tensor]:
    """New memory, as it may be at its worst. Returns what lies behind each piece of it, as poisoned
    (`is_poison`), which nobody may write."""
    behind = []

    def poisoned(allocate):
        def allocated(*size, **options):
            new = allocate(*size, **options)
            length, poison = new.numel(), torch.nan if new.is_floating_point() else 77
            memory = torch.full((length + 2048,), poison, dtype=new.dtype, device=new.device)
            behind.append(memory[length:])
            with torch.no_grad():  # it may be made to require a gradient
                return new.set_(memory.untyped_storage(), 0, new.shape, new.stride())

        return allocated

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(Tensor, name, poisoned(getattr(Tensor, name)))
    return behind


def is_poison(memory: Tensor) -> bool:
    return bool((memory.isnan() if memory.is_floating_point() else memory == 77).all())


def checkpointed(function, kind: str):
    """`function` under PyTorch's own checkpointing, of one of the CHECKPOINTS."""
    once = partial(checkpoint, function, use_reentrant=kind == "reentrant")
    return partial(checkpoint, once, use_reentrant=False) if kind == "nested" else once
