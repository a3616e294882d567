"""LoRA_Attention's heads, positions, masks and angles, against eager PyTorch in float64."""

import pytest
import torch
from cases.lora_attention_case import NAMES, make
from cases.operands import BF16, FP32, Case
from contract import OPERATIONS, assert_right, run

ATTENTION = OPERATIONS["LoRA_Attention"]
HEADS = {
    "MHA": {"kv_heads": 4},
    "MQA of 3 heads": {"heads": 3, "kv_heads": 1, "head_dim": 10},
    "our own kernels' tiles": {"head_dim": 32},
}


def case_of(device, positions=9, **options):
    inputs, gradient = make(positions=positions, device=device, **options)
    names = ("x", "cos", "sin", "mask", *NAMES, "frozen")
    return Case(dict(zip(names, inputs, strict=True)), [gradient])


def test_a_mask_is_taken(device):
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool, device=device).tril()
    mask[1, :, 3:, :2] = False
    assert_right(ATTENTION, case_of(device, mask=mask, **HEADS["MQA of 3 heads"]))


def test_a_mask_to_add_in_fp32_is_taken_under_autocast(device):
    """Pass the mask of an fp32 model while q, k and v are bf16."""
    mask = torch.full((2, 1, 9, 9), -30.0, device=device).triu(1)
    mask[1, :, 3:, :2] = -30.0
    case = case_of(device, dtype=FP32, mask=mask)
    with torch.autocast(device, dtype=BF16):
        got, eager = run(ATTENTION, case), run(ATTENTION, case, ATTENTION.eager)
    assert_right(ATTENTION, case, got, eager)


def test_angles_may_be_each_sequences_own_and_of_another_dtype(device):
    case = case_of(device)
    for name in ("cos", "sin"):
        t = case.inputs[name]
        case.inputs[name] = torch.cat((t, t.flip(1))).float()
    assert_right(ATTENTION, case)


@pytest.mark.parametrize("norms", [False, True, "together"])
@pytest.mark.parametrize("heads", ["MQA of 3 heads", "our own kernels' tiles"])
def test_q_and_k_need_not_be_rotated(heads, norms, device):
    case = case_of(device, norms=norms, **HEADS[heads])
    case.inputs.update(cos=None, sin=None)
    assert_right(ATTENTION, case)


@pytest.mark.slow("MHA")
@pytest.mark.parametrize("heads", HEADS)
def test_all_heads_may_be_normed_together(heads, device):
    assert_right(ATTENTION, case_of(device, norms="together", **HEADS[heads]))


@pytest.mark.slow("19")
@pytest.mark.parametrize("positions", [19, 70])
def test_sinks_and_a_window(positions, device):
    case = case_of(device, positions, window=6, **HEADS["our own kernels' tiles"])
    assert_right(ATTENTION, case)
    case.inputs["frozen"].sinks.requires_grad_()
    with pytest.raises(ValueError, match="sinks require a gradient, which they would not get"):
        run(ATTENTION, case)


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [64, 100, 130, 600])
def test_every_backend_of_a_gpu_is_right(positions, device):
    assert_right(ATTENTION, case_of(device, positions, head_dim=64))
