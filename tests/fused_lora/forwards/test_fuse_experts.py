"""Experts with adapters within a model: what runs fused and what does not, beside plain PEFT.
`test_families.py` has each family, and `contract.py` the function."""

import copy
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cases.counting import Watch
from cases.families_case import FAMILIES, everywhere
from cases.fused_case import (
    ALL,
    assert_close,
    batch,
    beside,
    functions_of,
    loss_of,
    step,
    values_of,
)
from cases.peft_models import MLP_ON, assert_equal, ids
from cases.reference import assert_near, random, relative_error
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fused_lora import Fusion, fuse, quantize_experts, report, unfuse
from fused_lora.kernels.dequantize_4bit import Dequantize4bit
from fused_lora.weights.four_bit_parts import memories_of

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": [GATE_UP, DOWN]}
# Ten tokens choose two of sixteen: some experts get none
MANY = {"num_experts": 16, "num_local_experts": 16, "experts_implementation": "grouped_mm"}


def moe_model(
    device, dtype=torch.float32, config=None, classes="Qwen3Moe", family="Qwen3-MoE", **lora
):
    family = FAMILIES[family]
    family = replace(family, classes=classes, config=family.config | MANY | (config or {}))
    return family.peft_model(device, dtype, **lora).train()


def experts_of(model):
    """The outermost wrapper of the first layer's."""
    return model.get_submodule(everywhere("mlp.experts")[0])


