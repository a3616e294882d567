"""Log-probabilities and their statistics against eager PyTorch in float64: values, gradients,
memory, errors."""

import pytest
import torch
from cases.counting import Watch, saved_tensors
from cases.cross_entropy_case import IGNORED, TOKENS, VOCABULARY, small_blocks
from cases.log_probs_case import FIELDS, SCALING, eager, make
from cases.pairwise import pairwise
from cases.reference import assert_within_budget, random

from fused_lora import log_probs
from fused_lora.loss.log_probs import HeadAdapter
from fused_mlp.launching import DTYPES

fixtures = (small_blocks,)  # pytest finds them in this module

NAMES = ("hidden", "weight", "bias", "A", "B")
PLAIN = {"temperature": 1.0}
CAPPED = {"softcap": 4.0, "logit_scale": 0.5, "temperature": 0.7}
SCALED = {"logit_scale": 2.0, "temperature": 1.3}


@pytest.fixture
def case(device):
    return make(*TOKENS, dtype=torch.bfloat16, device=device)


def run(function, case, trained=NAMES, adapted=True, differentiated=("log_probs",), **options):
    """Return the fields and, by operand, the gradients of these fields' weighted sum."""
    *tensors, labels = case
    operands = {
        name: tensor.clone().requires_grad_(name in trained)
        for name, tensor in zip(NAMES, tensors, strict=True)
    }
    hidden, weight, bias, A, B = operands.values()
    adapter = HeadAdapter(A, B, SCALING) if adapted else None
    found = function(hidden, weight, labels, bias=bias, adapter=adapter, **options)
    results = dict(zip((*FIELDS, "loss"), found, strict=True))
    weights = {
        name: random(*results[name].shape, device=hidden.device, seed=40 + place)
        for place, name in enumerate(differentiated)
    }
    sum((results[name] * one).sum() for name, one in weights.items()).backward()
    gradients = {name: one.grad for name, one in operands.items() if one.grad is not None}
    return {name: one.detach() for name, one in results.items() if one is not None}, gradients


def assert_right(case, own=None, **options):
    """`own`: options that eager does not have."""
    exact = *(tensor.double() for tensor in case[:-1]), case[-1]
    got = run(log_probs, case, **options, **(own or {}))
    rounded, truth = run(eager, case, **options), run(eager, exact, **options)
    for of_got, of_rounded, of_truth in zip(got, rounded, truth, strict=True):
        for name, one in of_got.items():
            assert one.shape == of_truth[name].shape, name
            if one.dtype is torch.bool:
                assert torch.equal(one, of_rounded[name])
            elif name != "loss":  # one number, whose errors may happen to cancel
                assert one.dtype == of_rounded[name].dtype, name
                assert_within_budget(name, one, of_rounded[name], of_truth[name])
    assert got[1].keys() == rounded[1].keys()
    assert torch.equal(got[0]["loss"], -got[0]["log_probs"].sum() / _items(case, options))


def _items(case, options):
    return options.get("num_items_in_batch", (case[-1] != IGNORED).sum())


@pytest.mark.parametrize(
    "options",
    pairwise(
        dtype=DTYPES,
        scaling=(PLAIN, CAPPED, SCALED),
        trained=(NAMES, NAMES[:1], NAMES[:3], NAMES[3:]),
        differentiated=(("log_probs",), ("log_probs", "entropy"), ("entropy",), ("loss",)),
        adapted=(True, False),
        own=({}, {"chunk_tokens": 4}, {"drop_ignored": False, "chunk_tokens": 7}),
    ),
)
def test_fields_and_gradients_are_within_the_error_budget(options, device):
    dtype, scaling, trained, differentiated, adapted, own = options.values()
    if not adapted and trained == NAMES[3:]:
        trained = NAMES[:1]
    assert_right(
        make(*TOKENS, dtype=dtype, device=device), own, trained=trained, adapted=adapted,
        differentiated=differentiated, **scaling,
    )  # fmt: skip


@pytest.mark.parametrize("outputs", [(), ("entropy",), ("is_top1", "mean_logits")], ids=str)
def test_fields_that_are_not_asked_for_are_none_and_the_others_the_same(outputs, case):
    everything, _ = run(log_probs, case)
    some, _ = run(log_probs, case, outputs=outputs)
    assert some.keys() == {"log_probs", "loss", *outputs}
    assert all(torch.equal(one, everything[name]) for name, one in some.items())


def test_among_equal_logits_the_first_is_the_largest(device):
    hidden, weight = torch.ones(6, 4, device=device), torch.zeros(VOCABULARY, 4, device=device)
    weight[[5, 130, 138]] = 1.0
    labels = torch.tensor([5, 130, 138, 0, IGNORED, 5], device=device)
    found = log_probs(hidden, weight, labels, outputs=("is_top1",))
    assert found.is_top1.tolist() == [True, False, False, False, False, True]
    given = hidden, weight, labels.clamp(min=0)
    found = log_probs(*given, outputs=("is_top1",), ignore_index=5, drop_ignored=False)
    assert not found.is_top1.any()


