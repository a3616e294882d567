"""Linear layer and cross entropy against eager PyTorch in float64: values, dtypes, what it
saves and holds, when it waits, errors."""

import pytest
import torch
from cases.counting import Watch, saved_tensors
from cases.cross_entropy_case import (
    HIDDEN,
    IGNORED,
    NAMES,
    TOKENS,
    VOCABULARY,
    assert_equal,
    assert_matches,
    assert_right,
    case,
    eager,
    inputs,
    run,
    small_blocks,
)
from cases.reference import assert_near, assert_within_budget, over_draws
from contract import LAYOUTS

import fused_lora.loss.cross_entropy as module
import fused_lora.loss.head as head_module
from fused_lora.loss.cross_entropy import linear_cross_entropy

fixtures = case, small_blocks  # pytest finds them in this module


# The ways to leave out tokens that have no label: not computed, computed in vain, and as many
# computed as may be labelled at most.
IGNORING = pytest.mark.parametrize(
    "ignoring", [{"drop_ignored": True}, {"drop_ignored": False}, {"max_labelled": 200}], ids=str
)


@pytest.mark.parametrize("max_labelled", [1, 5, 6, 20])
def test_at_most_so_many_tokens_are_computed(max_labelled, case, monkeypatch):
    """Where more are labelled, everything is NaN and not a part of the batch left out."""
    hidden, weight, bias, labels = case
    labels = torch.full_like(labels, IGNORED)
    labels.view(-1)[[0, 3, 4, 9, 20]] = 17
    rows = []
    kernel = head_module.cross_entropy_
    monkeypatch.setattr(
        head_module,
        "cross_entropy_",
        lambda *given, **others: rows.append(len(given[1])) or kernel(*given, **others),
    )
    options = {"max_labelled": max_labelled, "chunk_tokens": 6}
    if max_labelled >= 5:
        assert_right(hidden, weight, bias, labels, own=options)
    else:
        got = run(linear_cross_entropy, hidden, weight, bias, labels, **options)
        assert got["loss"].isnan() and got["weight"].isnan().all()
    assert sum(rows) == max_labelled


@pytest.mark.thinned
@IGNORING
@pytest.mark.parametrize("kept", [range(21), [0], [20], [5, 6, 7], range(0, 21, 2)], ids=str)
def test_ignored_tokens_add_nothing_and_have_a_zero_gradient(kept, ignoring, case):
    hidden, weight, bias, labels = case
    labels = torch.full_like(labels, IGNORED)
    labels.view(-1)[list(kept)] = torch.arange(len(kept), device=labels.device) * 6
    own = {"chunk_tokens": 6, **ignoring}
    got = assert_right(hidden, weight, bias, labels, own=own)
    zero = (got["hidden"] == 0).all(dim=-1)
    assert torch.equal(zero, labels == IGNORED)


@pytest.mark.thinned
@IGNORING
@pytest.mark.parametrize("num_items", [None, 5, 0])
@pytest.mark.parametrize("tokens", [TOKENS, (0,), (2, 0, 3)], ids=str)
def test_nothing_labelled_gives_pytorchs_loss_and_zero_gradients(
    tokens, num_items, ignoring, device
):
    hidden, weight, bias, labels = inputs(*tokens, dtype=torch.bfloat16, device=device)
    labels = torch.full_like(labels, IGNORED)
    options = {"num_items_in_batch": num_items}
    want = run(eager, hidden, weight, bias, labels, **options)
    assert want["loss"].isnan() if num_items in (None, 0) else want["loss"] == 0
    got = run(linear_cross_entropy, hidden, weight, bias, labels, **ignoring, **options)
    for name in want:
        assert got[name].dtype == want[name].dtype
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0, equal_nan=True)
    assert not any(got[name].any() for name in NAMES[1:])


@pytest.mark.thinned
@IGNORING
@pytest.mark.parametrize("ignore_index", [0, 138, -1])
def test_another_ignore_index(ignore_index, ignoring, case):
    hidden, weight, bias, labels = case
    labels = labels.where(labels != IGNORED, ignore_index)
    assert_right(hidden, weight, bias, labels, ignore_index=ignore_index, own=ignoring)


