"""One decoder layer as an autograd function, against PEFT's own in float64."""

import pytest
import torch
from layer_case import (
    FAMILIES,
    LAYOUTS,
    assert_layer_right,
    layer_of,
    leaves,
    operands,
    pair,
    run,
    tokens,
)
from reference import relative_error

import fused_lora.decoder_layer as module
from fused_lora.adopt.layer import read_layer
from fused_lora.decoder_layer import DecoderLayer
from fused_lora.kernels.rows import Handover

FP32 = {"dtype": torch.float32}
BF16 = {"dtype": torch.bfloat16, "autocast_adapter_dtype": False}


@pytest.fixture
def calls(monkeypatch):
    """The operands of every call of DecoderLayer."""
    seen = []
    apply = DecoderLayer.apply
    monkeypatch.setattr(
        DecoderLayer, "apply", lambda *inputs: seen.append(inputs) or apply(*inputs)
    )
    return seen


def check(device, calls, shape=(2, 9), mask=None, layout=None, grad_layout=None, **options):
    fused, plain, done = pair(device, **options)
    assert not done.left
    dtype = options.get("dtype", torch.float32)
    layouts = {"layout": layout, "grad_layout": grad_layout}
    assert_layer_right(fused, plain, shape, dtype, mask=mask, **layouts)
    assert len(calls) == 3


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [FP32, BF16, {"dtype": torch.float16, "autocast_adapter_dtype": False},
     {"dtype": torch.bfloat16}],
    ids=("fp32", "bf16", "fp16", "bf16 with fp32 adapters"),
)  # fmt: skip
def test_output_and_gradients_are_within_the_error_budget(options, family, calls, device):
    check(device, calls, family=family, **options)


@pytest.mark.parametrize(
    "lora",
    [
        {"r": 1},
        {"r": 12},
        {"r": 40, "use_rslora": True},
        {"rank_pattern": {"q_proj": 3, "up_proj": 12, "down_proj": 1},
         "alpha_pattern": {"v_proj": 5}},
    ],
    ids=("1", "12", "40, rsLoRA", "each its own"),
)  # fmt: skip
@pytest.mark.parametrize("options", [FP32, BF16], ids=("fp32", "bf16"))
def test_any_rank_and_scale(options, lora, calls, device):
    check(device, calls, **options, **lora)


SHAPES = {
    "biases everywhere": {"family": "Llama", "config": {"attention_bias": True, "mlp_bias": True}},
    "MHA": {"config": {"num_key_value_heads": 2}},
    "MQA of 3 heads": {"config": {"num_attention_heads": 3, "head_dim": 16}},
    "attention wider than hidden": {"config": {"num_attention_heads": 6, "num_key_value_heads": 2}},
    "narrow MLP": {"config": {"intermediate_size": 17}},
}


@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_of_a_layer(name, calls, device):
    check(device, calls, **BF16, **SHAPES[name])


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7)])
def test_any_number_of_tokens(shape, calls, device):
    check(device, calls, shape=shape)


def test_no_sequences_give_empty_results_and_gradients_of_zero(device):
    fused, _, _ = pair(device)
    hidden, grad = tokens((0, 5), torch.float32, device)
    got = run(fused, hidden, grad)
    assert got["output"].shape == got["hidden"].shape == (0, 5, 52)
    adapters = [t for name, t in got.items() if ".lora_" in name]
    assert len(adapters) == 14 and not any(t.any() for t in adapters)


