"""A graph attends with a mask only where the eager step does, or says so."""

import copy
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from cases.families_case import FAMILIES as OTHERS
from cases.fused_case import ALL
from cases.graph_case import (
    EagerStep,
    Recorded,
    adamw,
    assert_same,
    captured,
    graphed,
    steps,
    train,
)
from cases.layer_case import peft_model
from cases.peft_models import FAMILIES, LAYERS, ids

from fused_lora import Fusion, fill_row, fuse
from fused_lora.causal_lm import documents
from fused_lora.layer.decoder_layer import DecoderLayer, LoRA_Attention
from fused_lora.step.graph import EAGER_CALLS, GraphedStep

ONE_LAYER = {"num_hidden_layers": 1}


def inputs(device, seed=3, length=17, **others):
    tokens = ids(device, seed)[:, :length]
    return {"input_ids": tokens, "labels": tokens, **others}


def spy_on_masks(monkeypatch, fusion):
    """Collect the mask of every attention call from now on."""
    seen = []
    if fusion is None:
        attend = F.scaled_dot_product_attention
        monkeypatch.setattr(
            F, "scaled_dot_product_attention",
            lambda *a, attn_mask=None, **o: seen.append(attn_mask) or attend(
                *a, attn_mask=attn_mask, **o
            ),
        )  # fmt: skip
        return seen
    for function in (LoRA_Attention, DecoderLayer):
        monkeypatch.setattr(
            function, "apply",
            lambda *a, apply=function.apply: seen.append(a[-1][0].mask) or apply(*a),
        )  # fmt: skip
    return seen


class RunAtCapture(Recorded):
    """A "capture" that also runs Triton's kernels, which `Recorded` cannot record."""

    def capture(self, body):
        with (
            patch("torch.cuda.is_current_stream_capturing", return_value=True),
            patch.object(documents, "is_capturing", return_value=True),
        ):
            return (lambda: None), body()


class StepRunAtCapture(GraphedStep):
    _backend = RunAtCapture


