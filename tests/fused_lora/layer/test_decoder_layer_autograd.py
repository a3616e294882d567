"""One decoder layer as an autograd function: its behaviour under autograd, its errors, and weights
stored in other ways."""

import pytest
import torch
from cases.counting import saved_for_backward, saved_tensors
from cases.layer_case import BF16, in_a_call, layer_of, leaves, operands, operands_of
from cases.reference import assert_near
from cases.refusal import assert_refused, narrow, trained

from fused_lora.kernels.head_norms import HeadNorms
from fused_lora.kernels.rows import Handover
from fused_lora.layer import residual
from fused_lora.layer.buffer import Buffer
from fused_lora.layer.decoder_layer import DecoderLayer, Saved
from fused_lora.layer.filling import Adapter
from fused_lora.rerun import join, split

FEW = (1, 4)  # tokens, for tests that measure no error


def tensors_of(blocks):
    """Return the tensors that blocks read but do not train."""
    tensors, _ = split(blocks)
    return tensors + [group.buffer.matrix for block in blocks for group in block.frame.groups]


DORA = {"use_dora": True}


@pytest.mark.parametrize(
    ("family", "lora", "count"), [("Qwen2", {}, 15), ("Qwen3", {}, 15), ("Qwen2", DORA, 22)]
)
def test_a_second_backward_and_a_second_run_are_bitwise_equal_and_nothing_is_written(
    family, lora, count, device
):
    """Check that inputs and saved tensors keep their values."""
    _, inputs, grad = operands(device, FEW, family=family, **BF16, **lora)
    watched = [*leaves(inputs), grad, *tensors_of(inputs[-1])]
    with saved_tensors() as saved:
        output = DecoderLayer.apply(*inputs)
    watched += saved
    before = [t.detach().clone() for t in watched]
    first = torch.autograd.grad(output, leaves(inputs), grad, retain_graph=True)
    second = torch.autograd.grad(output, leaves(inputs), grad)
    assert len(saved) >= 19 and len(first) == count
    assert all(map(torch.equal, watched, before))
    again = DecoderLayer.apply(*inputs)
    others = torch.autograd.grad(again, leaves(inputs), grad)
    assert all(map(torch.equal, first, second)) and torch.equal(again, output)
    assert all(map(torch.equal, first, others))


def test_the_output_may_be_changed_in_place(device):
    _, inputs, grad = operands(device, FEW)
    want = torch.autograd.grad(DecoderLayer.apply(*inputs), leaves(inputs), 2 * grad)
    got = torch.autograd.grad(DecoderLayer.apply(*inputs).mul_(2), leaves(inputs), grad)
    for pair in zip(got, want, strict=True):
        assert_near(*pair, 1e-6)


def test_only_what_asks_for_a_gradient_gets_one(device):
    _, inputs, grad = operands(device, FEW)
    everything = leaves(inputs)
    want = dict(zip(map(id, everything), torch.autograd.grad(
        DecoderLayer.apply(*inputs), everything, grad), strict=True))  # fmt: skip
    every_A, every_B = range(3, 17, 2), range(4, 17, 2)
    for frozen in ([0], [3, 6], [4, 5, 9, 10, 12], [12, 13, 15], [0, *every_A], every_B):
        for index in (0, *range(3, 17)):
            inputs[index].requires_grad_(index not in frozen)
        some = leaves(inputs)
        got = torch.autograd.grad(DecoderLayer.apply(*inputs), some, grad)
        for leaf, gradient in zip(some, got, strict=True):
            assert gradient.dtype == leaf.dtype
            assert gradient.is_contiguous() or leaf is inputs[0]
            assert_near(gradient, want[id(leaf)], 1e-6)


def test_no_product_is_made_for_the_gradient_of_an_input_that_wants_none(device, monkeypatch):
    _, inputs, grad = operands(device, FEW)
    made = []
    gradient = Buffer.gradient
    monkeypatch.setattr(
        Buffer, "gradient", lambda self, *of: made.append(len(self.sB)) or gradient(self, *of)
    )
    for needed in (True, False):
        inputs[0].requires_grad_(needed)
        DecoderLayer.apply(*inputs).backward(grad)
    assert made == [52, 278, 52, 104, 52, 278, 52]


@pytest.fixture
def taken(monkeypatch):
    """Record, for each backward, whether it took over rows."""
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
    "fewer tokens": (lambda x: x[:, :2], False),
}


