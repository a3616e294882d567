"""fuse() in tiny models of four families: right where it fuses, PEFT itself where it does not."""

import copy
import io
import subprocess
import sys
import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from reference import assert_within_budget, random
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fused_lora import Fusion, FusionReport, fuse, report, unfuse
from fused_mlp import LoRA_MLP

FAMILIES = ("Qwen2", "Llama", "Mistral", "Qwen3")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LAYERS = "base_model.model.model.layers"
MLP_NAMES = [f"{LAYERS}.{index}.mlp" for index in range(2)]
MLP_ON = Fusion(mlp=True)


def set_weights(model, device, only=""):
    """Weights of a size at which every part of the model shows in the logits; no B is zero."""
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if only not in name:
                continue
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.1
            mean = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(random(*parameter.shape, seed=seed, scale=scale) + mean)
    return model.to(device)


def base_model(device, family="Qwen2", dtype=torch.float32, **changes):
    """Two layers; attention is the eager one, whose gradients are deterministic on a GPU too."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 52,
        "intermediate_size": 139,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 26,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{family}Config")(**(sizes | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return set_weights(model, device).to(dtype)


def adapt(model, device, autocast_adapter_dtype=True, **lora):
    options = {"r": 8, "lora_alpha": 12, "target_modules": [*ATTENTION, *MLP]}
    config = LoraConfig(**(options | lora))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, that lora_bias cannot be merged
        model = get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)
    return set_weights(model, device, only=".lora_")


def peft_model(device, family="Qwen2", dtype=torch.float32, autocast_adapter_dtype=True, **lora):
    return adapt(base_model(device, family, dtype), device, autocast_adapter_dtype, **lora)


def ids(device):
    return torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(3)).to(device)


def logits(model):
    torch.manual_seed(0)  # for those that drop out
    with torch.no_grad():
        return model(input_ids=ids(next(model.parameters()).device)).logits


def step(model, autocast=False):
    """Logits, the loss of every token and every gradient, by name."""
    device = next(model.parameters()).device
    inputs = ids(device)
    model.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        output = model(input_ids=inputs, labels=inputs)
    output.loss.backward()
    values = {"logits": output.logits.detach()}
    values["losses"] = F.cross_entropy(
        values["logits"][:, :-1].flatten(0, 1).double(), inputs[:, 1:].flatten(), reduction="none"
    )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            values[name.removeprefix("module.")] = parameter.grad.clone()
    return values


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def assert_right(fused, plain, autocast=False):
    """Fused against plain PEFT, both in their dtype, with plain PEFT in float64 for the truth."""
    got, eager = step(fused, autocast), step(plain, autocast)
    truth = step(copy.deepcopy(plain).double())
    trained = sum(parameter.requires_grad for parameter in plain.parameters())
    assert trained > 0
    assert got.keys() == eager.keys() == truth.keys() and len(truth) == 2 + trained
    for name in truth:
        assert got[name].dtype == eager[name].dtype
        assert_within_budget(name, got[name], eager[name], truth[name])


@pytest.fixture
def calls(monkeypatch):
    """The gate weight of every call of LoRA_MLP, in order."""
    seen = []
    apply = LoRA_MLP.apply

    def spy(*arguments):
        seen.append(arguments[-1].gate_weight)
        return apply(*arguments)

    monkeypatch.setattr(LoRA_MLP, "apply", spy)
    return seen


def layers(model):
    return model.get_submodule(LAYERS)


def pair(device, **options):
    """A fused model and the same one on PEFT's own path."""
    plain = peft_model(device, **options)
    fused = copy.deepcopy(plain)
    fuse(fused, MLP_ON)
    return fused, plain


