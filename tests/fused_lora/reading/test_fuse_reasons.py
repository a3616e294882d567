"""Each reason for a module to stay with PEFT. The module then runs as its class defines it, the
report says why, and its neighbours run fused."""

import copy
import re
import warnings
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from cases.fused_case import batch, functions_of
from cases.layer_case import LAYER, NAMES, layer_of, peft_model
from cases.peft_models import DECODER, MLP_NAMES, MLP_ON, logits
from cases.reasons import MODELS, MODULES, replace_forward
from cases.reference import assert_near
from torch import nn

from fused_lora import Fusion, FusionReport, fuse, report, unfuse

QKV, OUT, ROPE = Counter(LoRA_QKV=1), Counter(LoRA_W=1), Counter(RoPE=1)


class Kind(NamedTuple):
    """A kind of module that may stay with PEFT.

    fusion: the request. module: the module of a layer that stays, None for the changed one itself.
    fused: our functions in a layer where nothing stays. beside: our functions in a layer where that
    module stays. said: how much runs fused, as the report says it.
    """

    fusion: Fusion
    module: str | None
    fused: Counter
    beside: Counter
    said: str


APART, BOTH = Fusion(attention=True), Fusion(attention=True, rope=True)
ONE, WHOLE = Counter(LoRA_Attention=1), Counter(DecoderLayer=1)
KINDS = {
    "mlp": Kind(MLP_ON, "mlp", Counter(LoRA_MLP=1), Counter(), "3 of 6 projections"),
    "mlp's": Kind(MLP_ON, None, Counter(LoRA_MLP=1), OUT + OUT, "5 of 6 projections"),
    "attention's": Kind(APART, None, QKV + OUT, OUT + OUT + OUT, "7 of 8 projections"),
    "attention's o": Kind(APART, None, QKV + OUT, QKV, "7 of 8 projections"),
    "attention and rope's": Kind(BOTH, None, ONE, OUT + OUT + OUT + ROPE, "7 of 8 projections"),
    "attention and rope's o": Kind(BOTH, None, ONE, QKV + ROPE, "7 of 8 projections"),
    "layer": Kind(LAYER, "", WHOLE, Counter(), "1 of 2 layers"),
    "layer's mlp": Kind(LAYER, "", WHOLE, WHOLE, "1 of 2 layers and 1 in part"),
}


@pytest.mark.slow(
    "True-mlp",
    "True-layer",
    "True-attention's o",
    "True-attention and rope's-self_attn.q_proj",
    "False-mlp-mlp-its activation is GELU, not SiLU",
)
@pytest.mark.thinned
@pytest.mark.parametrize(
    "case", MODULES, ids=[f"{kind}-{at}-{said}" for kind, at, _, said in MODULES]
)
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
    assert_near(got.logits, want.logits, 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_which_nothing_fuses_is_left_as_it_is(name, fp8_in_fp32, device):
    make, fusion, reason, runs = MODELS[name]
    model = make(device)
    plain, places = copy.deepcopy(model), [p.data_ptr() for p in model.parameters()]
    asked = "|".join(part for part, value in vars(fusion).items() if value)
    wanted = f"^fuse: ({asked})=True fuses no (module|layer): .*{reason}.*(; leave .* out|of 16)$"
    with pytest.raises(ValueError, match=wanted):
        fuse(model, fusion)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is left out
        done = fuse(model, fusion, strict=False)
    assert not any(done.fused.values())
    assert any(re.search(reason, one) for one in (*done.left.values(), str(done)))
    assert report(model) == done
    assert not any("forward" in vars(module) for module in model.modules())
    assert places == [p.data_ptr() for p in model.parameters()]
    if runs:
        assert torch.equal(logits(model.eval()), logits(plain.eval()))


def test_a_forward_set_by_somebody_else_is_kept_and_reported(device):
    model = peft_model(device)
    mlp = layer_of(model).mlp
    replace_forward(mlp)
    forward = mlp.forward
    done = fuse(model, MLP_ON)
    assert done.left == {
        MLP_NAMES[0]: f"its forward has been replaced by {replace_forward.__module__}: undo that"
    }
    assert mlp.forward is forward and unfuse(model) == [DECODER, MLP_NAMES[1]]
    assert mlp.forward is forward


def test_an_mlp_that_becomes_fit_is_reported_until_fuse_is_called_again(device):
    model = peft_model(device)
    mlp = layer_of(model).mlp
    own, mlp.act_fn = mlp.act_fn, nn.GELU()
    fuse(model, MLP_ON)
    mlp.act_fn = own
    assert report(model).left[MLP_NAMES[0]].startswith("it became able to run fused")
    assert functions_of(model(**batch(model)).loss) == {"LoRA_MLP": 1}
    assert fuse(model, MLP_ON) == FusionReport({"mlp": MLP_NAMES}, {})
    assert functions_of(model(**batch(model)).loss) == {"LoRA_MLP": 2}
