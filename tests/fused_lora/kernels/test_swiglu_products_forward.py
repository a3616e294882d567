"""SwiGLU's forward with the product of its output with A in it, against eager in float64."""

import pytest
import torch
from cases.reference import GATED, dropped, mask_of, random
from test_swiglu_products_backward import scale_of

from fused_lora.kernels import swiglu_products_forward as module
from fused_lora.kernels.magnitudes import ColumnScale
from fused_lora.kernels.swiglu_products_forward import forward_tiling, swiglu_forward_product
from fused_lora.kernels.tiling import Tiling
from fused_mlp.swiglu import swiglu_forward

# rows, intermediate, rank
CASES = {
    "odd": (39, 139, 8),
    "one row": (1, 52, 12),
    "one column": (3, 1, 8),
    "whole tiles": (64, 128, 32),
    "rank 1": (39, 20, 1),
    "more than a block": (39, 52, 136),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Split a few columns into several tiles and ranges, the last of each partial."""
    monkeypatch.setattr(module, "forward_tiling", lambda rows: Tiling(16, 32, 2, 4, 2))


def make(case, dtype, device):
    rows, intermediate, rank = CASES[case]
    gate_up = random(rows, 2 * intermediate, seed=1, scale=2.0, dtype=dtype, device=device)
    return gate_up, random(rank, intermediate, seed=2, dtype=dtype, device=device)


def empty(gate_up, *columns):
    return [torch.full((len(gate_up), n), 7.0, dtype=gate_up.dtype).to(gate_up) for n in columns]


def fused(gate_up, A, layout=torch.clone, activation="silu", dropout=0.0, has_scale=False):
    """Return z, hidden and z's copy."""
    hidden, copy = map(layout, empty(gate_up, *A.t().shape))
    mask = mask_of(*hidden.shape, hidden.device, dropout) if dropout else None
    scale = None
    if has_scale:
        factor, inverse_norm, bias = scale_of(gate_up)
        scale = ColumnScale(factor.float(), inverse_norm, bias)
    z = swiglu_forward_product(layout(gate_up), layout(A), hidden, copy, mask, activation, scale)
    return z, hidden, copy


def eager(gate_up, A, activation="silu", dropout=0.0, has_scale=False):
    if has_scale:
        factor, _, bias = scale_of(gate_up)
        gate_up = factor * gate_up + bias
    hidden = GATED[activation](*gate_up.chunk(2, dim=1))
    z = dropped(hidden, dropout) @ A.t()
    return z, hidden, z


@pytest.mark.parametrize("case", ["odd", "more than a block"])
def test_hidden_is_bitwise_that_of_the_plain_kernel_and_the_copy_is_z(case, device):
    operands = make(case, torch.bfloat16, device)
    z, hidden, copy = fused(*operands)
    assert torch.equal(hidden, swiglu_forward(*operands[0].chunk(2, dim=1)))
    assert torch.equal(z, copy)


@pytest.mark.parametrize("case", ["odd", "more than a block"])
def test_neither_hidden_nor_a_copy_has_to_be_written(case, device):
    gate_up, A = make(case, torch.bfloat16, device)
    assert torch.equal(swiglu_forward_product(gate_up, A, None), fused(gate_up, A)[0])


@pytest.mark.parametrize(("rows", "splits"), [(98_304, 1), (16_384, 1), (4_096, 4), (2_048, 8)])
def test_fewer_rows_are_as_many_programs(rows, splits):
    tiling = forward_tiling(rows)
    assert tiling.splits == splits and rows // tiling.rows * splits >= 512