# --- right where it fuses -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "fp32_adapters", "autocast"),
    [
        (torch.float32, True, False),
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, True),
        (torch.bfloat16, True, False),
    ],
    ids=("fp32", "bf16", "fp32 adapters, autocast", "fp32 adapters"),
)
def test_fused_model_is_within_the_error_budget(
    family, dtype, fp32_adapters, autocast, calls, device
):
    options = {"family": family, "dtype": dtype, "autocast_adapter_dtype": fp32_adapters}
    fused, plain = pair(device, **options)
    adapter = layers(plain)[0].mlp.up_proj.lora_B["default"].weight
    assert adapter.dtype == (torch.float32 if fp32_adapters else dtype)
    assert_right(fused, plain, autocast)
    assert len(calls) == 2  # one for each layer of the fused model, none of the others


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"rank_pattern": {"gate_proj": 4, "layers.1.mlp.down_proj": 12}},
        {"alpha_pattern": {"up_proj": 32, "layers.0.mlp.gate_proj": 3}},
        {"target_modules": [*MLP]},
    ],
    ids=("rsLoRA", "rank_pattern", "alpha_pattern", "MLP alone"),
)
def test_other_ranks_scales_and_targets_are_within_the_error_budget(lora, calls, device):
    fused, plain = pair(device, **lora)
    assert_right(fused, plain)
    assert len(calls) == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_are_bitwise_equal(use_reentrant, calls, device):
    model, _ = pair(device)
    want = step(model.train())
    model.enable_input_require_grads()  # a reentrant checkpoint sees no other gradient
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    calls.clear()
    assert_equal(step(model), want)
    assert len(calls) == 4  # each MLP once more


def test_accumulated_steps_are_within_the_error_budget(device):
    fused, plain = pair(device, dtype=torch.bfloat16)
    double = copy.deepcopy(plain).double()
    gradients = []
    for model in (fused, plain, double):
        for row in ids(device):
            model(input_ids=row[None], labels=row[None]).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for name, truth in gradients[2].items():
        assert_within_budget(name, gradients[0][name], gradients[1][name], truth)


def test_frozen_adapters_get_no_gradient_and_the_others_the_right_one(device):
    fused, plain = pair(device)
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            if ".lora_A." in name or "layers.0.mlp" in name:
                parameter.requires_grad_(False)
    assert_right(fused, plain)


# --- what it reports, and what it leaves alone ----------------------------------------------------


def test_report_names_every_fused_module(device):
    model = peft_model(device)
    assert report(model) == FusionReport({}, {})
    assert str(report(model)) == "nothing is fused"
    done = fuse(model, MLP_ON)
    assert done == report(model) == FusionReport({"mlp": MLP_NAMES}, {})
    assert str(done) == "mlp: 2 modules fused"


def test_fusing_again_changes_nothing_and_unfuse_restores(calls, device):
    model = peft_model(device)
    want = logits(model)
    first = fuse(model, MLP_ON)
    got = logits(model)
    assert len(calls) == 2
    assert fuse(model, MLP_ON) == first
    assert torch.equal(logits(model), got)
    calls.clear()
    assert unfuse(model) == MLP_NAMES
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(logits(model), want) and not calls
    assert unfuse(model) == [] and report(model) == FusionReport({}, {})


def test_only_instances_are_patched(calls, device):
    cls = transformers.models.qwen2.modeling_qwen2.Qwen2MLP
    forward, names = cls.forward, set(vars(cls))
    fused, other = peft_model(device), peft_model(device)
    fuse(fused, MLP_ON)
    assert cls.forward is forward and set(vars(cls)) == names
    assert not any("forward" in vars(module) for module in other.modules())
    logits(other)
    assert not calls


def test_a_fusion_of_nothing_is_a_value_error(device):
    with pytest.raises(ValueError, match="asks for nothing; set at least one of mlp"):
        fuse(peft_model(device), Fusion())


NOTHING_TO_FUSE = {
    "dropout": (lambda d: peft_model(d, lora_dropout=0.1), "gate_proj: lora_dropout is 0.1"),
    "DoRA": (lambda d: peft_model(d, use_dora=True), "gate_proj: it uses DoRA"),
    "lora_bias": (lambda d: peft_model(d, lora_bias=True), "its adapter has a bias"),
    "attention alone": (
        lambda d: peft_model(d, target_modules=[*ATTENTION]),
        r"gate_proj: no LoRA adapter of PEFT's plain kind \(torch.nn.modules.linear.Linear\)",
    ),
    "no down_proj": (
        lambda d: peft_model(d, target_modules=["gate_proj", "up_proj"]),
        "down_proj: no LoRA adapter",
    ),
    "not PEFT": (base_model, "gate_proj: no LoRA adapter"),
    "no MLP": (
        lambda d: nn.Sequential(nn.Linear(2, 2)),
        "it has no MLP with gate_proj, up_proj and down_proj",
    ),
    "GeGLU": (
        lambda d: adapt(base_model(d, hidden_act="gelu_pytorch_tanh"), d),
        "its activation is GELUTanh, not SiLU",
    ),
    "Gemma": (
        lambda d: peft_model(d, "Gemma"),
        "GemmaMLP is not an MLP class that is known to compute SwiGLU",
    ),
    "other tuner": (
        lambda d: get_peft_model(
            base_model(d), peft.IA3Config(target_modules=[*MLP], feedforward_modules=["down_proj"])
        ),
        r"no LoRA adapter of PEFT's plain kind \(peft.tuners.ia3",
    ),
}


