"""Every variant as one record: its name, its look, how it is built. Imports no torch."""

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple, get_args

import msgspec

PART_TITLES = {"mlp": "MLP", "attention": "attention", "rope": "RoPE", "rms_norm": "RMSNorm",
               "cross_entropy": "cross entropy", "checkpoint": "checkpointing"}  # fmt: skip
FUSED_PARTS = tuple(PART_TITLES)
# The same with each decoder layer as one function. `rms_norm` then fuses the last norm alone.
WHOLE_LAYERS = ("layer", "rms_norm", "cross_entropy", "checkpoint")
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
TARGETS = (*ATTENTION_TARGETS, *MLP_TARGETS)
Base = Literal["bf16", "nf4"]  # weights; nf4 as QLoRA has it: double quantisation, bf16 compute
BF16, NF4 = BASES = get_args(Base)
FP32, FP8, FP8_LM_HEAD = "fp32", "fp8", "fp8_lm_head"  # other precisions of frozen matmuls


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapters, which every variant shares. Their scale is alpha / rank."""

    rank: int = 32
    alpha: int | float = 64
    dropout: float = 0.0
    bias: str = "none"
    targets: tuple[str, ...] = TARGETS
    dora: bool = False

    @property
    def is_plain_in_mlp(self) -> bool:
        """True if all of an MLP's projections have adapters, without dropout and magnitudes."""
        return set(MLP_TARGETS) <= set(self.targets) and not self.dropout and not self.dora


