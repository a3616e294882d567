"""Changes that users make to a fused model, with parts or whole layers fused. It computes what
vanilla PEFT does after the same change, and says so if it no longer runs fused."""

import copy
import warnings

import pytest
import torch
from cases.changes import DONE, activate_both, adapters, add_second, prepare_hot_swap
from cases.four_bit_case import EXPERTS, quantised
from cases.fused_case import assert_close, assert_same, batch, functions_of
from cases.layer_case import EVERYTHING, LAYER, NAMES, layer_of, pair, peft_model
from cases.peft_models import adapt, base_model

from fused_lora import Fusion, fuse, report

PARTS = Fusion(mlp=True, attention=True, rope=True)
FUSIONS = {"layer": LAYER, "DoRA": LAYER, "parts": PARTS, "4 bits": LAYER, "parts in 4 bits": PARTS}
FUSIONS["experts in 4 bits"] = PARTS
# Our functions in a layer.
FUNCTIONS = {"parts": {"LoRA_MLP": 1, "LoRA_Attention": 1}, "layer": {"DecoderLayer": 1}}
FUNCTIONS |= {"4 bits": FUNCTIONS["layer"], "DoRA": FUNCTIONS["layer"]}
FUNCTIONS |= {"parts in 4 bits": FUNCTIONS["parts"]}
FUNCTIONS["experts in 4 bits"] = {"LoRA_Experts": 1, "LoRA_Attention": 1}
MADE = {kind: {"change": quantised} for kind in ("4 bits", "parts in 4 bits")}
MADE["DoRA"] = {"use_dora": True}
MADE["experts in 4 bits"] = EXPERTS | {"dtype": torch.float32}
ONE_LAYER = {"num_hidden_layers": 1}
NORMED = {"family": "Qwen3"}  # a layer reads the weights of head norms, but does not move them


# --- a table of what users do ---------------------------------------------------------------------

OF_WEIGHTS = ("hot-swap", "load_state_dict(assign=True)", "to another dtype, a forward, and back")
OVER_PARTS = (  # which keep nothing: adapters in place, elsewhere, and others
    "optimizer", "load_state_dict(assign=True)", "another adapter and back"
)  # fmt: skip


OVER_4_BITS = (  # which bitsandbytes quantises, stores and moves in its own way
    "optimizer", "moving average through .data", "hot-swap", "merged and unmerged",
    "another adapter and back", "an adapter of a larger rank",
)  # fmt: skip
IN_PLACE = (  # over experts in 4 bits, and where norms are of the adapters
    "optimizer", "load_state_dict", "moving average through .data", "other .data",
    "to another dtype and back", "another adapter and back", "merged and unmerged",
    "safely merged and unmerged",
)  # fmt: skip
OVER_PARTS_IN_4_BITS = "optimizer", "another adapter and back", "merged and unmerged"


