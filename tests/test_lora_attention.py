"""LoRA_Attention, its output and gradients, against eager PyTorch in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_case import Calls, adapted_linear, assert_all_within_budget, assert_equal, doubled
from reference import random, relative_error
from torch.utils.checkpoint import checkpoint

from fused_lora.attention import FrozenLinear, FrozenQKV, LoRA_QKV, LoRA_W
from fused_lora.lora_attention import FrozenAttention, LoRA_Attention
from fused_lora.recompute import recomputed
from fused_lora.rope import rope

fused = LoRA_Attention.apply
IN, OUT = 52, 44  # multiples of nothing that a tile is
NAMES = ["q_A", "q_B", "k_A", "k_B", "v_A", "v_B", "o_A", "o_B"]
FP32 = (torch.float32,) * 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make(
    batch=2, positions=9, *, device, heads=4, kv_heads=2, head_dim=26, dtype=torch.bfloat16,
    r=(8, 8, 8, 8), bias=True, adapter_dtypes=None, frozen_dtype=None, mask=None,
):  # fmt: skip
    """x, cos, sin, mask, eight adapters (no B zero) and what is frozen; and a gradient."""
    options = {"dtype": frozen_dtype or dtype, "device": device}
    wide, narrow = heads * head_dim, kv_heads * head_dim
    sizes = [(IN, wide), (IN, narrow), (IN, narrow), (wide, OUT)]
    adapters, layers = [], []
    for i, ((inputs, out), rank) in enumerate(zip(sizes, r, strict=True)):
        of_A, of_B = (adapter_dtypes or (dtype,) * 8)[2 * i : 2 * i + 2]
        # scores of one unit: with larger ones rounding decides a token here and there
        small = 0.5 if i < 2 else 1.0
        scale = small * inputs**-0.5
        adapters.append(random(rank, inputs, seed=10 + i, scale=scale, device=device, dtype=of_A))
        scale = small * rank**-0.5
        adapters.append(random(out, rank, seed=20 + i, scale=scale, device=device, dtype=of_B))
        weight = random(out, inputs, seed=30 + i, scale=small * inputs**-0.5, **options)
        one_bias = random(out, seed=40 + i, scale=small, **options) if bias else None
        layers.append(FrozenLinear(weight, one_bias, (2.0, 0.5, 1.5, 0.75)[i]))
    weights, biases, scalings = zip(*layers[:3], strict=True)
    frozen = FrozenAttention(
        FrozenQKV(*weights, *biases, *scalings), layers[3], head_dim, head_dim**-0.5
    )
    angle = random(1, positions, head_dim // 2, seed=7, scale=3.0, device=device).repeat(1, 1, 2)
    x = random(batch, positions, IN, seed=1, device=device, dtype=dtype)
    grad = random(batch, positions, OUT, seed=2, device=device, dtype=dtype)
    return [x, angle.cos().to(dtype), angle.sin().to(dtype), mask, *adapters, frozen], grad


def eager(x, cos, sin, mask, q_A, q_B, k_A, k_B, v_A, v_B, o_A, o_B, frozen):
    qkv, o = frozen.qkv, frozen.o

    def heads_of(weight, bias, A, B, scaling):
        features = adapted_linear(x, weight, bias, A, B, scaling)
        return features.unflatten(-1, (-1, frozen.head_dim)).transpose(1, 2)

    q = heads_of(qkv.q_weight, qkv.q_bias, q_A, q_B, qkv.q_scaling)
    k = heads_of(qkv.k_weight, qkv.k_bias, k_A, k_B, qkv.k_scaling)
    v = heads_of(qkv.v_weight, qkv.v_bias, v_A, v_B, qkv.v_scaling)

    def turned(t):
        one, other = t.chunk(2, dim=-1)
        turned = t * cos.unsqueeze(1) + torch.cat((-other, one), -1) * sin.unsqueeze(1)
        return turned.to(t.dtype)

    q, k = turned(q), turned(k)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    is_causal = mask is None and q.shape[2] > 1
    attended = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=frozen.scaling
    )
    attended = attended.transpose(1, 2).flatten(2)
    return adapted_linear(attended, o.weight, o.bias, o_A, o_B, o.scaling)


def run(function, inputs, grad, layout=None):
    """The output and every gradient by name; `layout` makes another view of x in the graph."""
    x, cos, sin, mask, *adapters, frozen = inputs
    leaves = [t.detach().clone().requires_grad_() for t in (x, *adapters)]
    x, *adapters = leaves
    output = function(x if layout is None else layout(x), cos, sin, mask, *adapters, frozen)
    output.backward(grad.to(output.dtype))
    gradients = (leaf.grad for leaf in leaves)
    return {"output": output.detach(), **dict(zip(["x", *NAMES], gradients, strict=True))}


def exact(inputs, grad, layout=None):
    *tensors, frozen = inputs
    frozen = frozen._replace(
        qkv=FrozenQKV(*doubled(*frozen.qkv)), o=FrozenLinear(*doubled(*frozen.o))
    )
    tensors = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
    return run(eager, [*tensors, frozen], grad.double(), layout)


def assert_right(inputs, grad, layout=None):
    got, want = run(fused, inputs, grad, layout), run(eager, inputs, grad, layout)
    truth = exact(inputs, grad, layout)
    # of one value, however often, scores do not matter: q and k get what rounding left
    size = truth["v_A"].norm()
    for name in [n for n in truth if n[0] in "qk" and truth[n].norm() < 1e-9 * size]:
        assert got.pop(name).double().norm() < torch.finfo(torch.bfloat16).eps * size
        del want[name], truth[name]
    assert_all_within_budget(got, want, truth)


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


LAYOUTS = {
    "tokens apart": lambda t: torch.repeat_interleave(t, 2, dim=1)[:, ::2],
    "features apart": lambda t: torch.repeat_interleave(t, 2, dim=2)[..., ::2],
    "sequences last": lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "one for all": lambda t: t[:, :1].expand(t.shape),
}


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


def test_autocast_around_backward_alone_changes_nothing(device):
    inputs, grad = make(dtype=torch.float32, device=device)
    leaves = [t.requires_grad_() for t in (inputs[0], *inputs[4:-1])]
    want = torch.autograd.grad(fused(*inputs), leaves, grad)
    output = fused(*inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = torch.autograd.grad(output, leaves, grad)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


# --- what autograd asks ---------------------------------------------------------------------------


@pytest.fixture
def case(device):
    """With our own attention's backward, which a GPU repeats bit for bit."""
    inputs, grad = make(device=device, head_dim=32)
    leaves = [t.requires_grad_() for t in (inputs[0], *inputs[4:-1])]
    return inputs, leaves, grad


