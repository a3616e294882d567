"""Layers on FP8 weights, and the loss: exact apart from quantisation. Also what fuse refuses."""

import copy
import dataclasses
import functools

import pytest
import torch
from cases.families_case import FAMILIES
from cases.fp8_case import (
    CONFIG,
    FP8,
    OracleBuffer,
    assert_is_what_its_codes_make_it,
    assert_near_plain,
    base_weights,
    pair,
)
from cases.fused_case import SHORT, beside, step
from cases.layer_case import layer_of, peft_model
from cases.peft_models import assert_equal, logits
from cases.reference import assert_near, random

from fused_lora import Fusion, fuse, unfuse
from fused_lora.kernels.fp8_rows import codes_and_scales
from fused_lora.kernels.rows import Handover
from fused_lora.layer.buffer import Incoming
from fused_lora.layer.fp8.buffer import Fp8Buffer
from fused_lora.loss import cross_entropy as loss_module
from fused_lora.weights import fp8_border as border_module

pytestmark = pytest.mark.usefixtures("fp8_in_fp32")


# --- exact apart from quantisation ----------------------------------------------------------------


def test_products_in_bf16_are_what_the_codes_make_them(device):
    """On a GPU these are the GEMMs of `_scaled_mm`."""
    count, inputs, outputs, width = 40, 160, 96, 8
    draw = functools.partial(random, dtype=torch.bfloat16, device=device)
    weight, bias = draw(outputs, inputs, seed=1) * inputs**-0.5, draw(outputs + width, seed=2)
    bias[outputs:] = 0
    codes, scales = codes_and_scales(weight)
    got = Fp8Buffer(codes, scales, bias, width, torch.bfloat16)
    want = OracleBuffer(weight, bias, got)
    for buffer in (got, want):
        buffer.A.copy_(draw(width, inputs, seed=3) * inputs**-0.5)
        buffer.sB.copy_(draw(outputs, width, seed=4) * 0.1)
        buffer.encode([buffer])
    x, dy = draw(count, inputs, seed=5), draw(count, outputs, seed=6)
    extended = torch.cat([x, x @ got.A.t()], 1)

    def products(buffer):
        total, grad = draw(count, outputs, seed=7), draw(count, inputs, seed=8)
        buffer.add_product(total, extended, 0.5)
        buffer.add_gradient(grad, dy)
        y, read, _ = buffer.project_norm(x, None, bias[:outputs], None, None)
        incoming = Incoming(torch.cat([dy, torch.full_like(extended, 7.0)], 1))
        gradient, p = buffer.gradient(incoming, None, None)
        return {
            "product": buffer.product(extended, bias[:outputs]), "y": y, "z": read.z, "sum": total,
            "gradient": gradient, "p": p, "sum of gradients": grad,
        }  # fmt: skip

    def off(name):
        """Return the median error over rows, because some rows may be off. A quotient of bf16
        numbers may lie exactly between two codes, and which one it becomes is chance."""
        product, exact = products(got)[name].double(), products(want)[name].double()
        return ((product - exact).norm(dim=1) / exact.norm(dim=1)).median().item()

    # allows one or two roundings to bf16, and Hopper's fast accumulation
    for name in products(want):
        assert off(name) < 2**-8, name
    want.scales *= 1.02
    assert off("y") > 2**-7


