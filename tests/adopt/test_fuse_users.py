"""What users do to a fused model: it computes what plain PEFT does after the same was done to it,
and where it no longer runs fused it says so. Over the parts, and over whole layers."""

import copy
import io
import warnings

import pytest
import torch
from fused_case import batch, functions_of
from layer_case import LAYER, NAMES, layer_of, logits, peft_model
from peft import LoraConfig
from peft.utils.hotswap import hotswap_adapter_from_state_dict, prepare_model_for_compiled_hotswap
from peft_models import ATTENTION, LAYERS, MLP, adapt, base_model, set_weights
from reference import random, relative_error
from torch.nn.utils import parametrize

from fused_lora import Fusion, fuse, report

FUSIONS = {"layer": LAYER, "parts": Fusion(mlp=True, attention=True, rope=True)}
FUNCTIONS = {
    "parts": {"LoRA_MLP": 2, "LoRA_Attention": 2},
    "layer": {"DecoderLayer": 2},
}


@pytest.fixture(params=FUSIONS)
def kind(request):
    return request.param


def step(model, seed=3):
    """What runs fused in a step, and its loss and gradients."""
    model.zero_grad()
    loss = model(**batch(model, seed=seed)).loss
    functions = functions_of(loss)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return functions, {"loss": loss.detach(), **gradients}


def assert_same(got, want):
    assert got.keys() == want.keys() and len(want) > 1
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-4, name


def adapters(model):
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def pair(device, kind, **options):
    plain = peft_model(device, **options)
    fused = copy.deepcopy(plain)
    fuse(fused, FUSIONS[kind])
    return fused, plain


# --- a table of what users do ---------------------------------------------------------------------


def train(model, **options):
    # not Adam, which makes a step of the same size of the smallest gradient, noise and all
    optimizer = torch.optim.SGD(adapters(model).values(), lr=0.1, **options)
    for seed in (3, 4):
        step(model, seed)
        optimizer.step()


def load(model):
    state = {n: t + 0.05 if ".lora_" in n else t for n, t in model.state_dict().items()}
    model.load_state_dict(state)


def hot_swap(model, r=8):
    """Another one of the same scaling, which PEFT writes through .data."""
    config = LoraConfig(r=r, lora_alpha=1.5 * r, target_modules=[*ATTENTION, *MLP])
    device = next(model.parameters()).device
    state = {
        name: random(*p.shape, seed=seed, scale=0.2, device=device)
        for seed, (name, p) in enumerate(adapters(model).items())
    }
    hotswap_adapter_from_state_dict(model, state, "default", config)


def average(model):
    """As a moving average of the weights is put into a model."""
    for parameter in adapters(model).values():
        parameter.data.copy_(parameter.data * 1.5)


def assign(model):
    for parameter in adapters(model).values():
        parameter.data = parameter.data * 1.5


def scale(model):
    for name, projection in model.named_modules():
        if name.endswith("_proj"):
            projection.set_scale("default", 3.0)


def add_second(model, r):
    """Of a size at which rounding decides no token, as layer_case's first one is."""
    config = LoraConfig(r=r, lora_alpha=r, target_modules=[*ATTENTION, *MLP])
    model.add_adapter("second", config)
    set_weights(model, next(model.parameters()).device, only=".second.")
    for name, parameter in model.named_parameters():
        if ".second." in name:
            parameter.data.mul_(0.25 if ".q_proj.lora_B" in name else 0.5)


def another(model, r):
    add_second(model, r)
    model.set_adapter("second")


def there_and_back(model):
    another(model, 12)
    step(model)
    model.set_adapter("default")


def merged(model, **options):
    model.merge_adapter(**options)
    logits(model)
    model.unmerge_adapter()


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrise(model):
    parametrize.register_parametrization(
        layer_of(model).mlp.up_proj.lora_A["default"], "weight", Doubled()
    )


def prepare(model):
    prepare_model_for_compiled_hotswap(model, target_rank=12)
    for parameter in adapters(model).values():  # the new ones are frozen
        parameter.requires_grad_(True)
    hot_swap(model, r=12)


