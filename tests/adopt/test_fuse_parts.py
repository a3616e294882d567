"""Every fused part alone, and all together, against plain PEFT: the loss and every gradient."""

import copy
import warnings

import pytest
import torch
from fused_case import ALL, FUSIONS, assert_right, functions_of, pair, step
from peft_models import FAMILIES, LAYERS, base_model, ids, peft_model
from reference import assert_within_budget

from fused_lora import Fusion, fuse, report, unfuse


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("Qwen2", name) for name in FUSIONS),
        *((family, name) for family in FAMILIES[1:] for name in ("attention", "all")),
    ],
)
def test_parts_are_right_in_every_family(family, name, device):
    fused, plain, done = pair(device, FUSIONS[name], family=family)
    assert not done.left
    assert_right(fused, plain)


@pytest.mark.parametrize("name", FUSIONS)
def test_parts_are_right_in_bf16_with_fp32_adapters_under_autocast(name, device):
    fused, plain, _ = pair(device, FUSIONS[name], dtype=torch.bfloat16)
    assert next(p for p in fused.parameters() if p.requires_grad).dtype == torch.float32
    assert_right(fused, plain, autocast=True)


@pytest.mark.parametrize("name", FUSIONS)
def test_parts_are_right_in_fp32_under_autocast(name, device):
    """What the Trainer's bf16=True makes of a model that was loaded in fp32: projections give bf16,
    and the residual, to which they are added, is fp32."""
    fused, plain, _ = pair(device, FUSIONS[name])
    assert {parameter.dtype for parameter in fused.parameters()} == {torch.float32}
    assert_right(fused, plain, autocast=True)


@pytest.mark.parametrize("name", ["all", "all, checkpointed"])
def test_parts_are_right_in_bf16_alone(name, device):
    fused, plain, _ = pair(
        device, FUSIONS[name], dtype=torch.bfloat16, autocast_adapter_dtype=False
    )
    assert_right(fused, plain)


def test_the_report_names_every_module_of_every_part(device):
    _, _, done = pair(device, Fusion(**ALL, checkpoint="full"))
    blocks = [f"{LAYERS}.{index}" for index in range(2)]
    assert done.fused == {
        "mlp": [f"{block}.mlp" for block in blocks],
        "attention": [f"{block}.self_attn" for block in blocks]
        + [f"{block}.self_attn.o_proj" for block in blocks],
        "rope": [f"{block}.self_attn" for block in blocks],
        "rms_norm": [
            *(f"{b}.{n}" for b in blocks for n in ("input_layernorm", "post_attention_layernorm")),
            "base_model.model.model.norm",
        ],
        "cross_entropy": ["base_model.model"],
        "checkpoint": blocks,
    }


def test_every_function_runs_once_for_every_module_that_is_listed(device):
    """What the benchmark takes for proof that a part ran."""
    fused, _, done = pair(device, Fusion(**ALL))
    tokens = ids(device)
    seen = functions_of(fused(input_ids=tokens, labels=tokens).loss)
    expected = {
        "mlp": ("LoRA_MLP",),
        "attention": ("LoRA_QKV", "LoRA_W"),
        "rope": ("RoPE",),
        "rms_norm": ("RMSNorm", "AddRMSNorm"),
        "cross_entropy": ("LinearCrossEntropy",),
    }
    for part, names in expected.items():
        ran = sum(seen.get(name, 0) for name in names)
        # nothing before the first norm is trained, so it has no backward
        assert ran == len(done.fused[part]) - (part == "rms_norm"), part


def test_unfuse_gives_every_module_its_own_forward_back(device):
    fused, plain, _ = pair(device, Fusion(**ALL, checkpoint="full"))
    assert unfuse(fused)
    assert report(fused).fused == {}
    assert all("forward" not in vars(module) for module in fused.modules())
    got, want = step(fused), step(plain)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_parts_join_those_that_are_there(device):
    fused, plain, _ = pair(device, Fusion(rope=True))
    done = fuse(fused, Fusion(attention=True))
    assert done.fused.keys() == {"rope", "attention"}
    assert_right(fused, plain)


