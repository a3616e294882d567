"""q, k, v and o under every setting of PEFT: right where they run fused, and left where not."""

import copy
import warnings
from itertools import cycle

import pytest
import torch
from fused_case import SHORT, assert_close, assert_same, batch, step
from layer_case import pair, peft_model
from pairwise import pairwise
from peft import LoraConfig
from peft_models import ATTENTION, LAYERS, MLP, layers, set_weights
from projection_case import REASONS
from reference import relative_error

from fused_lora import Fusion, fuse, report

APART = ["LoRA_QKV", "LoRA_W"]
NAMES = [f"{LAYERS}.{index}.self_attn" for index in range(2)]

# Of each: what is fused, and what a layer runs then.
FUSIONS = {
    "attention": (Fusion(attention=True), APART),
    "attention and rope": (Fusion(attention=True, rope=True), ["LoRA_Attention"]),
}


def forward(model):
    """The loss and logits of one batch."""
    return model(**batch(model))


def assert_runs(fused, plain, ran, functions):
    """Right, and with these functions in a forward."""
    ran.clear()
    assert_same(fused, plain)
    assert ran == functions


# --- what runs fused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True, "lora_alpha": 4},
        {"rank_pattern": {"q_proj": 4, "k_proj": 16, "o_proj": 12}},
        {"alpha_pattern": {"q_proj": 16, "v_proj": 7, "layers.0.self_attn.o_proj": 3}},
        {"target_modules": [*ATTENTION]},
    ],
    ids=("rsLoRA", "rank_pattern", "alpha_pattern", "attention alone"),
)
@pytest.mark.parametrize(("fusion", "functions"), FUSIONS.values(), ids=FUSIONS)
def test_other_ranks_scales_and_targets_are_right(lora, fusion, functions, ran, device):
    fused, plain, done = pair(device, fusion, **lora)
    assert not done.left
    assert_runs(fused, plain, ran, functions * 2)


@pytest.mark.parametrize(("fusion", "functions"), FUSIONS.values(), ids=FUSIONS)
def test_adapters_that_are_switched_disabled_and_merged_are_right(fusion, functions, ran, device):
    fused, plain, _ = pair(device, fusion)
    for model in (fused, plain):
        config = LoraConfig(r=4, lora_alpha=4, target_modules=[*ATTENTION, *MLP])
        model.add_adapter("second", config)
        set_weights(model, device, only=".second.")
    before = forward(fused).loss
    for model in (fused, plain):
        model.set_adapter("second")
    assert_runs(fused, plain, ran, functions * 2)
    with fused.disable_adapter(), plain.disable_adapter():
        ran.clear()
        got, want = forward(fused).logits, forward(plain).logits
        assert relative_error(got, want) < 2e-5 and not ran
        assert "adapters are disabled" in report(fused).left[NAMES[0]]
    for model in (fused, plain):
        model.merge_adapter()
    ran.clear()
    assert relative_error(forward(fused).logits, forward(plain).logits) < 2e-5 and not ran
    for model in (fused, plain):
        model.unmerge_adapter()
        model.set_adapter("default")
        model.delete_adapter("second")
    assert_runs(fused, plain, ran, functions * 2)
    assert relative_error(forward(fused).loss, before) < 1e-5


# --- each reason for one projection to stay with PEFT ---------------------------------------------


def test_base_biases_that_are_trained_get_their_gradients(ran, device):
    """Of Qwen2's projections q, k and v have biases, and o has none."""
    fused, plain, done = pair(device, Fusion(attention=True, rope=True), bias="all")
    assert done.left == dict.fromkeys(NAMES, "q_proj: its base bias is trainable")
    assert_runs(fused, plain, ran, ["LoRA_W"] * 2)
    assert layers(fused)[0].self_attn.k_proj.base_layer.bias.grad.any()


# test_fuse_left.py has every kind of hook
CHANGES = [name for name in REASONS if "_pre" not in name and "backward" not in name]


CASES = pairwise(
    fused_first=[True, False], of_o=[False, True], fusion=list(FUSIONS), name=CHANGES
)  # fmt: skip
PART_OF = dict(zip(CHANGES, cycle(ATTENTION[:3]), strict=False))


@pytest.mark.parametrize("case", CASES)
def test_a_projection_that_may_not_be_fused_runs_as_peft_has_it(case, ran, device):
    change, reason = REASONS[case["name"]]
    part = "o_proj" if case["of_o"] else PART_OF[case["name"]]
    fusion, functions = FUSIONS[case["fusion"]]
    plain = peft_model(device)
    fused = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, that lora_bias cannot be merged
        if case["fused_first"]:
            fuse(fused, fusion)
        for model in (plain, fused):
            change(layers(model)[0].self_attn.get_submodule(part))
        done = report(fused) if case["fused_first"] else fuse(fused, fusion)
    where, prefix = (f"{NAMES[0]}.o_proj", "") if case["of_o"] else (NAMES[0], f"{part}: ")
    assert list(done.left) == [where] and prefix + reason in done.left[where]
    got, want = {}, {}
    for model, values in ((fused, got), (plain, want)):
        torch.manual_seed(0)  # for those that drop out
        values |= step(model, length=SHORT)
    assert ran == [*(APART[:1] if case["of_o"] else APART[1:]), *functions]
    assert_close(got, want)
