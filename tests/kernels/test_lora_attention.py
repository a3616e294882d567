"""LoRA_Attention, its output and gradients, against eager PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F
from attention_case import assert_all_within_budget, assert_equal
from layer_case import LAYOUTS
from lora_attention_case import (
    DTYPES,
    FP32,
    IN,
    NAMES,
    OUT,
    assert_right,
    eager,
    exact,
    fused,
    make,
    run,
)
from reference import relative_error

from fused_lora.lora_linear import LoRA_QKV, LoRA_W
from fused_lora.rope import rope

# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [(8, 8, 8, 8), (1, 12, 32, 3)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradients_are_within_the_error_budget(dtype, bias, r, device):
    assert_right(*make(dtype=dtype, bias=bias, r=r, device=device))


HEADS = {
    "MHA": {"kv_heads": 4},
    "MQA of 3 heads": {"heads": 3, "kv_heads": 1, "head_dim": 10},
    "tiles of our own attention": {"head_dim": 32},
}


@pytest.mark.parametrize("positions", [1, 9, 70])
@pytest.mark.parametrize("name", HEADS)
def test_any_heads_and_positions(name, positions, device):
    assert_right(*make(positions=positions, device=device, **HEADS[name]))


@pytest.mark.parametrize("name", HEADS)
def test_a_mask_is_taken(name, device):
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool, device=device).tril()
    mask[1, :, 3:, :2] = False
    assert_right(*make(mask=mask, device=device, **HEADS[name]))


def test_angles_may_be_each_sequences_own_and_of_another_dtype(device):
    (x, cos, sin, *rest), grad = make(device=device)
    cos, sin = (torch.cat((t, t.flip(1))).float() for t in (cos, sin))
    assert_right([x, cos, sin, *rest], grad)


def test_no_sequences_give_an_empty_output_and_gradients_of_zero(device):
    inputs, grad = make(batch=0, device=device)
    got = run(fused, inputs, grad)
    assert got["output"].shape == (0, 9, OUT) and got["x"].shape == (0, 9, IN)
    for name, adapter in zip(NAMES, inputs[4:-1], strict=True):
        assert torch.equal(got[name], torch.zeros_like(adapter))


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_of_x_and_of_the_gradient(name, device):
    inputs, grad = make(device=device)
    assert_right(inputs, grad, LAYOUTS[name])
    assert_right(inputs, LAYOUTS[name](grad))


def test_repetition_is_bitwise_equal(device):
    case = make(device=device, head_dim=32)
    assert_equal(run(fused, *case), run(fused, *case))


def test_it_is_what_its_parts_compute_one_after_the_other(device):
    """In fp32, where what rounds between them is too small to tell."""

    def parts(x, cos, sin, mask, *operands):
        *adapters, frozen = operands
        q, k, v = (
            t.unflatten(-1, (-1, frozen.head_dim)).transpose(1, 2)
            for t in LoRA_QKV.apply(x, *adapters[:6], frozen.qkv)
        )
        q, k = rope(q, k, cos, sin)
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=True, scale=frozen.scaling, enable_gqa=True
        )
        return LoRA_W.apply(attended.transpose(1, 2).flatten(2), *adapters[6:], frozen.o)

    case = make(dtype=torch.float32, device=device)
    got, want = run(fused, *case), run(parts, *case)
    assert all(relative_error(got[name], want[name]) < 1e-5 for name in want)


# --- dtypes and autocast --------------------------------------------------------------------------


@pytest.mark.parametrize("adapter_dtypes", [(torch.bfloat16,) * 8, FP32], ids=("bf16", "fp32"))
@pytest.mark.parametrize("frozen_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_is_right_and_gives_dtypes_as_eager_does(
    dtype, frozen_dtype, adapter_dtypes, device
):
    options = {"dtype": dtype, "frozen_dtype": frozen_dtype, "adapter_dtypes": adapter_dtypes}
    case = make(device=device, **options)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = run(fused, *case), run(eager, *case)
    assert got["output"].dtype == torch.bfloat16
    assert_all_within_budget(got, want, exact(*case))


def test_a_mask_to_add_in_fp32_is_taken_under_autocast(device):
    """As a model in fp32 has it, while q, k and v are bf16."""
    mask = torch.full((2, 1, 9, 9), -30.0, device=device).triu(1)
    mask[1, :, 3:, :2] = -30.0
    case = make(dtype=torch.float32, mask=mask, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = run(fused, *case), run(eager, *case)
    assert_all_within_budget(got, want, exact(*case))


def test_autocast_around_backward_alone_changes_nothing(device):
    inputs, grad = make(dtype=torch.float32, device=device)
    leaves = [t.requires_grad_() for t in (inputs[0], *inputs[4:-1])]
    want = torch.autograd.grad(fused(*inputs), leaves, grad)
    output = fused(*inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = torch.autograd.grad(output, leaves, grad)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


# --- what does not fit ----------------------------------------------------------------------------


def of_frozen(part, **changes):
    def change(inputs):
        frozen = inputs[-1]
        changed = {key: f(getattr(getattr(frozen, part), key)) for key, f in changes.items()}
        inputs[-1] = frozen._replace(**{part: getattr(frozen, part)._replace(**changed)})

    return change


def of_input(index, function):
    def change(inputs):
        inputs[index] = function(inputs[index])

    return change


ERRORS = {
    r"x is \[2, 9, 51\], its last dimension should be 52": of_input(0, lambda t: t[..., 1:]),
    r"x is \[9, 52\], should be \[batch, positions, in\]": of_input(0, lambda t: t[0]),
    "cos or sin requires a gradient": of_input(2, lambda t: t.requires_grad_()),
    r"7 adapter tensors given, should be 8: A and B of q, k, v and o": lambda i: i.pop(4),
    r"k_A is \[8, 52\] and k_B \[52, 7\]": of_input(7, lambda t: t[:, 1:]),
    r"o_A is \[8, 103\] and o_B \[44, 8\], should be \[r, 104\]": of_input(10, lambda t: t[:, 1:]),
    r"o_weight is \[44, 103\], should be \[44, 104\]": of_frozen("o", weight=lambda t: t[:, 1:]),
    r"v_weight requires a gradient": of_frozen("qkv", v_weight=lambda t: t.requires_grad_()),
    r"o_bias is torch.float16 and x torch.bfloat16": of_frozen("o", bias=lambda t: t.half()),
    r"q, k and v have 104, 52 and 52 features, should be heads of 24": (
        of_input(-1, lambda frozen: frozen._replace(head_dim=24))
    ),
    r"\[q \| k \| v\] is \[18, 208\], should be": (
        lambda inputs: [of_input(i, lambda t: t[..., :24])(inputs) for i in (1, 2)]
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_what_does_not_fit_is_a_value_error(message, device):
    inputs, _ = make(device=device)
    ERRORS[message](inputs)
    with pytest.raises(ValueError, match=message):
        fused(*inputs)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [64, 100, 130, 600])
def test_every_backend_of_a_gpu_is_right(positions, device):
    assert_right(*make(positions=positions, head_dim=64, device=device))