@pytest.mark.parametrize(
    ("family", "fusion"),
    [
        *((family, None) for family in FAMILIES),
        ("Llama", Fusion(attention=True, rope=True, checkpoint="full")),
        ("Llama", Fusion(layer=True, cross_entropy=True)),
        ("Qwen3", Fusion(attention=True, rope=True)),
        pytest.param("Qwen3", Fusion(layer=True, cross_entropy=True), marks=pytest.mark.exhaustive),
        ("Gemma3Text", Fusion(layer=True, cross_entropy=True)),
    ],
)
def test_without_padding_no_graph_attends_with_a_mask(family, fusion, monkeypatch, device):
    model = peft_model(device, family, config=ONE_LAYER)
    if fusion is not None:
        fuse(model, fusion)
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    seen = spy_on_masks(monkeypatch, fusion)
    step = (GraphedStep if device == "cuda" else StepRunAtCapture)(model, adamw(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for seed in range(EAGER_CALLS + 2):
            step(**inputs(device, seed, length=4))
    assert captured(step) == 1
    runs = 2 if fusion is not None and fusion.checkpoint == "full" else 1
    assert seen == [None] * (runs * (EAGER_CALLS + 1))  # a replay runs no Python
    assert hooks == [dict(module._forward_pre_hooks) for module in model.modules()]


def packed(device, seed):
    tokens = ids(device, seed)[:, :4].reshape(1, -1)
    lengths = 3 + seed
    position_ids = (torch.arange(tokens.shape[1], device=device) % lengths)[None]
    return {"input_ids": tokens, "labels": tokens, "position_ids": position_ids}


def steps_with_kernels(fusion, device, lr, with_sinks=False, window=None, **lora):
    """Return a step and an eager loop to compare it with."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # a GPU has no kernels for fp32
    if with_sinks:
        model = OTHERS["gpt-oss"].peft_model(device, dtype, target_parameters=None).train()
    else:
        config = ONE_LAYER | {"head_dim": 32, "sliding_window": window}
        model = peft_model(device, "Mistral", dtype, config=config, **lora)
    eager = copy.deepcopy(model)
    fuse(model, fusion), fuse(eager, fusion)
    step = (GraphedStep if device == "cuda" else StepRunAtCapture)(model, adamw(model, lr))
    return step, EagerStep(eager, adamw(eager, lr))


WHOLE = Fusion(layer=True, cross_entropy=True)
FUSIONS = Fusion(**ALL), WHOLE
SEEDS = {"cpu": range(EAGER_CALLS + 1), "cuda": range(EAGER_CALLS + 3)}  # the last are replays
# The eager step has no padding in its matmuls, so on a GPU bf16 rounds them differently. Adam would
# turn every near-zero gradient into a full step.
OF_OTHER_ROWS, OF_OTHER_STEPS = {"cpu": 1e-5, "cuda": 2**-8}, 2**-14


def padded(device, seed, case="apart"):
    """Return two rows of nine. The second is shorter, with padding before or after its tokens."""
    tokens, is_left = ids(device, seed)[:, :9].clone(), seed % 2 == 0
    is_token = torch.ones_like(tokens)
    is_token[1, slice(0, 2 + seed) if is_left else slice(7 - seed, 9)] = 0
    labels = tokens.masked_fill(is_token == 0, -100)
    if case == "between tokens":
        is_token[1, 0 if is_left else 8] = 1
    if case != "predicts" and is_left:
        labels[1, 2 + seed] = -100  # the first of the tokens
    elif case == "predicts" and not is_left:
        labels[1, 8] = 5
    return {"input_ids": tokens, "labels": labels, "attention_mask": is_token}


def train_as_eager(step, eager, calls, rtol, fusion, monkeypatch):
    """Train step and eager alike, and return the masks that the step attended with."""
    wanted = [eager(**call) for call in calls]
    seen = spy_on_masks(monkeypatch, fusion)
    losses = [step(**call) for call in calls]
    assert captured(step) == 1
    torch.testing.assert_close(losses, wanted, rtol=rtol, atol=0)
    return [None if mask is None else (tuple(mask.shape), mask.dtype) for mask in seen]


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.slow("parts")
@pytest.mark.parametrize(
    ("fusion", "use_dora"),
    [*zip(FUSIONS, (False, False), strict=True), (WHOLE, True)],
    ids=["parts", "whole", "whole, DoRA"],
)
def test_one_graph_takes_rows_of_any_documents(fusion, use_dora, no_warnings, monkeypatch, device):
    step, eager = steps_with_kernels(fusion, device, 2**-6, window=3, use_dora=use_dora)
    calls = [fill_row(packed(device, seed), 10) for seed in SEEDS[device]]
    masks = train_as_eager(step, eager, calls, 1e-5, fusion, monkeypatch)
    assert set(masks) == {((1, 1, 2, 10), torch.int32)}


@pytest.mark.slow("whole")
@pytest.mark.parametrize("fusion", FUSIONS, ids=["parts", "whole"])
def test_one_graph_takes_rows_of_any_padding(fusion, no_warnings, monkeypatch, device):
    step, eager = steps_with_kernels(fusion, device, OF_OTHER_STEPS, window=4)
    calls = [padded(device, seed) for seed in SEEDS[device]]
    masks = train_as_eager(step, eager, calls, OF_OTHER_ROWS[device], fusion, monkeypatch)
    in_graph = (2, 1, 2, 9), torch.int32
    assert masks[-1] == in_graph and in_graph not in masks[:-1]


def test_with_sinks_no_eager_call_needs_padding_for_that(no_warnings, monkeypatch, device):
    """Attention has bounds for whole rows too."""
    fusion = Fusion(**ALL)
    step, eager = steps_with_kernels(fusion, device, OF_OTHER_STEPS, with_sinks=True)
    calls = [padded(device, seed) for seed in SEEDS[device]]
    for call in calls[:EAGER_CALLS]:
        call["attention_mask"] = torch.ones_like(call["attention_mask"])
    masks = train_as_eager(step, eager, calls, OF_OTHER_ROWS[device], fusion, monkeypatch)
    assert set(masks) == {((2, 1, 2, 9), torch.int32)}


@pytest.mark.slow("predicts")
@pytest.mark.parametrize("case", ["predicts", "between tokens"])
def test_labels_that_depend_on_padding_keep_the_graphs_mask_or_make_its_loss_nan(
    case, monkeypatch, device
):
    step, eager = steps_with_kernels(WHOLE, device, OF_OTHER_STEPS)
    calls = [padded(device, seed, case) for seed in range(EAGER_CALLS + 1)]
    masks = train_as_eager(step, eager, calls, OF_OTHER_ROWS[device], WHOLE, monkeypatch)
    assert masks[-1][0] == (2, 1, 9, 9)
    step.reset()
    losses = [step(**call) for call in [padded(device, seed) for seed in range(EAGER_CALLS)]]
    losses.append(step(**calls[-1]))
    assert [loss.isnan().item() for loss in losses] == [False, False, True]


@pytest.mark.slow("predicts")
@pytest.mark.parametrize("case", ["predicts", "between tokens"])
def test_eager_calls_without_padding_say_nothing_of_it(case, monkeypatch, device):
    step, eager = steps_with_kernels(WHOLE, device, OF_OTHER_STEPS)
    calls = [padded(device, seed, case) for seed in range(EAGER_CALLS + 1)]
    for call in calls[:EAGER_CALLS]:
        call["attention_mask"] = torch.ones_like(call["attention_mask"])
    with pytest.warns(UserWarning, match="only in the graph, .* leave attention_mask out"):
        masks = train_as_eager(step, eager, calls, OF_OTHER_ROWS[device], WHOLE, monkeypatch)
    assert masks[-1][0] == (2, 1, 9, 9)


@pytest.mark.parametrize("window", [None, 5, 99])
def test_a_graph_has_the_masks_of_the_eager_step(window, monkeypatch, device):
    config = ONE_LAYER | {"sliding_window": window}
    step, eager = steps(peft_model(device, "Mistral", config=config))
    calls = [(inputs(device, seed), True) for seed in range(5)]
    wanted = train(eager, calls)
    seen = spy_on_masks(monkeypatch, None)
    assert_same(train(step, calls), wanted)
    assert captured(step) == 1
    assert {mask is not None for mask in seen} == {window == 5}


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_a_graph_that_cannot_go_without_a_mask_says_so(name, device):
    """Only the values say whether rows are padded or packed. The next batch's may be."""
    step, eager = steps(peft_model(device, "Llama", config=ONE_LAYER))
    ones = torch.ones(2, 17, dtype=torch.int64)
    given = {"attention_mask": ones, "position_ids": ones.cumsum(1) - 1}[name]
    other = {"attention_mask": ones.tril(9), "position_ids": torch.arange(17).expand(2, -1) % 9}
    calls = [(inputs(device, seed, **{name: given}), True) for seed in range(EAGER_CALLS + 1)]
    calls.append((inputs(device, 9, **{name: other[name]}), True))
    with pytest.warns(UserWarning, match=f"only in the graph, .* leave {name} out"):
        losses = train(step, calls)
    torch.testing.assert_close(losses, train(eager, calls), rtol=1e-5, atol=0)


def test_eager_calls_of_which_one_had_padding_say_nothing_of_the_graphs_mask(no_warnings, device):
    step, eager = steps(peft_model(device, "Llama", config=ONE_LAYER))
    ones = torch.ones(2, 17, dtype=torch.int64)
    masks = [ones.tril(9), *[ones] * EAGER_CALLS]  # only the first call is padded
    calls = [(inputs(device, seed, attention_mask=mask), True) for seed, mask in enumerate(masks)]
    torch.testing.assert_close(train(step, calls), train(eager, calls), rtol=1e-5, atol=0)
    assert captured(step) == 1


def test_a_mask_that_says_that_there_is_none_is_taken_as_before(monkeypatch, device):
    step, eager = steps(peft_model(device, "Qwen2", config=ONE_LAYER))
    calls = [(inputs(device, s, attention_mask={"full_attention": None}), True) for s in range(5)]
    wanted = train(eager, calls)
    seen = spy_on_masks(monkeypatch, None)
    assert_same(train(step, calls), wanted)
    assert captured(step) == 1 and set(seen) == {None}


def test_compiled_layers_are_warned_of():
    """Run on the CPU: no CUDA graph can capture layers that recompile for a mask, as these do."""
    model = peft_model("cpu", "Llama", config=ONE_LAYER)
    step = graphed(model, adamw(model))
    for _ in range(EAGER_CALLS):
        step(**inputs("cpu"))
    model.get_submodule(f"{LAYERS}.0").compile(backend="eager")
    with pytest.warns(UserWarning, match="cannot see the masks of compiled layers"):
        step(**inputs("cpu"))
