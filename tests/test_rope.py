"""RoPE against eager PyTorch in float64, and as a citizen of autograd."""

import pytest
import torch
import torch.nn.functional as F
import triton
from reference import assert_within_budget, random
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

import fused_lora.rope as module
from fused_lora.launching import DTYPES
from fused_lora.rope import RoPE, rope

NAMES = ("q_rotated", "k_rotated", "grad_q", "grad_k")
# batch, heads, kv_heads, positions, head_dim; sequences of cos and sin
SIZES = {
    "GQA": (2, 6, 2, 5, 12, 1),
    "MQA, angles of each sequence": (3, 3, 1, 4, 6, 3),
    "Qwen2.5-3B": (1, 16, 2, 3, 128, 1),
    "MHA": (2, 4, 4, 2, 64, 2),
    "more kv_heads than heads": (1, 1, 3, 2, 2, 1),
    "one token": (1, 2, 1, 1, 64, 1),
}


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def eager(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple((x * cos + rotate_half(x) * sin).to(x.dtype) for x in (q, k))


def angles(batch, positions, head_dim, *, dtype, device):
    """cos and sin as a model has them; every sequence of a batch begins somewhere else."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    starts = 7 * torch.arange(batch, dtype=torch.float64)[:, None] + 1
    turned = (starts + torch.arange(positions))[..., None] * frequencies
    turned = torch.cat((turned, turned), -1)
    return turned.cos().to(device, dtype), turned.sin().to(device, dtype)


def make(size="GQA", *, dtype, device, angle_dtype=None):
    """(q, k, cos, sin), (grad_q_rotated, grad_k_rotated); all contiguous."""
    batch, heads, kv_heads, positions, head_dim, angle_batch = SIZES[size]
    q, k, grad_q_rotated, grad_k_rotated = (
        random(batch, h, positions, head_dim, dtype=dtype, device=device, seed=seed)
        for seed, h in enumerate((heads, kv_heads, heads, kv_heads))
    )
    cos, sin = angles(angle_batch, positions, head_dim, dtype=angle_dtype or dtype, device=device)
    return (q, k, cos, sin), (grad_q_rotated, grad_k_rotated)


@pytest.fixture
def case(device):
    return make(dtype=torch.bfloat16, device=device)


def run(function, inputs, gradients):
    """q_rotated, k_rotated, grad_q, grad_k. q and k keep their layout, as do the gradients."""
    q, k = (t.detach().requires_grad_() for t in inputs[:2])
    rotated = function(q, k, *inputs[2:])
    return *(t.detach() for t in rotated), *torch.autograd.grad(rotated, (q, k), gradients)


def double(tensors):
    return [t.double() for t in tensors]


def assert_right(inputs, gradients, function=rope, oracle=eager):
    truth = run(oracle, double(inputs), double(gradients))
    got, budget = run(function, inputs, gradients), run(oracle, inputs, gradients)
    for row in zip(NAMES, got, budget, truth, strict=True):
        assert_within_budget(*row)


def assert_equal(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.fixture
def launches(monkeypatch):
    """The arguments of every launch, which does nothing."""
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: seen.append(arguments)

    monkeypatch.setattr(module, "_rope_kernel", Kernel())
    return seen


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_within_the_error_budget(dtype, size, device):
    assert_right(*make(size, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("angle_dtype", DTYPES, ids=str)
def test_cos_and_sin_may_have_another_dtype(angle_dtype, dtype, device):
    inputs, gradients = make(dtype=dtype, angle_dtype=angle_dtype, device=device)
    assert_right(inputs, gradients)
    assert all(t.dtype == dtype for t in run(rope, inputs, gradients))


def test_cos_and_sin_need_no_equal_halves(device):
    (q, k, *_), gradients = make(dtype=torch.float32, device=device)
    cos, sin = (random(1, 5, 12, device=device, seed=seed) for seed in (8, 9))
    assert_right((q, k, cos, sin), gradients)


def test_it_is_transformers_own(device):
    config = Qwen2Config(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    (q, k, *_), gradients = make("MQA, angles of each sequence", dtype=torch.float32, device=device)
    q, k, *gradients = (F.pad(t, (0, 2)) for t in (q, k, *gradients))  # head_dim 8 of this config
    positions = torch.tensor([[0, 1, 2, 3], [9, 8, 7, 6], [40, 50, 60, 32_000]], device=device)
    inputs = q, k, *Qwen2RotaryEmbedding(config).to(device)(q, positions)
    got, want = run(rope, inputs, gradients), run(apply_rotary_pos_emb, inputs, gradients)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("empty", [(0, 2, 1, 5, 12, 1), (2, 2, 1, 0, 12, 2), (0, 2, 1, 5, 12, 0)])
def test_no_tokens_launch_nothing_and_give_empty_results(empty, device, monkeypatch, launches):
    monkeypatch.setitem(SIZES, "empty", empty)
    inputs, gradients = make("empty", dtype=torch.bfloat16, device=device)
    for got, want in zip(run(rope, inputs, gradients), (*inputs[:2],) * 2, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert not launches


def test_repetition_is_bitwise_equal(case):
    assert_equal(run(rope, *case), run(rope, *case))


def test_autocast_changes_nothing(device):
    inputs, gradients = make(dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = run(rope, inputs, gradients)
    assert_equal(got, run(rope, inputs, gradients))


# --- layouts --------------------------------------------------------------------------------------


def by_token(t):
    """The view that a model makes of its projection's [batch, positions, heads * head_dim]."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def within_a_buffer(t):
    """A slice of a wider projection, as of q, k and v in one."""
    wide = by_token(torch.cat((t * 0, t, t), dim=1))
    return wide[:, t.shape[1] : 2 * t.shape[1]]


VIEWS = {
    "by token": by_token,
    "within a buffer": within_a_buffer,
    "every second sequence": lambda t: torch.repeat_interleave(t, 2, dim=0)[::2],
    "positions outermost": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "one head for all": lambda t: t[:, :1].expand(t.shape),
    "one position for all": lambda t: t[:, :, :1].expand(t.shape),
}
COPIED = {
    "features apart": lambda t: torch.repeat_interleave(t, 2, dim=-1)[..., ::2],
    "features first": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "one number for all": lambda t: t[:1, :1, :1, :1].expand(t.shape),
}
LAYOUTS = {**VIEWS, **COPIED}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", range(4), ids=("q", "k", "grad_q_rotated", "grad_k_rotated"))
def test_any_layout_gives_what_a_contiguous_one_does(position, layout, case):
    (q, k, *rest), gradients = case
    tensors = [q, k, *gradients]
    tensors[position] = LAYOUTS[layout](tensors[position])
    assert not tensors[position].is_contiguous()
    contiguous = [t.contiguous() for t in tensors]
    got = run(rope, (*tensors[:2], *rest), tensors[2:])
    assert_equal(got, run(rope, (*contiguous[:2], *rest), contiguous[2:]))


@pytest.mark.parametrize("batch", [1, 2])
def test_any_layout_of_cos_and_sin_gives_what_a_contiguous_one_does(batch, case):
    (q, k, *_), gradients = case
    cos, sin = angles(batch, 5, 12, dtype=torch.bfloat16, device=q.device)
    apart = torch.repeat_interleave(cos, 2, dim=-1)[..., ::2], sin.mT.contiguous().mT
    assert not any(t.is_contiguous() for t in apart)
    got = run(rope, (q, k, *apart), gradients)
    assert_equal(got, run(rope, (q, k, cos, sin), gradients))


@pytest.mark.parametrize("layout", VIEWS)
def test_one_launch_each_way_reads_strided_tensors_where_they_are(layout, case, launches):
    (q, k, cos, sin), gradients = case
    q, k, *gradients = (VIEWS[layout](t) for t in (q, k, *gradients))
    run(rope, (q, k, cos, sin), gradients)
    forward, backward = launches
    assert [t.data_ptr() for t in forward[:4]] == [t.data_ptr() for t in (q, k, cos, sin)]
    assert [t.data_ptr() for t in backward[:4]] == [t.data_ptr() for t in (*gradients, cos, sin)]


@pytest.mark.parametrize("layout", [by_token, torch.clone, COPIED["features first"]])
def test_results_are_new_and_lie_by_token(layout, case):
    (q, k, cos, sin), gradients = case
    q, k, *gradients = (layout(t) for t in (q, k, *gradients))
    results = run(rope, (q, k, cos, sin), gradients)
    for result, like in zip(results, (q, k, q, k), strict=True):
        assert (result.shape, result.dtype, result.device) == (like.shape, like.dtype, like.device)
        assert result.transpose(1, 2).is_contiguous()
    everything = (*results, q, k, cos, sin, *gradients)
    assert len({t.data_ptr() for t in everything}) == len(everything)


@pytest.mark.parametrize("size", ["GQA", "MQA, angles of each sequence"])
def test_the_kernel_writes_nothing_behind_the_last_element(size, device, monkeypatch):
    inputs, gradients = make(size, dtype=torch.float32, device=device)
    buffers = []

    def front_of_a_buffer(x):
        buffers.append(torch.full((x.numel() + 512,), 7.0, device=device))
        return buffers[-1][: x.numel()].view_as(x)

    monkeypatch.setattr(module, "_empty_by_token", front_of_a_buffer)
    run(rope, inputs, gradients)
    assert len(buffers) == 4
    for buffer in buffers:
        assert (buffer[:-512] != 7.0).all() and (buffer[-512:] == 7.0).all()


# --- autograd -------------------------------------------------------------------------------------


def test_nothing_that_came_in_is_written(case):
    everything = [t for tensors in case for t in tensors]
    before = [t.clone() for t in everything]
    run(rope, *case)
    assert_equal(everything, before)


def test_cos_and_sin_are_all_that_is_saved(case):
    (q, k, cos, sin), _ = case
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = rope(q.requires_grad_(), k, cos, sin)
    assert len(saved) == 2 and saved[0] is cos and saved[1] is sin
    del outputs  # they held them


def test_a_second_backward_through_a_retained_graph_gives_the_same(case):
    (q, k, cos, sin), gradients = case
    leaves = q.requires_grad_(), k.requires_grad_()
    outputs = rope(*leaves, cos, sin)
    first = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)
    assert_equal(torch.autograd.grad(outputs, leaves, gradients), first)


