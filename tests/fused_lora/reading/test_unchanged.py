"""A layer that has run before, and then changes, does what a layer does that changes before its
first call."""

import copy
import warnings
import weakref
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from cases.changes import (
    DONE,
    PATCHES,
    activate_both,
    add_second,
    parametrise,
    prepare_hot_swap,
)
from cases.four_bit_case import REFUSED, quantised
from cases.fp8_case import CONFIG, FP8
from cases.fused_case import SHORT, batch, functions_of
from cases.layer_case import BF16, EVERYTHING, LAYER, layer_of, peft_model
from cases.peft_models import DECODER
from cases.reasons import MODULES, OtherMLP, hook, replace_forward
from cases.reference import assert_near
from torch import nn

from fused_lora import fuse
from fused_lora.forwards import layer_reading
from fused_lora.reading import unchanged

ONE = {"num_hidden_layers": 1}


@pytest.fixture
def readings(monkeypatch):
    """One entry for each layer that is read in full."""
    seen, read = [], layer_reading.read_running
    monkeypatch.setattr(
        layer_reading, "read_running", lambda *given: seen.append(1) or read(*given)
    )
    return seen


class Outcome(NamedTuple):
    """What a call gives, the functions of ours that gave it, what it would train, what it says.
    For a call that fails, the error."""

    output: torch.Tensor | None
    functions: dict[str, int]
    trained: list[str]
    said: list[str]


def called(model):
    tokens = batch(model, length=SHORT)["input_ids"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)  # for those that drop out
        try:
            output = model.get_submodule(DECODER)(input_ids=tokens).last_hidden_state
        except (RuntimeError, ValueError, AssertionError) as error:
            return Outcome(None, {}, [], [repr(error)])
    said = [str(one.message) for one in caught if "fused" in str(one.message)]
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained = sorted(names[one] for one in leaves_of(output) if one in names)
    return Outcome(output.detach(), functions_of(output), trained, said)


def leaves_of(output):
    seen, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


def assert_same(got, want):
    assert got[1:] == want[1:]
    if got.output is None or want.output is None:
        assert got.output is want.output
    else:  # a border may be wider than the adapters that are in it now
        assert_near(got.output, want.output, 1e-5)


def assert_noticed(fused, change, readings):
    """That a change after two calls does what it does before the first."""
    fresh = copy.deepcopy(fused)
    called(fused)
    readings.clear()
    called(fused)
    assert not readings  # this is what may hide a change
    change(fresh), change(fused)
    want, got = called(fresh), called(fused)
    assert_same(got, want)
    return got


# --- what is there stays --------------------------------------------------------------------------