@pytest.mark.parametrize(("rows_times", "A_times", "B_times"), [
    (0.0, 1.0, 1.0), (1e-6, 1.0, 1.0), (1.0, 1e6, 0.0), (1.0, 0.0, 1e4),
])  # fmt: skip
def test_nothing_takes_the_digits_of_all_else(rows_times, A_times, B_times, device):
    """Try weight rows that are 0, as in a pruned weight, or tiny. Try a large A that a B of zeros
    cancels."""
    draw = functools.partial(random, dtype=torch.bfloat16, device=device)
    weight = draw(96, 160, seed=1) * 160**-0.5
    weight[3:6] *= rows_times
    buffer = Fp8Buffer(*codes_and_scales(weight), None, 16, torch.bfloat16)
    buffer.A.copy_(draw(16, 160, seed=2) * 160**-0.5 * A_times)
    buffer.sB.copy_(draw(96, 16, seed=3) * 0.01 * B_times)
    buffer.encode([buffer])
    x, dy = draw(40, 160, seed=4), draw(40, 96, seed=5)
    together = weight.double() + buffer.sB.double() @ buffer.A.double()
    y, _, _ = buffer.project_norm(x, None, None, None, None)
    dx, _ = buffer.gradient(Incoming(dy), None, None)
    assert_near(y[:, 6:], (x.double() @ together.t())[:, 6:], 0.04)
    assert_near(dx, dy.double() @ together, 0.04)


CASES = {
    "Qwen2": {},
    "normed heads": {"family": "Qwen3"},
    "norms that add one": {"family": "Gemma3Text"},
    "no norms of inputs": {"family": "Olmo2"},
    "a bias and a multiplier": {
        "family": "Granite",
        "config": {"mlp_bias": True, "residual_multiplier": 0.5},
    },
    "large B": {"scale": 30.0},
    "dropout": {"lora_dropout": 0.25},
    "magnitudes": {"use_dora": True},
    "magnitudes, dropout": {"use_dora": True, "lora_dropout": 0.25},
    "magnitudes, dropout of down": {"use_dora": True, "lora_dropout": 0.25, "whole": "gate up"},
    "magnitudes, a bias and a multiplier": {
        "family": "Granite",
        "use_dora": True,
        "config": {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.5},
    },
    "q and v alone": {"target_modules": ["q_proj", "v_proj"]},
}


@pytest.mark.slow("dropout", "a bias and a multiplier")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_layer_is_what_its_codes_make_it(case, device):
    case = dict(case)
    scale, whole = case.pop("scale", 1.0), case.pop("whole", "")
    fused, _, done = pair(device, **case)
    for one in whole.split():
        projection = layer_of(fused).mlp.get_submodule(f"{one}_proj")
        projection.lora_dropout["default"] = torch.nn.Identity()
    assert "layer: 1 of 1 layers in FP8 fused" in str(done)
    for name, parameter in fused.named_parameters():
        if ".lora_B" in name and "q_proj" not in name:  # or each token attends to one
            parameter.data.mul_(scale)
        if name.endswith(".bias"):  # 0 in a new model
            parameter.data.copy_(random(*parameter.shape, seed=9))
    assert_is_what_its_codes_make_it(fused, device)


