"""The last layer's output for labelled tokens alone: the layer, and in models with a fused loss."""

import copy

import pytest
import torch
from cases.fused_case import assert_close, assert_same, batch, step
from cases.layer_case import (
    LAYER,
    layer_of,
    leaves,
    operands,
    pair,
)
from cases.peft_models import ids
from cases.reference import assert_near, random
from torch import nn

from fused_lora import Fusion, fuse, unfuse
from fused_lora.cross_entropy import labelled_rows, linear_cross_entropy
from fused_lora.layer.buffer import Buffer
from fused_lora.layer.decoder_layer import DecoderLayer

WITH_LOSS = Fusion(layer=True, cross_entropy=True)
FULL = Fusion(checkpoint="full")
LENGTH = 9
# Of `step`'s tokens: a row's last has none to predict, and the next one of 3 others is -100.
TOKENS = 2 * LENGTH
LABELLED = TOKENS - 2 - 3


@pytest.fixture
def wanted(monkeypatch):
    """How many rows every call of DecoderLayer was to compute; None: all."""
    seen = []
    apply = DecoderLayer.apply

    def spy(*inputs):
        rows = inputs[-1].needed_tokens
        seen.append(None if rows is None else len(rows))
        return apply(*inputs)

    monkeypatch.setattr(DecoderLayer, "apply", spy)
    return seen


# --- one layer ------------------------------------------------------------------------------------


def with_rows(inputs, rows):
    """The operands of a layer whose output is wanted of these rows alone; None: of all."""
    if rows is not None:
        rows = torch.tensor(rows, dtype=torch.int64, device=inputs[0].device)
    return [*inputs[:-1], inputs[-1]._replace(needed_tokens=rows)]


@pytest.mark.slow("[0, 3, 4, 11, 17]")
@pytest.mark.parametrize("rows", [[0, 3, 4, 11, 17], [17], [5, 2, 9]], ids=str)
def test_rows_are_what_they_are_with_all(rows, device):
    """And with no gradient elsewhere. Twice, for a backward may write nothing that it reads."""
    _, inputs, grad = operands(device)
    elsewhere = [i for i in range(18) if i not in rows]
    zeroed, poisoned = grad.clone(), grad.clone()
    zeroed.view(18, -1)[elsewhere] = 0.0
    poisoned.view(18, -1)[elsewhere] = float("nan")  # is not read
    some, every = (DecoderLayer.apply(*with_rows(inputs, given)) for given in (rows, None))
    assert not some.flatten(0, 1)[elsewhere].any()
    assert_near(*(output.flatten(0, 1)[rows] for output in (some, every)), 1e-5)
    first = torch.autograd.grad(some, leaves(inputs), poisoned, retain_graph=True)
    second = torch.autograd.grad(some, leaves(inputs), poisoned)
    want = torch.autograd.grad(every, leaves(inputs), zeroed)
    assert all(map(torch.equal, first, second)) and len(want) == 15
    for one, other in zip(first, want, strict=True):
        assert one.shape == other.shape
        assert_near(one, other, 1e-5)


def test_what_is_left_out_is_neither_multiplied_nor_saved(device, monkeypatch):
    model, inputs, grad = operands(device)
    made = []
    for name in ("project_norm", "add_projected", "gradient"):
        method = getattr(Buffer, name)

        def spy(self, x, *rest, name=name, method=method):
            made.append((name, len(x.rows if name == "gradient" else x)))
            return method(self, x, *rest)

        monkeypatch.setattr(Buffer, name, spy)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = DecoderLayer.apply(*with_rows(inputs, [1, 4, 16]))
    output.backward(grad)
    forward = [("project_norm", 18), ("add_projected", 3), ("project_norm", 3)]
    assert made == [*forward, *(("gradient", rows) for rows in (3, 3, 3, 18))]
    intermediate = layer_of(model).mlp.up_proj.out_features
    assert [len(t) for t in saved if t.shape[1:] == (2 * intermediate,)] == [3]  # gate and up


# --- which rows -----------------------------------------------------------------------------------


def test_labelled_rows(device):
    labels = torch.tensor([[-100, 5, -100, 0], [7, -100, -100, 2]], device=device)
    assert labelled_rows(labels).tolist() == [1, 3, 4, 7]
    assert labelled_rows(labels, ignore_index=0).tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert labelled_rows(labels, max_labelled=6).tolist() == [1, 3, 4, 7, 0, 2]
    assert labelled_rows(labels, max_labelled=2).tolist() == [1, 3]
    assert labelled_rows(labels, max_labelled=20).tolist() == [1, 3, 4, 7, 0, 2, 5, 6]
    assert labelled_rows(torch.full((3,), -100, device=device)).tolist() == []


@pytest.mark.parametrize("most", [None, 4, 6])
def test_a_loss_that_is_given_rows_asks_for_no_others(most, device):
    labels = torch.tensor([[-100, 5, -100, 0], [7, -100, -100, 2]], device=device)
    hidden, weight = random(2, 4, 20, device=device), random(139, 20, seed=1, device=device)
    rows = labelled_rows(labels, max_labelled=most)
    elsewhere = [i for i in range(8) if i not in rows.tolist()]
    poisoned = hidden.clone()
    poisoned.view(8, 20)[elsewhere] = float("nan")
    leaves = [t.requires_grad_() for t in (hidden, poisoned)]
    want = linear_cross_entropy(hidden, weight, labels, max_labelled=most)
    got = linear_cross_entropy(poisoned, weight, labels, max_labelled=most, rows=rows)
    assert torch.equal(got, want) and not got.isnan()
    assert torch.equal(*(torch.autograd.grad(loss, leaf)[0]
                         for loss, leaf in zip((want, got), leaves, strict=True)))  # fmt: skip


