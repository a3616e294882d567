"""A decoder's forward and backward as graphs: the eager numbers, and what runs eagerly."""

import copy
import warnings

import pytest
import torch
from cases import layer_case
from cases.graph_case import Recorded, held_nodes, seen_as_captured
from cases.peft_models import ids
from cases.reference import assert_near
from peft import LoraConfig
from torch.multiprocessing.reductions import StorageWeakRef

from fused_lora import Fusion, fuse
from fused_lora.step import graphed_module as module
from fused_lora.step.graph import EAGER_CALLS
from fused_lora.step.graphed_module import CACHES, GraphedModule
from fused_lora.step.masks import MASK

CALLS = 5  # two of them eager


def pair(device, monkeypatch, max_graphs=8, config=None, **options):
    """Return a graphed decoder and its eager twin."""
    if device == "cpu":
        monkeypatch.setattr(GraphedModule, "_backend", Recorded)
    model = layer_case.peft_model(
        device, config={"num_hidden_layers": 1} | (config or {}), **options
    )
    decoder = model.get_base_model().model
    twin = copy.deepcopy(decoder)
    return GraphedModule(decoder, lambda: None, max_graphs), twin


def assert_same(got, want, is_reordered=False):
    """Bit by bit on the CPU. A GPU may sum in another order on another stream."""
    if (got.is_cuda or is_reordered) and want.any():
        assert_near(got, want, 1e-5)
    else:
        assert got.equal(want)


def batch(seed, device, length=7):
    return {"input_ids": ids(device, seed)[:, :length], "use_cache": False}