@pytest.mark.slow(
    "layer-optimizer",
    "DoRA-optimizer",
    "4 bits-merged and unmerged",
    "layer-hot-swap",
    "layer-merged and unmerged",
    "layer-an adapter of a larger rank",
    "parts-another adapter and back",
)
@pytest.mark.parametrize(
    ("kind", "what", "options"),
    [
        *(("layer", what, {}) for what in DONE),
        *(("DoRA", what, {}) for what in IN_PLACE),
        *(("parts", what, {}) for what in OVER_PARTS),
        *(("4 bits", what, {}) for what in OVER_4_BITS),
        *(("parts in 4 bits", what, {}) for what in OVER_PARTS_IN_4_BITS),
        *(("experts in 4 bits", what, {}) for what in IN_PLACE),
        *(("layer", what, NORMED) for what in OF_WEIGHTS),
    ],
)
def test_a_fused_model_computes_what_plain_peft_does(what, kind, options, device):
    options = {"config": {}} | options | MADE.get(kind, {})
    options["config"] = options["config"] | ONE_LAYER
    fused, plain, _ = pair(device, FUSIONS[kind], **options)
    waiting = fused(**batch(fused)).loss  # its graph keeps everything it was computed from
    assert functions_of(waiting) == FUNCTIONS[kind]
    for model in (fused, plain):
        DONE[what](model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*fused")
        assert assert_same(fused, plain, most=1e-4) == FUNCTIONS[kind]
    assert not report(fused).left


@pytest.mark.slow("prepare_model_for_compiled_hotswap")
@pytest.mark.parametrize(
    ("change", "fusion", "reason", "are_said"),
    [
        (prepare_hot_swap, LAYER, "its scaling is a tensor", 1),
        (activate_both, LAYER, "2 adapters are active", 0),  # by the user's own wish
        # of lm_head, a layer, its first projections and o, and as rope, a norm, and gate
        (torch.nn.Module.double, EVERYTHING, "torch.float64: cast the model", 7),
    ],
    ids=("prepare_model_for_compiled_hotswap", "several adapters", "float64"),
)
def test_where_it_may_not_run_fused_it_says_so_once(change, fusion, reason, are_said, device):
    fused, plain, _ = pair(device, fusion)
    assert assert_same(fused, plain)["DecoderLayer"] == 2
    change(fused), change(plain)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert assert_same(fused, plain, most=1e-4) == {}
    assert reason in report(fused).left[NAMES[0]]
    said = [str(one.message) for one in said if "fused" in str(one.message)]
    assert [reason in one for one in said] == [True] * are_said


# --- graphs that wait while something else is run -------------------------------------------------


def loss_of(model, adapter="default", seed=3):
    model.set_adapter(adapter)
    return model(**batch(model, seed=seed)).loss


def run_reference(model):
    """Run the reference adapter, as DPO with ref_adapter_name does between forward and backward."""
    with torch.no_grad():
        loss_of(model, "second")
    model.set_adapter("default")


def a_reference_between(model):
    loss = loss_of(model)
    run_reference(model)
    loss.backward()


def a_move_between(model):
    loss = loss_of(model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.clone()
    run_reference(model)
    loss.backward()


def twice(model):
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    run_reference(model)
    loss.backward()


def two_batches(model):
    for loss in [loss_of(model, seed=seed) for seed in (3, 4)]:
        loss.backward()


def two_forwards(model):
    losses = [loss_of(model, "default"), loss_of(model, "second", seed=4)]
    for parameter in adapters(model).values():
        parameter.requires_grad_(True)
    for loss in losses:
        loss.backward()


def on_the_host(model):
    """Save tensors to the host: backward gets them as other tensors."""
    with torch.autograd.graph.save_on_cpu():
        two_forwards(model)


# Recomputed layers read whichever adapter is active by then, as they do in vanilla PEFT.
RUN_AGAIN = [a_reference_between, a_move_between, twice, two_batches]
ORDERS = [*RUN_AGAIN, two_forwards, on_the_host]


@pytest.mark.slow("layer-full-two_batches", "parts-none-on_the_host")
@pytest.mark.parametrize(
    ("kind", "policy", "order"),
    [
        *((kind, "none", order) for kind in FUSIONS for order in ORDERS),
        *((kind, "full", order) for kind in ("layer", *MADE) for order in RUN_AGAIN),
    ],
)
def test_gradients_are_those_of_the_forward_that_they_belong_to(kind, policy, order, device):
    plain = peft_model(device, **MADE.get(kind, {}))
    add_second(plain, 12)
    fused = copy.deepcopy(plain)
    fuse(fused, FUSIONS[kind]), fuse(fused, Fusion(checkpoint=policy))
    gradients = []
    for model in (fused, plain):
        order(model)
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_close(*gradients, 1e-4)


def test_an_optimizers_step_before_backward_is_plain_pytorchs_error(device):
    for model in pair(device)[:2]:
        loss = loss_of(model)
        with torch.no_grad():
            for parameter in adapters(model).values():
                parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- layers that share ----------------------------------------------------------------------------


def test_of_layers_with_the_same_base_weights_the_first_runs_as_one(device):
    base = base_model(device, "Llama", attn_implementation="sdpa")
    base.config.use_cache = False
    plain = adapt(base, device, layer_replication=[[0, 2], [0, 1]]).train()
    fused = copy.deepcopy(plain)
    left = fuse(fused, LAYER).left
    replica = NAMES[0].replace("0", "2")
    assert [*left] == [replica] and f"the base weights of {NAMES[0]}: only" in left[replica]
    weights = [layer_of(fused, index).mlp.up_proj.base_layer.weight for index in (0, 2)]
    assert weights[0] is weights[1]
    place = weights[0].data_ptr()
    with pytest.warns(UserWarning, match="layer_replication"):
        assert assert_same(fused, plain, most=1e-4) == {"DecoderLayer": 2}
    assert weights[0].data_ptr() == place
