"""Every variant starts from the same weights, adapters and settings."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fused_lora.attention
import fused_lora.cross_entropy
import fused_lora.rms_norm
import fused_lora.rope
import fused_mlp.fast_lora
import fused_mlp.swiglu
import models
from models import Lora, build
from summary import NO_CHECKPOINTING, baseline_of, twin_of
from variants import ALONE, EVIDENCE, PARTS, POLICIES, SUITES, TOGETHER, VARIANTS
from weights import materialize, resolve

MODULES = {  # where a part's functions are, the last of them with its kernels
    "mlp": (fused_mlp.fast_lora, fused_mlp.swiglu),
    "attention": (fused_lora.attention,),
    "rope": (fused_lora.rope,),
    "rms_norm": (fused_lora.rms_norm,),
    "cross_entropy": (fused_lora.cross_entropy,),
    "checkpoint": (),
}
TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny.json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    source = resolve(str(TINY), tmp_path_factory.mktemp("cache"), 0)
    materialize(source, 0, "cpu")
    return source.folder


def make(variant, checkpoint, device, **changes):
    asked = {"lora": Lora(rank=4, alpha=8), "seq_len": 16, "checkpointing": True, "seed": 0}
    return build(variant, checkpoint, device=device, **(asked | changes))


def test_fused_mlp_differs_from_vanilla_in_its_mlps_alone(checkpoint, device):
    vanilla, fused = (make(name, checkpoint, device) for name in ("vanilla_peft", "fused_mlp"))
    ours, theirs = fused.model.state_dict(), vanilla.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert fused.settings == vanilla.settings
    assert vanilla.fused_modules == []
    assert fused.fused_modules == [
        f"base_model.model.model.layers.{index}.mlp: mlp" for index in range(2)
    ]


def test_vanilla_is_peft_as_it_ships(checkpoint, device):
    built = make("vanilla_peft", checkpoint, device)
    assert built.settings == {
        "checkpointing": "non-reentrant",
        "adapter_dtype": "float32",
        "autocast": "bfloat16",
        "attention": "sdpa",
        "compile": False,
    }
    trained = {name: p for name, p in built.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(models.TARGETS)
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    frozen = [p for p in built.model.parameters() if not p.requires_grad]
    assert all(p.dtype == torch.bfloat16 for p in frozen)
    assert built.model.training
    assert built.model.base_model.model.model.layers[0].gradient_checkpointing


def test_no_checkpointing_when_not_asked_for(checkpoint, device):
    built = make("vanilla_peft", checkpoint, device, checkpointing=False)
    assert built.settings["checkpointing"] == "none"
    assert not built.model.base_model.model.model.layers[0].gradient_checkpointing


def test_adapters_depend_on_their_name_and_the_seed_alone(checkpoint, device):
    one, again, other = (
        dict(models._adapters(make("vanilla_peft", checkpoint, device, seed=seed).model))
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    values = list(one.values())
    assert not any(a.shape == b.shape and torch.equal(a, b) for a, b in pairwise(values))


def test_no_adapter_starts_at_zero(checkpoint, device):
    """With B = 0 as PEFT starts it, every dA is zero and a wrong one goes unseen."""
    for name, parameter in make("vanilla_peft", checkpoint, device).model.named_parameters():
        if ".lora_B." in name:
            assert 0.01 < parameter.std() < 0.03
        elif ".lora_A." in name:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound


def test_what_proves_a_part_exists():
    """Every function and every kernel that a part must have run is one of its own."""
    for part in PARTS:
        evidence = EVIDENCE[part]
        assert all(hasattr(module, k) for k in evidence.kernels for module in MODULES[part][-1:])
        for function in evidence.functions:
            name = function.removesuffix("Backward")
            assert any(hasattr(module, name) for module in MODULES[part])


@pytest.mark.parametrize(
    "variant",
    [
        *(v for v in (*ALONE, *TOGETHER, *POLICIES) if not VARIANTS[v].compiled),
        "fused_all_no_checkpointing",
    ],
)
def test_fused_variants_differ_from_vanilla_in_what_they_fuse_alone(variant, checkpoint, device):
    recipe = VARIANTS[variant]
    built = make(variant, checkpoint, device, checkpointing=recipe.checkpointing != "none")
    vanilla = make("vanilla_peft", checkpoint, device).model.state_dict()
    ours = built.model.state_dict()
    assert ours.keys() == vanilla.keys()
    assert all(torch.equal(ours[name], vanilla[name]) for name in ours)
    parts = {name.split(": ")[1] for name in built.fused_modules}
    assert parts == set(recipe.fused)
    layer = built.model.base_model.model.model.layers[0]
    assert layer.gradient_checkpointing is (recipe.checkpointing != "none")


def test_every_suite_has_its_baselines_and_twins():
    for suite in SUITES.values():
        for variant in suite:
            assert baseline_of(variant) in suite and twin_of(variant) in suite
    assert len(VARIANTS) == len(SUITES["all"])


def test_without_checkpointing_nothing_else_changes():
    for name, recipe in VARIANTS.items():
        if name.endswith(NO_CHECKPOINTING):
            twin = VARIANTS[name.removesuffix(NO_CHECKPOINTING)]
            kept = tuple(part for part in twin.fused if part != "checkpoint")
            assert recipe == replace(twin, checkpointing="none", fused=kept)


def test_bf16_adapters_train_without_autocast(checkpoint, device):
    built = make("vanilla_peft_bf16", checkpoint, device)
    assert built.autocast_dtype is None and built.settings["autocast"] == "None"
    assert built.settings["adapter_dtype"] == "bfloat16"