@pytest.mark.slow("{'drop_ignored': True}")
@IGNORING
def test_int32_and_strided_labels_give_what_contiguous_int64_ones_do(ignoring, case):
    *tensors, labels = case
    options = {"chunk_tokens": 4, **ignoring}
    want = run(linear_cross_entropy, *case, **options)
    sliced = torch.stack([labels, labels + 1], dim=-1)[..., 0]
    for other in (labels.int(), sliced, labels.t().contiguous().t()):
        got = run(linear_cross_entropy, *tensors, other, **options)
        assert all(torch.equal(got[name], want[name]) for name in NAMES)
    hidden, weight, bias = tensors
    expanded = labels[0, :1].expand(5)
    assert expanded.stride() == (0,)
    assert_right(hidden[0, :5], weight, bias, expanded, own=options)


def test_num_items_in_batch_divides_the_sum(case, device):
    """An int or a tensor of any shape of one element, dtype and device."""
    on_device = [torch.tensor(37), torch.tensor([37]), torch.tensor(37.0, dtype=torch.float64)]
    for number in (37, torch.tensor(37), *(one.to(device) for one in on_device)):
        got = run(linear_cross_entropy, *case, num_items_in_batch=number)
        assert_matches(got, case, num_items_in_batch=37)


@pytest.mark.slow("transposed-{'drop_ignored': True}")
@pytest.mark.thinned
@IGNORING
@pytest.mark.parametrize("layout", ["transposed", "one for all", "within wider rows"])
def test_strided_hidden(layout, ignoring, device):
    layout = LAYOUTS[layout]
    # of 24 tokens each: "one for all" has no more, and the errors of a few are luck
    case = hidden, *others = inputs(3, 24, dtype=torch.float32, device=device)
    assert not layout(hidden).is_contiguous()
    got = run(linear_cross_entropy, *case, layout, **ignoring)
    want = run(linear_cross_entropy, layout(hidden).contiguous(), *others)
    # expanded tokens err together, which the loss' budget does not know: a sum in another order
    assert_near(got.pop("loss"), want["loss"], 2.0**-21)
    assert_matches(got, case, layout)


@pytest.mark.parametrize(
    ("tokens", "vocabulary"),
    [((), 139), ((1,), 200), ((1, 1), 128), ((13,), 3), ((2, 1, 3, 2), 64)],
    ids=str,
)
def test_any_leading_dimensions_and_vocabulary_with_a_strided_weight(tokens, vocabulary, device):
    options = {"dtype": torch.bfloat16, "device": device, "vocabulary": vocabulary}

    def check():
        hidden, weight, bias, labels = inputs(*tokens, **options)
        assert_right(hidden, weight.t().contiguous().t(), bias, labels)

    over_draws(check, first=1)


def test_the_only_word_costs_nothing(device):
    options = {"dtype": torch.bfloat16, "device": device, "vocabulary": 1}
    assert not any(t.any() for t in run(linear_cross_entropy, *inputs(5, **options)).values())


def test_the_scale_is_not_rounded_to_bf16(case):
    unscaled = run(linear_cross_entropy, *case, num_items_in_batch=1)
    scale = torch.tensor(1 / 3, device=case[0].device)
    got = run(linear_cross_entropy, *case, num_items_in_batch=1, grad_loss=1 / 3)
    assert torch.equal(got["hidden"], (unscaled["hidden"].float() * scale).bfloat16())


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_the_product_is_bf16_and_gradients_have_their_inputs_dtype(
    weight_dtype, hidden_dtype, device
):
    hidden, weight, bias, labels = inputs(*TOKENS, dtype=torch.float32, device=device)
    case = hidden.to(hidden_dtype), weight.to(weight_dtype), bias.to(weight_dtype), labels
    with torch.autocast(device, dtype=torch.bfloat16):
        got = run(linear_cross_entropy, *case)
        rounded = run(eager, *case)
    truth = run(eager, *(t.double() for t in case[:3]), labels)
    for name, tensor in zip(NAMES[1:], case, strict=False):
        assert got[name].dtype == rounded[name].dtype == tensor.dtype
        assert_within_budget(name, got[name], rounded[name], truth[name])
    with torch.autocast(device, dtype=torch.bfloat16):
        # it is bf16, and not fp32, that was computed
        bf16 = run(linear_cross_entropy, *(t.bfloat16() for t in case[:3]), labels)
        leaves = [t.clone().requires_grad_() for t in case[:3]]
        loss = linear_cross_entropy(*leaves[:2], labels, bias=leaves[2])
    assert torch.equal(got["loss"], bf16["loss"])
    with torch.no_grad():  # its own backward, before autograd would cast
        gradients = loss.grad_fn.apply(torch.ones_like(loss))[:3]
    for name, gradient, leaf in zip(NAMES[1:], gradients, leaves, strict=True):
        assert gradient.dtype == leaf.dtype and torch.equal(gradient, got[name])