def test_a_second_backward_through_a_retained_graph_is_bitwise_equal(case):
    inputs, leaves, grad = case
    output = fused(*inputs)
    first = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(output, leaves, grad)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_nothing_that_came_in_or_was_saved_is_written(case):
    inputs, _, grad = case
    frozen = inputs[-1]
    watched = [t for t in (*inputs[:-1], *frozen.qkv[:6], *frozen.o[:2], grad) if t is not None]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: watched.append(t) or t, lambda t: t):
        output = fused(*inputs)
    watched.append(output)
    before = [t.detach().clone() for t in watched]
    output.backward(grad)
    assert len(watched) > 30
    assert all(torch.equal(t, old) for t, old in zip(watched, before, strict=True))


def test_x_may_have_other_consumers_and_the_output_may_be_changed_in_place(device):
    def block(function):
        return lambda x, *rest: function(x, *rest).mul_(2).add_(x.sum(-1, keepdim=True))

    inputs, grad = make(device=device)
    truth = exact(inputs, grad)  # of the function itself, whose x the block uses once more
    got, want = run(block(fused), inputs, grad), run(block(eager), inputs, grad)
    beside = grad.double().sum(-1, keepdim=True)
    truth = {name: 2 * tensor for name, tensor in truth.items()}
    truth["x"] = truth["x"] + beside
    truth["output"] = truth["output"] + inputs[0].double().sum(-1, keepdim=True)
    assert_all_within_budget(got, want, truth)


