"""RoPE against eager PyTorch in float64: values and layouts."""

import pytest
import torch
import torch.nn.functional as F
from reference import assert_within_budget, random
from rope_case import NAMES, SIZES, angles, assert_equal, assert_right, double, eager, make, run
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

import fused_lora.rope as module
from fused_lora.rope import rope
from fused_mlp.launching import DTYPES


@pytest.fixture
def case(device):
    return make(dtype=torch.bfloat16, device=device)


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