def test_a_part_that_fuses_nothing_changes_nothing(device):
    model = peft_model(device, target_modules=["gate_proj", "up_proj", "down_proj"])
    with pytest.raises(ValueError, match=r"attention=True fuses no module.*no LoRA adapter"):
        fuse(model, Fusion(mlp=True, attention=True))
    assert report(model).fused == {}


def test_gemma_is_left_alone_with_the_reason(device):
    model = peft_model(device, family="Gemma")
    plain = copy.deepcopy(model).train()
    for part, reason in (
        ("mlp", "GemmaMLP is not an MLP class that is known to compute SwiGLU"),
        ("rms_norm", "GemmaRMSNorm is not a norm class"),
        ("rope", "GemmaAttention is not an attention class"),
        ("cross_entropy", "GemmaForCausalLM is not a class"),
    ):
        with pytest.raises(ValueError, match=reason):
            fuse(model, Fusion(**{part: True}))
    done = fuse(model, Fusion(attention=True))  # its o is a linear layer like any other
    assert "GemmaAttention is not" in done.left[f"{LAYERS}.0.self_attn"]
    assert_right(model.train(), plain)


def test_part_of_the_projections_adapted_fuses_what_it_can_and_names_the_rest(device):
    fused, plain, done = pair(device, Fusion(attention=True), target_modules=["q_proj", "o_proj"])
    assert done.fused["attention"] == [f"{LAYERS}.{i}.self_attn.o_proj" for i in range(2)]
    assert "k_proj: no LoRA adapter" in done.left[f"{LAYERS}.0.self_attn"]
    assert_right(fused, plain)


@pytest.mark.parametrize("adapters", ["disabled", "merged"])
def test_fused_modules_step_aside_for_disabled_and_merged_adapters(adapters, device):
    fused, plain, _ = pair(device, Fusion(**ALL))
    tokens = ids(device)

    def logits(model):
        with torch.no_grad():
            return model.eval()(input_ids=tokens).logits

    if adapters == "merged":
        fused.merge_adapter()
        plain.merge_adapter()
        assert torch.allclose(logits(fused), logits(plain), atol=1e-5)
    else:
        with fused.disable_adapter(), plain.disable_adapter():
            assert torch.allclose(logits(fused), logits(plain), atol=1e-5)


def test_padding_and_hidden_states_are_as_without_fusion(device):
    mask = torch.ones_like(ids(device))
    mask[1, 9:] = 0
    fused, plain, _ = pair(device, Fusion(**ALL))
    assert_right(fused, plain, attention_mask=mask)
    tokens = ids(device)
    ours, theirs, truth = (
        m(input_ids=tokens, labels=tokens, output_hidden_states=True).hidden_states
        for m in (fused, plain, copy.deepcopy(plain).double())
    )
    assert len(ours) == len(theirs)
    for got, want, exact in zip(ours, theirs, truth, strict=True):
        assert_within_budget("hidden states", got, want, exact)


def test_a_frozen_norm_gets_no_gradient_and_a_trained_one_its_own(device):
    fused, plain, _ = pair(device, Fusion(rms_norm=True))
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter.requires_grad_(True)
    assert_right(fused, plain)


@pytest.mark.parametrize("fusion", [Fusion(rms_norm=True), Fusion(**ALL)], ids=("alone", "all"))
def test_trained_norms_of_q_and_k_get_their_gradients(fusion, device):
    fused, plain, _ = pair(device, fusion, family="Qwen3")
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.requires_grad_(True)
    assert_right(fused, plain)
    assert any("q_norm" in name for name in step(fused))


def test_base_models_without_adapters_fuse_their_norms_and_loss(device):
    plain = base_model(device).train()
    fused = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(fused, Fusion(rope=True, rms_norm=True, cross_entropy=True))
    assert_right(fused, plain)
