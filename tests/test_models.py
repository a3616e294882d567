"""Every variant starts from the same weights, adapters and settings."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import models
from models import VARIANTS, Lora, build
from weights import materialize, resolve

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


def test_the_kernels_that_prove_a_fusion_exist():
    import fused_mlp.swiglu

    for name in VARIANTS["fused_mlp"].kernels:
        assert hasattr(fused_mlp.swiglu, name)