FROZEN = {"target_modules": ["q_proj"], "target_parameters": None}
SETTINGS = {  # of LoraConfig, and of the model
    "all-linear": ({}, {}),
    "both parameters": (EXPERTS, {}),
    "eager experts": (EXPERTS, {"experts_implementation": "eager"}),
    "one expert of each token": (EXPERTS, {"num_experts_per_tok": 1}),
    "gate_up alone": (EXPERTS | {"target_parameters": [GATE_UP]}, {}),
    "down alone": (EXPERTS | {"target_parameters": [DOWN]}, {}),
    "rank 5, rsLoRA": (EXPERTS | {"r": 5, "use_rslora": True}, {}),
    "frozen": (FROZEN, {}),
    "ranks that differ": (EXPERTS | {"rank_pattern": {DOWN: 2}}, {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains_as_plain_peft_does(name, device):
    lora, config = SETTINGS[name]
    fused, plain, done = beside(moe_model(device, config=config, **lora), MLP_ON)
    assert done.fused == {"mlp": everywhere("mlp.experts")} and not done.left
    assert done.counts == {"mlp": "4 of 4 projections"}
    got, want = (step(model, length=5) for model in (fused, plain))
    assert got.functions == {"LoRA_Experts": 2} and not want.functions
    assert_close(got, want, 1e-4)
    by_expert = [A.view(16, -1) for at, A in want.items() if "experts" in at and "lora_A" in at]
    assert bool(by_expert) is (name != "frozen")
    assert not any(A.any(dim=1).all() for A in by_expert)  # an expert had no tokens
    assert set(everywhere("mlp.experts")) < set(unfuse(fused))
    assert functions_of(loss_of(fused)) == {}


@pytest.mark.parametrize("policy", ["full", "transformers'"])
def test_checkpointing_recomputes_experts(policy, device):
    plain = moe_model(device)
    fused = copy.deepcopy(plain)
    if policy == "full":
        fuse(fused, Fusion(**ALL, checkpoint="full"))
    else:
        fuse(fused, Fusion(**ALL))
        fused.gradient_checkpointing_enable()
    assert_close(*(step(model, length=5) for model in (fused, plain)), 2e-4)


def test_it_forms_neither_the_adapted_weights_nor_their_gradients(device):
    model = moe_model(device)
    weight_bytes = experts_of(model).get_base_layer().down_proj.nbytes
    largest = []
    for _ in ("plain", "fused"):
        with Watch() as seen:
            loss_of(model).backward()
        largest.append(max(seen.sizes))
        fuse(model, MLP_ON)
    assert largest[0] >= 2 * weight_bytes and largest[1] < weight_bytes


def test_fp32_adapters_of_a_bf16_model_get_fp32_gradients(device):
    plain = moe_model(device, torch.bfloat16)
    for name, parameter in plain.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    fused = copy.deepcopy(plain)
    fuse(fused, MLP_ON)
    got, want = (step(model, length=5) for model in (fused, plain))
    assert got.functions == {"LoRA_Experts": 2}
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in want.items()}


# --- in 4 bits ------------------------------------------------------------------------------------


IN_MXFP4 = {"quant_type": "mxfp4"}
# the family, its dtype, LoraConfig's options, how it is quantised, Fusion's options
IN_4_BITS = {
    "frozen": ("Qwen3-MoE", torch.float32, FROZEN, {}, {}),
    "checkpointed": ("Qwen3-MoE", torch.bfloat16, EXPERTS, {}, {"checkpoint": "full"}),
    "FP4, simple scales": (
        "Qwen3-MoE", torch.float32, EXPERTS, {"quant_type": "fp4", "double_quant": False}, {},
    ),
    "clamped, by columns": ("gpt-oss", torch.bfloat16, FROZEN, {}, {}),
    "MXFP4": ("Qwen3-MoE", torch.float32, SETTINGS["ranks that differ"][0], IN_MXFP4, {}),
    "MXFP4, checkpointed": ("gpt-oss", torch.bfloat16, EXPERTS, IN_MXFP4, {"checkpoint": "full"}),
    "MXFP4, frozen": ("gpt-oss", torch.bfloat16, FROZEN, IN_MXFP4, {}),
}  # fmt: skip


def in_4_bits(name, device):
    """Return a model with experts in 4 bits, and one with the weights that these stand for."""
    family, dtype, lora, options, _ = IN_4_BITS[name]
    config = dict.fromkeys(("moe_intermediate_size", "intermediate_size"), 64)
    config |= dict.fromkeys(("num_experts", "num_local_experts"), 32)
    model = moe_model(
        device, dtype, config, family=family, classes=FAMILIES[family].classes, **lora
    )
    plain = copy.deepcopy(model)
    assert quantize_experts(model, **options) == everywhere("mlp.experts")
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    coded = [(one, weight) for (name, one), weight in pairs if name.endswith(("up_proj", "n_proj"))]
    assert len(coded) == 4
    for one, weight in coded:
        assert one.shape == weight.shape and one.dtype == weight.dtype and one.grad_fn is None
        assert 0 < relative_error(one, weight) < 0.2
        weight.data = one + 0
    return model, plain


@pytest.mark.parametrize("name", IN_4_BITS)
def test_experts_in_4_bits_train_as_what_they_stand_for(name, device):
    """Bit for bit, though all weights lie in the same memory in turns, and some rows of experts
    without tokens are not even numbers."""
    fusion = Fusion(mlp=True, **IN_4_BITS[name][-1])
    models = coded, _ = in_4_bits(name, device)
    for model in models:
        assert fuse(model, fusion).left == report(model).left == {}
    assert len(coded._ddp_params_and_buffers_to_ignore) == 4
    loss_of(coded)
    memories = [one.memory.fill_(torch.nan) for one in memories_of(coded).values()]
    got, want = (step(model, length=5) for model in models)
    assert got.functions == want.functions == {"LoRA_Experts": 2}
    assert_equal(got, want)
    (memory,) = memories
    assert 0 < memory.isnan().sum() < memory.numel()
    moved = copy.deepcopy(coded).float().to(coded.dtype)
    assert torch.equal(step(moved, length=5)["loss"], want["loss"])
    for model in models:
        unfuse(model)
    got, want = (step(model, length=5) for model in models)
    assert got.keys() == want.keys()
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize(("policy", "recomputed"), [("none", 2), ("full", 3), ("offload", 3)])
def test_experts_are_written_before_each_matmul_and_not_twice_in_a_row(
    policy, recomputed, monkeypatch, device
):
    model, _ = in_4_bits("frozen", device)
    fuse(model, Fusion(**ALL, checkpoint=policy))
    written, write = Counter(), Dequantize4bit.write

    def count(self, *given):
        written[self] += 1
        write(self, *given)

    monkeypatch.setattr(Dequantize4bit, "write", count)
    step(model, length=5)
    assert sorted(written.values()) == [1, 2, 2, recomputed]


def test_a_backward_has_the_experts_of_its_own_tokens(device):
    """The memory has those of other tokens, of the same layer."""
    models = in_4_bits("MXFP4", device)
    gradients = []
    for model in models:
        fuse(model, MLP_ON)
        loss, _ = (loss_of(model, batch(model, seed=seed)) for seed in (3, 4))
        gradients.append(values_of(model, loss))
    assert_equal(*gradients)


def test_adapters_of_experts_in_4_bits_are_saved_and_the_base_is_not(device, tmp_path):
    models = coded, _ = in_4_bits("checkpointed", device)
    for model, folder in zip(models, "ab", strict=True):
        fuse(model, MLP_ON)
        model.save_pretrained(tmp_path / folder)
    got, want = (load_file(tmp_path / one / "adapter_model.safetensors") for one in "ab")
    assert_equal(got, want)
    weight = experts_of(coded.float()).get_base_layer().down_proj
    assert weight.dtype == (weight + 0).dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"experts in 4 bits cannot be torch\.float64"):
        coded.double()
    with pytest.raises(RuntimeError, match="give it experts in 4 bits as ignored_params"):
        weight.chunk(2)  # as fully_shard does
    with pytest.raises(RuntimeError, match="save the adapters alone"):
        torch.save(coded.state_dict(), tmp_path / "base")


@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("name", ["FP4, simple scales", "MXFP4", "MXFP4, checkpointed"])
def test_adapters_are_merged_into_codes(name, safe_merge, device):
    """As PEFT merges them into a linear layer in 4 bits: the sum is quantised again."""
    models = coded, plain = in_4_bits(name, device)
    for model in models:
        fuse(model, MLP_ON)
        model.merge_adapter(safe_merge=safe_merge)
    quantize_experts(plain, **IN_4_BITS[name][3])
    coded_weight, weight = (experts_of(model).get_base_layer().down_proj for model in models)
    assert torch.equal(coded_weight + 0, weight + 0)
    assert "adapters are merged" in report(coded).left[everywhere("mlp.experts")[0]]
    got, want = (model(**batch(model)).logits for model in models)
    assert torch.equal(got, want)
    coded.unmerge_adapter()
    assert step(coded, length=5).functions == {"LoRA_Experts": 2}


def test_a_model_without_experts_is_an_error(device):
    with pytest.raises(ValueError, match="no experts of a class"):
        quantize_experts(nn.Linear(8, 8))


# --- reasons --------------------------------------------------------------------------------------


def wrappers(model):
    outer = experts_of(model)
    return outer, outer.base_layer


def add_active(model):
    options = {name: getattr(model.peft_config["default"], name) for name in EXPERTS}
    model.add_adapter("second", LoraConfig(**options, r=2))
    model.base_model.set_adapter(["default", "second"])


def train_base(model):
    experts_of(model).get_base_layer().down_proj.requires_grad_()


def set_activation(model):
    experts_of(model).get_base_layer().act_fn = nn.GELU()


def set_implementation(model):
    experts_of(model).get_base_layer().config._experts_implementation = "sonicmoe"


def spread(model):
    experts_of(model).get_base_layer()._is_expert_parallel = True


def set_scaling(model):
    wrappers(model)[1].scaling["default"] = torch.tensor(1.5)


REASONS = {
    "merged": (lambda model: model.merge_adapter(), "adapters are merged into the weight"),
    "two adapters": (add_active, "2 adapters are active: default, second"),
    "trained": (train_base, "its base weight is trained"),
    "GELU": (set_activation, "its activation is GELU, not SiLU"),
    "another implementation": (set_implementation, "its experts are sonicmoe's"),
    "expert parallelism": (spread, "its experts are spread over ranks"),
    "a tensor as scaling": (set_scaling, "its scaling is a tensor"),
    "a hook within": (
        lambda model: wrappers(model)[1].register_forward_hook(lambda *_: None),
        "it has hooks",
    ),
    "a hook on the experts": (
        lambda model: experts_of(model).get_base_layer().register_forward_hook(lambda *_: None),
        "it has hooks",
    ),
}


WISHED = ("merged", "two adapters")  # which nobody is warned of


@pytest.mark.parametrize("name", REASONS)
def test_experts_that_may_not_be_fused_run_as_peft_has_them(name, device):
    change, reason = REASONS[name]
    fused = moe_model(device, **EXPERTS)
    fuse(fused, MLP_ON)
    change(fused)
    assert reason in report(fused).left[everywhere("mlp.experts")[0]]
    if name in ("another implementation", "a tensor as scaling"):
        return  # which plain PEFT cannot run here
    plain = copy.deepcopy(fused)
    unfuse(plain)
    with nullcontext() if name in WISHED else pytest.warns(UserWarning, match=reason):
        got = fused(input_ids=ids(device)[:, :5])
    assert_near(got.logits, plain(input_ids=ids(device)[:, :5]).logits, 1e-5)


@pytest.mark.parametrize(
    ("classes", "config", "lora", "reason"),
    [
        ("Qwen3Moe", {"moe_intermediate_size": 12}, {}, "its sizes are 32 and 12, not multiples"),
        ("Olmoe", {}, FROZEN, "and no experts that we know"),
    ],
)
def test_a_mixture_that_cannot_run_fused_says_why(classes, config, lora, reason, device):
    config = config | {"experts_implementation": "eager"}
    with pytest.raises(ValueError, match=reason):
        fuse(moe_model(device, config=config, classes=classes, **lora), MLP_ON)


def test_a_patched_class_is_left_alone(monkeypatch, device):
    model = moe_model(device)
    fuse(model, MLP_ON)
    monkeypatch.setattr(Qwen3MoeExperts, "_apply_gate", lambda self, both: both.chunk(2, -1)[0])
    (reason,) = set(report(model).left.values())
    assert "not transformers' own" in reason


def test_disabled_adapters_and_other_dtypes(device):
    fused, plain, _ = beside(moe_model(device), MLP_ON)
    with fused.disable_adapter(), plain.disable_adapter():
        got, want = (model(input_ids=ids(device)[:, :5]).logits for model in (fused, plain))
    assert_near(got, want, 1e-5)
    x = random(3, 32, device=device)
    chosen = torch.tensor([[0, 1]] * 3, device=device)
    with torch.autocast(device, torch.bfloat16), pytest.warns(UserWarning, match="give both one"):
        experts_of(fused)(x, chosen, torch.ones(3, 2, device=device))