def test_fp16_gradients_outlive_a_large_batch_and_a_loss_scaler(device):
    """1 / 2^20 items times a softmax of 1 / 139 is 7e-9 and less than half of fp16's least number;
    eager scales it first, so this has to do as if."""
    options = {"num_items_in_batch": 2**20, "grad_loss": 2.0**16}
    case = inputs(*TOKENS, dtype=torch.float16, device=device)
    got = run(linear_cross_entropy, *case, **options)
    assert got["hidden"].count_nonzero() >= 14 * HIDDEN * 0.99
    assert_matches(got, case, **options)


def test_fp16_weight_gradients_whose_sum_over_a_chunk_overflows(device):
    hidden, weight, bias, labels = inputs(64, dtype=torch.float16, device=device)
    hidden = hidden * 0.01 + 2000.0  # 64 times that is 128,000
    assert_matches(
        {"weight": run(linear_cross_entropy, hidden, weight * 1e-3, bias, labels * 0)["weight"]},
        (hidden, weight * 1e-3, bias, labels * 0),
    )


# --- with the rest of PyTorch ---------------------------------------------------------------------


def test_compiled_around_it_is_right(case):
    """Compiled up to it and after it: it is one graph break."""

    def model(hidden, weight, labels, bias):
        return linear_cross_entropy(torch.sin(hidden), weight, labels, bias=bias) * 2

    compiled = torch.compile(model, backend="eager")
    assert_equal(run(compiled, *case), run(model, *case))
    torch._dynamo.reset()


# --- in chunks of tokens --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "trained", "in_forward"),
    [
        (torch.enable_grad, (), 2),
        (torch.enable_grad, ("hidden",), 4),
        (torch.enable_grad, ("weight",), 4),
        (torch.enable_grad, ("bias",), 2),
        (torch.enable_grad, ("hidden", "weight"), 6),
        (torch.no_grad, ("hidden", "weight"), 2),
        (torch.inference_mode, ("hidden", "weight"), 2),
    ],
)
def test_forward_has_only_the_products_that_are_needed_and_backward_none(
    mode, trained, in_forward, case
):
    *tensors, labels = case
    leaves = dict(zip(NAMES[1:], tensors, strict=True))
    for name in trained:
        leaves[name].requires_grad_()
    with mode(), Watch() as forward:
        loss = linear_cross_entropy(**leaves, labels=labels, chunk_tokens=7)  # 14 are labelled
    assert forward.products() == in_forward
    if loss.requires_grad:
        with Watch() as backward:
            loss.backward()
        assert backward.products() == 0


def test_saved_are_the_gradients_of_labelled_tokens_and_of_what_is_trained(case):
    hidden, weight, bias, labels = case
    for trained in ((hidden,), (hidden, weight, bias)):
        for tensor in trained:
            tensor.requires_grad_()
        with saved_tensors() as saved:
            loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
        want = [((14, HIDDEN), torch.bfloat16), ((14,), torch.int64), ((), torch.int64)]
        if weight.requires_grad:
            want[1:1] = [((VOCABULARY, HIDDEN), torch.float32), ((VOCABULARY,), torch.float32)]
        assert [(tuple(t.shape), t.dtype) for t in saved] == want
        del loss  # it held them


@pytest.mark.slow("True")
@pytest.mark.parametrize("drop_ignored", [True, False])
def test_no_more_logits_than_a_chunks_are_ever_held(drop_ignored, device):
    hidden, weight, bias, labels = inputs(60, 2, dtype=torch.bfloat16, device=device)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    options = {"bias": bias, "chunk_tokens": 50, "drop_ignored": drop_ignored}
    with Watch() as watch:
        linear_cross_entropy(*leaves[:2], labels, **options).backward()
    # once for all chunks; the weight's gradient, 139 x 20 in fp32, is smaller
    assert [size for size in watch.sizes if size >= 50 * VOCABULARY * 2] == [50 * 192 * 2]