@pytest.mark.parametrize("changed", ["x", "k_B", "o_A", "v_weight", "cos"])
def test_an_input_changed_in_place_before_backward_is_autograds_error(changed, case):
    inputs, _, grad = case
    inputs[0] = inputs[0] * 1
    output = fused(*inputs)
    tensors = {"x": inputs[0], "cos": inputs[1], "v_weight": inputs[-1].qkv.v_weight}
    tensors |= dict(zip(NAMES, inputs[4:-1], strict=True))
    with torch.no_grad():
        tensors[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(grad)


def test_only_what_asks_for_a_gradient_gets_one(case):
    inputs, leaves, grad = case
    want = dict(
        zip(map(id, leaves), torch.autograd.grad(fused(*inputs), leaves, grad), strict=True)
    )
    for trained in ([0], [1], [2, 3], [1, 3, 5], [7], [8], [7, 8], [0, 8], range(1, 9)):
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(index in trained)
        some = [leaves[index] for index in trained]
        got = torch.autograd.grad(fused(*inputs), some, grad)
        for leaf, gradient in zip(some, got, strict=True):
            assert gradient.dtype == leaf.dtype
            assert torch.equal(gradient, want[id(leaf)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same_and_nothing_is_saved(mode, case):
    inputs, _, _ = case
    want, saved = fused(*inputs), []
    with (
        mode(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        output = fused(inputs[0] * 1, *inputs[1:])
    assert not saved and torch.equal(output, want) and not output.requires_grad


def test_create_graph_is_an_error(case):
    inputs, leaves, grad = case
    with pytest.raises(RuntimeError, match="LoRA_Attention is not twice differentiable"):
        torch.autograd.grad(fused(*inputs), leaves, grad, create_graph=True)


# --- what runs and what is kept -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "products"), [(range(9), 16), (range(1, 9), 12), ([7], 2), ([8], 1)], ids=str
)
def test_no_product_is_made_for_what_wants_no_gradient(trained, products, case):
    inputs, leaves, grad = case
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in trained)
    with Calls() as forward:
        output = fused(*inputs)
    some = [leaves[index] for index in trained]
    with Calls() as backward:
        torch.autograd.grad(output, some, grad)
    assert forward.counted["GEMM"] == 10
    assert backward.counted["GEMM"] == products


def test_what_is_saved_is_what_the_docstring_counts(device):
    inputs, _ = make(device=device, head_dim=32)
    for tensor in (inputs[0], *inputs[4:-1]):
        tensor.requires_grad_()
    found = {}

    def pack(t):
        if t.shape[0] in (18, 2) and t.dim() > 1:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = fused(*inputs)
    assert output.requires_grad
    # x, z, [q | k | v], a and a Ao' of each token in bf16; of each of its heads a log-sum-exp
    assert sum(found.values()) == 18 * (2 * (IN + 24 + 8 * 32 + 4 * 32 + 8) + 4 * 4)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "ours"])
def test_checkpointed_gradients_are_bitwise_equal(kind, device):
    def checkpointed(*inputs):
        if kind == "ours":
            return recomputed(fused, *inputs)
        return checkpoint(fused, *inputs, use_reentrant=kind == "reentrant")

    case = make(device=device, head_dim=32)
    assert_equal(run(checkpointed, *case), run(fused, *case))


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


@pytest.mark.gpu
def test_a_captured_cuda_graph_is_right_on_new_data(device):
    inputs, grad = make(device=device, head_dim=32, adapter_dtypes=FP32)
    leaves = [t.requires_grad_() for t in (inputs[0], *inputs[4:-1])]

    def step():
        # the cache of casts outlives neither this block nor, so, the capture
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
            output = fused(*inputs)
        return output, *torch.autograd.grad(output, leaves, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for number, tensor in enumerate((*leaves, grad)):
            scale = tensor.float().std().item()
            tensor.copy_(random(*tensor.shape, seed=60 + number, scale=scale))
    graph.replay()
    got = dict(zip(["output", "x", *NAMES], (t.detach() for t in results), strict=True))
    now = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
    with torch.autocast(device, dtype=torch.bfloat16):
        want = run(eager, now, grad)
    assert_all_within_budget(got, want, exact(now, grad))
    assert math.isfinite(sum(t.float().sum().item() for t in got.values()))