def test_differentiating_twice_is_a_clear_error(case):
    (q, k, cos, sin), gradients = case
    outputs = rope(q.requires_grad_(), k, cos, sin)
    with pytest.raises(RuntimeError, match="rope is not twice differentiable"):
        torch.autograd.grad(outputs, q, gradients, create_graph=True)


@pytest.mark.parametrize("used", [0, 1], ids=["q", "k"])
def test_an_output_that_nobody_uses_changes_nothing_for_the_other(used, case):
    (q, k, cos, sin), gradients = case
    want = run(rope, *case)[2 + used]
    leaves = q.requires_grad_(), k.requires_grad_()
    rope(*leaves, cos, sin)[used].backward(gradients[used])
    assert torch.equal(leaves[used].grad, want)
    assert not leaves[1 - used].grad.any()


@pytest.mark.parametrize("trained", [0, 1], ids=["q", "k"])
def test_q_or_k_alone_may_need_a_gradient(trained, case):
    (q, k, cos, sin), gradients = case
    want = run(rope, *case)[2 + trained]
    leaves = q, k
    leaves[trained].requires_grad_()
    torch.autograd.backward(rope(q, k, cos, sin), gradients)
    assert torch.equal(leaves[trained].grad, want) and leaves[1 - trained].grad is None