@pytest.mark.parametrize("name", NOTHING_TO_FUSE)
def test_a_model_in_which_nothing_fuses_is_a_value_error_with_the_reason(name, calls, device):
    make, reason = NOTHING_TO_FUSE[name]
    model = make(device)
    with pytest.raises(ValueError, match="fuse: mlp=True fuses no module.*" + reason):
        fuse(model, MLP_ON)
    assert not any("forward" in vars(module) for module in model.modules())
    if name != "no MLP":
        logits(model)
        assert not calls


# --- each reason for one MLP to stay with PEFT ----------------------------------------------------


class Wrapped(nn.Parameter):
    """Stands for a quantised weight, which is a Parameter of a class of its own."""


class OtherMLP(transformers.models.qwen2.modeling_qwen2.Qwen2MLP):
    pass


def readapt(projection, **lora):
    """Give a projection's adapter other settings."""
    config = LoraConfig(**lora)
    projection.update_layer("default", r=8, lora_alpha=12, config=config)
    set_weights(projection, projection.weight.device, only="lora_")


def add_active(projection):
    projection.update_layer("second", r=4, lora_alpha=4, config=LoraConfig())
    projection.set_adapter(["default", "second"])


def replace_weight(base):
    base.weight = Wrapped(base.weight.detach(), requires_grad=False)


def set_bias(base):
    base.bias = nn.Parameter(torch.ones_like(base.weight[:, 0]), requires_grad=False)


def subclass_base(projection):
    projection.base_layer.__class__ = type("Linear4bit", (nn.Linear,), {})


def replace_forward(module):
    original = module.forward
    module.forward = lambda *arguments, **options: original(*arguments, **options)


def hook(*_):
    return None


REASONS = {
    "dropout": (
        lambda mlp: readapt(mlp.down_proj, lora_dropout=0.25), "down_proj: lora_dropout is 0.25"
    ),
    "DoRA": (lambda mlp: readapt(mlp.up_proj, use_dora=True), "up_proj: it uses DoRA"),
    "a LoRA variant": (
        lambda mlp: readapt(mlp.up_proj, init_lora_weights="mica"),
        "up_proj: it uses a variant of LoRA (MiCALinearVariant)",
    ),
    "lora_bias": (
        lambda mlp: readapt(mlp.up_proj, lora_bias=True), "up_proj: its adapter has a bias"
    ),
    "two active adapters": (
        lambda mlp: add_active(mlp.gate_proj), "gate_proj: 2 adapters are active: default, second"
    ),
    "no such adapter": (
        lambda mlp: mlp.gate_proj.set_adapter("other"),
        "gate_proj: it has no adapter named other",
    ),
    "merged": (lambda mlp: mlp.down_proj.merge(), "down_proj: adapters are merged"),
    "disabled": (
        lambda mlp: mlp.down_proj.enable_adapters(False), "down_proj: adapters are disabled"
    ),
    "not adapted": (
        lambda mlp: setattr(mlp, "up_proj", mlp.up_proj.base_layer), "up_proj: no LoRA adapter"
    ),
    "base bias": (
        lambda mlp: set_bias(mlp.gate_proj.base_layer), "gate_proj: its base layer has a bias"
    ),
    "trainable base": (
        lambda mlp: mlp.gate_proj.base_layer.weight.requires_grad_(),
        "gate_proj: its base weight is trainable",
    ),
    "wrapped weight": (
        lambda mlp: replace_weight(mlp.up_proj.base_layer),
        "up_proj: its base weight is quantised or wrapped (Wrapped)",
    ),
    "other base layer": (
        lambda mlp: subclass_base(mlp.up_proj), "up_proj: its base layer is Linear4bit"
    ),
    "GeGLU": (lambda mlp: setattr(mlp, "act_fn", nn.GELU()), "its activation is GELU, not SiLU"),
    "unknown class": (
        lambda mlp: setattr(mlp, "__class__", OtherMLP), "OtherMLP is not an MLP class"
    ),
    "forward of a projection": (
        lambda mlp: replace_forward(mlp.up_proj), "up_proj: its forward has been replaced"
    ),
    "forward of A": (
        lambda mlp: replace_forward(mlp.up_proj.lora_A["default"]),
        "up_proj: its forward has been replaced",
    ),
    "forward of the activation": (
        lambda mlp: replace_forward(mlp.act_fn), "act_fn: its forward has been replaced"
    ),
}  # fmt: skip

