"""The change that a small adapter makes, relative to its change in float64: 1 is right.

An adapter's delta of 3e-4 is far below bf16's step of 4e-3 to 8e-3 for the numbers we add it to. So
each output either stays or jumps a whole step. If we add base, adapter and residual in fp32 and
round once, the right share of outputs jumps.
"""

import pytest
import torch
from cases.reference import random, unpacked

from fused_lora.functions.lora_linear import FrozenLayers, FrozenLinear, LoRA_W
from fused_lora.kernels.fp8_rows import codes_and_scales
from fused_lora.kernels.magnitudes import ColumnScale, scale_columns
from fused_lora.layer.buffer import Activation, Buffer, Dropout
from fused_lora.layer.fp8.buffer import Fp8Buffer
from fused_lora.layer.residual import Norm
from fused_mlp.dropout import draw_masks

# 128 columns: Hopper sums this many FP8 values before it adds them in fp32, so borders stay apart
ROWS, IN, OUT, RANK = 512, 128, 128, 8
DELTA = 3e-4
BF16 = torch.bfloat16


class Case:
    """x [rows, in], a frozen weight [out, in], its adapter, whose B can be 0, and a residual."""

    def __init__(self, device, fp8, drops):
        self.x = random(ROWS, IN, dtype=BF16, device=device)
        self.gate_up = random(ROWS, 2 * IN, seed=1, dtype=BF16, device=device)
        self.weight = random(OUT, IN, seed=2, scale=IN**-0.5, dtype=BF16, device=device)
        self.A = random(RANK, IN, seed=3, scale=IN**-0.5, dtype=BF16, device=device)
        self.B = random(OUT, RANK, seed=4, scale=DELTA * RANK**-0.5, dtype=BF16, device=device)
        self.residual = random(ROWS, OUT, seed=5, dtype=BF16, device=device)
        self.dropout, self.kept = None, 1.0
        if drops:
            seed = torch.tensor([5], device=device)
            masks = draw_masks("test", seed, (0.25,), [ROWS], [IN])
            self.dropout = Dropout(masks, (RANK,))
            self.kept = unpacked(masks[0], ROWS).double()
        self.fp8 = fp8

    def buffer(self, B):
        if self.fp8:
            codes, scales = codes_and_scales(self.weight)
            buffer = Fp8Buffer(codes, scales, None, RANK, BF16)
        else:
            matrix = self.weight.new_zeros(OUT + RANK, IN + RANK)
            buffer = Buffer(matrix, None, OUT, IN)
            buffer.weight.copy_(self.weight)
        buffer.A.copy_(self.A)
        buffer.sB.copy_(B)
        buffer.encode([buffer])
        return buffer

    def share(self, output, adapted):
        """Return the output's change when B goes from 0 to B, projected on the exact change for an
        adapter that reads `adapted`."""
        changed = (output(self.B).double() - output(torch.zeros_like(self.B)).double()).flatten()
        exact = (
            (adapted.double() * self.kept) @ self.A.double().t() @ self.B.double().t()
        ).flatten()
        return (changed @ exact / (exact @ exact)).item()


def output_projection(case):
    def output(B):
        total = case.residual.clone()
        buffer = case.buffer(B)
        buffer.add_projected(case.x, None, total, total, None, 1.0, case.dropout)
        return total

    return case.share(output, case.x)


def down_projection(case):
    gate, up = case.gate_up.double().chunk(2, 1)

    def output(B):
        total = case.residual.clone()
        buffer = case.buffer(B)
        buffer.add_swiglu(case.gate_up, total, total, None, 1.0, Activation(), case.dropout)
        return total

    return case.share(output, torch.nn.functional.silu(gate) * up)


def behind_a_norm(case):
    """Return projections that read a norm: q, k and v, or gate and up."""
    norm = Norm(torch.ones(IN, dtype=BF16, device=case.x.device), 1e-6)
    n = case.x.double() / case.x.double().square().mean(1, keepdim=True).add(1e-6).sqrt()
    return case.share(
        lambda B: case.buffer(B).project_norm(case.x, norm, None, case.dropout, None)[0], n
    )


@pytest.mark.slow(
    "output_projection-FP8-dropout",
    "output_projection-bf16-",
    "down_projection-bf16-",
    "down_projection-FP8-dropout",
    "behind_a_norm-bf16-",
)
@pytest.mark.parametrize("drops", [False, True], ids=("", "dropout"))
@pytest.mark.parametrize("fp8", [False, True], ids=("bf16", "FP8"))
@pytest.mark.parametrize("place", [output_projection, down_projection, behind_a_norm])
def test_whole_layers_show_all_of_a_small_adapter(place, fp8, drops, device):
    assert 0.9 < place(Case(device, fp8, drops)) < 1.1


def test_a_part_alone_shows_less_of_it_and_never_more(device):
    """Do as PEFT does: round the matmul before adding the adapter."""
    case = Case(device, False, False)

    def output(B):
        frozen = FrozenLayers((FrozenLinear(case.weight, None, 1.0),))
        return LoRA_W.apply(case.x, case.A, B, frozen)[0]

    assert 0.0 <= case.share(output, case.x) < 0.5


def scaled(case, place):
    """Return the share of the change that factors of 1 + DELTA make where they were 1, as where
    training begins. A bf16 number times that rounds to itself."""
    buffer, norm = case.buffer(case.B), Norm(torch.ones(IN, dtype=BF16, device=case.x.device), 1e-6)

    def scale(factor, columns):
        factors = torch.full((columns,), factor, device=case.x.device)
        return ColumnScale(factors, factors, None)

    def output(factor):
        given, y = torch.empty(ROWS, OUT, device=case.x.device), torch.empty_like(case.residual)
        if place == "down":
            y.copy_(case.residual)
            activation = Activation("silu", scale(factor, 2 * IN))
            buffer.add_swiglu(case.gate_up, y, y, None, 1.0, activation, None)
            return y.double()
        if place == "o":
            buffer.add_projected(case.x, None, None, given, None, 1.0, None)
        else:
            given, *_ = buffer.project_norm(case.x, norm, None, None, None, in_fp32=True)
        residual = case.residual if place == "o" else None
        scale_columns(given, scale(factor, OUT), y, torch.empty_like(y), residual)
        return y.double()

    together = (case.weight.double() + case.B.double() @ case.A.double()).t()
    gate, up = case.gate_up.double().chunk(2, 1)
    inputs = {
        "v": case.x.double() * case.x.double().square().mean(1, keepdim=True).add(1e-6).rsqrt(),
        "o": case.x.double(),
        # the slope of the factors of both
        "down": torch.func.jvp(
            lambda c: torch.nn.functional.silu(c * gate) * c * up,
            *[(torch.ones((), dtype=gate.dtype, device=gate.device),)] * 2,
        )[1],
    }
    exact = (inputs[place] @ together * DELTA).flatten()
    changed = (output(1.0 + DELTA) - output(1.0)).flatten()
    return (changed @ exact / (exact @ exact)).item()


@pytest.mark.parametrize("place", ["v", "o", "down"])
def test_whole_layers_show_all_of_a_small_change_of_magnitudes(place, device):
    assert 0.9 < scaled(Case(device, False, False), place) < 1.1
