"""Each checkpointing policy in everyday training: which layers are recomputed, and what happens
when transformers' own checkpointing or a cache is switched on and off beside it."""

import copy
import re
import warnings
from dataclasses import replace

import pytest
import torch
from cases.fused_case import ALL, SHORT, assert_close, assert_same, batch, loss_of, pickled, step
from cases.layer_case import LAYER, layer_of, pair, peft_model
from cases.peft_models import ATTENTION, LAYERS, MLP, ids
from cases.reference import relative_error
from peft import LoraConfig
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from fused_lora import Fusion, fuse, report, unfuse
from fused_lora.foreign.checkpointing import policy_of
from fused_lora.layer import buffer
from fused_lora.step.checkpoint import policies_in
from fused_lora.step.settings import ModuleSettings

KEPT = {"checkpoint": "selective", "checkpoint_gib": 90e3 / 2**30}  # one layer of three
NONE_KEPT = {"checkpoint": "selective", "checkpoint_gib": 0}
LOSS = Fusion(cross_entropy=True)
ALONE = "attention as one, offload"
FUSIONS = {
    "attention": Fusion(attention=True),
    "full": Fusion(attention=True, checkpoint="full"),
    "offload": Fusion(attention=True, checkpoint="offload"),
    "selective": Fusion(attention=True, **KEPT),
    "all, full": Fusion(**ALL, checkpoint="full"),
    ALONE: Fusion(attention=True, rope=True, checkpoint="offload"),
    "layer, offload": Fusion(layer=True, cross_entropy=True, checkpoint="offload"),
    "DoRA, full": Fusion(layer=True, checkpoint="full"),
    "DoRA, selective": Fusion(layer=True, **KEPT),
    "DoRA, offload": Fusion(layer=True, cross_entropy=True, checkpoint="offload"),
    "none": Fusion(checkpoint="none"),
}
# The last layer's input stays in place, and nothing below the first is trained.
THREE_LAYERS = {"num_hidden_layers": 3}


def with_hidden_states(model, inputs):
    output = model(**inputs, output_hidden_states=True)
    return output.loss + sum(hidden.pow(3).mean() for hidden in output.hidden_states)


# With whole layers, only the plain loss lets the last one skip tokens without a label.
@pytest.mark.slow("loss_of-selective", "with_hidden_states-full")
@pytest.mark.parametrize(("loss_of", "name"), [
    *((loss_of, name) for name in ("offload", "selective", "all, full", ALONE, "layer, offload")),
    *((loss_of, name) for name in FUSIONS if "DoRA" in name),
    *((with_hidden_states, name) for name in ("full", "selective", "layer, offload")),
])  # fmt: skip
def test_micro_batches_add_up_to_the_gradients_of_one_batch(loss_of, name, device):
    """Run the first batch's backward alone, and one backward for the other two."""
    fused, plain, _ = pair(device, FUSIONS[name], config=THREE_LAYERS, use_dora="DoRA" in name)
    first, *others = batches = [batch(plain, seed=seed) for seed in (3, 4, 5)]
    one = {name: torch.cat([each[name] for each in batches]) for name in first}
    loss_of(plain, one).backward()
    (loss_of(fused, first) / 3).backward()
    sum(loss_of(fused, other) / 3 for other in others).backward()
    got, want = (
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for model in (fused, plain)
    )
    assert_close(got, want)


# --- which layers are recomputed ------------------------------------------------------------------


def runs_of_a_step(model):
    """Return the layers in the order they ran, forward and backward, and the step's values."""
    runs = []
    hooks = [
        layer.mlp.gate_proj.register_forward_hook(lambda *_, index=index: runs.append(index))
        for index, layer in enumerate(model.get_submodule(LAYERS))
    ]
    values = step(model, length=SHORT)
    for hook in hooks:
        hook.remove()
    return runs, values


