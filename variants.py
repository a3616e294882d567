"""The variants: a name -> a recipe, the suites that they make up, and what proves that one ran."""

import importlib.util
from dataclasses import dataclass, replace
from typing import NamedTuple

from report.statistics import NO_CHECKPOINTING

PARTS = ("mlp", "attention", "rope", "rms_norm", "cross_entropy", "checkpoint")
# What PARTS fuse, with each decoder layer as one function; rms_norm is then the last norm alone.
WHOLE_LAYERS = ("layer", "rms_norm", "cross_entropy", "checkpoint")


@dataclass(frozen=True)
class Recipe:
    """How a variant differs from vanilla PEFT.

    library: "peft"; "liger" for PEFT on transformers as Liger patches it; "unsloth" for
        FastLanguageModel.
    fused: the parts given to `fused_lora.fuse`.
    checkpointing: "full", "none", and what else the library has: "unsloth" (its offloading mode),
        for the fused part "checkpoint" its policies.
    checkpoint_gib: for the policy "selective", what the layers that are kept may hold.
    adapter_dtype: fp32 under bf16 autocast, as PEFT has it, or bf16 without autocast.
    compiled: whether each decoder layer is compiled with torch.compile.
    graph: whether the whole training step is captured in a CUDA graph and replayed.
    """

    library: str = "peft"
    fused: tuple[str, ...] = ()
    checkpointing: str = "full"
    checkpoint_gib: float | None = None
    adapter_dtype: str = "float32"
    compiled: bool = False
    graph: bool = False


EXPERIMENT = {
    "vanilla_peft": Recipe(),
    "fused_mlp": Recipe(fused=("mlp",)),
    "full_unsloth": Recipe(library="unsloth", checkpointing="unsloth"),
    # the same code once more: how far the two come out apart is the noise (A/A). Last, so that the
    # alternating rounds put all the others between the two.
    "vanilla_peft_again": Recipe(),
}
ALONE = {
    **{f"fused_{part}": Recipe(fused=(part,)) for part in PARTS},
    # in the place of the MLP's and attention's own
    "fused_bordered": Recipe(fused=("bordered",)),
}
TOGETHER = {
    "fused_all": Recipe(fused=PARTS),
    **{f"fused_all_but_{part}": Recipe(fused=tuple(p for p in PARTS if p != part))
       for part in PARTS},
    # the same without the host's time between the kernels
    "fused_all_graph": Recipe(fused=PARTS, graph=True),
}  # fmt: skip
LAYER = {
    "fused_layer": Recipe(fused=WHOLE_LAYERS),
    "fused_layer_graph": Recipe(fused=WHOLE_LAYERS, graph=True),
}
POLICIES = {
    "fused_all_offload": Recipe(fused=PARTS, checkpointing="offload"),
    "fused_all_selective_10": Recipe(fused=PARTS, checkpointing="selective", checkpoint_gib=10),
    "fused_all_selective_20": Recipe(fused=PARTS, checkpointing="selective", checkpoint_gib=20),
}
LAYER_POLICIES = {
    "fused_layer_graph_offload": Recipe(fused=WHOLE_LAYERS, checkpointing="offload", graph=True),
    "fused_layer_graph_selective_10": Recipe(
        fused=WHOLE_LAYERS, checkpointing="selective", checkpoint_gib=10, graph=True
    ),
}
PEERS = {
    "vanilla_peft_bf16": Recipe(adapter_dtype="bfloat16"),
    "compiled_peft": Recipe(compiled=True),
    "compiled_peft_bf16": Recipe(compiled=True, adapter_dtype="bfloat16"),
    "liger_peft": Recipe(library="liger"),
    "unsloth_full": Recipe(library="unsloth"),  # the checkpointing that full_unsloth does not use
}


# Every variant again without checkpointing; what checkpointing is all about has no such twin.


def _without_checkpointing(variants: dict[str, Recipe]) -> dict[str, Recipe]:
    return {
        name + NO_CHECKPOINTING: replace(
            recipe, checkpointing="none", fused=tuple(p for p in recipe.fused if p != "checkpoint")
        )
        for name, recipe in variants.items()
        if "checkpoint" not in name and name not in (*POLICIES, *LAYER_POLICIES, "unsloth_full")
    }


SUITES = {
    "experiment": EXPERIMENT,
    "parts": {
        **{name: EXPERIMENT[name] for name in ("vanilla_peft", "vanilla_peft_again")},
        **ALONE,
        **TOGETHER,
    },
    "peers": {
        **EXPERIMENT,
        **PEERS,
        "fused_all": TOGETHER["fused_all"],
        **POLICIES,
    },
    "fastest": {
        "vanilla_peft": EXPERIMENT["vanilla_peft"],
        "full_unsloth": EXPERIMENT["full_unsloth"],
        **{name: PEERS[name] for name in ("unsloth_full", "compiled_peft", "liger_peft")},
        "fused_all": TOGETHER["fused_all"],
        **LAYER,
        **LAYER_POLICIES,
        "vanilla_peft_again": EXPERIMENT["vanilla_peft_again"],
    },
}
for _name in ("parts", "peers", "fastest"):
    SUITES[_name] = SUITES[_name] | _without_checkpointing(SUITES[_name])
SUITES["all"] = SUITES["experiment"] | SUITES["parts"] | SUITES["peers"] | SUITES["fastest"]
VARIANTS = SUITES["all"]


class Evidence(NamedTuple):
    """What a step has run if a part did: the backward of its autograd functions, for every module
    that the part fuses (a forward may run twice), and on a GPU its kernels, as often or more.

    functions: their names, and for how many of these modules each stands.
    kernels: their names, or what is in the name of each that may be the one.
    without_backward: how many of the modules have none: nothing before the first norm is trained.
    twice_in: the name, within its layer, of a module that runs the function twice.
    """

    functions: dict[str, int]
    kernels: tuple[str, ...] = ()
    without_backward: int = 0
    twice_in: str = ""


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
    # q, k and v; o; and of an MLP gate and up, then down. Its products are the library's kernels
    "bordered": Evidence({"BorderedLinearBackward": 1}, twice_in="mlp"),
    "layer": Evidence(
        {"DecoderLayerBackward": 1},
        ("_add_adapted_kernel", "_rope_kernel", "_swiglu_forward_product_kernel",
         "_swiglu_backward_products_kernel", "_rms_norm_forward_kernel",
         "_rms_norm_backward_kernel"),
    ),
    "checkpoint": Evidence({}),
    "unsloth": Evidence({}, ("_fg_kernel", "_rms_layernorm_forward", "_rope_embedding_QK")),
    "liger": Evidence({}, ("_swiglu_forward_kernel", "_rms_norm_forward_kernel")),
}  # fmt: skip

PACKAGES = {"liger": "liger_kernel", "unsloth": "unsloth"}


def missing_package(variant: str) -> str | None:
    """The package that the variant needs and that is not installed (none is imported)."""
    package = PACKAGES.get(VARIANTS[variant].library)
    return package if package and importlib.util.find_spec(package) is None else None
