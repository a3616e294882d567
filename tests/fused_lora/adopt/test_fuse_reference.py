"""The reference passes of DPO, KTO and GRPO: a fused model without its adapters, or with others."""

import pytest
import torch
from cases import fp8_case, layer_case
from cases.counting import saved_tensors
from cases.four_bit_case import EXPERTS, quantised
from cases.fp8_case import FP8
from cases.fused_case import ALL, SHORT, assert_close, functions_of, step
from cases.graph_case import adamw, graphed
from cases.layer_case import EVERYTHING, LAYER, operands_of_calls
from cases.peft_models import MLP_ON, assert_equal, ids
from cases.reference import assert_near, seeded
from peft import LoraConfig

from fused_lora import Fusion, fuse, report
from fused_lora.step.graph import EAGER_CALLS
from fused_lora.weights.fp8_weight import Fp8Weight

PARTS = Fusion(**ALL)
FUSIONS = {  # and what a pass of two layers runs of it
    "mlp": (MLP_ON, {"LoRA_MLP": 2}),
    "attention": (Fusion(attention=True), {"LoRA_QKV": 2, "LoRA_W": 2}),
    "attention and rope": (Fusion(attention=True, rope=True), {"LoRA_Attention": 2}),
    "layer": (LAYER, {"DecoderLayer": 2}),
}
WITHOUT_B = {  # models whose B is zero, as PEFT makes it
    "layer": (LAYER, {}),
    "layer, bf16": (EVERYTHING, {"dtype": torch.bfloat16}),
    "layer, 4 bits": (LAYER, {"dtype": torch.bfloat16, "change": quantised}),
    "layer, dropout": (LAYER, {"lora_dropout": 0.3}),
    "parts, bf16": (PARTS, {"dtype": torch.bfloat16}),
    "parts, 4 bits": (PARTS, {"dtype": torch.bfloat16, "change": quantised}),
    "experts in 4 bits": (PARTS, EXPERTS),
}


def to_inputs(model, backward=True):
    """Return the logits of a pass, the gradient of its input embeddings, and the functions of ours
    that made it."""
    embeddings = model.get_input_embeddings().weight[ids(model.device)[:, :SHORT]]
    leaf = embeddings.detach().clone().requires_grad_()
    logits = model(inputs_embeds=leaf).logits
    functions = functions_of(logits)
    (grad,) = torch.autograd.grad(logits.float().square().sum(), leaf)
    return logits.detach(), grad, functions


