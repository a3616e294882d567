"""Every variant: one record each, with what it is called, how it looks, how it is built and what
proves that it ran. No torch."""

import importlib.util
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

FUSED_PARTS = ("mlp", "attention", "rope", "rms_norm", "cross_entropy", "checkpoint")
# What PARTS fuse, with each decoder layer as one function; rms_norm is then the last norm alone.
WHOLE_LAYERS = ("layer", "rms_norm", "cross_entropy", "checkpoint")
OF_MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *OF_MLP)


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapters, the same in every variant. Scale = alpha / rank."""

    rank: int = 32
    alpha: int | float = 64
    dropout: float = 0.0
    bias: str = "none"
    targets: tuple[str, ...] = TARGETS

    @property
    def is_plain_in_mlp(self) -> bool:
        """True if an MLP's projections all have adapters, without dropout."""
        return set(OF_MLP) <= set(self.targets) and not self.dropout


class Settings(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The settings that a variant was built with, in the words of results.json; None: not built.

    graph: whether its step is one CUDA graph. allocator: what PyTorch's was told, if anything.
    cublaslt_workspace: how many KiB cuBLASLt was given by whoever runs it, if anyone said.
    """

    checkpointing: str | None = None
    adapter_dtype: str | None = None
    autocast: str | None = None
    attention: str | None = None
    compile: bool | None = None
    graph: bool = False
    allocator: str | None = None
    cublaslt_workspace: str | None = None


class Evidence(NamedTuple):
    """Proof that a part ran in a step: the backward of its autograd functions, for every module
    that the part fuses (a forward may run twice), and on a GPU its kernels, as often or more.

    functions: their names, and for how many of these modules each stands.
    kernels: their names, or what is in the name of each that may be the one.
    without_backward: how many of the modules have none: nothing before the first norm is trained.
    of_lora_mlp: kernels that run where gate, up and down have adapters without dropout, only.
    """

    functions: dict[str, int]
    kernels: tuple[str, ...] = ()
    without_backward: int = 0
    of_lora_mlp: tuple[str, ...] = ()


EVIDENCE = {  # by fused part, and for a library as a whole
    "mlp": Evidence({"LoRA_MLPBackward": 1}, ("_swiglu_forward_kernel", "_swiglu_backward_kernel")),
    # with rope, one function for q, k, v and o
    "attention": Evidence(
        {"LoRA_QKVBackward": 1, "LoRA_WBackward": 1, "LoRA_AttentionBackward": 2}
    ),
    "rope": Evidence({"RoPEBackward": 1, "LoRA_AttentionBackward": 1}, ("_rope_kernel",)),
    "rms_norm": Evidence(
        {"RMSNormBackward": 1, "AddRMSNormBackward": 1},
        ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
        without_backward=1,
    ),
    "cross_entropy": Evidence({"LinearCrossEntropyBackward": 1}, ("_cross_entropy_kernel",)),
    "layer": Evidence(
        {"DecoderLayerBackward": 1},
        ("_qkv_rope_kernel", "_swiglu_backward_products_kernel",
         "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
    ),
    "fp8": Evidence(  # of a layer
        {"DecoderLayerBackward": 1},
        ("_qkv_rope_kernel", "_swiglu_backward_products_kernel", "_rms_norm_backward_kernel",
         "_fp8_rows_kernel", "_fp8_borders_kernel"),
    ),
    "fp8_lm_head": Evidence({}, ("_logit_codes_kernel",)),
    "checkpoint": Evidence({}),
    "unsloth": Evidence(
        {}, ("_rms_layernorm_forward", "_rope_embedding"), of_lora_mlp=("_fg_kernel",)
    ),
    "liger": Evidence({}, ("_swiglu_forward_kernel", "_rms_norm_forward_kernel")),
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The differences of a variant from vanilla PEFT.

    library: "peft"; "liger" for PEFT on transformers as Liger patches it; "unsloth" for
        FastLanguageModel.
    fused: the parts given to `fused_lora.fuse`.
    checkpointing: "full", "none", and what else the library has: "unsloth" (its offloading mode),
        for the fused part "checkpoint" its policies.
    checkpoint_gib: for the policy "selective", what the layers that are kept may hold.
    adapter_dtype: fp32 under bf16 autocast, as PEFT has it, or bf16 without autocast.
    compiled: whether each decoder layer is compiled with torch.compile.
    graph: whether the whole training step is captured in a CUDA graph and replayed.
    attention: transformers' name of it; "varlen" for FlashAttention's by the documents' lengths.
    base_dtype: of the base weights; in fp32 there is no autocast.
    fp8: whether whole layers multiply in FP8: another precision, which is held against its own. Its
        process gives cuBLASLt no workspace, unless the environment says how much.
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

    @property
    def evidence(self) -> dict[str, Evidence]:
        """The proof that it ran, by the part (or library) that it proves."""
        of = {"layer": "fp8"} if self.fp8 else {}
        found = {part: EVIDENCE.get(of.get(part, part)) for part in (self.library, *self.fused)}
        return {part: evidence for part, evidence in found.items() if evidence}

    @property
    def look(self) -> "Look":
        layers = "fp8" if self.fp8 else "layers"
        fused = layers if "layer" in self.fused else "fused" if self.fused else self.library
        return LOOKS["compiled" if self.compiled else fused]


class Look(NamedTuple):
    """The look of one family's variants in every picture; marker and hatch tell them apart without
    colour."""

    family: str
    colour: str
    marker: str
    hatch: str


# In Okabe and Ito's colours, which no eye confuses; the baseline in grey, and FP8 in an indigo
# darker than all of them.
LOOKS = {
    "peft": Look("vanilla PEFT", "#595959", "o", ""),
    "fused": Look("fused parts", "#d55e00", "s", "///"),
    "unsloth": Look("Unsloth", "#cc79a7", "^", "..."),
    "layers": Look("whole layers", "#0072b2", "P", "\\\\\\"),
    "fp8": Look("layers in FP8", "#332288", "d", "xx"),
    "compiled": Look("compiled PEFT", "#56b4e9", "D", "xxx"),
    "liger": Look("Liger", "#009e73", "v", "---"),
    "other": Look("other", "#e69f00", "<", "+++"),
}


@dataclass(frozen=True)
class Variant:
    """A way to train, with all that is known of it.

    id: in results.json and on the command line. plain_title: what people call it, in a table or
    picture that says whether layers are checkpointed. recipe: None where this version cannot build
    it. suites: that it is of. plain_id: of the same variant with checkpointing, its own if it has
    it. instead: of a retired variant, what to measure in its place.
    """

    id: str
    plain_title: str
    recipe: Recipe | None
    look: Look
    checkpoints: bool = True
    suites: tuple[str, ...] = ()
    plain_id: str = ""
    instead: str = ""

    @property
    def title(self) -> str:
        """Its name in tables and pictures."""
        return self.plain_title + ("" if self.checkpoints else " without checkpointing")

    @property
    def baseline(self) -> "Variant":
        """The variant that its speedup is over: vanilla PEFT with or without checkpointing, as it
        is."""
        return counterpart(BASELINE, self.checkpoints)

    @property
    def again(self) -> "Variant":
        """The A/A twin of its baseline: the same code measured twice shows the noise."""
        return counterpart(AGAIN, self.checkpoints)

    @property
    def is_ours(self) -> bool:
        """True if anything in it is fused by this repository."""
        return self.recipe is not None and bool(self.recipe.fused)

    @property
    def is_baseline(self) -> bool:
        """True if it is a baseline or the A/A twin of one."""
        return self.id in (self.baseline.id, self.again.id)


def _one(id: str, title: str, recipe: Recipe, suites: str) -> list[Variant]:
    """A variant that is all about checkpointing, so that there is none without."""
    return [Variant(id, title, recipe, recipe.look, True, tuple(suites.split()), id)]


def _both(id: str, title: str, recipe: Recipe, suites: str) -> list[Variant]:
    """A variant with checkpointing and one without, which is in all of its suites but the
    experiment."""
    fused = tuple(part for part in recipe.fused if part != "checkpoint")
    without = replace(recipe, checkpointing="none", fused=fused)
    others = tuple(suite for suite in suites.split() if suite != "experiment")
    return [
        *_one(id, title, recipe, suites),
        Variant(id + WITHOUT, title, without, recipe.look, False, others, id),
    ]


def _but(part: str) -> Recipe:
    return Recipe(fused=tuple(other for other in FUSED_PARTS if other != part))


BASELINE, AGAIN, IN_FP32 = "vanilla_peft", "vanilla_peft_again", "vanilla_peft_fp32"
WITHOUT = "_no_checkpointing"
OFFLOAD = Recipe(fused=FUSED_PARTS, checkpointing="offload")
KEEP_10_GIB = Recipe(fused=FUSED_PARTS, checkpointing="selective", checkpoint_gib=10)
BF16_ADAPTERS = Recipe(adapter_dtype="bfloat16")

_RECORDS = [
    *_both(BASELINE, "vanilla PEFT", Recipe(), "experiment parts peers fastest"),
    *_both("fused_mlp", "fused MLP", Recipe(fused=("mlp",)), "experiment parts peers"),
    *_both("full_unsloth", "full Unsloth", Recipe("unsloth", checkpointing="unsloth"),
           "experiment peers fastest"),
    # whole layers as one CUDA graph, their inputs in host memory, as Unsloth has them at 512
    *_one("fused_layer_graph_offload", "everything fused",
          replace(OFFLOAD, fused=WHOLE_LAYERS, graph=True), "experiment fastest"),
    # one part alone, and all but one
    *_both("fused_attention", "fused attention", Recipe(fused=("attention",)), "parts"),
    *_both("fused_rope", "fused RoPE", Recipe(fused=("rope",)), "parts"),
    *_both("fused_rms_norm", "fused RMSNorm", Recipe(fused=("rms_norm",)), "parts"),
    *_both("fused_cross_entropy", "fused cross entropy", Recipe(fused=("cross_entropy",)), "parts"),
    *_one("fused_checkpoint", "fused checkpointing", Recipe(fused=("checkpoint",)), "parts"),
    *_both("fused_all", "all parts", Recipe(fused=FUSED_PARTS), "parts peers fastest"),
    *_both("fused_all_but_mlp", "all parts but the MLP", _but("mlp"), "parts"),
    *_both("fused_all_but_attention", "all parts but attention", _but("attention"), "parts"),
    *_both("fused_all_but_rope", "all parts but RoPE", _but("rope"), "parts"),
    *_both("fused_all_but_rms_norm", "all parts but RMSNorm", _but("rms_norm"), "parts"),
    *_both("fused_all_but_cross_entropy", "all parts but cross entropy",
           _but("cross_entropy"), "parts"),
    *_one("fused_all_but_checkpoint", "all parts but checkpointing", _but("checkpoint"), "parts"),
    # the same without the host's time between the kernels
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
    # documents as PEFT's users have them with FlashAttention, and not with a mask; `--documents`
    *_one("vanilla_peft_varlen", "PEFT, FlashAttention", Recipe(attention="varlen"), ""),
    # what all others round, for the losses; it is slow
    *_one(IN_FP32, "vanilla PEFT in fp32", Recipe(base_dtype="float32"), ""),
    # whole layers
    *_both("fused_layer", "fused layers", Recipe(fused=WHOLE_LAYERS), "fastest"),
    *_both("fused_layer_graph", "fused layers, CUDA graph",
           Recipe(fused=WHOLE_LAYERS, graph=True), "fastest"),
    *_one("fused_layer_graph_selective_10_gib", "fused layers, CUDA graph, 10 GiB kept",
          replace(KEEP_10_GIB, fused=WHOLE_LAYERS, graph=True), "fastest"),
    # the same in another precision
    *_both("fp8_layer", "FP8 layers", Recipe(fused=WHOLE_LAYERS, fp8=True), ""),
    *_both("fp8_layer_graph", "FP8 layers, graph",
           Recipe(fused=WHOLE_LAYERS, graph=True, fp8=True), ""),
    *_both("fp8_lm_head_graph", "FP8 + lm_head, graph",
           Recipe(fused=(*WHOLE_LAYERS, "fp8_lm_head"), graph=True, fp8=True), ""),
    *_one("fp8_layer_graph_offload", "everything fused, in FP8",
          replace(OFFLOAD, fused=(*WHOLE_LAYERS, "fp8_lm_head"), graph=True, fp8=True), ""),
    # the same code once more: how far the two come out apart is the noise (A/A). Last, so that the
    # alternating rounds put all the others between the two
    *_both(AGAIN, "vanilla PEFT, again", Recipe(), "experiment parts peers fastest"),
]  # fmt: skip
_RECORDS.sort(key=lambda variant: not variant.checkpoints)
VARIANTS = {variant.id: variant for variant in _RECORDS}

# Measured once, and in published results: they keep their title.
RETIRED = {
    id: Variant(id, "bordered weights", None, LOOKS["fused"], with_it,
                plain_id="fused_bordered", instead="fused_layer")
    for id, with_it in (("fused_bordered", True), ("fused_bordered" + WITHOUT, False))
}  # fmt: skip

OLD_IDS = {
    "unsloth_full": "unsloth_plain_checkpointing",
    "fused_all_selective_10": "fused_all_selective_10_gib",
    "fused_all_selective_20": "fused_all_selective_20_gib",
    "fused_layer_graph_selective_10": "fused_layer_graph_selective_10_gib",
    **{
        f"{library}_peft_bf16{end}": f"{library}_peft_bf16_adapters{end}"
        for library in ("vanilla", "compiled")
        for end in ("", WITHOUT)
    },
}

# The variant of each part alone, and of all the others.
_ID_OF = {variant.recipe: variant.id for variant in _RECORDS if variant.checkpoints}
ALONE = {part: _ID_OF[Recipe(fused=(part,))] for part in FUSED_PARTS}
ALL_BUT = {part: _ID_OF[_but(part)] for part in FUSED_PARTS}

SUITES = {
    suite: [variant.id for variant in _RECORDS if suite in variant.suites]
    for suite in ("experiment", "parts", "peers", "fastest")
}
SUITES["all"] = [id for id, variant in VARIANTS.items() if variant.suites]
# Others' published settings have long steps: vanilla PEFT once, and no A/A twin.
SUITES["published"] = [
    BASELINE,
    *(
        VARIANTS[id + end].id
        for end in ("", WITHOUT)
        for id in ("full_unsloth", "fused_all", "fused_layer", "fused_layer_graph")
    ),
]


def current_id(id: str) -> str:
    """The id of today for one of an earlier version; any other stays as it is."""
    return OLD_IDS.get(id, id)


def variant_of(id: str) -> Variant:
    """The record of an id. One that this version does not know (of a newer one's results) is its
    own title, and has the baseline that its name says."""
    id = current_id(id)
    if known := VARIANTS.get(id) or RETIRED.get(id):
        return known
    title, checkpoints = id.removesuffix(WITHOUT), not id.endswith(WITHOUT)
    return Variant(id, title, None, LOOKS["other"], checkpoints, plain_id=id)


def title_of(id: str) -> str:
    """Return the name of a variant that tables and pictures show."""
    return variant_of(id).title


def recipe_of(id: str) -> Recipe:
    """Return the recipe to build a variant.

    Raises:
        ValueError: this version cannot build it.
    """
    recipe = variant_of(id).recipe
    if recipe is None:
        raise ValueError(f"{id} cannot be built by this version")
    return recipe


def counterpart(id: str, checkpoints: bool) -> Variant:
    """The same variant with or without checkpointing.

    Raises:
        KeyError: there is none, for what it does is checkpointing.
    """
    plain = variant_of(id).plain_id
    return VARIANTS[plain if checkpoints else plain + WITHOUT]


PACKAGE_OF_LIBRARY = {"liger": "liger_kernel", "unsloth": "unsloth"}


def missing_package(variant: str) -> str | None:
    """The package that the variant needs and that is not installed (none is imported)."""
    package = PACKAGE_OF_LIBRARY.get(recipe_of(variant).library)
    return package if package and importlib.util.find_spec(package) is None else None
