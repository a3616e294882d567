"""Variants as built: the same weights, adapters and settings for all."""

import importlib
import json
import os
import pkgutil
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fused_lora
import fused_mlp
import models
from batches import Batch
from bench import cells, evidence
from bench.evidence import LIBRARIES, functions_of
from bench.parity import gradients_of
from bench.profiler import profile_step
from bench.weights import materialize, resolve
from fused_lora.adopt.switches import BORDERS, SWITCHES, switches_for
from fused_lora.step.graph import EAGER_CALLS, GraphedStep
from models import build
from variants import BF16, SUITES, TARGETS, VARIANTS, Lora, Settings, counterpart, recipe_of

FUSED = [v for v in VARIANTS.values() if v.recipe.fused and not v.recipe.compiled]
EXACT = {"dynamic": False}
TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny.json"


def materialized(config, folder):
    source = resolve(str(config), folder, 0)
    materialize(source, 0, "cpu")
    return source.folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return materialized(TINY, tmp_path_factory.mktemp("cache"))


def make(variant, checkpoint, device, **changes):
    asked = {"lora": Lora(rank=4, alpha=8), "seq_len": 16, "seed": 0}
    return build(variant, checkpoint, device=device, **(asked | changes))


@pytest.fixture(scope="module")
def vanilla(checkpoint, device):
    return make("vanilla_peft", checkpoint, device)


def test_a_compiled_model_starts_with_an_empty_cache_and_exact_shapes(
    checkpoint, device, monkeypatch
):
    done = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **how: done.append(how))
    for variant, wanted in (("vanilla_peft", []), ("compiled_peft", ["reset"] + [EXACT] * 2)):
        make(variant, checkpoint, device)
        assert done == wanted


@pytest.mark.parametrize(("layers", "told"), [(0, {}), (3, {"offload_layers": 3})])
def test_unsloth_is_told_how_many_layers_lie_in_host_memory(layers, told, monkeypatch):
    asked = {}
    unsloth = SimpleNamespace(
        from_pretrained=lambda folder, **options: (asked.update(options), None),
        get_peft_model=lambda model, **options: model,
    )
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=unsloth))
    recipe = recipe_of("full_unsloth")
    models._unsloth_model(recipe, "folder", Lora(), 16, "cuda", 0, BF16, layers)
    assert {key: asked[key] for key in asked if "offload" in key} == told


