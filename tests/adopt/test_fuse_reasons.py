"""Each reason for a module to stay with PEFT: it runs as its class has it, the report says why, and
what is beside it runs fused."""

import copy
import warnings
from collections import Counter
from itertools import cycle, product
from typing import NamedTuple

import peft
import pytest
import torch
from cases.fused_case import batch, functions_of
from cases.layer_case import LAYER, NAMES, layer_of, peft_model
from cases.peft_models import ATTENTION, MLP, MLP_NAMES, MLP_ON, base_model
from cases.projection_case import HOOKS, REASONS, hook, replace_forward
from cases.reference import relative_error
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fused_lora import Fusion, FusionReport, fuse, report, unfuse

QKV, OUT, ROPE = Counter(LoRA_QKV=1), Counter(LoRA_W=1), Counter(RoPE=1)


class Kind(NamedTuple):
    """fusion: what is asked for. module: of a layer, the one that is left; None: the one that is
    changed. fused, beside: what a layer runs of ours where nothing is left, and where that module
    is. said: how much of it runs fused."""

    fusion: Fusion
    module: str | None
    fused: Counter
    beside: Counter
    said: str


APART, BOTH = Fusion(attention=True), Fusion(attention=True, rope=True)
ONE = Counter(LoRA_Attention=1)
KINDS = {
    "mlp": Kind(MLP_ON, "mlp", Counter(LoRA_MLP=1), Counter(), "3 of 6 projections"),
    "mlp's": Kind(MLP_ON, None, Counter(LoRA_MLP=1), OUT + OUT, "5 of 6 projections"),
    "attention's": Kind(APART, None, QKV + OUT, OUT + OUT + OUT, "7 of 8 projections"),
    "attention's o": Kind(APART, None, QKV + OUT, QKV, "7 of 8 projections"),
    "attention and rope's": Kind(BOTH, None, ONE, OUT + OUT + OUT + ROPE, "7 of 8 projections"),
    "attention and rope's o": Kind(BOTH, None, ONE, QKV + ROPE, "7 of 8 projections"),
    "layer": Kind(LAYER, "", Counter(DecoderLayer=1), Counter(), "1 of 2 layers"),
}


class OtherMLP(Qwen2MLP):
    pass


class OtherLayer(Qwen2DecoderLayer):
    pass


class OtherNorm(Qwen3RMSNorm):
    pass


def of_class(cls):
    return lambda module: setattr(module, "__class__", cls)


def add_hook(module):
    module.register_forward_hook(hook)


def double(projection):
    projection.lora_A.double(), projection.lora_B.double()


def train(module):
    module.weight.requires_grad_()


def use_gelu(mlp):
    mlp.act_fn = nn.GELU()


# The kind, the module of a layer to which something is done, what that is, and what is said of it.
CASES = [
    ("mlp", "mlp", use_gelu, "its activation is GELU, not SiLU"),
    ("mlp", "mlp", of_class(OtherMLP), "OtherMLP is not an MLP class"),
    ("mlp", "mlp.act_fn", replace_forward, "act_fn: its forward has been replaced"),
    *(
        ("mlp", "mlp.act_fn", lambda act, kind=kind: getattr(act, f"register_{kind}_hook")(hook),
         "act_fn: it has hooks")
        for kind in HOOKS
    ),
    ("layer", "", of_class(OtherLayer), "OtherLayer is not a layer class"),
    ("layer", "mlp.up_proj", double, "an adapter is torch.float64, should be"),
    ("layer", "self_attn", replace_forward, "self_attn: its forward has been replaced"),
    ("layer", "mlp", replace_forward, "mlp: its forward has been replaced"),
    ("layer", "self_attn", add_hook, "self_attn: it has hooks"),
    ("layer", "mlp", add_hook, "mlp: it has hooks"),
    ("layer", "input_layernorm", add_hook, "input_layernorm: it has hooks"),
    ("layer", "mlp.act_fn", add_hook, "mlp: act_fn: it has hooks"),
    ("layer", "self_attn.o_proj", add_hook, "o_proj: it has hooks"),
    ("layer", "post_attention_layernorm", lambda m: m.half(),
     "its norms are torch.float16"),
    ("layer", "self_attn", lambda m: setattr(m, "attention_dropout", 0.1),
     "self_attn: attention_dropout is 0.1"),
    ("layer", "self_attn", lambda m: setattr(m, "is_causal", False),
     "self_attn: it is not causal"),
    ("layer", "mlp", use_gelu, "mlp: its activation is GELU, not SiLU"),
    ("layer", "self_attn.k_norm", add_hook, "self_attn: k_norm: it has hooks"),
    ("layer", "self_attn.q_norm", replace_forward, "q_norm: its forward has been replaced"),
    ("layer", "self_attn.q_norm", of_class(OtherNorm), "q_norm: OtherNorm is not"),
    ("layer", "self_attn.k_norm", train, "self_attn: k_norm: its weight is trained"),
    ("layer", "self_attn.q_norm", lambda m: m.half(),
     "its norms are torch.float16"),
]  # fmt: skip
CASES += [
    ("mlp's", f"mlp.{part}", change, reason)
    for part, (change, reason) in zip(cycle(MLP), REASONS.values(), strict=False)
]
# The other kinds of hook are tried on an MLP, and so is dropout that nothing trains through.
ELSEWHERE = ("_pre", "backward", "dropout of all", "dropout in place")
OF_ATTENTION = [name for name in REASONS if not any(part in name for part in ELSEWHERE)]
PLACES = cycle(product(("attention", "attention and rope"), ATTENTION))
for (kind, part), name in zip(PLACES, OF_ATTENTION + OF_ATTENTION[::-1], strict=False):
    o = " o" if part == "o_proj" else ""
    CASES.append((f"{kind}'s{o}", f"self_attn.{part}", *REASONS[name]))


