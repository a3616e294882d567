"""The fused loss and the checkpointing policies in a model."""

import copy
import gc
import weakref

import pytest
import torch
from fused_case import ALL, assert_right, pair, step
from layer_case import peft_model as sdpa_model
from peft_models import LAYERS, ids, peft_model
from reference import relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fused_lora import Fusion, fuse, unfuse
from fused_lora.step import checkpoint

# --- the loss -------------------------------------------------------------------------------------


def test_the_fused_loss_has_no_logits_in_training_and_all_of_them_elsewhere(device):
    fused, plain, _ = pair(device, Fusion(cross_entropy=True))
    tokens = ids(device)
    assert fused(input_ids=tokens, labels=tokens).logits is None
    with torch.no_grad():
        assert torch.equal(fused(input_ids=tokens).logits, plain(input_ids=tokens).logits)
        fused.eval(), plain.eval()
        ours, theirs = (m(input_ids=tokens, labels=tokens) for m in (fused, plain))
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)


def test_the_loss_is_fused_for_pefts_causal_lm_class_too(device):
    """Which passes more on than its base class: output_attentions, return_dict and the like."""
    fused, plain, _ = pair(device, Fusion(cross_entropy=True), task_type="CAUSAL_LM")
    tokens = ids(device)
    assert fused(input_ids=tokens, labels=tokens, attention_mask=None).logits is None
    assert_right(fused, plain)
    in_a_tuple = fused(input_ids=tokens, labels=tokens, return_dict=False)
    assert torch.equal(in_a_tuple[1], plain(input_ids=tokens).logits)


def test_num_items_in_batch_reaches_the_fused_loss(device):
    fused, plain, _ = pair(device, Fusion(cross_entropy=True))
    assert_right(fused, plain, num_items_in_batch=torch.tensor(77, device=device))


@pytest.mark.parametrize("num_items", [None, 7])
def test_nothing_labelled_is_as_in_transformers(num_items, device):
    """Without a number of items a mean of nothing, which is nan, and a sum of nothing with one."""
    fused, plain, _ = pair(device, Fusion(cross_entropy=True))
    tokens = ids(device)
    options = {} if num_items is None else {"num_items_in_batch": num_items}
    for model in (fused, plain):
        loss = model(input_ids=tokens, labels=torch.full_like(tokens, -100), **options).loss
        loss.backward()
        assert loss.isnan() if num_items is None else loss == 0
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_max_labelled_tokens_reaches_the_fused_loss_and_nothing_else(device):
    fused, plain, _ = pair(device, Fusion(cross_entropy=True))
    tokens = ids(device)
    inputs = {"input_ids": tokens, "labels": tokens}
    want = plain(**inputs).loss
    enough = fused(**inputs, max_labelled_tokens=tokens.numel()).loss
    torch.testing.assert_close(enough, want)
    assert fused(**inputs, max_labelled_tokens=5).loss.isnan()
    # the class's own forward has no such option
    assert torch.equal(fused.eval()(**inputs, max_labelled_tokens=5).loss, plain(**inputs).loss)


def test_a_trained_head_gets_its_gradient_tied_or_not(device):
    for tied in (False, True):
        plain = peft_model(device)
        head = plain.get_submodule("base_model.model.lm_head")
        if tied:
            head.weight = plain.get_submodule("base_model.model.model.embed_tokens").weight
        head.weight.requires_grad_(True)
        fused = copy.deepcopy(plain)
        fuse(fused, Fusion(cross_entropy=True))
        assert_right(fused.train(), plain.train())


def test_what_the_fused_loss_does_not_know_goes_to_transformers_own(device):
    fused, plain, _ = pair(device, Fusion(cross_entropy=True))
    tokens = ids(device)
    for options in ({"ignore_index": 5}, {"logits_to_keep": 3, "labels": None}):
        inputs = {"input_ids": tokens, "labels": tokens, **options}
        ours, theirs = fused(**inputs), plain(**inputs)
        assert torch.equal(ours.logits, theirs.logits)