@pytest.mark.slow("nothing", "a hook that replaces")
@pytest.mark.parametrize("between", BETWEEN)
def test_rows_are_taken_over_only_where_they_are_the_gradient(between, taken, device):
    """Run two layers in a row, and compare with autograd's result with a copy between them."""
    model, inputs, grad = operands(device, FEW)
    *adapters, blocks = operands_of(layer_of(model, 1))
    angles = inputs[-1][0].cos, inputs[-1][0].sin
    differentiated = [*leaves(inputs), *adapters]
    function, is_taken = BETWEEN[between]

    def gradients(function, copies):
        hidden = function(DecoderLayer.apply(*inputs))
        positions = hidden.shape[1]
        now = in_a_call(blocks, *(t[:, :positions] for t in angles))
        if copies:
            hidden = hidden * 1
        output = DecoderLayer.apply(hidden, None, None, *adapters, now)
        return torch.autograd.grad(output, differentiated, grad[:, :positions])

    got = gradients(function, copies=False)
    # nobody takes the first layer's offer until the next one replaces it
    assert taken == [False, is_taken]
    blocks[1].frame.filling.handover.take(grad, 0)
    want = gradients(function, copies=True)
    assert not taken[-1] and len(got) == 29
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_create_graph_is_an_error(device):
    _, inputs, grad = operands(device, FEW)
    output = DecoderLayer.apply(*inputs)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        torch.autograd.grad(output, inputs[0], grad, create_graph=True)


@pytest.mark.parametrize(
    ("lora", "copied"), [({}, [True, True, True, False]), (DORA, [False] * 4)], ids=("", "DoRA")
)
def test_without_its_output_a_layer_has_the_same_gradients(lora, copied, device, monkeypatch):
    """Run a layer as checkpointing recomputes it. It saves as many tensors of the same shapes, and
    the norm copies the residual only for an output, and for a matmul that adds to it."""
    copies, function = [], residual.rms_norm_forward

    def spy(x, weight, eps, y, copy, zero_centered):
        copies.append(copy is not None)
        return function(x, weight, eps, y, copy, zero_centered)

    monkeypatch.setattr(residual, "rms_norm_forward", spy)
    _, inputs, grad = operands(device, FEW, **lora)
    attention, mlp = inputs.pop()
    results, shapes = [], []
    for needed in (True, False):
        with saved_tensors() as saved:
            blocks = attention, mlp._replace(output_needed=needed)
            output = DecoderLayer.apply(*inputs, blocks)
        results.append(torch.autograd.grad(output, leaves([*inputs, None]), grad))
        shapes.append([(t.shape, t.dtype) for t in saved])
        assert bool(output.any()) == needed
    assert shapes[0] == shapes[1]
    assert copies == copied  # the residuals that o and down add to
    for pair in zip(*results, strict=True):
        assert_near(*pair, 1e-5)


@pytest.mark.slow("Qwen2-0-0.0-False")
@pytest.mark.parametrize(
    ("family", "more", "dropout", "dora"),
    [("Qwen2", 0, 0.0, False), ("Qwen2", 0, 0.3, False), ("Qwen3", 104, 0.0, False),
     ("Olmo2", 104 + 2 * 52, 0.3, False), ("Qwen2", 104 + 2 * 52, 0.0, True)],
)  # fmt: skip
def test_what_is_saved_is_what_the_docstring_counts(family, more, dropout, dora, device):
    """Count the bf16 elements per token: x, [n|zn], qkv, a, za, t, [m|zm], gu and zh, and two fp32
    rstd. With norms of q and k, raw qkv adds another copy. With norms of outputs, the outputs of o
    and down are saved too. Dropout adds one bit per element of each projection's input, in words of
    32 tokens. Magnitudes add q, k, v and the outputs of o and down before a pass has scaled them,
    and two fp32 for each output feature."""
    config = {"pad_token_id": 0}
    lora = {"lora_dropout": dropout, "use_dora": dora}
    _, inputs, _ = operands(device, family=family, config=config, **BF16, **lora)
    known = [*leaves(inputs)[1:], *tensors_of(inputs[-1])]
    with saved_for_backward() as saved:
        output = DecoderLayer.apply(*inputs)
    assert output.requires_grad
    for tensor in known:
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    # rows of [n|zn] and [m|zm], 52 + 24 and 52 + 16, are padded to a multiple of 128 bytes
    elements = 52 + 128 + 104 + more + 52 + 8 + 52 + 128 + 278 + 8
    # on a GPU the backend may save the log-sum-exp, and pad heads of 26 to 32
    beyond = [4 * 2 * 2 * 9, 18 * 2 * 2 * 6] if device == "cuda" else []
    bits = 4 * (6 * 52 + 139) if dropout else 2 * 4 * (104 + 52 + 278 + 52) if dora else 0
    total = sum(storage.nbytes() for storage in saved.values()) - 18 * (2 * elements + 8) - bits
    assert total in {0, sum(beyond), *beyond}