@pytest.mark.parametrize("options", [FP32, BF16], ids=("fp32", "bf16"))
def test_a_mask_is_taken(options, calls, device):
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool, device=device).tril()
    mask[1, :, 3:, :2] = False
    check(device, calls, mask=mask, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of", ["layout", "grad_layout"])
def test_any_layout_of_the_input_and_of_the_gradient(of, layout, calls, device):
    check(device, calls, **{of: LAYOUTS[layout]})


def test_repetition_is_bitwise_equal(device):
    fused, _, _ = pair(device, **BF16)
    case = tokens((2, 9), torch.bfloat16, device)
    one, other = run(fused, *case), run(fused, *case)
    assert all(torch.equal(one[name], other[name]) for name in one)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture
def attended(monkeypatch):
    """What every call of attention saved, and whose kernels it had."""
    seen = []
    forward = module.attention_forward

    def spy(*inputs):
        result = forward(*inputs)
        seen.append((len(result[1]), result[2].backend))
        return result

    monkeypatch.setattr(module, "attention_forward", spy)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_own_attention_is_within_the_error_budget(dtype, calls, attended, device):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("in fp32 PyTorch attends")
    options = BF16 if dtype == torch.bfloat16 else FP32
    check(device, calls, shape=(2, 33), config={"hidden_size": 128} | HEADS, **options)
    assert attended == [(1, None)] * 3  # the logsumexp alone


@pytest.mark.gpu
def test_on_a_gpu_attention_of_longer_ones_is_one_of_the_fast_two(calls, attended, device):
    check(device, calls, shape=(2, 70), config={"hidden_size": 128} | HEADS, **BF16)
    assert attended == [attended[0]] * 3 and attended[0][1] is not None


# --- what autograd asks ---------------------------------------------------------------------------


def test_a_second_backward_through_a_retained_graph_is_bitwise_equal(device):
    _, inputs, grad = operands(device, **BF16)
    output = DecoderLayer.apply(*inputs)
    first = torch.autograd.grad(output, leaves(inputs), grad, retain_graph=True)
    second = torch.autograd.grad(output, leaves(inputs), grad)
    assert len(first) == 15
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_nothing_that_came_in_or_was_saved_is_written(device):
    _, inputs, grad = operands(device)
    frozen = inputs[-1]
    watched = [t for t in inputs[:-1] if t is not None]
    watched += [frozen.input_norm, frozen.post_norm, grad]
    watched += [getattr(frozen, name).matrix for name in module.GROUPS]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = DecoderLayer.apply(*inputs)
    watched += saved
    before = [t.detach().clone() for t in watched]
    output.backward(grad)
    assert len(saved) >= 19
    assert all(torch.equal(t, old) for t, old in zip(watched, before, strict=True))


def test_the_output_may_be_changed_in_place(device):
    _, inputs, grad = operands(device)
    want = torch.autograd.grad(DecoderLayer.apply(*inputs), leaves(inputs), 2 * grad)
    got = torch.autograd.grad(DecoderLayer.apply(*inputs).mul_(2), leaves(inputs), grad)
    assert all(relative_error(*pair) < 1e-6 for pair in zip(got, want, strict=True))


def test_only_what_asks_for_a_gradient_gets_one(device):
    _, inputs, grad = operands(device)
    everything = leaves(inputs)
    want = dict(zip(map(id, everything), torch.autograd.grad(
        DecoderLayer.apply(*inputs), everything, grad), strict=True))  # fmt: skip
    every_A, every_B = range(4, 18, 2), range(5, 18, 2)
    for frozen in ([0], [4, 7], [5, 6, 10, 11, 13], [13, 14, 16], [0, *every_A], every_B):
        for index in (0, *range(4, 18)):
            inputs[index].requires_grad_(index not in frozen)
        some = leaves(inputs)
        got = torch.autograd.grad(DecoderLayer.apply(*inputs), some, grad)
        for leaf, gradient in zip(some, got, strict=True):
            assert gradient.dtype == leaf.dtype
            assert gradient.is_contiguous() or leaf is inputs[0]
            assert relative_error(gradient, want[id(leaf)]) < 1e-6


def test_no_product_is_made_for_the_gradient_of_an_input_that_wants_none(device, monkeypatch):
    _, inputs, grad = operands(device)
    made = []
    backward = module.grow_k_backward
    monkeypatch.setattr(
        module, "grow_k_backward", lambda *of: made.append(of[1].out) or backward(*of)
    )
    for needed in (True, False):
        inputs[0].requires_grad_(needed)
        DecoderLayer.apply(*inputs).backward(grad)
    assert made == [52, 278, 52, 104, 52, 278, 52]


@pytest.fixture
def taken(monkeypatch):
    """Whether rows were taken over, for each backward."""
    seen = []
    take = Handover.take

    def spy(self, *inputs):
        seen.append((rows := take(self, *inputs)) is not None)
        return rows

    monkeypatch.setattr(Handover, "take", spy)
    return seen


BETWEEN = {
    "nothing": (lambda x: x, True),
    "a hook that looks": (lambda x: x.register_hook(lambda grad: None) and x, True),
    "a hook that writes": (lambda x: x.register_hook(lambda grad: grad.mul_(2)) and x, True),
    "a hook that replaces": (lambda x: x.register_hook(lambda grad: 2 * grad) and x, False),
    "another consumer": (lambda x: x + torch.sin(x), False),
    "a view": (lambda x: x.view(x.shape), True),
    "fewer tokens": (lambda x: x[:, :5], False),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_rows_are_taken_over_only_where_they_are_the_gradient(between, taken, device):
    """Two layers, one after the other, and what autograd makes of it with a copy between them."""
    model, inputs, grad = operands(device)
    *adapters, frozen = read_layer(layer_of(model, 1))
    of_both = [*leaves(inputs), *adapters]
    function, is_taken = BETWEEN[between]

    def gradients(function, copies):
        hidden = function(DecoderLayer.apply(*inputs))
        positions = hidden.shape[1]
        angles = (t[:, :positions] for t in inputs[1:3])
        if copies:
            hidden = hidden * 1
        output = DecoderLayer.apply(hidden, *angles, None, *adapters, frozen)
        return torch.autograd.grad(output, of_both, grad[:, :positions])

    got = gradients(function, copies=False)
    # the first layer's last offer lies unused until another takes its place
    assert taken == [False, is_taken]
    frozen.borders.handover.take(grad, 0)
    want = gradients(function, copies=True)
    assert not taken[-1] and len(got) == 29
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_create_graph_is_an_error(device):
    _, inputs, grad = operands(device)
    output = DecoderLayer.apply(*inputs)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        torch.autograd.grad(output, inputs[0], grad, create_graph=True)


def test_without_its_output_a_layer_has_the_same_gradients(device):
    """As checkpointing runs it again; what it saves are as many tensors of the same shapes."""
    _, inputs, grad = operands(device)
    frozen = inputs.pop()
    results, shapes = [], []
    for needed in (True, False):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append((t.shape, t.dtype)) or t, lambda t: t
        ):
            output = DecoderLayer.apply(*inputs, frozen._replace(output_needed=needed))
        results.append(torch.autograd.grad(output, leaves([*inputs, None]), grad))
        shapes.append(saved)
        assert bool(output.any()) == needed
    assert shapes[0] == shapes[1]
    assert all(relative_error(*pair) < 1e-5 for pair in zip(*results, strict=True))


def test_the_norm_copies_the_residual_only_for_an_output(device, monkeypatch):
    copies = []
    function = module.residual_norm_forward

    def spy(*inputs, copy=None):
        copies.append(copy is not None)
        return function(*inputs, copy=copy)

    monkeypatch.setattr(module, "residual_norm_forward", spy)
    _, inputs, _ = operands(device)
    frozen = inputs.pop()
    for needed in (True, False):
        DecoderLayer.apply(*inputs, frozen._replace(output_needed=needed))
    assert copies == [False, True, False, False]


def test_what_is_saved_is_what_the_docstring_counts(device):
    """In bf16, by token: x, [n|zn], qkv, a, za, t, [m|zm], gu, zh and two fp32 rstd."""
    _, inputs, _ = operands(device, **BF16)
    known = {t.untyped_storage().data_ptr() for t in inputs[1:-1] if t is not None}
    known |= {
        getattr(inputs[-1], name).matrix.untyped_storage().data_ptr() for name in module.GROUPS
    }
    known |= {inputs[-1].input_norm.data_ptr(), inputs[-1].post_norm.data_ptr()}
    found = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = DecoderLayer.apply(*inputs)
    assert output.requires_grad
    # rows of [n|zn] and [m|zm], 52 + 24 and 52 + 16, are a multiple of 128 bytes apart
    elements = 52 + 128 + 104 + 52 + 8 + 52 + 128 + 278 + 8
    # on a GPU the log-sum-exp, if the backend saves it, and heads of 26 padded to 32, if it does
    beyond = [4 * 2 * 2 * 9, 18 * 2 * 2 * 6] if device == "cuda" else []
    total = sum(found.values()) - 18 * (2 * elements + 8)
    assert total in {0, sum(beyond), *beyond}


# --- what does not fit ----------------------------------------------------------------------------


def change(position, function):
    def changed(inputs):
        inputs[position] = function(inputs[position])

    return changed


BAD = {
    r"hidden is \[2, 9, 51\], should be \[batch, positions, 52\]": change(0, lambda t: t[..., :51]),
    r"hidden is \[9, 52\]": change(0, lambda t: t[0]),
    r"hidden is torch.float16, the buffers torch.float32": change(0, torch.Tensor.half),
    "cos or sin requires a gradient": change(1, lambda t: t.requires_grad_()),
    r"\[q \| k \| v\] is \[18, 104\], should be \[batch \* 9, 4 \* 24\]": (
        lambda inputs: [change(i, lambda t: t[..., :24])(inputs) for i in (1, 2)]
    ),
    "13 adapter tensors given, should be 14: A and B of q, k, v, o, gate": lambda i: i.pop(4),
    r"gate_up: A 1 is \[8, 51\] and B 1 \[139, 8\], should be \[r, 52\] and \[139, r\]": change(
        14, lambda t: t[:, :51]
    ),
    r"o: A 0 is \[16, 52\].* of one r up to 8": change(10, lambda t: torch.cat((t, t))),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_a_value_error(message, device):
    _, inputs, _ = operands(device)
    BAD[message](inputs)
    with pytest.raises(ValueError, match=message):
        DecoderLayer.apply(*inputs)


def test_autocast_to_another_dtype_is_a_value_error(device):
    _, inputs, _ = operands(device)
    with (
        torch.autocast(device, dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"computation torch.bfloat16: give all one dtype"),
    ):
        DecoderLayer.apply(*inputs)