@pytest.mark.parametrize("told", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_vanilla_is_peft_as_it_ships(told, checkpoint, device, monkeypatch):
    """Compare with PEFT as it ships. Its settings include the allocator's."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", models.CUBLASLT_WORKSPACE):
        monkeypatch.delenv(name, raising=False)
    allocator = "expandable_segments:True" if told else None
    if told:
        monkeypatch.setenv(told, allocator)
    built = make("vanilla_peft", checkpoint, device)
    as_shipped = ("non-reentrant", "float32", "bfloat16", "sdpa", False)
    assert built.settings == Settings(*as_shipped, allocator=allocator)
    trained = {name: p for name, p in built.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(TARGETS)
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    frozen = [p for p in built.model.parameters() if not p.requires_grad]
    assert all(p.dtype == torch.bfloat16 for p in frozen)
    assert built.model.training
    layer = built.model.base_model.model.model.layers[0]
    assert layer.gradient_checkpointing and layer.mlp.up_proj.scaling == {"default": 8 / 4}
    assert layer._gradient_checkpointing_func.keywords == {"use_reentrant": False}


def test_a_base_in_nf4_is_qloras_and_leaves_the_rest_as_it_is(checkpoint, device, vanilla):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    built = make("vanilla_peft", checkpoint, device, base="nf4")
    assert built.settings == vanilla.settings and built.autocast_dtype == vanilla.autocast_dtype
    there, here = (dict(model.named_parameters()) for model in (vanilla.model, built.model))
    assert there.keys() == here.keys()
    quantised = {name for name in here if isinstance(here[name], bitsandbytes.nn.Params4bit)}
    assert quantised == {name for name in here if name.endswith("proj.base_layer.weight")}
    for name in quantised:
        state = here[name].quant_state
        assert (state.quant_type, state.nested, state.blocksize) == ("nf4", True, 64)
        assert state.dtype == torch.bfloat16
    for name in here.keys() - quantised:
        assert here[name].dtype == there[name].dtype and torch.equal(here[name], there[name])
    bases = [m for m in built.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert {base.compute_dtype for base in bases} == {torch.bfloat16}


@pytest.mark.parametrize(("variant", "given", "has"), [
    ("fp8_layer", None, "0"), ("fp8_layer", "64", "64"), ("vanilla_peft", None, None),
])  # fmt: skip
def test_fp8_is_measured_without_a_workspace_of_cublaslt_unless_one_is_given(
    variant, given, has, monkeypatch
):
    monkeypatch.delenv(models.CUBLASLT_WORKSPACE, raising=False)
    if given:
        monkeypatch.setenv(models.CUBLASLT_WORKSPACE, given)
    seen = []

    def build(*_):
        seen.append(os.environ.get(models.CUBLASLT_WORKSPACE))
        raise RuntimeError("built enough")

    monkeypatch.setattr(cells, "_build_and_check", build)
    cells.measure_cells(lambda message: None, SimpleNamespace(device=None), variant, [(1, 16)])
    assert seen == [has]


def test_bf16_adapters_train_without_autocast_and_a_variant_without_checkpointing_has_none(
    checkpoint, device
):
    built = make("vanilla_peft_bf16_adapters_no_checkpointing", checkpoint, device)
    assert built.autocast_dtype is None
    assert built.settings == Settings("none", "bfloat16", "None", "sdpa", False)
    assert not built.model.base_model.model.model.layers[0].gradient_checkpointing


@pytest.mark.parametrize(("variant", "seq_len", "words"), [
    ("full_unsloth", 511, "unsloth (plain)"),
    ("full_unsloth", 512, "unsloth (offloaded)"),
    ("unsloth_plain_checkpointing", 512, "unsloth (plain)"),
])  # fmt: skip
def test_unsloth_offloads_from_512_tokens_on_unless_told_otherwise(variant, seq_len, words):
    assert models._checkpointing_in_words(recipe_of(variant), seq_len) == words


def test_in_fp32_nothing_is_rounded(checkpoint, device):
    built = make("vanilla_peft_fp32", checkpoint, device)
    assert built.autocast_dtype is None and built.settings.autocast == "None"
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_depend_on_their_name_and_the_seed_alone_and_none_starts_at_zero(
    dora, checkpoint, device
):
    """Start no adapter at zero: with PEFT's B = 0 every dA is zero, and a wrong one goes unseen.
    A model that has been trained starts again."""
    lora = Lora(rank=4, alpha=8, dora=dora)
    trained, *models_of = (
        make("vanilla_peft", checkpoint, device, seed=seed, lora=lora).model for seed in (0, 0, 1)
    )
    one = dict(models._adapters(trained))
    assert all(parameter.dtype == torch.float32 for parameter in one.values())
    with torch.no_grad():
        for parameter in one.values():
            parameter.mul_(1.5)
    models.set_adapters(trained, 0)
    again, other = (dict(models._adapters(model)) for model in models_of)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    values = list(one.values())
    assert not any(a.shape == b.shape and torch.equal(a, b) for a, b in pairwise(values))
    for name, parameter in one.items():
        if ".lora_magnitude_vector." in name:
            base = trained.get_submodule(name.split(".lora_")[0]).base_layer
            scale = parameter / base.weight.float().norm(dim=1)
            assert 0.9 < scale.min() < 1.0 < scale.max() < 1.1 and 0.01 < scale.std() < 0.03
        elif ".lora_B." in name:
            assert 0.01 < parameter.std() < 0.03
        else:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound


def test_what_proves_a_part_exists():
    """Find all functions and kernels that our parts name in our code. Each switch has a variant."""
    recipes = [variant.recipe for variant in VARIANTS.values()]
    assert SWITCHES.keys() | {"checkpoint"} == {one for recipe in recipes for one in recipe.fused}
    assert LIBRARIES.keys() == {recipe.library for recipe in recipes}
    found = [
        module
        for room in (fused_mlp, fused_lora)
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    ]
    ours = {name for module in found for name in vars(importlib.import_module(module.name))}
    for part in (*SWITCHES.values(), switches_for(BORDERS["fp8"])["layer"]):
        proof = part.evidence
        assert proof.functions.keys() <= ours
        for kernel in (*proof.kernels, *proof.kernels_in_4_bits):
            assert all(any(one in name for name in ours) for one in kernel.split("|"))
        for beginning in chain(*part.kinds.values()):
            assert any(name.startswith(beginning) and name.endswith("_kernel") for name in ours)


def profile_of(variant, built, device, monkeypatch):
    """Profile a step. On the CPU, count kernels as they are launched."""
    launched = Counter()
    if device == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def counted(kernel, *inputs, **options):
            launched[kernel.fn.__name__] += 1
            return run(kernel, *inputs, **options)

        monkeypatch.setattr(InterpretedFunction, "run", counted)
    rows, length = (2, 16) if device == "cuda" else (1, 8)  # the interpreter takes its time
    ids = torch.arange(rows * length, device=device).view(rows, length)

    def step():
        with built.autocast():
            loss = built.model(input_ids=ids, labels=ids).loss
        loss.backward()

    profile = profile_step(step, functions_of(recipe_of(variant)), mark_modules=True)
    return replace(profile, kernels_seen=dict(launched)) if device == "cpu" else profile


@pytest.mark.slow("fused_all-LoRA_MLPBackward-bf16", "nf4")
@pytest.mark.parametrize(
    ("variant", "function", "base"),
    [
        ("fused_layer_no_checkpointing", "DecoderLayerBackward", "bf16"),
        ("fused_layer_graph_offload", "DecoderLayerBackward", "bf16"),
        ("fused_layer", "DecoderLayerBackward", "bf16"),
        ("fused_layer", "DecoderLayerBackward", "nf4"),
        ("fp8_lm_head_graph_no_checkpointing", "DecoderLayerBackward", "bf16"),
        ("fused_all", "LoRA_MLPBackward", "bf16"),
    ],
)
def test_a_step_shows_what_proves_its_parts_and_no_less_will_do(
    variant, function, base, checkpoint, device, monkeypatch
):
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    built = make(variant, checkpoint, device, base=base)
    profile = profile_of(variant, built, device, monkeypatch)
    assert profile.functions_seen[function] == 2  # of two layers
    eager, graph = (replace(recipe_of(variant), graph=is_graph) for is_graph in (False, True))
    not_run = partial(evidence.not_run, fused_modules=built.fused_modules, on_gpu=True, base=base)
    assert not_run(eager, profile=profile) is None
    less = replace(profile, functions_seen={**profile.functions_seen, function: 1})
    assert not_run(eager, profile=less).startswith(f"{function} ran 1 times")
    # a replay has only kernels
    replayed = replace(profile, functions_seen={})
    assert not_run(graph, profile=replayed) is None
    kernels = profile.kernels_seen
    (fewer,) = (
        SWITCHES["layer"].evidence.kernels_in_4_bits if base == "nf4" else ["_swiglu_backward"]
    )
    few = {name: 1 if fewer in name else kernels[name] for name in kernels}
    less = replace(replayed, kernels_seen=few)
    assert " ran 1 times in a step, for 2 modules" in not_run(graph, profile=less)


@pytest.mark.parametrize(
    ("variant", "functions"),
    [
        ("fused_all", ("LoRA_AttentionBackward", "AddRMSNormBackward")),
        ("fused_layer", ("DecoderLayerBackward",)),
    ],
)
def test_qwen3s_norms_of_heads_prove_themselves_within_the_attention(
    variant, functions, tmp_path, device, monkeypatch
):
    config = json.loads(TINY.read_text())
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    (tmp_path / "qwen3.json").write_text(json.dumps(config))
    built = make(variant, materialized(tmp_path / "qwen3.json", tmp_path), device)
    profile = profile_of(variant, built, device, monkeypatch)
    # on a GPU attention rotates its gradients back itself
    in_forward = {"_qkv_rope_kernel": profile.kernels_seen["_qkv_rope_kernel"] // 2}
    profile = replace(profile, kernels_seen={**profile.kernels_seen, **in_forward})
    not_run = partial(evidence.not_run, recipe_of(variant), built.fused_modules, on_gpu=True)
    assert not_run(profile) is None
    for function in functions:
        seen = {**profile.functions_seen, function: 1}
        assert " times in a step, for " in not_run(replace(profile, functions_seen=seen))


def test_a_graph_has_its_step(checkpoint, device):
    built = make("fused_layer_graph", checkpoint, device)
    step_for = built.graph.step_for
    assert built.settings.graph is True and built.graph.eager_calls == EAGER_CALLS
    assert (step_for.func, step_for.args) == (GraphedStep, (built.model,))
    eager = make("fused_layer", checkpoint, device)
    assert eager.graph is None and eager.settings.graph is False


@pytest.mark.parametrize(
    "variant",
    [*(v.id for v in FUSED if v.checkpoints),
     "fused_all_no_checkpointing", "fused_layer_no_checkpointing"],
)  # fmt: skip
def test_fused_variants_differ_from_vanilla_in_what_they_fuse_alone(
    variant, vanilla, checkpoint, device
):
    recipe = recipe_of(variant)
    checkpoints = recipe.checkpointing != "none"
    built = make(variant, checkpoint, device)
    ours, theirs = (
        {n: getattr(weight, "original", weight).cpu() for n, weight in model.state_dict().items()}
        for model in (built.model, vanilla.model)
    )  # of weights in FP8, what they were
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {name.split(": ")[1] for name in built.fused_modules} == set(recipe.fused)
    if variant == "fused_mlp":
        assert built.settings == vanilla.settings
        layers = "base_model.model.model.layers"
        assert built.fused_modules == [f"{layers}.{index}.mlp: mlp" for index in range(2)]
    layer = built.model.base_model.model.model.layers[0]
    assert layer.gradient_checkpointing is checkpoints


def test_the_fastest_suite_holds_ours_against_the_strongest_without_checkpointing_too():
    both = ("vanilla_peft", "vanilla_peft_again", "full_unsloth", "compiled_peft", "liger_peft",
            "fused_all", "fused_layer", "fused_layer_graph")  # fmt: skip
    wanted = {counterpart(id, checkpoints).id for id in both for checkpoints in (True, False)}
    policies = {"fused_layer_graph_offload", "fused_layer_graph_selective_10_gib"}
    assert set(SUITES["fastest"]) == wanted | {"unsloth_plain_checkpointing", *policies}


def test_documents_by_their_lengths_train_as_with_a_mask(checkpoint, device):
    tokens = torch.arange(3, 39, device=device)[None]
    lengths = torch.tensor([7, 1, 12, 16], dtype=torch.int32, device=device)
    places = torch.cat([torch.arange(int(n), device=device) for n in lengths])[None]
    batch = Batch(tokens, tokens, position_ids=places, lengths=lengths)
    trained = {}
    for variant in ("vanilla_peft", "vanilla_peft_varlen"):
        built = make(variant, checkpoint, device)
        trained[variant] = gradients_of(built, batch)
    (loss, gradients), (other_loss, others) = trained.values()
    assert built.settings.attention == "varlen"
    told = built.lengths_as(lengths)
    assert (told["max_length_q"], told["cu_seq_lens_k"].tolist()) == (16, [0, 7, 8, 20, 36])
    assert other_loss == pytest.approx(loss, rel=1e-2)
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() < 0.05 * gradient.norm(), name
    # without lengths it does not know of documents
    alone, _ = gradients_of(built, replace(batch, lengths=None))
    assert abs(alone - loss) > 10 * abs(other_loss - loss)