# --- the record that backward reads ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "lora"), [("Qwen2", {}), ("Qwen3", {}), ("Olmo2", {}), ("Qwen2", DORA)]
)
def test_a_layer_holds_no_tensor_that_autograd_does_not_know(family, lora, device):
    _, inputs, _ = operands(device, (1, 4), family=family, config={"pad_token_id": 0}, **lora)
    output = DecoderLayer.apply(*inputs)
    rest = output.grad_fn.without_tensors
    assert not any(isinstance(one, torch.Tensor) for one in rest.values)
    saved = join(rest, output.grad_fn.saved_tensors)
    assert isinstance(saved, Saved)
    assert saved.hidden is inputs[0] and any(saved.adapters[1][2].B is one for one in inputs)
    groups = [group for block in saved.blocks for group in block.frame.groups]
    assert not any(group.scale for group in groups)


def test_a_record_comes_back_as_it_was():
    """Each has one type, and they differ in what a layout says."""
    a, b = torch.zeros(2).unbind()
    records = [
        Adapter(a, None), Adapter(None, a), Adapter(a, b), Adapter(b, Adapter(b, a)),
        Adapter(Adapter(a, b), None), Adapter((a, b), None), Adapter((a,), None),
        Adapter((), 1), Adapter(a.shape, b),
    ]  # fmt: skip

    def assert_same(one, other):
        assert type(one) is type(other)
        if not isinstance(one, tuple):
            assert one is other
            return
        for values in zip(one, other, strict=True):
            assert_same(*values)

    for record in records * 2:
        tensors, rest = split(record)
        assert not any(isinstance(one, torch.Tensor) for one in rest.values)
        assert_same(join(rest, tensors), record)


# --- what does not fit ----------------------------------------------------------------------------


NAMES = {
    0: "hidden", 3: "q_A", 9: "o_A", 13: "v_bias", 16: "k_magnitude", 23: "up_A",
    34: "norm_after_mlp", 35: "attention", 36: "mlp",
}  # fmt: skip
ERRORS = [
    ({"hidden": narrow}, r"hidden is \[2, 9, 51\], should be \[batch, positions, 52\]"),
    ({"hidden": lambda t: t[0]}, r"hidden is \[9, 52\]"),
    ({"hidden": torch.Tensor.half}, "hidden is torch.float16, the buffers torch.float32"),
    ({"hidden": torch.Tensor.double}, "DecoderLayer computes in .*, got torch.float64"),
    ({"attention.cos": trained}, "cos or sin requires a gradient"),
    ({"attention.cos": narrow}, "cos has 25 angles, should have 2 of each pair"),
    ({"mlp.activation": lambda _: "relu"}, "activation is 'relu', should be 'silu' or"),
    ({"mlp.frame.norm.weight": narrow}, r"Layer, MLPBlock: norm is \[51\], should be \[52\]"),
    (
        {f"attention.{name}": lambda t: t.repeat(1, 1, 2) for name in ("cos", "sin")},
        r"cos is \[1, 9, 52\], should be \[1 or 2, 9, 26\]",
    ),
    ({"attention.sinks": lambda _: torch.zeros(3)}, r"sinks is \[3\], should be \[2\]"),
    ({"attention.sin": lambda _: None}, "only one of cos and sin is given"),
    (
        {"attention.sin": torch.Tensor.double},
        "sin is torch.float64 on .*, should be bfloat16, float16 or",
    ),
    (
        {
            "attention": lambda block: block._replace(
                head_norms=HeadNorms(*[block.cos.new_ones(52)] * 2, 1e-6, 1e-6)
            )
        },
        r"k_norm is \[52\], should be \[26\], or of all heads together \[52\] for q and \[26\]",
    ),
    ({"q_A": None}, "31 trained tensors given, should be 32: A and B of each projection of"),
    ({"up_A": narrow}, r"inputs: A 1 is \[8, 51\] and B 1 \[139, 8\], should be \[r, 52\] and"),
    ({"v_bias": narrow}, r"AttentionBlock: inputs: bias 2 is \[25\], should be \[26\]"),
    ({"k_magnitude": lambda _: torch.ones(3)}, r"magnitude 1 is \[3\], should be \[26\]"),
    ({"norm_after_mlp": lambda _: torch.ones(52)}, "norm_after is given, and the block has no"),
    ({"o_A": lambda t: torch.cat((t, t))}, r"output: A 0 is \[16, 52\].* of one r up to 8"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_what_does_not_fit_is_a_value_error(changes, message, device):
    _, (*inputs, blocks), _ = operands(device, lora_bias=True)
    arguments = {NAMES.get(i, i): value for i, value in enumerate((*inputs, *blocks))}

    def function(*given):
        DecoderLayer.apply(*given[:-2], given[-2:])

    assert_refused(function, arguments, changes, message)


def test_autocast_to_another_dtype_is_a_value_error(device):
    _, inputs, _ = operands(device)
    with (
        torch.autocast(device, dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"computation torch.bfloat16: give all one dtype"),
    ):
        DecoderLayer.apply(*inputs)