def test_inputs_and_incoming_gradients_may_have_other_consumers(device):
    # k is of q's shape: one gradient tensor reaches the rotation of both, and both sums
    inputs, gradients = make("MHA", dtype=torch.bfloat16, device=device)

    def with_residuals(function):
        def block(q, k, cos, sin):
            q_rotated, k_rotated = function(q, k, cos, sin)
            both = q_rotated + k_rotated + q + k
            return both, both * 2

        return block

    assert_right(inputs, gradients, with_residuals(rope), with_residuals(eager))


def test_outputs_may_be_changed_in_place(case):
    def scaled(*inputs):
        return [x.mul_(0.5) for x in rope(*inputs)]

    def eager_scaled(*inputs):
        return [x * 0.5 for x in eager(*inputs)]

    assert_right(*case, scaled, eager_scaled)


def test_an_angle_changed_in_place_before_backward_is_autograds_error(case):
    (q, k, cos, sin), gradients = case
    outputs = rope(q.requires_grad_(), k, cos, sin)
    cos.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, gradients)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_bitwise_equal(reentrant, case):
    def checkpointed(*inputs):
        return checkpoint(rope, *inputs, use_reentrant=reentrant)

    def backward(function):  # a reentrant checkpoint allows backward() alone
        (q, k, cos, sin), gradients = case
        leaves = [t.clone().requires_grad_() for t in (q, k)]
        outputs = function(*leaves, cos, sin)
        torch.autograd.backward(outputs, gradients)
        return *outputs, *(t.grad for t in leaves)

    assert_equal(backward(checkpointed), backward(rope))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_outputs_are_the_same(mode, case):
    (q, k, cos, sin), _ = case
    want = rope(q.requires_grad_(), k, cos, sin)
    with mode():
        got = rope(q, k, cos, sin)
    assert_equal(got, want)
    assert not any(t.requires_grad for t in got)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": lambda q: q[0]}, r"q is \[6, 5, 12\], should be \[batch, heads, seq, head_dim\]"),
        ({"q": lambda q: q[..., 1:]}, r"q is \[2, 6, 5, 11\], .* head_dim even"),
        ({"q": lambda q: q[..., :0]}, r"q is \[2, 6, 5, 0\], .* head_dim even"),
        ({"q": lambda q: q[:, :0]}, r"q is \[2, 0, 5, 12\], should be \[batch, heads, seq"),
        ({"k": lambda k: k[0]}, r"k is \[2, 5, 12\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k[:1]}, r"k is \[1, 2, 5, 12\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k[:, :, 1:]}, r"k is \[2, 2, 4, 12\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k[..., 2:]}, r"k is \[2, 2, 5, 10\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k[:, :0]}, r"k is \[2, 0, 5, 12\], should be \[2, kv_heads, 5, 12\]"),
        ({"k": lambda k: k.half()}, r"k is torch.float16 on .* and q torch.bfloat16"),
        ({"k": lambda k: k.to("meta")}, r"k is torch.bfloat16 on meta and q torch.bfloat16"),
        ({"cos": lambda t: t[..., :6]}, r"cos is \[1, 5, 6\], .*all of head_dim is rotated"),
        ({"sin": lambda t: t[..., :6]}, r"sin is \[1, 5, 6\], .*all of head_dim is rotated"),
        ({"cos": lambda t: t[0]}, r"cos is \[5, 12\], should be \[1 or 2, 5, 12\]"),
        ({"cos": lambda t: t[:, 1:]}, r"cos is \[1, 4, 12\], should be \[1 or 2, 5, 12\]"),
        ({"sin": lambda t: t.repeat(3, 1, 1)}, r"sin is \[3, 5, 12\], should be \[1 or 2, 5"),
        ({"sin": lambda t: t.repeat(2, 1, 1)}, r"sin is \[2, 5, 12\] and cos \[1, 5, 12\]"),
        ({"cos": lambda t: t.double()}, r"cos is torch.float64 .* should be bfloat16, float16"),
        ({"sin": lambda t: t.to("meta")}, r"sin is torch.bfloat16 on meta, should be"),
        ({"cos": lambda t: t.requires_grad_()}, r"cos requires a gradient.* detach it"),
        ({"sin": lambda t: t.requires_grad_()}, r"sin requires a gradient.* detach it"),
        (
            {"q": lambda q: q.double(), "k": lambda k: k.double()},
            r"rope computes in bfloat16, float16 or float32, got torch.float64",
        ),
    ],
)
def test_what_does_not_fit_is_a_value_error(changed, message, case):
    inputs = dict(zip(("q", "k", "cos", "sin"), case[0], strict=True))
    for name, change in changed.items():
        inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        rope(**inputs)


