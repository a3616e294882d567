"""Dropout masks: that they are random, and what kernels do with them, compared with PyTorch using
the same masks. test_launchers.py checks what every launcher promises."""

from functools import cache

import pytest
import test_sums_over_tokens as sums
import torch
from cases.operands import DTYPES
from cases.reference import mask_of, random, unpacked

from fused_lora.kernels import sums_over_tokens as sums_module
from fused_lora.kernels.dropped_products import dropped_gradient, dropped_products
from fused_lora.kernels.sums_over_tokens import sums_over_tokens
from fused_lora.kernels.swiglu_products_backward import Product
from fused_lora.kernels.tiling import Tiling
from fused_mlp.dropout import add_dropped, draw_masks, draw_seed, drop, kept_share


def seed_of(number, device):
    return torch.tensor([number], device=device)


# --- chance ---------------------------------------------------------------------------------------

ROWS, COLUMNS = 2048, 256
NUMBER = ROWS * COLUMNS


@cache
def kept(device, dropout=0.05, **options):
    """Return [ROWS, COLUMNS] of 0.0 and 1.0."""
    mask = mask_of(ROWS, COLUMNS, device, dropout, **options)
    return (unpacked(mask, ROWS) != 0).double()


@pytest.mark.slow("0.05")
@pytest.mark.parametrize("dropout", [0.05, 0.1, 0.5, 0.37, 0.999, 1e-3])
def test_as_many_are_dropped_as_should_be_and_the_mean_is_kept(dropout, device):
    """Allow five standard deviations of a binomial distribution."""
    mask = mask_of(ROWS, COLUMNS, device, dropout)
    values = unpacked(mask, ROWS)
    share = (values == 0).double().mean().item()
    deviation = (dropout * (1 - dropout) / NUMBER) ** 0.5
    assert abs(share - dropout) < 5 * deviation + 2**-17
    assert {*values.unique().tolist()} == {0.0, mask.scale}
    # of the masks drawn, which makes the mean exact
    assert mask.scale == pytest.approx(2**16 / kept_share(dropout), rel=1e-12)
    assert abs(values.mean().item() - 1) < 5 * mask.scale * deviation


@pytest.mark.parametrize("dropout", [0.05, 0.5])
@pytest.mark.parametrize("dim", [0, 1], ids=["columns", "rows"])
def test_sums_of_rows_and_columns_vary_as_those_of_independent_elements(dim, dropout, device):
    found = kept(device, dropout)
    number = found.shape[dim]
    squares = (found.sum(dim) - number * (1 - dropout)) ** 2 / (number * dropout * (1 - dropout))
    assert abs(squares.mean().item() - 1) < 5 * (2 / len(squares)) ** 0.5


OTHERS = {  # each mask is independent of the first
    "another projection": {"stream": 1},
    "a later projection": {"stream": 6},
    "another seed": {"seed": 6},
    "a seed of other high bits": {"seed": 5 + 2**32},
}
NEIGHBOURS = {"row": (1, 0), "column": (0, 1), "both": (1, 1), "word": (32, 0),
              "word's next": (32, 1), "third row": (3, 0)}  # fmt: skip


@pytest.mark.slow("0.5")
@pytest.mark.parametrize("dropout", [0.05, 0.5])
def test_masks_are_independent_of_each_other_and_neighbours_too(dropout, device):
    found = kept(device, dropout)
    pairs = {name: (found, kept(device, dropout, **options)) for name, options in OTHERS.items()}
    for name, (down, right) in NEIGHBOURS.items():
        pairs[name] = found[down:, right:], found[: ROWS - down, : COLUMNS - right]
    for name, (one, other) in pairs.items():
        correlation = ((one - 1 + dropout) * (other - 1 + dropout)).mean() / dropout / (1 - dropout)
        assert abs(correlation.item()) < 5 * one.numel() ** -0.5, name


def test_a_seed_and_a_projection_decide_and_torch_draws_the_seed(device):
    one, other = (mask_of(39, 139, device) for _ in range(2))
    assert torch.equal(one.bits, other.bits) and one.scale == other.scale
    seeds = []
    for number in (0, 0, 1):
        torch.manual_seed(number)
        seeds.append(draw_seed(torch.device(device)))
    assert seeds[0].dtype == torch.int64 and seeds[0].shape == (1,)
    assert seeds[0] == seeds[1] != seeds[2]


def test_something_is_kept_at_any_dropout(device):
    assert mask_of(39, 139, device, 1 - 2**-18).scale == 2**16


@pytest.mark.parametrize("dropout", [0.0, 2**-18])
def test_what_drops_less_than_one_of_131_072_is_no_dropout(dropout, device):
    seed = seed_of(0, device)
    assert draw_masks("it", seed, [dropout], [5], [3]) is None
    masks = draw_masks("it", seed, [dropout, 0.5], [5, 5], [3, 3])
    assert masks[0] is None and masks[1] is not None