@pytest.mark.filterwarnings("ignore:overflow")  # numpy, in the interpreter
@pytest.mark.parametrize("magnitude", [1e-4, 100.0, 1e4])
def test_statistics_of_large_and_of_almost_equal_logits_are_right(magnitude, device):
    *tensors, labels = make(*TOKENS, dtype=torch.float32, device=device)
    tensors[0] = tensors[0] * magnitude
    assert_right((*tensors, labels), differentiated=("log_probs", "entropy"), trained=NAMES[:1])


def test_nothing_labelled_is_a_loss_of_zero_and_a_gradient_of_zero(case):
    *tensors, labels = case
    fields, gradients = run(log_probs, (*tensors, torch.full_like(labels, IGNORED)))
    assert not any(field.any() for field in (*fields.values(), *gradients.values()))
    assert gradients.keys() == {*NAMES}


@pytest.mark.parametrize("autocast", [False, True])
def test_in_fp32_it_multiplies_as_an_fp32_head_does(autocast, device):
    """GRPO's cast_lm_head_to_fp32: hidden is bf16, and lm_head fp32."""
    hidden, *head, labels = make(*TOKENS, dtype=torch.float32, device=device)
    hidden = hidden.bfloat16().float()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        got = run(log_probs, (hidden.bfloat16(), *head, labels), adapted=False, in_fp32=True)
    want = run(log_probs, (hidden, *head, labels), adapted=False)
    assert all(torch.equal(got[0][name], one) for name, one in want[0].items())
    assert torch.equal(got[1]["hidden"], want[1]["hidden"].bfloat16())
    assert all(torch.equal(got[1][name], want[1][name]) for name in ("weight", "bias"))


def test_autocast_is_as_right_as_eagers(device):
    case = make(*TOKENS, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_right(case, differentiated=("log_probs", "entropy"))


# --- chunks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "differentiated", "in_forward", "in_backward"),
    [
        ((), (), 2, 0),
        (NAMES[:1], ("log_probs",), 4, 0),
        (NAMES[:1], ("log_probs", "entropy"), 4, 4),
        (NAMES[:2], ("log_probs",), 2, 6),
        (NAMES[1:2], ("log_probs",), 2, 4),
    ],
)
def test_only_the_products_that_are_needed_are_computed(
    trained, differentiated, in_forward, in_backward, case
):
    """Two chunks. A gradient of entropy alone makes the backward recompute the logits."""
    *tensors, labels = case
    hidden, weight, bias, *_ = (
        tensor.requires_grad_(name in trained) for name, tensor in zip(NAMES, tensors, strict=True)
    )
    with Watch() as forward:
        found = log_probs(hidden, weight, labels, bias=bias, chunk_tokens=7)  # 14 are labelled
    assert forward.products() == in_forward
    if trained:
        with Watch() as backward:
            sum(getattr(found, name).sum() for name in differentiated).backward()
        assert backward.products() == in_backward


@pytest.mark.parametrize("trained", [NAMES[:1], NAMES], ids=str)
def test_no_more_logits_than_a_chunks_are_ever_held(trained, device):
    case = make(60, 2, dtype=torch.bfloat16, device=device)
    with Watch() as watch:
        run(log_probs, case, trained=trained, differentiated=("entropy",), chunk_tokens=50)
    # once in the forward and once in the backward; the weight's gradient in fp32 is smaller
    assert [size for size in watch.sizes if size >= 50 * VOCABULARY * 2] == 2 * [50 * 192 * 2]


def test_saved_are_the_gradients_of_labelled_tokens_or_what_recomputes_the_logits(case):
    hidden, weight, bias, _, _, labels = case
    for outputs, saved_shapes in (
        ((), [(14, 20), (14,)]),
        (
            ("entropy",),
            [(14, 20), (14,), (3, 7, 20), (VOCABULARY, 20), (VOCABULARY,), (3, 7), *3 * [(14,)]],
        ),
    ):
        with saved_tensors() as saved:
            log_probs(hidden.requires_grad_(), weight, labels, bias=bias, outputs=outputs)
        # the loss of autograd's own keeps the number of items
        assert [tuple(t.shape) for t in saved if t.ndim] == saved_shapes


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", torch.zeros(3, 6).long(), r"labels \[\.\.\.\].*labels \[3, 6\]"),
        ("temperature", 0.0, "temperature above 0, got 0.0"),
        ("softcap", -1.0, "softcap above 0, got -1.0"),
        ("chunk_tokens", 0, "chunk_tokens above 0, got 0"),
        ("outputs", ("entropy", "top5"), "outputs among entropy, is_top1, .*, got top5"),
    ],
)
def test_inputs_that_do_not_fit_are_a_value_error(name, value, message, case):
    hidden, weight, _, _, _, labels = case
    with pytest.raises(ValueError, match=f"^log_probs needs .*{message}") as error:
        log_probs(**{"hidden": hidden, "weight": weight, "labels": labels, name: value})
    assert "\n" not in str(error.value)