def test_a_chunk_is_512_tokens_unless_told_otherwise(monkeypatch, case):
    hidden, weight, _, labels = case
    seen, launch = [], head_module.cross_entropy_

    def spy(logits, *others, **settings):
        seen.append(logits.shape[0])
        return launch(logits, *others, **settings)

    monkeypatch.setattr(head_module, "cross_entropy_", spy)
    assert module.CHUNK_TOKENS == 512
    linear_cross_entropy(hidden, weight, labels)
    monkeypatch.setattr(module, "CHUNK_TOKENS", 5)
    linear_cross_entropy(hidden, weight, labels)
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=9)
    linear_cross_entropy(hidden, weight.clone().requires_grad_(), labels)  # twice as many
    assert seen == [14, 5, 5, 4, 9, 5, 10, 4]


SYNCHRONISING = {"nonzero", "_local_scalar_dense", "item", "masked_select", "is_nonzero"}


@pytest.mark.parametrize("num_items", [None, 7, "tensor"])
@pytest.mark.parametrize("drop_ignored", [True, False])
def test_the_host_waits_once_or_with_all_tokens_never(drop_ignored, num_items, case):
    leaves = [t.requires_grad_() for t in case[:3]]
    if num_items == "tensor":
        num_items = torch.tensor(7, device=leaves[0].device)
    options = {"num_items_in_batch": num_items, "drop_ignored": drop_ignored, "chunk_tokens": 4}
    with Watch() as watch:
        linear_cross_entropy(*leaves[:2], case[3], bias=leaves[2], **options).backward()
    waits = [name for name in watch.names if name in SYNCHRONISING]
    assert waits == (["nonzero"] if drop_ignored else [])


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hidden", lambda t: t[..., 1:], r"hidden \[\.\.\., hidden\].*got hidden \[3, 7, 19\]"),
        ("hidden", lambda t: t[0, 0, 0], r"hidden \[\.\.\., hidden\].*got hidden \[\]"),
        ("weight", lambda t: t[0], r"weight \[vocabulary, hidden\].*weight \[20\]"),
        ("weight", lambda t: t[:0], r"weight \[vocabulary, hidden\].*weight \[0, 20\]"),
        ("labels", lambda t: t[:, 1:], r"labels \[\.\.\.\].*labels \[3, 6\]"),
        ("labels", lambda t: t.view(-1), r"labels \[\.\.\.\].*labels \[21\]"),
        ("bias", lambda t: t[1:], r"bias \[vocabulary\].*bias \[138\]"),
        ("labels", lambda t: t.float(), r"labels in int64 or int32, got.*labels .*float32"),
        ("weight", lambda t: t.float(), r"one dtype, or torch.autocast, got.*weight .*float32"),
        ("bias", lambda t: t.float(), r"one dtype, or torch.autocast, got.*bias .*float32"),
        ("labels", lambda t: t.to("meta"), r"on one device, got.*labels .* on meta"),
        ("weight", lambda t: t.to("meta"), r"on one device, got.*weight .* on meta"),
        ("chunk_tokens", lambda t: 0, r"chunk_tokens above 0, got 0"),
        ("num_items_in_batch", lambda t: torch.ones(2), r"num_items_in_batch as a number.*\[2\]"),
    ],
)
def test_inputs_that_do_not_fit_are_a_value_error(name, change, message, case):
    arguments = dict(zip(("hidden", "weight", "bias", "labels"), case, strict=True))
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=r"linear_cross_entropy needs .*" + message) as error:
        linear_cross_entropy(**arguments)
    assert "\n" not in str(error.value)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.alone
def test_more_than_2_to_the_31_logits_in_a_chunk(monkeypatch, device):
    """Repeat a few tokens: eager PyTorch on just those gives the reference."""
    monkeypatch.undo()  # the block of real vocabularies
    count, vocabulary, pattern = 14_200, 151_936, 100
    assert count * vocabulary > 2**31
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB of free GPU memory")
    few = inputs(pattern, dtype=torch.bfloat16, device=device, vocabulary=vocabulary)
    few[3][few[3] == IGNORED] = 11
    which = torch.arange(count, device=device) % pattern
    options = {"num_items_in_batch": count, "drop_ignored": False, "chunk_tokens": count}
    got = run(linear_cross_entropy, few[0][which], *few[1:3], few[3][which], **options)
    assert got["hidden"].isfinite().all()
    # count is a multiple of the pattern: each of its tokens occurs equally often
    assert_matches({name: got[name] for name in ("loss", "weight", "bias")}, few)
    for start in (0, 7100, count - pattern):
        tokens = got["hidden"][start : start + pattern]
        assert_matches({"hidden": tokens}, few, num_items_in_batch=count)
