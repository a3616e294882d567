"""RoPE: everything that test_contract.py does not cover."""

import pytest
import torch
from cases.counting import saved_tensors
from cases.operands import Case
from cases.reference import assert_within_budget, random
from cases.rope_case import angles
from contract import OPERATIONS, leaves_of, run, truth_of, with_layout

from fused_lora.functions.rope import rope

ROPE = OPERATIONS["rope"]
ROTATED = ("q", "k", "gradient 0", "gradient 1")


@pytest.fixture
def case(device):
    return ROPE.case(device, shape="GQA")


# --- values ---------------------------------------------------------------------------------------


def test_k_may_have_no_heads(case):
    leaves = leaves_of(ROPE, case)
    q, k, cos, sin, _ = leaves.values()
    (want, _), (got, none) = rope(q, k, cos, sin), rope(q, q[:, :0], cos, sin)
    assert torch.equal(got, want) and none.shape == q[:, :0].shape
    gradients = [torch.autograd.grad(one, q, case.gradients[0])[0] for one in (want, got)]
    assert torch.equal(*gradients)


# --- autograd -------------------------------------------------------------------------------------


def test_cos_and_sin_are_all_that_is_saved(case):
    leaves = leaves_of(ROPE, case)
    with saved_tensors() as saved:
        outputs = rope(*leaves.values())
    assert len(saved) == 2 and saved[0] is leaves["cos"] and saved[1] is leaves["sin"]
    del outputs  # they held them


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda q: q[0], r"q is \[6, 5, 12\], should be \[batch, heads, seq, head_dim\]"),
        ("q", lambda q: q[..., 1:], r"q is \[2, 6, 5, 11\], .* head_dim even"),
        ("q", lambda q: q[..., :0], r"q is \[2, 6, 5, 0\], .* head_dim even"),
        ("q", lambda q: q[:, :0], r"q is \[2, 0, 5, 12\], should be \[batch, heads, seq"),
        ("k", lambda k: k[0], r"k is \[2, 5, 12\], should be \[2, kv_heads, 5, 12\]"),
        ("k", lambda k: k[:1], r"k is \[1, 2, 5, 12\], should be \[2, kv_heads, 5, 12\]"),
        ("k", lambda k: k[:, :, 1:], r"k is \[2, 2, 4, 12\], should be \[2, kv_heads, 5, 12\]"),
        ("k", lambda k: k.half(), r"k is torch.float16 on .* and q torch.bfloat16"),
        ("k", lambda k: k.to("meta"), r"k is torch.bfloat16 on meta and q torch.bfloat16"),
        ("cos", lambda t: t.repeat(1, 1, 2), r"cos is \[1, 5, 24\], .*or less than 12"),
        ("cos", lambda t: t[..., :5], r"cos has 5 angles, should have 2 of each pair"),
        ("sin", lambda t: t[..., :6], r"sin is \[1, 5, 6\] and cos \[1, 5, 12\]"),
        ("cos", lambda t: t[:, 1:], r"cos is \[1, 4, 12\], should be \[1 or 2, 5, 12\]"),
        ("sin", lambda t: t.repeat(3, 1, 1), r"sin is \[3, 5, 12\], should be \[1 or 2, 5"),
        ("sin", lambda t: t.repeat(2, 1, 1), r"sin is \[2, 5, 12\] and cos \[1, 5, 12\]"),
        ("cos", lambda t: t.double(), r"cos is torch.float64 .* should be bfloat16, float16"),
        ("sin", lambda t: t.to("meta"), r"sin is torch.bfloat16 on meta, should be"),
        ("cos", lambda t: t.requires_grad_(), r"cos requires a gradient.* detach it"),
        ("sin", lambda t: t.requires_grad_(), r"sin requires a gradient.* detach it"),
    ],
)
def test_inputs_that_do_not_fit_are_a_value_error(name, change, message, case):
    with pytest.raises(ValueError, match=f"^rope: {message}"):
        rope(**{**case.inputs, name: change(case.inputs[name])})


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("layout", ["by token", "by head"])
def test_more_than_2_to_the_31_elements(layout, device):
    """Repeat a few tokens: eager PyTorch on just those gives the reference."""
    heads, positions, head_dim, pattern = 16, 1_050_000, 128, 64
    assert heads * positions * head_dim > 2**31
    # q, its gradients and results, twice while we make them
    if torch.cuda.mem_get_info()[0] < 8 * 2 * heads * positions * head_dim:
        pytest.skip("needs 35 GB of free GPU memory")
    options = {"dtype": torch.bfloat16, "device": device}
    q, grad_q = (random(1, heads, pattern, head_dim, seed=seed, **options) for seed in (0, 2))
    k, grad_k = (random(1, 1, pattern, head_dim, seed=seed, **options) for seed in (1, 3))
    cos, sin = angles(1, pattern, head_dim, **options)
    few = Case({"q": q, "k": k, "cos": cos, "sin": sin}, [grad_q, grad_k])
    which = torch.arange(positions, device=device) % pattern

    def often(t):
        if layout == "by head":
            return t[:, :, which]
        return t.transpose(1, 2)[:, which].transpose(1, 2)

    many = with_layout(with_layout(few, ROTATED, often), ("cos", "sin"), lambda t: t[:, which])
    assert many.inputs["q"].is_contiguous() == (layout == "by head")
    got = run(ROPE, many)
    del many
    budget, truth = run(ROPE, few, ROPE.eager), truth_of(ROPE, few)
    over = 2**31 // (heads * head_dim)
    for name, result in got.items():
        for window in (slice(0, 256), slice(over - 256, over + 256), slice(-256, None)):
            rows = which[window]
            few_rows = budget[name][:, :, rows], truth[name][:, :, rows]
            assert_within_budget(name, result[:, :, window], *few_rows)