@pytest.mark.slow("torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_is_near_plain_peft_and_trains_its_adapters(dtype, device):
    fused, plain, _ = pair(device, dtype=dtype, autocast_adapter_dtype=False)
    assert_equal(*(step(fused, length=SHORT) for _ in range(2)))
    assert_near_plain(fused, plain)


def test_a_gradient_that_a_layer_hands_over_is_read_as_any_other(device, monkeypatch):
    fused, _, _ = pair(device, layers=2)
    handed_over = step(fused, length=SHORT)
    monkeypatch.setattr(Handover, "take", lambda *_: None)
    assert_equal(handed_over, step(fused, length=SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "offload"])
def test_gradients_of_layers_that_run_again_are_those_of_kept_ones(policy, device):
    kept, _, _ = pair(device)
    again = copy.deepcopy(kept)
    fuse(again, Fusion(checkpoint=policy))
    got, want = (step(model, length=SHORT) for model in (again, kept))
    assert got.functions == want.functions
    assert_equal(dict(got), dict(want))


def test_layers_that_run_whole_already_go_on_in_fp8(device):
    model = peft_model(device, config=CONFIG)
    fuse(model, Fusion(layer=True))
    assert str(fuse(model, FP8)) == "layer: 1 of 1 layers in FP8 fused"
    assert len(base_weights(model)) == 7


# --- lm_head --------------------------------------------------------------------------------------

LOSS = Fusion(cross_entropy=True, fp8_lm_head=True)
VOCABULARY = CONFIG | {"vocab_size": 256}


@pytest.fixture
def heads(monkeypatch):
    """Record the head weights that are quantised, in order."""
    made = []

    class Spy(loss_module.Fp8Head):
        def __init__(self, weight, *others):
            made.append(weight)
            super().__init__(weight, *others)

    monkeypatch.setattr(loss_module, "Fp8Head", Spy)
    return made


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_in_fp8_is_near_its_own_and_follows_the_weight(tied, heads, device):
    fused, plain, done = beside(
        peft_model(device, config=VOCABULARY | {"tie_word_embeddings": tied}), LOSS
    )
    assert done.counts == {"cross_entropy": "1 of 1 losses", "fp8_lm_head": "1 of 1 losses"}
    for change in (1.0, -3.0):
        for model in (fused, plain):
            model.get_output_embeddings().weight.data.mul_(change)
        assert_near_plain(fused, plain, "LinearCrossEntropy", 0.1)
    assert len(heads) == 2 and heads[0] is fused.get_output_embeddings().weight
    torch.testing.assert_close(logits(fused), logits(plain))  # in evaluation nothing is fused
    unfuse(fused)
    assert_equal(*(dict(step(model, length=SHORT)) for model in (fused, plain)))
    assert len(heads) == 2


def test_layers_and_loss_in_fp8(heads, device):
    fused, plain, done = pair(
        device, dataclasses.replace(FP8, cross_entropy=True, fp8_lm_head=True)
    )
    assert "layer: 1 of 1 layers in FP8 fused" in str(done) and "fp8_lm_head" in done.fused
    assert_near_plain(fused, plain)
    assert len(heads) == 1


def test_a_head_that_is_trained_or_of_another_size_is_refused_or_told(heads, device):
    model = peft_model(device, config=VOCABULARY, modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match=r"its lm_head is trained, .* leave fp8_lm_head out"):
        fuse(model, LOSS)
    with pytest.raises(
        ValueError, match=r"a base weight is \[250, 32\]: FP8 needs multiples of 16"
    ):
        fuse(peft_model(device, config=CONFIG | {"vocab_size": 250}), LOSS)
    later = peft_model(device, config=VOCABULARY)
    fuse(later, LOSS)
    later.get_output_embeddings().weight.requires_grad_()
    with pytest.warns(UserWarning, match="its lm_head is trained"):
        step(later, length=SHORT)
    assert not heads


# --- refused --------------------------------------------------------------------------------------


def test_soft_capped_logits_are_not_multiplied_in_fp8(device):
    model = FAMILIES["Gemma 2"].peft_model(device).train()
    with pytest.raises(ValueError, match="its logits are soft-capped, never in FP8"):
        fuse(model, LOSS)


def test_sizes_that_fp8_cannot_take_are_refused_or_run_in_the_models_precision(device):
    model = peft_model(device)
    with pytest.raises(ValueError, match=r"fuse: fp8=True fuses no layer: .* multiples of 16"):
        fuse(model, FP8)
    done = fuse(model, FP8, strict=False)
    assert done.counts["layer"] == "2 of 2 layers"
    assert any("in FP8" in where for where in done.left)


def test_layers_with_a_gated_delta_net_keep_no_others_from_fp8(device):
    model = FAMILIES["Qwen3.5"].peft_model(device, torch.bfloat16)
    assert fuse(model, FP8).counts["layer"] == "1 of 2 layers in FP8"


def test_a_gpu_without_fp8_is_refused_by_name(monkeypatch):
    class Weight:
        shape, is_cuda, dtype, device = (64, 64), True, torch.bfloat16, "cuda:0"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    reason = "NVIDIA A100-SXM4-80GB has no FP8 matmul (sm_89 and newer have): leave fp8 out"
    assert border_module.Fp8Border.why_not(iter([Weight, Weight])) == reason