TWICE = [0, 1, 1, 0]
TILE = SHORT + 1  # rows of a tile: a step's 2 * SHORT do not make two
RUNS = {  # what we fuse, one after the other, the rows of a tile, what then runs
    "none": ([Fusion(checkpoint="none")], TILE, [0, 1]),
    "full": ([Fusion(checkpoint="full")], TILE, TWICE),
    "full, then offload": ([Fusion(checkpoint="full"), Fusion(checkpoint="offload")], TILE, TWICE),
    "selective": ([Fusion(**NONE_KEPT)], TILE, TWICE),
    # the last layer is not recomputed: its backward comes next
    "fused loss": ([LOSS, Fusion(checkpoint="offload")], TILE, [0, 1, 0]),
    "fused loss at once": ([Fusion(cross_entropy=True, **NONE_KEPT)], TILE, [0, 1, 0]),
    "long rows": ([LOSS, Fusion(checkpoint="offload")], TILE - 1, TWICE),
    "long rows, full": ([Fusion(cross_entropy=True, checkpoint="full")], TILE - 1, TWICE),
    "long rows, none": ([Fusion(cross_entropy=True, checkpoint="none")], TILE - 1, [0, 1]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_policy_takes_the_place_of_the_models_own_until_unfuse(name, device):
    fusions, tile_rows, wanted = RUNS[name]
    model = peft_model(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    runs, want = runs_of_a_step(model)
    assert runs == TWICE
    for fusion in fusions:
        fuse(model, fusion)
    for policy in policies_in(model):
        policy.tile_rows = tile_rows
    runs, got = runs_of_a_step(model)
    assert runs == wanted
    assert_close(got, want)
    unfuse(model)
    assert runs_of_a_step(model)[0] == TWICE
    assert own_of(layer_of(model)) == (True, torchs_checkpoint)


@pytest.mark.parametrize("where", ["mlp", ""])
def test_a_hook_that_saves_an_output_finds_it_when_the_layer_runs_again(where, device):
    whole = Fusion(mlp=True, layer=not where, checkpoint="full")
    fused, plain, _ = pair(device, whole)
    for model in (fused, plain):
        for layer in model.get_submodule(LAYERS):
            layer.get_submodule(where).register_forward_hook(lambda module, given, y: y * y.tanh())
    assert_same(fused, plain)


def test_the_down_projection_does_not_run_again(device, monkeypatch):
    """A checkpointed layer runs twice, but the recompute stops before the down projection."""
    import fused_mlp.fast_lora as module

    calls, swiglu_forward = [], module.swiglu_forward
    monkeypatch.setattr(
        module, "swiglu_forward", lambda *tensors: calls.append(1) or swiglu_forward(*tensors)
    )
    fused, _, _ = pair(device, Fusion(mlp=True, checkpoint="full"))
    step(fused, length=SHORT)
    assert len(calls) == 2  # two layers, once each


@pytest.mark.parametrize("policy", ["full", "offload"])
def test_magnitudes_become_factors_once_and_down_does_not_run_again(policy, device, monkeypatch):
    """A checkpointed layer keeps its factors and what down gives, and trains as a kept one."""
    made, added = [], []
    function, add = buffer.magnitude_factors, buffer.Buffer.add_swiglu
    monkeypatch.setattr(
        buffer, "magnitude_factors", lambda *given: made.append(1) or function(*given)
    )
    monkeypatch.setattr(
        buffer.Buffer, "add_swiglu", lambda *given: added.append(given[3]) or add(*given)
    )
    kept, _, _ = pair(device, LAYER, use_dora=True, config=THREE_LAYERS)
    again = copy.deepcopy(kept)
    fuse(again, Fusion(checkpoint=policy))
    for model in (kept, again):
        results = step(model, length=SHORT)
        assert len(made) == 4 * 3 and len(added) == 3, "once for each group of each layer"
        made.clear(), added.clear()
        if model is kept:
            want = results
    assert results.functions == want.functions and results.keys() == want.keys()
    assert all(torch.equal(results[name], want[name]) for name in want)


def activate_another(model):
    model.set_adapter("second")


def activate_another_and_train_both(model):
    model.set_adapter("second")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def turn_adapters_off(model):
    model.base_model.disable_adapter_layers()


def scale(model):
    for layer in model.get_submodule(LAYERS):
        layer.mlp.up_proj.set_scale("default", 3.0)


def turn_dropout_off(model):
    for module in model.modules():
        if type(module) is torch.nn.Dropout:
            module.p = 0.0


CHANGES = (
    activate_another, activate_another_and_train_both, turn_adapters_off, scale, turn_dropout_off,
    torch.nn.Module.eval,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fusion", [Fusion(**ALL), LAYER, Fusion(checkpoint="none")])
@pytest.mark.parametrize("checkpoint", ["full", "offload"])
def test_a_recompute_sees_the_model_as_its_forward_did(checkpoint, fusion, change, device):
    """Whatever happens to adapters, dropout and modes before the backward."""
    plain = peft_model(device, lora_dropout=0.5)
    plain.add_adapter("second", LoraConfig(r=4, target_modules=[*ATTENTION, *MLP]))
    found = []
    for policy in (checkpoint, "none"):
        model = copy.deepcopy(plain)
        fuse(model, replace(fusion, checkpoint=policy))
        torch.manual_seed(1)
        loss = loss_of(model, batch(model, length=SHORT))
        change(model)
        settings = ModuleSettings(model)
        before = settings.modes(), settings.adapters()
        loss.backward()
        assert (settings.modes(), settings.adapters()) == before
        found.append([(name, p.grad) for name, p in model.named_parameters()])
    for (name, got), (_, want) in zip(*found, strict=True):
        assert (got is None) == (want is None), name
        assert got is None or relative_error(got, want) < 2e-5, name


def test_in_eval_mode_it_says_that_nothing_is_checkpointed(device):
    fused, plain, _ = pair(device, Fusion(cross_entropy=True, checkpoint="full"))
    fused.eval(), plain.eval()
    said = "transformers checkpoints nothing in eval mode: call model.train()"
    # not in the report: models are fused in eval mode, before a trainer calls model.train()
    assert len(report(fused).fused["checkpoint"]) == 2 and not report(fused).left
    with pytest.warns(UserWarning, match=re.escape(said)):
        assert_same(fused, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step(fused, length=SHORT)


# --- beside transformers' own switch --------------------------------------------------------------


def own_of(layer):
    """Return what transformers set on a layer: whether to checkpoint, and by which function."""
    function = vars(layer).get("_gradient_checkpointing_func")
    return layer.gradient_checkpointing, getattr(function, "func", function)


@pytest.mark.parametrize("parts", [{}, {"rms_norm": True}], ids=["layer's own", "fused forward"])
def test_a_policy_stays_when_checkpointing_is_switched_on_and_off(parts, device):
    """The Trainer does that: its gradient_checkpointing=True comes after fuse()."""
    fused, plain, _ = pair(device, Fusion(**parts, checkpoint="full"))
    layers = fused.get_submodule(LAYERS)
    policies = [policy_of(layer) for layer in layers]
    want = step(plain, length=SHORT)
    for _ in range(2):
        fused.gradient_checkpointing_disable()
        assert runs_of_a_step(fused)[0] == [0, 1]
        fused.gradient_checkpointing_enable()
        runs, got = runs_of_a_step(fused)
        assert runs == TWICE
        assert_close(got, want)
    assert all(policies) and [policy_of(layer) for layer in layers] == policies
    fuse(fused, FUSIONS["none"])
    fused.gradient_checkpointing_enable()
    assert runs_of_a_step(fused)[0] == [0, 1]
    fused.gradient_checkpointing_disable()
    unfuse(fused)
    assert [own_of(layer) for layer in layers] == [(False, torchs_checkpoint)] * 2


@pytest.mark.slow("selective-pickled", "attention-pickled")
@pytest.mark.thinned
@pytest.mark.parametrize("duplicate", [pickled, copy.deepcopy])
@pytest.mark.parametrize("name", ["selective", "layer, offload", "none", "attention"])
def test_a_copy_trains_as_before_and_has_a_policy_and_a_switch_of_its_own(name, duplicate, device):
    fusion = FUSIONS[name]
    fused, plain, _ = pair(device, fusion, config=THREE_LAYERS)
    twin = duplicate(fused)
    assert_same(twin, plain)
    policies = {policy_of(layer_of(one)) for one in (fused, twin)}
    assert len(policies) == (1 if name == "attention" else 2)  # each model has one, if any
    twin.gradient_checkpointing_disable()
    assert not layer_of(twin).gradient_checkpointing
    assert layer_of(fused).gradient_checkpointing == (fusion.checkpoint not in ("", "none"))
    unfuse(fused)
    assert policy_of(layer_of(fused)) is None and policy_of(layer_of(twin)) in policies
    assert "_set_gradient_checkpointing" not in vars(fused.get_base_model())


@pytest.mark.parametrize("switched_on", [False, True])
def test_without_checkpointing_a_model_in_training_keeps_its_cache(switched_on, device):
    fused, plain, _ = pair(device, FUSIONS["none"])
    if switched_on:
        fused.gradient_checkpointing_enable()
    caches = [
        model(input_ids=ids(device), use_cache=True).past_key_values for model in (fused, plain)
    ]
    assert [cache.get_seq_length() for cache in caches] == [17, 17]
    assert fused.training
    unfuse(fused)
    decoder = fused.get_base_model().model
    assert decoder.gradient_checkpointing == layer_of(fused).gradient_checkpointing == switched_on


@pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("fusion", [FUSIONS["all, full"], Fusion(rms_norm=True, checkpoint="full")])
def test_without_gradients_a_model_in_training_fills_the_cache_that_plain_peft_does(fusion, device):
    """transformers 5.24 then checkpoints nothing and keeps the cache. 5.23 fills none."""
    fused, plain, _ = pair(device, fusion)
    plain.gradient_checkpointing_enable()
    with torch.no_grad():
        outputs = [model.train()(input_ids=ids(device), use_cache=True) for model in (fused, plain)]
    torch.testing.assert_close(*(output.logits for output in outputs))
    caches = [output.past_key_values for output in outputs]
    got, want = ([] if cache is None else cache.layers for cache in caches)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