def assigned(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for parameter in adapters(model).values():
        parameter.requires_grad_(True)


# Of each: what is done, which may return another model, and why layers do not run as one after it.
DONE = {
    "optimizer": (lambda model: train(model, foreach=True), None),
    "fused optimizer": (lambda model: train(model, fused=True), None),
    "load_state_dict": (load, None),
    "load_state_dict(assign=True)": (assigned, None),
    "hot-swap": (hot_swap, None),
    "moving average through .data": (average, None),
    "other .data": (assign, None),
    "set_scale": (scale, None),
    "to another dtype and back": (lambda model: model.to(torch.bfloat16).float(), None),
    "to another dtype, a step, and back": (
        lambda model: (model.to(torch.bfloat16), logits(model), model.float())[-1], None
    ),
    "deepcopy": (copy.deepcopy, None),
    "torch.save and torch.load": (pickled, None),
    "an adapter of a larger rank": (lambda model: another(model, 12), None),
    "an adapter of a smaller rank": (lambda model: another(model, 3), None),
    "another adapter and back": (there_and_back, None),
    "merged and unmerged": (merged, None),
    "safely merged and unmerged": (lambda model: merged(model, safe_merge=True), None),
    "a parametrised A": (parametrise, None),
    "prepare_model_for_compiled_hotswap": (prepare, "its scaling is a tensor"),
    "a hook": (
        lambda model: layer_of(model).mlp.register_forward_hook(lambda *_: None) and None,
        "mlp: it has hooks",
    ),
    "several adapters": (
        lambda model: (another(model, 3), model.base_model.set_adapter(["default", "second"]))[1],
        "2 adapters are active",
    ),
}  # fmt: skip
BY_WISH = {"several adapters"}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *(("layer", what) for what in DONE),
        # which keep nothing: adapters in place, elsewhere, another one, and none that they may run
        ("parts", "optimizer"),
        ("parts", "load_state_dict(assign=True)"),
        ("parts", "another adapter and back"),
        ("parts", "several adapters"),
    ],
)
def test_a_fused_model_computes_what_plain_peft_does(what, kind, device):
    change, reason = DONE[what]
    fused, plain = pair(device, kind)
    assert step(fused)[0] == FUNCTIONS[kind]
    fused, plain = (change(model) or model for model in (fused, plain))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        functions, got = step(fused)
        fused(**batch(fused))  # which says nothing twice
    assert_same(got, step(plain)[1])
    said = [str(one.message) for one in said if "fused" in str(one.message)]
    if reason is None:
        assert functions == FUNCTIONS[kind] and not said
        assert not report(fused).left
    elif kind == "layer":
        assert functions.get("DecoderLayer", 0) < 2
        assert [reason in one for one in said] == ([] if what in BY_WISH else [True])
        assert reason in report(fused).left[NAMES[0]]


# --- graphs that wait while something else is run -------------------------------------------------


def two_adapters(device, kind):
    plain = peft_model(device)
    add_second(plain, 12)
    fused = copy.deepcopy(plain)
    fuse(fused, FUSIONS[kind])
    return fused, plain


def loss_of(model, adapter="default", seed=3):
    model.set_adapter(adapter)
    return model(**batch(model, seed=seed)).loss


def a_reference_between(model):
    """As DPO has it, with ref_adapter_name."""
    loss = loss_of(model)
    with torch.no_grad():
        loss_of(model, "second")
    model.set_adapter("default")
    loss.backward()


def two_forwards(model):
    losses = [loss_of(model, "default"), loss_of(model, "second", seed=4)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    for loss in losses:
        loss.backward()


def two_batches(model):
    losses = [loss_of(model, seed=seed) for seed in (3, 4)]
    for loss in losses:
        loss.backward()


def twice(model):
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        loss_of(model, "second")
    model.set_adapter("default")
    loss.backward()


def a_move_between(model):
    loss = loss_of(model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.clone()
    with torch.no_grad():
        loss_of(model, "second")
    model.set_adapter("default")
    loss.backward()


def on_the_host(model):
    """What is saved comes back as other tensors."""
    with torch.autograd.graph.save_on_cpu():
        two_forwards(model)


ORDERS = [a_reference_between, two_forwards, two_batches, twice, a_move_between, on_the_host]
# where layers run again they read the active adapter, in plain PEFT, too
RERUN = [a_reference_between, two_batches, twice, a_move_between]


@pytest.mark.parametrize(
    ("kind", "policy", "order"),
    [
        *((kind, "none", order) for kind in FUSIONS for order in ORDERS),
        *(("layer", "full", order) for order in RERUN),
    ],
)
def test_gradients_are_those_of_the_forward_that_they_belong_to(kind, policy, order, device):
    fused, plain = two_adapters(device, kind)
    fuse(fused, Fusion(checkpoint=policy))
    gradients = []
    for model in (fused, plain):
        order(model)
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same(*gradients)


def test_an_optimizers_step_before_backward_is_plain_pytorchs_error(kind, device):
    for model in pair(device, kind):
        loss = loss_of(model)
        with torch.no_grad():
            for parameter in adapters(model).values():
                parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- layers that share their weights --------------------------------------------------------------


def test_of_layers_with_the_same_base_weights_the_first_runs_as_one(kind, device):
    base = base_model(device, "Llama", attn_implementation="sdpa")
    base.config.use_cache = False
    plain = adapt(base, device, layer_replication=[[0, 2], [0, 1]]).train()
    fused = copy.deepcopy(plain)
    done = fuse(fused, FUSIONS[kind])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        functions, got = step(fused)
    assert_same(got, step(plain)[1])
    weights = [layer_of(fused, index).mlp.up_proj.base_layer.weight for index in (0, 2)]
    assert weights[0] is weights[1]
    if kind == "layer":
        assert list(done.left) == [NAMES[0].replace("0", "2")] and functions == {"DecoderLayer": 2}
        assert f"are those of {NAMES[0]}, too" in done.left[NAMES[0].replace("0", "2")]
        assert len([one for one in said if "layer_replication" in str(one.message)]) == 1
        places = [weight.data_ptr() for weight in weights]
        step(fused)
        assert places == [weight.data_ptr() for weight in weights]
    else:
        assert functions == {"LoRA_MLP": 3, "LoRA_Attention": 3}


# --- torch.compile --------------------------------------------------------------------------------


def test_compiled_layers_share_their_code_and_run_as_one(device):
    fused, _ = pair(device, "layer")
    fused.enable_input_require_grads()  # to the first layer nothing is another than to the second
    _, want = step(fused)
    torch._dynamo.reset()
    for layer in fused.get_submodule(LAYERS):
        layer.compile(backend="aot_eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        functions, got = step(fused)
    assert functions == FUNCTIONS["layer"]
    assert_same(got, want)