# --- checkpointing --------------------------------------------------------------------------------


def test_checkpointing_is_set_on_the_layers_and_taken_away_again(device):
    model = peft_model(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.get_submodule(f"{LAYERS}.0")
    before = layer._gradient_checkpointing_func
    for policy in ("full", "offload"):
        fuse(model, Fusion(checkpoint=policy))
        assert layer._gradient_checkpointing_func is not before
    unfuse(model)
    assert layer._gradient_checkpointing_func is before and layer.gradient_checkpointing
    other = peft_model(device)
    fuse(other, Fusion(checkpoint="full"))
    unfuse(other)
    assert not other.get_submodule(f"{LAYERS}.0").gradient_checkpointing


def test_without_checkpointing_each_layer_runs_once_whatever_the_model_was_told(device):
    model = peft_model(device).train()
    want = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    runs = []
    for index, layer in enumerate(model.get_submodule(LAYERS)):
        layer.input_layernorm.register_forward_hook(lambda *_, index=index: runs.append(index))
    step(model)
    assert runs == [0, 1, 1, 0]
    fuse(model, Fusion(checkpoint="none"))
    runs.clear()
    got = step(model)
    assert runs == [0, 1]
    assert all(torch.equal(got[name], want[name]) for name in want)
    unfuse(model)
    runs.clear()
    step(model)
    assert runs == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpoint": "most"}, "'most' is unknown; give one of none, full, offload, selective"),
        ({"checkpoint": "selective"}, "selective wants checkpoint_gib"),
        ({"checkpoint": "full", "checkpoint_gib": 3.0}, "is for selective, not for full"),
        ({"checkpoint_gib": 3.0}, "'' is unknown"),
    ],
)
def test_a_policy_that_cannot_be(options, words, device):
    with pytest.raises(ValueError, match=words):
        fuse(peft_model(device), Fusion(**options))


@pytest.mark.parametrize("policy", [{"checkpoint": "full"}, {"checkpoint": "offload"},
                                    {"checkpoint": "selective", "checkpoint_gib": 0}])  # fmt: skip
@pytest.mark.parametrize("loss", ["fused", "fused before", "not fused"])
def test_with_a_fused_loss_the_last_layer_runs_once(loss, policy, device):
    model = peft_model(device).train()
    want = step(model)
    if loss == "fused before":
        fuse(model, Fusion(cross_entropy=True))
    fuse(model, Fusion(cross_entropy=loss == "fused", **policy))
    runs = []
    for index, layer in enumerate(model.get_submodule(LAYERS)):
        layer.input_layernorm.register_forward_hook(lambda *_, index=index: runs.append(index))
    got = step(model)
    assert runs == ([0, 1, 1, 0] if loss == "not fused" else [0, 1, 0])
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-5, name


def test_the_down_projection_does_not_run_again(device, monkeypatch):
    """A checkpointed layer runs twice, but its second forward stops before the down projection."""
    import fused_mlp.fast_lora as module

    calls, swiglu_forward = [], module.swiglu_forward
    monkeypatch.setattr(
        module, "swiglu_forward", lambda *tensors: calls.append(1) or swiglu_forward(*tensors)
    )
    counts = {}
    for name in ("full", ""):
        fused, _, _ = pair(device, Fusion(mlp=True, checkpoint=name))
        calls.clear()
        step(fused)
        counts[name] = len(calls)
    assert counts == {"full": 2, "": 2}  # two layers, once each


def test_a_second_backward_through_a_checkpointed_model_is_right(device):
    fused, _, _ = pair(device, Fusion(**ALL, checkpoint="full"))
    tokens = ids(device)
    loss = fused(input_ids=tokens, labels=tokens).loss
    trained = [p for p in fused.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, trained, retain_graph=True)
    second = torch.autograd.grad(loss, trained)
    assert all(map(torch.equal, first, second))