HOOKED = {
    "projection": (lambda mlp: mlp.down_proj, "down_proj"),
    "base": (lambda mlp: mlp.down_proj.base_layer, "down_proj"),
    "A": (lambda mlp: mlp.down_proj.lora_A["default"], "down_proj"),
    "B": (lambda mlp: mlp.down_proj.lora_B["default"], "down_proj"),
    "dropout": (lambda mlp: mlp.down_proj.lora_dropout["default"], "down_proj"),
    "activation": (lambda mlp: mlp.act_fn, "act_fn"),
}
for where, (find, part) in HOOKED.items():
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        REASONS[f"{kind} hook on {where}"] = (
            lambda mlp, find=find, kind=kind: getattr(find(mlp), f"register_{kind}_hook")(hook),
            f"{part}: it has hooks",
        )


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("fused_first", [True, False])
def test_an_mlp_that_may_not_be_fused_runs_as_peft_has_it(name, fused_first, calls, device):
    change, reason = REASONS[name]
    model = peft_model(device)
    mlp, other = (layer.mlp for layer in layers(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, that lora_bias cannot be merged
        if fused_first:
            fuse(model, MLP_ON)
            change(mlp)
            done = report(model)
        else:
            change(mlp)
            done = fuse(model, MLP_ON)
    assert done.fused == {"mlp": MLP_NAMES[1:]}
    assert list(done.left) == MLP_NAMES[:1] and reason in done.left[MLP_NAMES[0]]
    assert f"left to PEFT: {MLP_NAMES[0]}: {done.left[MLP_NAMES[0]]}" in str(done)
    logits(model)
    assert len(calls) == 1 and calls[0] is other.gate_proj.base_layer.weight
    x = random(2, 3, 52, device=device)
    outputs = []
    for forward in (mlp, lambda x: type(mlp).forward(mlp, x)):
        torch.manual_seed(0)
        outputs.append(forward(x))
    assert torch.equal(*outputs) and len(calls) == 1


def test_a_forward_set_by_somebody_else_is_kept_and_reported(calls, device):
    model = peft_model(device)
    mlp = layers(model)[0].mlp
    replace_forward(mlp)
    forward = mlp.forward
    done = fuse(model, MLP_ON)
    assert done.left == {MLP_NAMES[0]: "its forward has been replaced by something else"}
    assert mlp.forward is forward and unfuse(model) == MLP_NAMES[1:] and mlp.forward is forward


def test_an_mlp_that_becomes_fit_is_reported_until_fuse_is_called_again(calls, device):
    model = peft_model(device)
    projection = layers(model)[0].mlp.up_proj
    projection.base_layer.weight.requires_grad_(True)
    fuse(model, MLP_ON)
    projection.base_layer.weight.requires_grad_(False)
    assert report(model).left[MLP_NAMES[0]].startswith("not asked for")
    logits(model)
    assert len(calls) == 1
    assert fuse(model, MLP_ON) == FusionReport({"mlp": MLP_NAMES}, {})
    logits(model)
    assert len(calls) == 3


# --- PEFT goes on working -------------------------------------------------------------------------


def test_disabled_adapters_give_the_base_model_and_come_back(calls, device):
    fused, _ = pair(device)
    want = logits(fused)
    calls.clear()
    with fused.disable_adapter():
        assert torch.equal(logits(fused), logits(base_model(device)))
        assert all("adapters are disabled" in reason for reason in report(fused).left.values())
        assert report(fused).fused == {"mlp": []} and not calls
    assert torch.equal(logits(fused), want) and len(calls) == 2


def test_fusing_disabled_adapters_is_a_value_error(device):
    model = peft_model(device)
    with model.disable_adapter(), pytest.raises(ValueError, match="adapters are disabled"):
        fuse(model, MLP_ON)


def test_merging_is_as_in_peft_and_unmerging_fuses_again(calls, device):
    fused, plain = pair(device)
    for model in (fused, plain):
        model.merge_adapter()
    assert torch.equal(logits(fused), logits(plain)) and not calls
    for model in (fused, plain):
        model.unmerge_adapter()
    assert_right(fused, plain)
    assert len(calls) == 2


def test_merge_and_unload_gives_what_it_gives_without_fusing(calls, device):
    fused, plain = (model.merge_and_unload() for model in pair(device))
    assert torch.equal(logits(fused), logits(plain)) and not calls
    assert unfuse(fused) == [f"model.layers.{index}.mlp" for index in range(2)]
    assert torch.equal(logits(fused), logits(plain))


def test_a_second_adapter_can_be_added_and_switched_to_and_deleted(calls, device):
    fused, plain = pair(device)
    first = logits(fused)
    for model in (fused, plain):
        config = LoraConfig(r=4, lora_alpha=20, target_modules=[*MLP, "q_proj"])
        model.add_adapter("second", config)
        set_weights(model, device, only=".second.")
    assert torch.equal(logits(fused), first)
    for model in (fused, plain):
        model.set_adapter("second")
    calls.clear()
    assert_right(fused, plain)
    assert len(calls) == 2
    for model in (fused, plain):
        model.set_adapter("default")
        model.delete_adapter("second")
    assert_right(fused, plain)
    assert len(calls) == 4 and torch.equal(logits(fused), first)


def test_a_batch_of_mixed_adapters_is_as_without_fusing(calls, device):
    fused, plain = pair(device)
    outputs = []
    for model in (fused, plain):
        model.add_adapter("second", LoraConfig(r=4, target_modules=[*MLP]))
        set_weights(model, device, only=".second.")
        model.eval()
        with torch.no_grad():
            outputs.append(model(ids(device), adapter_names=["default", "second"]).logits)
    assert torch.equal(*outputs) and not calls
    assert_right(fused, plain)
    assert len(calls) == 2  # the hooks of the mixed batch are gone


def test_generation_is_as_without_fusing(calls, device):
    fused, plain = pair(device)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        fused.generate(ids(device), **options), plain.generate(ids(device), **options)
    )
    assert len(calls) == 2 * 4


def test_state_dict_is_unchanged_and_a_saved_adapter_loads_anywhere(tmp_path, device):
    fused, plain = pair(device)
    assert_equal(fused.state_dict(), plain.state_dict())
    fused.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base_model(device), tmp_path, is_trainable=True)
    assert torch.equal(logits(loaded), logits(plain))
    fuse(loaded, MLP_ON)
    assert_equal(step(loaded), step(fused))


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_is_fused_and_independent_of_the_original(duplicate, calls, device):
    fused, _ = pair(device)
    want = logits(fused)
    twin = duplicate(fused)
    assert report(twin) == report(fused)
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.zero_()
    unfuse(fused)
    calls.clear()
    assert torch.equal(logits(twin), want)
    assert [id(weight) for weight in calls] == [
        id(layer.mlp.gate_proj.base_layer.weight) for layer in layers(twin)
    ]