@pytest.mark.parametrize(
    ("seed", "dropout", "message"),
    [
        (None, 0.5, "^it: there is dropout, and the seed is none, should be one int64"),
        (torch.zeros(2, dtype=torch.int64), 0.5, r"the seed is \[2\] torch.int64"),
        (torch.zeros(1), 0.5, r"the seed is \[1\] torch.float32"),
        (torch.zeros(1, dtype=torch.int64), 1.0, "^it: dropout is 1.0, should be at least 0 and"),
        (torch.zeros(1, dtype=torch.int64), -0.1, "^it: dropout is -0.1"),
    ],
)
def test_what_is_no_dropout_or_no_seed_is_a_value_error(seed, dropout, message, device):
    seed = None if seed is None else seed.to(device)
    with pytest.raises(ValueError, match=message):
        draw_masks("it", seed, [dropout], [5], [3])


# --- applying the masks ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(39, 139), (1, 1), (64, 128), (33, 5)])
def test_an_element_is_scaled_or_dropped_and_rounded_once(shape, dtype, device):
    x, total = (random(*shape, seed=seed, dtype=dtype, device=device) for seed in (1, 2))
    mask = mask_of(*shape, device)
    exact = x.double() * unpacked(mask, shape[0])
    for laid_out in (x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, : shape[1]]):
        torch.testing.assert_close(drop(laid_out, mask), exact.to(dtype), rtol=2e-7, atol=0)
        added = add_dropped(total.clone(), laid_out, mask)
        want = (total.float() + exact.float()).to(dtype)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(added, want, rtol=eps, atol=4 * eps)


# rows, columns, width of A's rows, ranks, and the dropout of each
CASES = {
    "odd": (39, 139, 24, (8, 8, 3), (0.3, 0.0, 0.5)),
    "one row": (1, 52, 16, (12,), (0.5,)),
    "one column": (3, 1, 8, (8,), (0.5,)),
    "whole tiles": (64, 256, 64, (32, 32), (0.05, 0.05)),
    "more than a block and a launch": (39, 52, 176, (72, 0, 8, 8, 70, 16), (0.3,) * 6),
}


def masks_for(size, device):
    rows, columns, _, ranks, dropouts = CASES[size]
    shapes = [rows] * len(ranks), [columns] * len(ranks)
    return draw_masks("masks", seed_of(7, device), dropouts, *shapes)


def make(size, dtype, device):
    rows, columns, width, ranks, _ = CASES[size]
    x = random(rows, columns, seed=1, dtype=dtype, device=device)
    A = random(width, columns, seed=2, dtype=dtype, device=device)
    A[sum(ranks) :] = 0
    p = random(rows, width, seed=3, dtype=dtype, device=device)
    return x, A, p


def fused(size, case, layout=torch.clone):
    """Return z, and the term added to dx."""
    x, A, p = case
    ranks, masks = CASES[size][3], masks_for(size, x.device.type)
    masks = masks or [None] * len(ranks)
    z, total = (layout(torch.full_like(t, 7.0)) for t in (p, x))
    A = layout(A)
    dropped_products(layout(x), A, ranks, masks, z)
    dropped_gradient(layout(p), A, ranks, masks, total)
    return z, total


def eager(size, case):
    x, A, p = case
    ranks, masks = CASES[size][3], masks_for(size, x.device.type)
    z, total, row = torch.zeros_like(p), torch.zeros_like(x), 0
    for rank, mask in zip(ranks, masks or (), strict=False):
        some = slice(row, row + rank)
        factor = 1.0 if mask is None else unpacked(mask, len(x))
        z[:, some] = (x * factor).to(x.dtype) @ A[some].t()
        total = total + ((p[:, some] @ A[some]) * factor).to(x.dtype)
        row += rank
    return z, total


@pytest.mark.slow("16-torch.bfloat16")
@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [16, 32])
def test_sums_over_tokens_with_masks_are_those_of_masked_tensors(rows, dtype, device, monkeypatch):
    """Compare bit by bit. A tile holds half of a word's rows, or all."""
    for name in ("TILING", "TILING_OF_MASKED", "TILING_IN_FP32"):
        monkeypatch.setattr(sums_module, name, Tiling(rows, 32, 2, 4, 2))
    x = random(100, 139, seed=1, dtype=dtype, device=device)
    factors = random(100, 96, seed=2, dtype=dtype, device=device).split((8, 72, 8, 8), dim=1)
    masks = [None] + [mask_of(100, 139, device, stream=i) for i in range(3)]
    kept = [x if m is None else torch.where(unpacked(m, 100) != 0, x, 0.0) for m in masks]
    results = []
    for masked in (True, False):
        gradients = [torch.empty(139, f.shape[1], dtype=dtype, device=device) for f in factors]
        if masked:
            products = list(map(Product, factors, gradients, (1.0, 2.0, 1.0, 1.0), masks))
            sums_over_tokens([(x, products), (x, [])])
        else:
            scales = [
                scaling * (m.scale if m else 1.0)
                for scaling, m in zip((1.0, 2.0, 1.0, 1.0), masks, strict=True)
            ]
            for one, *product in zip(kept, factors, gradients, scales, strict=True):
                sums_over_tokens([(one, [Product(*product)])])
        results.append(gradients)
    sums.assert_equal(*results)