KINDS = {
    "plain": {},
    "bf16": BF16,
    "normed heads": {"family": "Qwen3"},
    "dropout": {"lora_dropout": 0.25},
    "magnitudes": {"use_dora": True},
    "trained biases": {"bias": "all"},
    "adapters' biases": {"lora_bias": True},
    "norms in modules_to_save": {"modules_to_save": ["input_layernorm"]},
    "adapters on some": {"target_modules": ["q_proj", "up_proj"]},
    "joined projections": {
        "target_modules": "all-linear",
        "family": "Phi3",
        "config": ONE | {"pad_token_id": 0},
    },
    "4 bits": {"change": quantised},
    "FP8": {"fusion": FP8, "config": ONE | CONFIG},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_layer_that_stays_as_it_is_is_read_once(options, readings, fp8_in_fp32, device):
    options = {"config": ONE, "fusion": LAYER} | options
    model = peft_model(device, **{k: v for k, v in options.items() if k != "fusion"})
    fuse(model, options["fusion"])
    readings.clear()
    values = [called(model) for _ in range(3)]
    assert len(readings) == 1
    assert_same(values[1], values[0])
    assert_same(values[2], values[0])


def test_what_is_computed_in_every_call_is_read_in_every_call(readings, device):
    model = peft_model(device, config=ONE)
    parametrise(model)
    fuse(model, LAYER)
    assert_same(called(model), called(model))
    assert len(readings) > 2


def test_adapters_on_and_off_in_turns_are_read_once_each(readings, device):
    """As where a model without them is its own reference."""
    model = peft_model(device, config=ONE)
    fuse(model, LAYER)
    readings.clear()
    outcomes = []
    for _ in range(3):
        outcomes.append(called(model))
        with model.disable_adapter():
            outcomes.append(called(model))
    assert len(readings) == 2
    for index, outcome in enumerate(outcomes):
        assert_same(outcome, outcomes[index % 2])
    assert not torch.equal(outcomes[0].output, outcomes[1].output)


def test_an_adapter_that_is_gone_is_not_held_for_long(monkeypatch, device):
    monkeypatch.setattr(unchanged, "LONGEST_IDLE", 2)
    model = peft_model(device, config=ONE)
    fuse(model, LAYER)
    called(model)
    gone = weakref.ref(layer_of(model).mlp.up_proj.lora_A["default"])
    delete_and_add(model)
    for _ in range(4):
        called(model)
    assert gone() is None


# --- what changes is seen -------------------------------------------------------------------------


def at_module(path, change):
    return lambda model: change(layer_of(model).get_submodule(path))


def switch_dropout_on(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5


def replace_hooks(model):
    """As some libraries clear them."""
    mlp = layer_of(model).mlp
    mlp._forward_hooks = OrderedDict()
    mlp.register_forward_hook(hook)


def replace_base(model):
    projection = layer_of(model).self_attn.v_proj
    projection.base_layer = copy.deepcopy(projection.base_layer)
    projection.base_layer.weight.data *= 2


def replace_norm(model):
    layer = layer_of(model)
    layer.input_layernorm = copy.deepcopy(layer.input_layernorm)
    layer.input_layernorm.weight.data *= 2


def transpose(model):
    """At the same address."""
    weight = layer_of(model).self_attn.q_proj.base_layer.weight
    weight.data = weight.data.t()


def cut_rank(projection):
    """At the same address, with the same strides."""
    A, B = projection.lora_A["default"].weight, projection.lora_B["default"].weight
    A.data, B.data = A.data[:3], B.data[:, :3]


def delete_and_add(model):
    add_second(model, 4)
    model.set_adapter("second")
    model.delete_adapter("default")


def disable(model):
    model.base_model.disable_adapter_layers()


def set_eps(model):
    layer_of(model).input_layernorm.variance_epsilon = 0.5


PROJECTION = "self_attn.k_proj"
SETTINGS = {
    "adapters are disabled": disable,
    "adapters are merged": lambda model: model.merge_adapter(),
    "adapters are unloaded": lambda model: model.unload(),
    "another adapter replaces one": delete_and_add,
    "eval": lambda model: model.eval(),
    "dropout is on": switch_dropout_on,
    "a hook": at_module("mlp.act_fn", lambda one: one.register_forward_hook(hook)),
    "a hook before": at_module(PROJECTION, lambda one: one.register_forward_pre_hook(hook)),
    "an own forward": at_module("self_attn", replace_forward),
    "a class": at_module("mlp", lambda mlp: setattr(mlp, "__class__", OtherMLP)),
    "hooks are replaced, then added to": replace_hooks,
    "a base layer is replaced": replace_base,
    "a norm is replaced": replace_norm,
    "a weight is transposed": transpose,
    "a scaling": at_module(PROJECTION, lambda p: p.scaling.update(default=0.1)),
    "a scaling that is a tensor": at_module(
        PROJECTION, lambda p: p.scaling.update(default=torch.tensor(p.scaling["default"]))
    ),
    "eps": set_eps,
    "an element of a list": at_module(
        PROJECTION, lambda p: p._active_adapter.__setitem__(0, "none")
    ),
    "attention's scaling": at_module("self_attn", lambda one: setattr(one, "scaling", 0.01)),
    "attention's implementation": lambda model: model.set_attn_implementation("eager"),
    "a bias is trained": at_module(PROJECTION, lambda p: p.base_layer.bias.requires_grad_()),
    "a norm is trained": at_module("input_layernorm", lambda norm: norm.weight.requires_grad_()),
    "A is frozen": at_module(
        f"{PROJECTION}.lora_A.default", lambda A: A.weight.requires_grad_(False)
    ),
    "a rank": at_module(PROJECTION, cut_rank),
    "B's .data": at_module(PROJECTION, lambda p: setattr(p.lora_B["default"].weight, "data",
                                                  2 * p.lora_B["default"].weight.data)),
    "a bias's .data": at_module(PROJECTION, lambda p: setattr(p.base_layer.bias, "data",
                                                       2 * p.base_layer.bias.data)),
    "a weight's .data": at_module(PROJECTION, lambda p: setattr(p.base_layer.weight, "data",
                                                         2 * p.base_layer.weight.data)),
    "a weight": at_module(PROJECTION, lambda p: setattr(
        p.base_layer, "weight", nn.Parameter(2 * p.base_layer.weight, requires_grad=False))),
    "a module's name": at_module("self_attn.q_proj.lora_A", lambda one: setattr(
        one, "other", one._modules.pop("default"))),
}  # fmt: skip
IN_TABLES = {
    **{f"{at or 'layer'}: {says} ({number})": at_module(at, change)
       for number, (_, at, change, says) in enumerate(MODULES)},
    **DONE,
    "several adapters": activate_both,
    "prepare_model_for_compiled_hotswap": prepare_hot_swap,
    "float64": nn.Module.double,
}  # fmt: skip


def is_normed(name):
    return "k_norm" in name or "q_norm" in name


@pytest.mark.parametrize("name", SETTINGS)
def test_a_change_after_two_calls_is_seen(name, readings, device):
    model = peft_model(device, config=ONE)
    fuse(model, EVERYTHING)
    assert_noticed(model, SETTINGS[name], readings)


@pytest.mark.slow("load_state_dict(assign=True)", "a parametrised A", "several adapters")
@pytest.mark.parametrize("name", IN_TABLES)
def test_a_change_of_other_tables_is_seen(name, readings, device):
    model = peft_model(device, "Qwen3" if is_normed(name) else "Qwen2", config=ONE)
    fuse(model, EVERYTHING)
    assert_noticed(model, IN_TABLES[name], readings)


@pytest.mark.slow("another shape", "not quantised", "a plain parameter")
@pytest.mark.parametrize("name", [name for name in REFUSED if not REFUSED[name][0]])
def test_a_change_of_4_bits_is_seen(name, readings, device):
    model = peft_model(device, dtype=torch.bfloat16, config=ONE, change=quantised)
    fuse(model, EVERYTHING)
    assert_noticed(model, REFUSED[name][1], readings)


@pytest.mark.parametrize("place, name", dict.fromkeys(patch[1:] for patch in PATCHES))
def test_a_patch_after_two_calls_is_seen(place, name, readings, monkeypatch, device):
    own = getattr(place, name)
    model = peft_model(device, config=ONE)
    fuse(model, EVERYTHING)

    def patched(*given, **options):
        return own(*given, **options)

    assert_noticed(model, lambda _: monkeypatch.setattr(place, name, patched), readings)
