"""gpt-oss's attention with sinks in fused models, beside vanilla PEFT."""

import copy
from dataclasses import replace

import pytest
import torch
from cases.families_case import FAMILIES
from cases.fused_case import ALL
from cases.peft_models import ATTENTION, ids
from test_fuse_documents import assert_trained_as, documents, one_by_one, padded, step
from transformers import DataCollatorWithFlattening
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from fused_lora import Fusion, fuse
from fused_lora.forwards.attend import mask_for_attention, why_not_sdpa
from fused_lora.kernels.document_bounds import documents_of

OSS = FAMILIES["gpt-oss"]  # a layer with a window of 4 positions, and one without
PARTS = Fusion(**ALL)
NO_LOSS = Fusion(**ALL | {"cross_entropy": False})
ALONE = {"target_parameters": None}


def pair(device, fusion=PARTS, change=lambda model: None, config=None, **lora):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # a GPU has no kernels for fp32
    family = replace(OSS, config=OSS.config | (config or {}))
    plain = family.peft_model(device, dtype, **lora).train()
    change(plain)
    fused = copy.deepcopy(plain)
    fuse(fused, fusion, strict=False)
    return fused, plain


def attentions(model):
    return [layer.self_attn for layer in model.get_base_model().model.layers]


def whole_rows(device):
    tokens = ids(device)[:2, :9]
    return {"input_ids": tokens, "labels": tokens}


def masked(device):
    batch = whole_rows(device)
    return batch | {"attention_mask": torch.ones_like(batch["labels"])}


RECIPES = {  # the first layer's experts alone get an input without a gradient
    "attention": {"target_modules": [*ATTENTION]} | ALONE,
    "all-linear": ALONE,
    "q and v": {"target_modules": ["q_proj", "v_proj"]} | ALONE,
    "experts": {"target_modules": []},
    "everything": {},
}


@pytest.mark.slow("all-linear", "q and v", "everything")
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_run_fused_and_train_as_plain_peft_does(name, device):
    fused, plain = pair(device, **RECIPES[name])
    got = step(fused, whole_rows(device))
    assert got.functions["LoRA_Attention"] == (1 if name == "experts" else 2)
    assert got.functions["LoRA_Experts"] == 2
    assert_trained_as(got, plain, whole_rows(device))


@pytest.mark.slow("full")
@pytest.mark.parametrize("policy", ["full", "transformers'"])
def test_checkpointing_attends_again(policy, device):
    fused, plain = pair(device, Fusion(**ALL, checkpoint="full") if policy == "full" else PARTS)
    if policy != "full":
        fused.gradient_checkpointing_enable()
    assert_trained_as(step(fused, whole_rows(device)), plain, whole_rows(device))


@pytest.mark.slow("right")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_run_without_their_padding(side, device):
    fused, plain = pair(device, **ALONE)
    got = step(fused, padded(side, device))
    assert got.functions["LoRA_Attention"] == 2
    assert_trained_as(got, plain, padded(side, device))


def test_a_mask_of_ones_is_none(device):
    fused, plain = pair(device, NO_LOSS, **ALONE)
    got = step(fused, masked(device))
    assert got.functions["LoRA_Attention"] == 2
    assert_trained_as(got, plain, masked(device))


def test_packed_documents_train_as_they_do_alone(device):
    """In transformers they see each other: its masks get no positions. Where attention does not
    run fused they would, and the call is refused."""
    fused, plain = pair(device, **ALONE)
    batch = DataCollatorWithFlattening()(documents(device))
    got = step(fused, batch)
    assert got.functions["LoRA_Attention"] == 2
    assert_trained_as(got, plain, *one_by_one())
    hook(fused)
    with pytest.raises(ValueError, match=r"mix the documents .* not all attention runs fused"):
        step(fused, batch)


def test_a_routers_loss_is_added(device):
    config = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    fused, plain = pair(device, NO_LOSS, config=config, **ALONE)
    batch = padded("left", device)
    assert_trained_as(step(fused, batch), plain, batch)


def train_sinks(model):
    for attention in attentions(model):
        attention.sinks.requires_grad_()


def hook(model):
    attentions(model)[1].v_proj.register_forward_hook(lambda *_: None)


def left_alone(model):
    pass


def labelled_padding(device):
    batch = padded("left", device)
    return batch | {"labels": batch["input_ids"]}


def parted(device):
    batch = masked(device)
    batch["attention_mask"][0, 4] = 0
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 4:6] = -100
    return batch


REASONS = {
    "trained sinks": (PARTS, train_sinks, whole_rows, "its sinks are trained"),
    "a hook in one layer": (PARTS, hook, masked, "its mask is a matrix"),
    "padding without a fused loss": (
        NO_LOSS,
        left_alone,
        lambda device: padded("right", device),
        "its mask is a matrix",
    ),
    "padding that predicts a label": (PARTS, left_alone, labelled_padding, "its mask is a matrix"),
    "padding between tokens": (PARTS, left_alone, parted, "its mask is a matrix"),
}


@pytest.mark.slow("a hook in one layer")
@pytest.mark.parametrize("name", REASONS)
def test_what_runs_in_parts_says_why(name, device):
    fusion, change, batch_on, reason = REASONS[name]
    fused, plain = pair(device, fusion, change, **ALONE)
    with pytest.warns(UserWarning, match=reason):
        got = step(fused, batch_on(device))
    assert "LoRA_Attention" not in got.functions and "LoRA_QKV" in got.functions
    assert_trained_as(got, plain, batch_on(device))


def test_other_implementations_are_named(device):
    attention = attentions(pair(device, **ALONE)[0])[0]
    assert why_not_sdpa(attention) is None
    attention.config._attn_implementation = "flex_attention"
    assert "call model.set_attn_implementation('eager')" in why_not_sdpa(attention)


def test_bounds_as_a_mask_are_transformers_own(device):
    fused, _ = pair(device, **ALONE)
    config, rows = fused.get_base_model().config, torch.zeros(2, 9, 32, device=device)
    documents = documents_of(torch.arange(9, device=device).expand(2, -1))
    for attention, made in zip(
        attentions(fused), (create_sliding_window_causal_mask, create_causal_mask), strict=True
    ):
        got = mask_for_attention(attention, documents, rows.dtype)
        assert torch.equal(got, made(config, rows, None, None))