# --- in a model -----------------------------------------------------------------------------------


@pytest.mark.slow("full")
@pytest.mark.parametrize(
    ("how", "runs"),
    [("reentrant", 2), ("not reentrant", 2), ("full", 1), ("full, before the loss", 2)],
)
def test_a_last_layer_that_runs_again_leaves_out_the_same(how, runs, wanted, device):
    fused, _, _ = pair(device)
    kept = copy.deepcopy(fused)
    fuse(kept, WITH_LOSS)
    want = step(kept, length=LENGTH)
    wanted.clear()
    if how.endswith("reentrant"):
        fused.enable_input_require_grads()  # a reentrant checkpoint sees no other gradient
        fused.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    if how == "full, before the loss":
        fuse(fused, FULL)
    fuse(fused, WITH_LOSS)
    if how == "full":
        fuse(fused, FULL)
    assert_close(step(fused, length=LENGTH), want, 1e-6)
    assert wanted == [None, *[LABELLED] * runs, None]


@pytest.mark.slow("12")
@pytest.mark.parametrize("most", [LABELLED - 1, LABELLED, TOKENS - 1])
def test_at_most_so_many_rows(most, wanted, device):
    """Too many labels make the loss nan."""
    fused, plain, _ = pair(device, WITH_LOSS)
    got = step(fused, length=LENGTH, max_labelled_tokens=most)
    assert wanted == [None, most]
    if most < LABELLED:
        assert got["loss"].isnan()
    else:
        assert_close(got, step(plain, length=LENGTH))


def test_nothing_labelled_is_as_in_pytorch(wanted, device):
    fused, _, _ = pair(device, WITH_LOSS)
    tokens = ids(device)
    loss = fused(input_ids=tokens, labels=torch.full_like(tokens, -100)).loss
    loss.backward()
    assert loss.isnan() and wanted == [None, 0]
    assert not any(p.grad.any() for p in fused.parameters() if p.grad is not None)


def test_labels_that_do_not_fit_are_refused(wanted, device):
    fused, _, _ = pair(device, WITH_LOSS)
    tokens = ids(device)[:, :3]
    for labels in (tokens.repeat(2, 1), tokens[:, 1:]):
        with pytest.raises(ValueError, match="linear_cross_entropy needs hidden"):
            fused(input_ids=tokens, labels=labels)
    assert not any(wanted)


def test_embeddings_may_be_given(wanted, device):
    fused, plain, _ = pair(device, WITH_LOSS)
    tokens = ids(device)[:, :LENGTH]
    losses = [
        model(inputs_embeds=model.get_input_embeddings()(tokens), labels=tokens).loss
        for model in (fused, plain)
    ]
    assert_near(*losses, 1e-5)
    assert wanted == [None, TOKENS - 2]


def hook(module, inputs, output):
    return None


def decoder(model):
    return model.base_model.model.model


SEEN_BY_OTHERS = {
    "hidden states": lambda model: {"output_hidden_states": True},
    "hidden states by the config": lambda model: setattr(
        decoder(model).config, "output_hidden_states", True
    ),
    "a hook on the layer": lambda model: layer_of(model, 1).register_forward_hook(hook),
    "a hook on the norm": lambda model: decoder(model).norm.register_forward_hook(hook),
    "a hook on the decoder": lambda model: decoder(model).register_forward_hook(hook),
    # as `layer.compile()` has it, which the interpreter of kernels does not live through
    "a compiled layer": lambda model: setattr(
        layer_of(model, 1), "_compiled_call_impl", layer_of(model, 1)._call_impl
    ),
    "no fused loss": lambda model: (unfuse(model), fuse(model, LAYER)),
}


@pytest.mark.slow("a hook on the layer", "hidden states", "no fused loss")
@pytest.mark.parametrize("name", SEEN_BY_OTHERS)
def test_all_is_computed_where_somebody_else_may_see_it(name, wanted, device):
    fused, plain, _ = pair(device, WITH_LOSS)
    options = SEEN_BY_OTHERS[name](fused)
    options = options if isinstance(options, dict) else {}
    got, want = (model(**batch(model, length=5), **options) for model in (fused, plain))
    assert_near(got.loss, want.loss, 1e-5)
    # what a hook is on runs as its class has it
    assert wanted and not any(wanted)


def test_all_is_computed_by_a_last_layer_that_is_an_earlier_one_too(wanted, device):
    _, plain, _ = pair(device)
    decoder(plain).layers[0] = decoder(plain).layers[1]
    fused = copy.deepcopy(plain)
    fuse(fused, WITH_LOSS)
    assert_same(fused, plain, LENGTH)
    assert wanted == [None, None]


def drop_out(model, index):
    """A reason for one layer not to run fused."""
    layer_of(model, index).mlp.up_proj.lora_dropout["default"] = nn.AlphaDropout(1e-9)


@pytest.mark.slow("first-parts0")
@pytest.mark.parametrize("parts", [{}, {"attention": True, "rope": True, "rms_norm": True}])
@pytest.mark.parametrize(("index", "ran"), [(0, [LABELLED]), (1, [None])], ids=("first", "last"))
def test_beside_a_layer_that_does_not_run_fused(index, ran, parts, wanted, device):
    """The first is not fused and need not know of it; the last one steps aside and computes all."""
    plain = pair(device)[1]
    if index == 0:
        drop_out(plain, 0)
    fused = copy.deepcopy(plain)
    fuse(fused, Fusion(layer=True, cross_entropy=True, **parts))
    if index == 1:
        drop_out(fused, 1), drop_out(plain, 1)
    assert_same(fused, plain, LENGTH, 1e-4)
    assert wanted == ran
