"""An MLP with adapters to try LoRA_MLP on."""

from cases.reference import random

from fused_mlp import FrozenMLP

HIDDEN, INTERMEDIATE = 52, 139  # multiples of nothing


def mlp(
    dtype, device, *, r=(8, 8, 8), adapter_dtype=None, hidden=HIDDEN, intermediate=INTERMEDIATE
):
    """Six adapters, no B zero, and three frozen weights with three different scales."""
    sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    adapters, weights = [], []
    for seed, (rank, (rows, columns)) in enumerate(zip(r, sizes, strict=True)):
        options = {"dtype": adapter_dtype or dtype, "device": device}
        adapters.append(random(rank, columns, seed=10 + seed, scale=columns**-0.5, **options))
        adapters.append(random(rows, rank, seed=20 + seed, scale=max(rank, 1) ** -0.5, **options))
        options["dtype"] = dtype
        weights.append(random(rows, columns, seed=30 + seed, scale=columns**-0.5, **options))
    return adapters, FrozenMLP(*weights, 2.0, 0.5, 1.5)


def tokens(*shape, dtype, device):
    """x and an incoming gradient."""
    return [random(*shape, HIDDEN, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