def step(graphed, twin, inputs, forwards=1):
    """Run `forwards` forwards and then their backward, here and there, and compare hidden states
    and gradients, which accumulate."""
    with graphed.in_place():
        got = [graphed.module(**inputs).last_hidden_state for _ in range(forwards)]
    want = [twin(**inputs).last_hidden_state for _ in range(forwards)]
    sum(one.square().sum() for one in got).backward()
    sum(one.square().sum() for one in want).backward()
    for one, wanted in zip(got, want, strict=True):
        assert_same(one.detach(), wanted.detach())
    pairs = zip(graphed.module.parameters(), twin.parameters(), strict=True)
    for parameter, wanted in pairs:
        assert (parameter.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            assert_same(parameter.grad, wanted.grad, is_reordered=forwards > 1)


def run(graphed, twin, make, calls=CALLS, **options):
    """Take steps, and return the warnings that they give."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for seed in range(calls):
            step(graphed, twin, make(seed), **options)
    return [str(one.message) for one in given if "graph_steps" in str(one.message)]


@pytest.mark.parametrize("is_held", [False, True])
def test_gradients_accumulate_until_they_are_dropped(device, monkeypatch, is_held):
    """Also where somebody else holds the nodes that accumulate them."""
    graphed, twin = pair(device, monkeypatch)
    nodes = held_nodes(graphed.module) if is_held else []
    before = dict(graphed.module.named_parameters())
    for _ in range(3):
        assert not run(graphed, twin, lambda seed: batch(seed, device))
        for one in (graphed.module, twin):
            one.zero_grad()
    assert graphed.captured == 1 and len(nodes) == is_held * len(graphed._replays.sums)
    assert "forward" not in vars(graphed.module)
    for name, parameter in graphed.module.named_parameters():
        assert parameter is before[name]


def test_what_was_accumulated_elsewhere_is_kept(device, monkeypatch):
    graphed, twin = pair(device, monkeypatch)
    run(graphed, twin, lambda seed: batch(seed, device))
    for one in (graphed.module, twin):
        for parameter in one.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    run(graphed, twin, lambda seed: batch(seed, device), calls=2)


def test_gradients_may_get_other_data(device, monkeypatch):
    """A graph adds where it did when it was captured."""
    graphed, twin = pair(device, monkeypatch)
    run(graphed, twin, lambda seed: batch(seed, device))
    places = [one.data_ptr() for one in graphed._replays.sums.values()]
    for one in (graphed.module, twin):
        for parameter in one.parameters():
            if parameter.requires_grad:
                parameter.grad.data = parameter.grad * 2
    run(graphed, twin, lambda seed: batch(seed, device), calls=2)
    assert places == [one.data_ptr() for one in graphed._replays.sums.values()]


def test_forwards_without_gradients_have_a_graph_of_their_own(device, monkeypatch):
    """As a reference pass does, one runs between a forward and its backward."""
    graphed, twin = pair(device, monkeypatch)
    for seed in range(CALLS):
        inputs, other = batch(seed, device), batch(seed + 9, device)
        with graphed.in_place():
            hidden = graphed.module(**inputs).last_hidden_state
            with torch.no_grad():
                reference = graphed.module(**other).last_hidden_state
        hidden.square().sum().backward()
        twin(**inputs).last_hidden_state.square().sum().backward()
        with torch.no_grad():
            assert_same(reference, twin(**other).last_hidden_state)
    for got, want in zip(graphed.module.parameters(), twin.parameters(), strict=True):
        if want.grad is not None:
            assert_same(got.grad, want.grad)
    assert graphed.captured == 2


@pytest.mark.parametrize("rows", ["packed", "packed, and the first capture fails", "padded"])
def test_packed_rows_of_another_length_are_captured_at_their_next_call(rows, device, monkeypatch):
    """If that fails they run eagerly first, as with a mask, which eager calls look
    at."""
    graphed, twin = pair(device, monkeypatch, config={"head_dim": 32}, **layer_case.BF16)
    for one in (graphed.module, twin):
        fuse(one, Fusion(layer=True))
    capture = graphed._capture

    def capture_later(form, *others):
        if "fails" in rows and form.eager_calls < EAGER_CALLS:
            raise RuntimeError("not loaded")
        return capture(form, *others)

    def inputs(seed, length):
        places = torch.arange(length, device=device).expand(2, -1)
        if rows == "padded":
            return batch(seed, device, length) | {MASK: (places < 4).long()}
        return batch(seed, device, length) | {"position_ids": places % 3}

    graphed._capture = capture_later
    lengths = [6, 7, 7, 7, 6, 6, 6, 5, 5, 5]
    assert not run(graphed, twin, lambda seed: inputs(seed, lengths[seed]), len(lengths))
    assert graphed.captured == 3
    calls = [form.eager_calls for form in graphed._forms.values()]
    assert calls == ([1, 2, 0] if rows == "packed" else [2, 2, 2])


def test_an_eager_backward_does_not_trust_memory_that_a_replay_has_written(device, monkeypatch):
    """As where a policy cannot be captured, and its reference pass can."""
    graphed, _ = pair(device, monkeypatch)
    forgotten, waiting = [], False
    graphed.forget = lambda: forgotten.append(waiting)
    next(one for one in graphed.module.parameters() if one.requires_grad).register_hook(
        lambda gradient: None
    )
    with warnings.catch_warnings(action="ignore"), graphed.in_place():
        for seed in range(CALLS):
            hidden = graphed.module(**batch(seed, device)).last_hidden_state
            waiting = True
            with torch.no_grad():
                graphed.module(**batch(seed, device))
            waiting = False
            hidden.sum().backward()
    assert graphed.captured == 1 and forgotten == [True] * (CALLS - EAGER_CALLS)


@pytest.mark.parametrize("lengths", [(7, 5), (5, 7)])
def test_graphs_of_several_lengths_share_memory(lengths, device, monkeypatch):
    """The longest first has them all share one; a longer one takes new memory. Gradients are freed
    a few at a time."""
    added, add = [], torch._foreach_add_
    monkeypatch.setattr(module, "ADDED_AT_ONCE", 4)
    monkeypatch.setattr(
        torch, "_foreach_add_", lambda sums, new: (added.append(len(new)), add(sums, new))
    )
    graphed, twin = pair(device, monkeypatch)
    for length in (*lengths, lengths[0]):
        assert not run(graphed, twin, lambda seed, length=length: batch(seed, device, length))
    captured = [form.captured for form in graphed._forms.values()]
    places = {one.crossing.data_ptr() for one in captured}
    assert len(captured) == 2 and len(places) == (1 if lengths[0] > lengths[1] else 2)
    assert added == 2 * [4, 4, 4, 2]
    assert all(len(one.received) == 14 for one in captured)


def test_moved_weights_are_captured_anew(device, monkeypatch):
    graphed, twin = pair(device, monkeypatch)
    run(graphed, twin, lambda seed: batch(seed, device))
    for parameter in graphed.module.parameters():
        parameter.data = parameter.data.clone()
    run(graphed, twin, lambda seed: batch(seed, device), calls=1)
    assert graphed.captured == 0
    run(graphed, twin, lambda seed: batch(seed, device), calls=3)
    assert graphed.captured == 1


@pytest.mark.parametrize("is_parameter", [False, True])
def test_what_was_replaced_is_captured_anew(is_parameter, device, monkeypatch):
    graphed, twin = pair(device, monkeypatch)
    run(graphed, twin, lambda seed: batch(seed, device))
    for one in (graphed.module, twin):
        projection = one.layers[0].mlp.up_proj
        other = copy.deepcopy(projection.lora_A["default"])
        if is_parameter:
            projection.lora_A["default"].weight = other.weight
        else:
            projection.lora_A["default"] = other
    run(graphed, twin, lambda seed: batch(seed, device))
    assert graphed.captured == 1


def test_adapters_that_are_added_get_gradients(device, monkeypatch):
    graphed, _ = pair(device, monkeypatch)
    model = layer_case.peft_model(device, config={"num_hidden_layers": 1})
    graphed.module = model.get_base_model().model
    graphed.reset()
    for active in (["default"], ["default", "second"]):
        if "second" in active:
            model.add_adapter("second", LoraConfig(r=4, target_modules="all-linear"))
            model.base_model.set_adapter(active)
        twin = copy.deepcopy(graphed.module)
        for _ in range(2):
            graphed.module.zero_grad(), twin.zero_grad()
            run(graphed, twin, lambda seed: batch(seed, device), calls=4)
        assert graphed.captured == 1


def test_generating_is_no_step_and_says_nothing(device, monkeypatch):
    graphed, _ = pair(device, monkeypatch)
    output = graphed.module(**batch(0, device) | {"use_cache": True})
    name = next(name for name in reversed(CACHES) if name in output)
    cache = output[name]
    with torch.no_grad(), graphed.in_place(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(CALLS):
            token = {"input_ids": ids(device, seed)[:, :1]}
            graphed.module(**token, use_cache=True, **{name: cache})
    assert graphed.captured == 0 and cache.get_seq_length() == 7 + CALLS


def with_a_cache(graphed, device):
    return lambda seed: {"input_ids": batch(seed, device)["input_ids"], "use_cache": True}


def with_many_lengths(graphed, device):
    return lambda seed: batch(seed, device, 3 + seed)


def with_embeddings(graphed, device):
    def embedded(module, seed):
        tokens = module.embed_tokens(batch(seed, device)["input_ids"])
        return {"inputs_embeds": tokens.detach().requires_grad_(), "use_cache": False}

    return lambda seed: embedded(graphed.module, seed)


def with_an_object(graphed, device):
    return lambda seed: batch(seed, device) | {"given": object()}


def with_a_hook(graphed, device):
    trained = [parameter for parameter in graphed.module.parameters() if parameter.requires_grad]
    trained[0].register_hook(lambda gradient: None)
    return lambda seed: batch(seed, device)


def with_a_kept_parameter(graphed, device):
    kept = next(parameter for parameter in graphed.module.parameters() if parameter.requires_grad)
    graphed.module.embed_tokens.register_forward_hook(
        lambda _, inputs, output: output + 0 * kept.sum()
    )
    return lambda seed: batch(seed, device)


def waiting(graphed, device):
    layer = graphed.module.layers[0]
    layer.register_forward_hook(lambda _, inputs, output: (output.sum().item(), output)[1])
    return lambda seed: batch(seed, device)


EAGER = {
    with_a_cache: "beside hidden states: set model.config.use_cache = False",
    with_many_lengths: "more than max_graphs=2 shapes",
    with_embeddings: "inputs require gradients",
    with_an_object: "got given as object",
    with_a_hook: "a parameter has hooks",
    with_a_kept_parameter: "a parameter is used by something else than the module that has it",
    waiting: "cannot be captured: RuntimeError: called a synchronizing CUDA operation",
}


@pytest.mark.parametrize("make", EAGER)
def test_what_cannot_be_captured_is_named_once_and_runs_eagerly(make, device, monkeypatch):
    graphed, twin = pair(device, monkeypatch, max_graphs=2)
    said = run(graphed, twin, make(graphed, device))
    assert len(said) == 1 and EAGER[make] in said[0]
    assert graphed.captured == 0


def test_a_second_forward_before_the_backward_runs_eagerly(device, monkeypatch):
    graphed, twin = pair(device, monkeypatch)
    said = run(graphed, twin, lambda seed: batch(seed, device), forwards=2)
    assert len(said) == 1 and "a second forward before the backward" in said[0]
    assert graphed.captured == 1


def test_a_second_backward_is_an_error(device, monkeypatch):
    graphed, twin = pair(device, monkeypatch)
    run(graphed, twin, lambda seed: batch(seed, device))
    with graphed.in_place():
        loss = graphed.module(**batch(9, device)).last_hidden_state.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through one forward"):
        loss.backward()


class Held(Recorded):
    """Runs what it should capture, and holds no more than that does."""

    def capture(self, body):
        with seen_as_captured():
            return (lambda: None), body()


def test_a_captured_backward_holds_no_hidden_states_and_no_gradient_of_embeddings(
    device, monkeypatch
):
    """Though a trainer has the embeddings require one."""
    monkeypatch.setattr(module, "EAGER_CALLS", 0)
    monkeypatch.setattr(GraphedModule, "_backend", Held)
    model = layer_case.peft_model(device, config={"num_hidden_layers": 2})
    fuse(model, Fusion(layer=True, checkpoint="full"))
    model.enable_input_require_grads()
    decoder = model.get_base_model().model
    graphed, backward = GraphedModule(decoder, lambda: None, 1), GraphedModule._backward
    embedded, results, is_held = [], [], []
    decoder.embed_tokens.register_forward_hook(lambda *call: embedded.append(call[-1]))
    for one in (decoder.layers[0], decoder.norm):
        one.register_forward_hook(
            lambda *call: results.append(StorageWeakRef(call[-1].untyped_storage()))
        )

    def seen(*given):
        is_held.extend(not one.expired() for one in results)
        return backward(*given)

    monkeypatch.setattr(GraphedModule, "_backward", seen)
    with graphed.in_place():
        decoder(**batch(0, device))
    assert not graphed.told
    assert is_held == [True, False]  # the second layer is recomputed from the first one's
    assert embedded[0].requires_grad and embedded[0].grad is None