@pytest.mark.slow("mlp", "layer", "attention's o", "attention and rope's-self_attn.q_proj")
@pytest.mark.thinned
@pytest.mark.parametrize("case", CASES, ids=[f"{kind}-{at}-{said}" for kind, at, _, said in CASES])
@pytest.mark.parametrize("fused_first", [True, False])
def test_a_module_that_may_not_be_fused_runs_as_its_class_has_it(fused_first, case, device):
    kind, changed, change, reason = case
    fusion, module, functions, beside, said = KINDS[kind]
    plain = peft_model(device, "Qwen3" if changed.endswith(("q_norm", "k_norm")) else "Qwen2")
    fused = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it steps aside: test_fuse_aside.py
        if fused_first:
            fuse(fused, fusion)
        for model in (plain, fused):
            change(layer_of(model).get_submodule(changed))
        done = report(fused) if fused_first else fuse(fused, fusion)
        outputs = []
        for model in (fused, plain):
            torch.manual_seed(0)  # for those that drop out
            outputs.append(model(**batch(model)))
    where = f"{NAMES[0]}.{changed if module is None else module}".rstrip(".")
    assert [*done.left] == [where] and reason in done.left[where]
    assert f"left to PEFT: {where}: {done.left[where]}" in str(done)
    assert f": {said} fused" in str(done)
    got, want = outputs
    assert functions_of(got.loss) == functions + beside
    assert relative_error(got.logits, want.logits) < 2e-5


@pytest.mark.parametrize("part", ["mlp", "layer"])
def test_a_model_in_which_nothing_fuses_is_left_as_it_is(part, device):
    config = peft.IA3Config(target_modules=[*MLP], feedforward_modules=["down_proj"])
    model = peft.get_peft_model(base_model(device), config)
    reason = {
        "mlp": "its adapter is peft.tuners.ia3.layer.Linear: take LoraConfig's plain LoRA",
        "layer": "self_attn: its attention is eager: call",
    }[part]
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    wanted = f"fuse: {part}=True fuses no module.*{reason}.*; leave {part} out"
    with pytest.raises(ValueError, match=wanted):
        fuse(model, Fusion(**{part: True}))
    assert not any("forward" in vars(module) for module in model.modules())
    assert weights == {p.untyped_storage().data_ptr() for p in model.parameters()}


def test_a_forward_set_by_somebody_else_is_kept_and_reported(device):
    model = peft_model(device)
    mlp = layer_of(model).mlp
    replace_forward(mlp)
    forward = mlp.forward
    done = fuse(model, MLP_ON)
    assert done.left == {
        MLP_NAMES[0]: f"its forward has been replaced by {replace_forward.__module__}: undo that"
    }
    assert mlp.forward is forward and unfuse(model) == MLP_NAMES[1:] and mlp.forward is forward


def test_an_mlp_that_becomes_fit_is_reported_until_fuse_is_called_again(device):
    model = peft_model(device)
    mlp = layer_of(model).mlp
    own, mlp.act_fn = mlp.act_fn, nn.GELU()
    fuse(model, MLP_ON)
    mlp.act_fn = own
    assert report(model).left[MLP_NAMES[0]].startswith("not asked for")
    assert functions_of(model(**batch(model)).loss) == {"LoRA_MLP": 1}
    assert fuse(model, MLP_ON) == FusionReport({"mlp": MLP_NAMES}, {})
    assert functions_of(model(**batch(model)).loss) == {"LoRA_MLP": 2}