class Storages(TorchDispatchMode):
    """Those that operations made, or took."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        self.seen += [weakref.ref(t.untyped_storage()) for t in tensors]
        return result

    def alive(self):
        """How large those are that are still there, by address."""
        storages = (one() for one in self.seen)
        return {one.data_ptr(): one.nbytes() for one in storages if one is not None}


def held(model, tokens):
    """Bytes that are there between a forward and its backward because the forward made them."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    with Storages() as storages:
        loss = model(input_ids=tokens, labels=tokens).loss
    gc.collect()
    found = sum(size for address, size in storages.alive().items() if address not in own)
    loss.backward()
    model.zero_grad()
    return found


BUDGETED = {
    "nothing fused": ({}, {}),
    "a last layer that runs once": ({"attention": True, "cross_entropy": True}, {}),
    "a first layer that needs nothing": ({"attention": True}, {"layers_to_transform": [1, 2, 3]}),
}


@pytest.mark.parametrize("name", BUDGETED)
def test_a_budget_is_used_and_holds_from_the_first_step_on(name, device):
    parts, lora = BUDGETED[name]
    model = sdpa_model(device, config={"num_hidden_layers": 4}, **lora)
    tokens = ids(device)

    def steps(**policy):
        fuse(model, Fusion(**parts, **policy))
        with torch.no_grad():
            model(input_ids=tokens, labels=tokens)
        held(model, tokens[:, :5])  # where layers need less
        return [held(model, tokens) for _ in range(3)]

    def selective(budget):
        return steps(checkpoint="selective", checkpoint_gib=budget / 2**30)

    least, most = steps(checkpoint="full")[-1], selective(2**30)[-1]
    of_a_layer = (most - least) / 4
    assert of_a_layer > 0
    for layers in (0.5, 2.5):
        budget = layers * of_a_layer
        first, *later = selective(budget)
        assert max(first, *later) - least <= budget, layers
        # what is left has no room for another: what layers share is counted for each
        assert min(budget, most - least) - (min(later) - least) < 1.6 * of_a_layer, layers


@pytest.mark.parametrize("parts", [ALL, {"layer": True}], ids=("parts", "layer"))
@pytest.mark.parametrize("policy", ["full", "offload", "selective"])
def test_a_step_leaves_nothing_behind_but_gradients(policy, parts, device):
    """The tensors are so small that offloading leaves them where they are."""
    model = sdpa_model(device)
    gib = 0.0 if policy == "selective" else None
    fuse(model, Fusion(**parts, checkpoint=policy, checkpoint_gib=gib))
    tokens = ids(device)
    model(input_ids=tokens, labels=tokens).loss.backward()  # what a first step sets up stays
    model.zero_grad()
    with Storages() as storages:
        model(input_ids=tokens, labels=tokens).loss.backward()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    model.zero_grad()
    gc.collect()
    assert len(storages.seen) > 100
    assert not storages.alive().keys() - own


@pytest.mark.parametrize("where", ["lora_dropout", "attention_dropout"])
def test_dropout_in_a_capture_is_refused_where_a_layer_runs_again(where, device, monkeypatch):
    """It would drop other elements the second time, and nobody would see it."""
    dropping = {"lora_dropout": 0.5} if where == "lora_dropout" else {}
    model = peft_model(device, **dropping).train()
    if where == "attention_dropout":
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
    fuse(model, Fusion(checkpoint="full"))
    tokens = ids(device)
    monkeypatch.setattr(checkpoint, "is_capturing", lambda tensor: True)
    with pytest.raises(ValueError, match="dropout cannot be captured"):
        model(input_ids=tokens, labels=tokens)
    monkeypatch.setattr(checkpoint, "is_capturing", lambda tensor: False)
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_a_layer_without_dropout_may_be_captured(device, monkeypatch):
    model = peft_model(device).train()
    fuse(model, Fusion(checkpoint="full"))
    monkeypatch.setattr(checkpoint, "is_capturing", lambda tensor: True)
    assert model(input_ids=ids(device), labels=ids(device)).loss.isfinite()