def test_cpu_tensors_without_the_interpreter_are_a_value_error(monkeypatch):
    compiled = triton.JITFunction(module._rope_kernel.fn)
    monkeypatch.setattr(module, "_rope_kernel", compiled)
    inputs, _ = make(dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match=r"rope got tensors on the CPU.*TRITON_INTERPRET=1"):
        RoPE.apply(*inputs)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_is_within_the_error_budget(dtype, device):
    compiled = torch.compile(lambda *inputs: rope(*inputs))
    assert_right(*make(dtype=dtype, device=device), compiled)


@pytest.mark.gpu
def test_a_second_gpu_is_right():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    assert_right(*make(dtype=torch.bfloat16, device="cuda:1"))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["by token", "by head"])
def test_more_than_2_to_the_31_elements(layout, device):
    """A few tokens over and over, so that eager PyTorch on those few says what is right."""
    heads, positions, head_dim, pattern = 16, 1_050_000, 128, 64
    assert heads * positions * head_dim > 2**31
    # q, its gradients and results, twice over while they are made
    if torch.cuda.mem_get_info()[0] < 8 * 2 * heads * positions * head_dim:
        pytest.skip("needs 35 GB of free GPU memory")
    which = torch.arange(positions, device=device) % pattern
    few_inputs, few_gradients = [], []
    for seed, (tensors, h) in enumerate(
        ((few_inputs, heads), (few_inputs, 1), (few_gradients, heads), (few_gradients, 1))
    ):
        options = {"dtype": torch.bfloat16, "device": device, "seed": seed}
        tensors.append(random(1, h, pattern, head_dim, **options))
    few_inputs += angles(1, pattern, head_dim, dtype=torch.bfloat16, device=device)

    def often(t):
        if t.ndim == 3:
            return t[:, which]
        if layout == "by head":
            return t[:, :, which]
        return t.transpose(1, 2)[:, which].transpose(1, 2)

    inputs, gradients = [often(t) for t in few_inputs], [often(t) for t in few_gradients]
    assert inputs[0].is_contiguous() == (layout == "by head")
    got = run(rope, inputs, gradients)
    del inputs, gradients
    budget = run(eager, few_inputs, few_gradients)
    truth = run(eager, double(few_inputs), double(few_gradients))
    over = 2**31 // (heads * head_dim)
    for name, many, *few in zip(NAMES, got, budget, truth, strict=True):
        for window in (slice(0, 256), slice(over - 256, over + 256), slice(-256, None)):
            rows = which[window]
            assert_within_budget(name, many[:, :, window], *(t[:, :, rows] for t in few))
