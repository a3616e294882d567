"""The causal convolution of a mixer, where `test_contract.py` does not look."""

import pytest
import torch
from contract import OPERATIONS, assert_right

from fused_lora.functions.causal_conv import Conv, causal_conv

CONV = OPERATIONS["causal_conv"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv": Conv((2, 2, 8))}, r"x is \[2, 5, 11\], should be \[\.\.\., positions, 12\]"),
        ({"conv": Conv((0, 2, 9))}, "sizes are .* should be one to three, 1 or more each"),
        (
            {"conv": Conv((11,), seq_idx=torch.zeros(2, 5))},
            r"seq_idx is \[2, 5\] torch.float32, should be contiguous \[2, 5\] torch.int32",
        ),
        ({"weight": torch.ones(11, 9)}, r"weight is \[11, 9\], should be \[11, 1 to 8\]"),
        ({"weight": torch.ones(10, 4)}, r"weight is \[10, 4\], should be \[11, 1 to 8\]"),
        ({"bias": torch.ones(10)}, r"bias is \[10\], should be \[11\]"),
        ({"x": torch.ones(2, 5, 11).double()}, "computes in bfloat16, float16 or float32"),
        ({"weight": torch.ones(11, 4, device="meta")}, "weight is on meta and x on"),
    ],
)
def test_operands_that_do_not_fit_are_a_value_error(changes, message, device):
    inputs = CONV.case(device).inputs
    with pytest.raises(ValueError, match=f"^causal_conv:? {message}"):
        causal_conv(**inputs | changes)


def test_a_token_is_independent_of_those_behind_it_and_of_other_sequences(device):
    inputs = CONV.case(device, shape=(2, 37, 9)).inputs
    changed = inputs["x"].clone()
    changed[0, 20:] = torch.nan
    before, after = (causal_conv(**inputs | {"x": x}) for x in (inputs["x"], changed))
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[1], other[1]) and torch.equal(one[0, :20], other[0, :20])
        assert other[0, 20:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_at_real_sizes_it_is_right(dtype, device):
    assert_right(CONV, CONV.case(device, dtype, shape=(2, 515, 8192)))