@pytest.mark.parametrize(("fusion", "functions"), FUSIONS.values(), ids=FUSIONS)
def test_without_its_adapters_a_model_runs_fused(fusion, functions, device):
    fused, plain, done = layer_case.pair(device, fusion)
    want = step(fused, length=SHORT)
    with fused.disable_adapter(), plain.disable_adapter():
        assert report(fused) == done
        (*got, ran), (*wanted, _) = to_inputs(fused), to_inputs(plain)
        with saved_tensors() as saved:  # nothing is trained
            fused(input_ids=ids(device))
    assert ran == functions and not saved
    for one, other in zip(got, wanted, strict=True):
        assert_near(one, other, 2e-5)
    assert_equal(step(fused, length=SHORT), want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_runs_whole_layers_and_training_goes_on(mode, device, monkeypatch):
    fused, plain, _ = layer_case.pair(device)
    want = step(plain, length=SHORT)
    for model in (fused, plain):
        model.double().float().eval()  # the evaluation moves the weights into new buffers
    ran = operands_of_calls(monkeypatch)
    with mode():
        logits = [model(input_ids=ids(device)).logits for model in (fused, plain)]
    assert len(ran) == 2
    assert_near(*logits, 2e-5)
    assert_close(step(fused.train(), length=SHORT), want)
    assert len(ran) == 4


@pytest.mark.parametrize(("fusion", "options"), WITHOUT_B.values(), ids=WITHOUT_B)
def test_a_policy_whose_B_is_zero_is_bit_for_bit_its_reference(fusion, options, device):
    model = layer_case.peft_model(device, **options)
    fuse(model, fusion)
    assert_is_reference(model)


def assert_is_reference(model, tokens=None):
    """Check that a model with B = 0 gives the logits that it gives without adapters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.zero_()
    tokens = ids(model.device) if tokens is None else tokens
    policy = model(input_ids=tokens).logits
    with model.disable_adapter(), torch.no_grad():
        reference = model(input_ids=tokens).logits
    assert policy.grad_fn is not None and torch.equal(policy, reference)
    with model.disable_adapter(), torch.inference_mode():
        assert torch.equal(policy, model(input_ids=tokens).logits)


def test_in_fp8_a_policy_whose_B_is_zero_is_its_reference(device, fp8_in_fp32, monkeypatch):
    """And no pass copies an original from the host, which no graph could capture."""
    fused, _, _ = fp8_case.pair(device)
    monkeypatch.setattr(Fp8Weight, "whole", lambda weight: pytest.fail("read an original"))
    assert_is_reference(fused)


def test_a_checkpoint_recomputes_with_the_adapters_of_its_forward(device):
    fused, _, _ = layer_case.pair(device, Fusion(layer=True, checkpoint="full"))
    embeds = fused.get_input_embeddings()(ids(device)[:, :SHORT]).detach().requires_grad_()
    loss = fused(inputs_embeds=embeds).logits.sum()
    (wanted,) = torch.autograd.grad(loss, embeds, retain_graph=True)
    with fused.disable_adapter():
        (found,) = torch.autograd.grad(loss, embeds)
    assert torch.equal(found, wanted)


# --- graphs ---------------------------------------------------------------------------------------


def disable(model):
    model.base_model.disable_adapter_layers()


def switch(model):
    model.set_adapter("second")


ONE_LAYER = {"num_hidden_layers": 1}


@pytest.mark.parametrize("change", [disable, switch])
def test_a_graph_notices_that_adapters_are_off_or_others(change, device):
    model = layer_case.peft_model(device, config=ONE_LAYER)
    model.add_adapter("second", LoraConfig(r=4, target_modules="all-linear"))
    model.set_adapter("default")
    step = graphed(model, adamw(model))
    batch = {"input_ids": ids("cpu"), "labels": ids("cpu")}
    for _ in range(EAGER_CALLS + 2):
        step(**batch)
    change(model)
    with pytest.raises(ValueError, match=r"a parameter is not what it was .* call reset\(\)"):
        step(**batch)


# --- at real size ---------------------------------------------------------------------------------

QWEN = {  # Qwen2.5-3B without its vocabulary
    "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
AT_REAL_SIZE = {
    "layer": (EVERYTHING, {}),
    "layer, 4 bits": (EVERYTHING, {"change": quantised}),
    "layer, FP8": (FP8, {}),
    "parts": (PARTS, {}),
}


def at_real_size(device, layers=2, **options):
    config = QWEN | {"num_hidden_layers": layers}
    return layer_case.peft_model(device, dtype=torch.bfloat16, config=config, r=32, **options)


def tokens_at_real_size(device, length=1024):
    generator = seeded(0)
    return torch.randint(96, (4, length), generator=generator).to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1024, 333])
@pytest.mark.parametrize(("fusion", "options"), AT_REAL_SIZE.values(), ids=AT_REAL_SIZE)
def test_a_policy_of_real_size_is_bit_for_bit_its_reference(fusion, options, length, device):
    model = at_real_size(device, **options)
    fuse(model, fusion)
    with torch.autocast(device, torch.bfloat16):
        assert_is_reference(model, tokens_at_real_size(device, length))


def requested_bytes(when):
    """Return the bytes of all tensors, which the allocator has not rounded up."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


@pytest.mark.gpu
@pytest.mark.alone
def test_a_reference_pass_keeps_nothing_of_a_layer_for_the_next(device):
    peaks = []
    for layers in (2, 4):
        model = at_real_size(device, layers)
        fuse(model, EVERYTHING)
        tokens = tokens_at_real_size(device)
        with torch.no_grad(), model.disable_adapter():
            for _ in range(2):  # the first compiles
                before = requested_bytes("current")
                torch.cuda.reset_peak_memory_stats()
                model(input_ids=tokens)
        assert requested_bytes("current") == before
        peaks.append(requested_bytes("peak") - before)
        del model
    assert peaks[0] == peaks[1]