class Settings(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The settings a variant was built with, in the words of results.json. None: it was not built.

    graph: the step is one CUDA graph. allocator: the settings of PyTorch's allocator, if any were
    given. cublaslt_workspace: the KiB that the environment gave cuBLASLt, if any.
    """

    checkpointing: str | None = None
    adapter_dtype: str | None = None
    autocast: str | None = None
    attention: str | None = None
    compile: bool | None = None
    graph: bool = False
    allocator: str | None = None
    cublaslt_workspace: str | None = None


@dataclass(frozen=True)
class Recipe:
    """The differences of a variant from vanilla PEFT.

    library: "peft"; "liger" for PEFT on a transformers that Liger has patched; "unsloth" for
        FastLanguageModel.
    fused: the parts that `fused_lora.fuse` fuses.
    checkpointing: "full", "none" or another mode of the library: "unsloth" offloads, and the fused
        part "checkpoint" has policies.
    checkpoint_gib: how much the layers kept by the policy "selective" may hold.
    adapter_dtype: fp32 under bf16 autocast, as in PEFT, or bf16 without autocast.
    compiled: torch.compile compiles each decoder layer.
    graph: the whole training step is captured in a CUDA graph and replayed.
    attention: its name in transformers; "varlen" is FlashAttention over documents' lengths.
    base_dtype: that of the base weights. fp32 runs without autocast.
    fp8: whole layers multiply in FP8. This is another precision with its own parity reference. Its
        process gives cuBLASLt no workspace unless the environment says how much.
    """

    library: str = "peft"
    fused: tuple[str, ...] = ()
    checkpointing: str = "full"
    checkpoint_gib: float | None = None
    adapter_dtype: str = "float32"
    compiled: bool = False
    graph: bool = False
    attention: str = "sdpa"
    base_dtype: str = "bfloat16"
    fp8: bool = False

    def precision(self, base: Base) -> str:
        """The precision of its frozen matmuls on a base."""
        if self.fp8:
            return FP8_LM_HEAD if FP8_LM_HEAD in self.fused else FP8
        return FP32 if self.base_dtype == "float32" else base

    @property
    def look(self) -> "Look":
        layers = "fp8" if self.fp8 else "layers"
        fused = layers if "layer" in self.fused else "fused" if self.fused else self.library
        return LOOKS["compiled" if self.compiled else fused]


class Look(NamedTuple):
    """The look of one family of variants. The marker tells families apart without colour."""

    colour: str
    marker: str


# Okabe and Ito's colours, which no eye confuses. The baseline is grey, FP8 a darker indigo.
LOOKS = {
    "peft": Look("#595959", "o"),
    "fused": Look("#d55e00", "s"),
    "unsloth": Look("#cc79a7", "^"),
    "layers": Look("#0072b2", "P"),
    "fp8": Look("#332288", "d"),
    "compiled": Look("#56b4e9", "D"),
    "liger": Look("#009e73", "v"),
    "other": Look("#e69f00", "<"),
}


@dataclass(frozen=True)
class Variant:
    """A way to train.

    id: its name in results.json and on the command line. plain_title: its name for people, without
    a word about checkpointing. recipe: None if this version cannot build it. plain_id: the id of
    the same variant with checkpointing.
    """

    id: str
    plain_title: str
    recipe: Recipe | None
    look: Look
    checkpoints: bool = True
    suites: tuple[str, ...] = ()
    plain_id: str = ""

    @property
    def title(self) -> str:
        """Its name in tables and pictures."""
        return self.plain_title + ("" if self.checkpoints else " without checkpointing")

    @property
    def baseline(self) -> "Variant":
        """Vanilla PEFT, with checkpointing if this variant has it. Its speedup is over that."""
        return counterpart(BASELINE, self.checkpoints)

    @property
    def again(self) -> "Variant":
        """The baseline's A/A twin: the same code measured twice shows the noise."""
        return counterpart(AGAIN, self.checkpoints)

    @property
    def is_ours(self) -> bool:
        """True if this repository fuses anything in it."""
        return self.recipe is not None and bool(self.recipe.fused)

    @property
    def is_baseline(self) -> bool:
        """True if it is a baseline or the A/A twin of one."""
        return self.id in (self.baseline.id, self.again.id)


def _one(id: str, title: str, recipe: Recipe, suites: str) -> list[Variant]:
    """Make a variant that exists with checkpointing only."""
    return [Variant(id, title, recipe, recipe.look, True, tuple(suites.split()), id)]


def _both(id: str, title: str, recipe: Recipe, suites: str) -> list[Variant]:
    """Make a variant with checkpointing and one without, which stays out of the experiment."""
    fused = tuple(part for part in recipe.fused if part != "checkpoint")
    without = replace(recipe, checkpointing="none", fused=fused)
    others = tuple(suite for suite in suites.split() if suite != "experiment")
    return [
        *_one(id, title, recipe, suites),
        Variant(id + WITHOUT, title, without, recipe.look, False, others, id),
    ]


def _about(id: str, title: str, part: str, fused: tuple[str, ...]) -> list[Variant]:
    """Make a variant of the suite "parts" that is about one part."""
    make = _one if part == "checkpoint" else _both  # the part is what others leave out
    return make(id, title, Recipe(fused=fused), "parts")


BASELINE, AGAIN, IN_FP32 = "vanilla_peft", "vanilla_peft_again", "vanilla_peft_fp32"
WITHOUT = "_no_checkpointing"
# For each part, the variant that fuses it alone and the one that fuses all the others.
ALONE = {part: f"fused_{part}" for part in FUSED_PARTS}
ALL_BUT = {part: f"fused_all_but_{part}" for part in FUSED_PARTS}
OFFLOAD = Recipe(fused=FUSED_PARTS, checkpointing="offload")
KEEP_10_GIB = Recipe(fused=FUSED_PARTS, checkpointing="selective", checkpoint_gib=10)
BF16_ADAPTERS = Recipe(adapter_dtype="bfloat16")

_RECORDS = [
    *_both(BASELINE, "vanilla PEFT", Recipe(), "experiment parts peers fastest"),
    *_both("fused_mlp", "fused MLP", Recipe(fused=("mlp",)), "experiment parts peers"),
    *_both("full_unsloth", "full Unsloth", Recipe("unsloth", checkpointing="unsloth"),
           "experiment peers fastest"),
    # whole layers as one CUDA graph, with their inputs in host memory like Unsloth at 512 tokens
    *_one("fused_layer_graph_offload", "everything fused",
          replace(OFFLOAD, fused=WHOLE_LAYERS, graph=True), "experiment fastest"),
    # one part alone, and all but one
    *chain.from_iterable(_about(ALONE[part], f"fused {title}", part, (part,))
                         for part, title in PART_TITLES.items() if part != "mlp"),
    *_both("fused_all", "all parts", Recipe(fused=FUSED_PARTS), "parts peers fastest"),
    *chain.from_iterable(
        _about(ALL_BUT[part], f"all parts but {'the MLP' if part == 'mlp' else title}", part,
               tuple(other for other in FUSED_PARTS if other != part))
        for part, title in PART_TITLES.items()
    ),
    # the same without waiting for the host between kernels
    *_both("fused_all_graph", "all parts, CUDA graph",
           Recipe(fused=FUSED_PARTS, graph=True), "parts"),
    # peers
    *_both("vanilla_peft_bf16_adapters", "vanilla PEFT, bf16 adapters", BF16_ADAPTERS, "peers"),
    *_both("compiled_peft", "compiled PEFT", Recipe(compiled=True), "peers fastest"),
    *_both("compiled_peft_bf16_adapters", "compiled PEFT, bf16 adapters",
           replace(BF16_ADAPTERS, compiled=True), "peers"),
    *_both("liger_peft", "Liger", Recipe("liger"), "peers fastest"),
    # the checkpointing that full_unsloth does not use
    *_one("unsloth_plain_checkpointing", "Unsloth, plain checkpointing",
          Recipe("unsloth"), "peers fastest"),
    *_one("fused_all_offload", "all parts, inputs offloaded", OFFLOAD, "peers"),
    *_one("fused_all_selective_10_gib", "all parts, 10 GiB kept", KEEP_10_GIB, "peers"),
    *_one("fused_all_selective_20_gib", "all parts, 20 GiB kept",
          replace(KEEP_10_GIB, checkpoint_gib=20), "peers"),
    # `--documents` by FlashAttention, as PEFT's users have it, and not by a mask
    *_one("vanilla_peft_varlen", "PEFT, FlashAttention", Recipe(attention="varlen"), ""),
    # slow: the losses without the rounding of all others
    *_one(IN_FP32, "vanilla PEFT in fp32", Recipe(base_dtype="float32"), ""),
    # whole layers
    *_both("fused_layer", "whole layers", Recipe(fused=WHOLE_LAYERS), "fastest"),
    *_both("fused_layer_graph", "whole layers, CUDA graph",
           Recipe(fused=WHOLE_LAYERS, graph=True), "fastest"),
    *_one("fused_layer_graph_selective_10_gib", "whole layers, CUDA graph, 10 GiB kept",
          replace(KEEP_10_GIB, fused=WHOLE_LAYERS, graph=True), "fastest"),
    # the same in another precision
    *_both("fp8_layer", "FP8 layers", Recipe(fused=WHOLE_LAYERS, fp8=True), ""),
    *_both("fp8_layer_graph", "FP8 layers, graph",
           Recipe(fused=WHOLE_LAYERS, graph=True, fp8=True), ""),
    *_both("fp8_lm_head_graph", "FP8 + lm_head, graph",
           Recipe(fused=(*WHOLE_LAYERS, "fp8_lm_head"), graph=True, fp8=True), ""),
    *_one("fp8_layer_graph_offload", "everything fused, in FP8",
          replace(OFFLOAD, fused=(*WHOLE_LAYERS, "fp8_lm_head"), graph=True, fp8=True), ""),
    # The A/A twin. It comes last: alternating rounds then put all others between the two.
    *_both(AGAIN, "vanilla PEFT, again", Recipe(), "experiment parts peers fastest"),
]  # fmt: skip
_RECORDS.sort(key=lambda variant: not variant.checkpoints)
VARIANTS = {variant.id: variant for variant in _RECORDS}

SUITES = {
    suite: [variant.id for variant in _RECORDS if suite in variant.suites]
    for suite in ("experiment", "parts", "peers", "fastest")
}
SUITES["all"] = [id for id, variant in VARIANTS.items() if variant.suites]
# The experiment on a base in NF4.
EXPERIMENT_ON_NF4 = [
    *(BASELINE, "compiled_peft", "fused_mlp", "full_unsloth"),
    *("fused_all", "fused_layer", "fused_layer_graph_offload", AGAIN),
]
# The experiment with DoRA, which only whole layers run fused.
EXPERIMENT_WITH_DORA = [
    *(BASELINE, "compiled_peft", "full_unsloth", "fused_layer"),
    *("fused_layer_graph", "fused_layer_graph_offload", AGAIN),
]
# The experiment on several GPUs.
ON_SEVERAL_GPUS = [BASELINE, "full_unsloth", "fused_all", "fused_layer", "fused_layer_graph"]
# Others' published settings have long steps: vanilla PEFT runs once, without its A/A twin.
SUITES["published"] = [
    BASELINE,
    *(
        VARIANTS[id + end].id
        for end in ("", WITHOUT)
        for id in ("full_unsloth", "fused_all", "fused_layer", "fused_layer_graph")
    ),
]


def unadapted_projections(variant: str, targets: Collection[str]) -> tuple[str, ...]:
    """Return the projections that a variant is about, if all adapters are elsewhere, else ().

    It would time them without LoRA, under its usual name.
    """
    sides = {"mlp": (MLP_TARGETS, ATTENTION_TARGETS), "attention": (ATTENTION_TARGETS, MLP_TARGETS)}
    for part, (own, elsewhere) in sides.items():
        is_about_it = variant_of(variant).plain_id in (ALONE[part], ALL_BUT[part])
        if is_about_it and set(targets) <= set(elsewhere):
            return own
    return ()


def variant_of(id: str) -> Variant:
    """Return the record of an id. One that another version's results have is titled by its own
    words."""
    if known := VARIANTS.get(id):
        return known
    title, checkpoints = id.removesuffix(WITHOUT).replace("_", " "), not id.endswith(WITHOUT)
    return Variant(id, title, None, LOOKS["other"], checkpoints, plain_id=id)


def title_of(id: str) -> str:
    """Return a variant's name in tables and pictures."""
    return variant_of(id).title


def recipe_of(id: str) -> Recipe:
    """Return a variant's recipe, or raise ValueError if this version cannot build it."""
    recipe = variant_of(id).recipe
    if recipe is None:
        raise ValueError(f"{id} cannot be built by this version")
    return recipe


def counterpart(id: str, checkpoints: bool) -> Variant:
    """Return the same variant with or without checkpointing, or raise KeyError if there is none."""
    plain = variant_of(id).plain_id
    return VARIANTS[plain if checkpoints else plain + WITHOUT]


def missing_package(variant: str) -> str | None:
    """Return the package a variant needs if it is not installed. Imports none."""
    packages = {"liger": "liger_kernel", "unsloth": "unsloth"}
    package = packages.get(recipe_of(variant).library)
    return package if package and importlib.util.find_spec(package) is None else None