def test_moved_to_another_dtype_it_computes_in_that(device):
    fused, plain = pair(device)
    assert_right(fused.to(torch.bfloat16), plain.to(torch.bfloat16))


def test_distributed_data_parallel_gives_the_same_gradients(calls, device):
    fused, _ = pair(device)
    want = step(fused)
    backend = "nccl" if device == "cuda" else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        calls.clear()
        assert_equal(step(DistributedDataParallel(fused)), want)
    finally:
        torch.distributed.destroy_process_group()
    assert len(calls) == 2


def test_importing_changes_nothing_in_transformers_peft_or_torch():
    program = """
import inspect, sys
import peft, torch, transformers.models.qwen2.modeling_qwen2
import transformers.models.llama.modeling_llama

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("peft", "transformers.models.", "torch.nn", "torch.autograd")):
            for key, value in list(vars(module).items()):
                found[name, key] = id(value)
                if inspect.isclass(value):
                    found |= {(name, key, k): id(v) for k, v in list(vars(value).items())}
    return found

before = snapshot()
import fused_lora
after = snapshot()
assert len(before) > 10_000
print([key for key in before.keys() | after.keys() if before.get(key) != after.get(key)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("fp32_adapters", [False, True])
def test_fused_layers_under_torch_compile_are_within_the_error_budget(fp32_adapters, device):
    options = {"dtype": torch.bfloat16, "autocast_adapter_dtype": fp32_adapters}
    fused, plain = pair(device, **options)
    for layer in layers(fused):
        layer.compile()
    assert_right(fused, plain, autocast=fp32_adapters)
